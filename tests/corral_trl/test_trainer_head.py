"""The trainer's loss: taken at once with its gradient where it is of tokens one by one; Triton's kernels give the same."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import (
    RIGHT_REDUCTIONS,
    loss_and_gradient,
    make_trainer,
    measured,
    nudge,
    rollouts,
    tiny_model,
    without_fused_loss,
)

import corral.trl.scoring
from corral.head import forward
from corral.head.torch.stream import HeadGradients
from corral.trl.api import FUSED
from interpreted import DEVICE
from tolerance import assert_close

from corral.head import dispatch  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.skipif(not FUSED, reason="this TRL computes all logits"),
]

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "troll": ("troll", {"bound": 0.01}),
    "dppo on a support": ("dppo", {"estimator": "topk", "bound": 0.01}),
    "dppo": ("dppo", {}),
    "ppo_clip": ("ppo_clip", {}),
    "sapo": ("sapo", {}),
}


@pytest.fixture
def rows_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows' logits the torch head recomputed, backward pass by backward pass."""
    seen, inner = list[int](), forward.head_backward

    def counted(source: Any, rows: Any, upstream: Any, *rest: Any, shard: Any) -> Any:
        seen.append(len(HeadGradients.of(upstream, rows).nonzero()))
        return inner(source, rows, upstream, *rest, shard=shard)

    monkeypatch.setattr(forward, "head_backward", counted)
    return seen


def assert_same(got: tuple[Any, Any], wanted: tuple[Any, Any], atol: float = 1e-6) -> None:
    assert_close(got[0], wanted[0], atol=atol)
    assert got[1].keys() == wanted[1].keys()
    assert max(float(g.abs().max()) for g in wanted[1].values()) > 1e-3
    for name, gradient in wanted[1].items():
        assert_close(got[1][name], gradient, atol=atol)


class TestAtOnce:
    """The torch path, which is the CPU's."""

    @pytest.mark.parametrize("loss_type", RIGHT_REDUCTIONS)
    @pytest.mark.parametrize(("objective", "config"), OBJECTIVES.values(), ids=OBJECTIVES)
    def test_loss_and_gradient_are_those_of_the_building_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_back: list[int], objective: str, config: Any, loss_type: str
    ) -> None:
        trainer = make_trainer(tmp_path, objective, use_cpu=True, objective_config=config, loss_type=loss_type)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        got = loss_and_gradient(trainer, inputs)
        assert rows_back == []
        without_fused_loss(trainer)
        wanted = loss_and_gradient(trainer, inputs)
        assert len(rows_back) == 1
        assert_same(got, wanted)

    @pytest.mark.parametrize("objective", ["troll", "ppo_clip"])
    def test_a_policy_that_is_its_own_anchor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_back: list[int], objective: str
    ) -> None:
        trainer = make_trainer(tmp_path, objective, use_cpu=True, gradient_accumulation_steps=2)
        inputs = rollouts(trainer)[0]
        assert "old_per_token_logps" not in inputs
        got = loss_and_gradient(trainer, inputs)
        assert rows_back == []
        without_fused_loss(trainer)
        assert_same(got, loss_and_gradient(trainer, inputs))

    @pytest.mark.parametrize(
        "more",
        [{"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"tool mask": True}],
        ids=["reference", "entropy bonus", "top entropy", "tool mask"],
    )
    def test_other_terms_change_nothing_but_the_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_back: list[int], more: dict[str, Any]
    ) -> None:
        more = dict(more)
        tools = more.pop("tool mask", False)
        if "beta" in more:  # the reference is the model without its adapter
            more["trainer_kwargs"] = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
        trainer = make_trainer(tmp_path, "troll", use_cpu=True, objective_config={"bound": 0.01}, **more)
        inputs = dict(rollouts(trainer)[0])
        if tools:
            inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
            inputs["tool_mask"][:, 1] = 0
        nudge(trainer.model)
        got = loss_and_gradient(trainer, inputs)
        assert len(rows_back) == (0 if tools else 1)
        without_fused_loss(trainer)
        assert_same(got, loss_and_gradient(trainer, inputs))

    def test_tied_embeddings_under_checkpointing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_back: list[int]
    ) -> None:
        model = tiny_model()
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
        given = {"use_cpu": True, "gradient_checkpointing": True, "objective_config": {"bound": 0.01}}
        trainer = make_trainer(tmp_path, "troll", model=model, **given)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        got = loss_and_gradient(trainer, inputs)
        assert rows_back == []
        assert "lm_head.weight" not in got[1]
        without_fused_loss(trainer)
        assert_same(got, loss_and_gradient(trainer, inputs))


class TestTriton:
    """Kernels in Triton's interpreter, or on a GPU if there is one: the same as the torch path."""

    @pytest.fixture(autouse=True)
    def small_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if DEVICE == "cpu":
            for dtype in dispatch.TILES:
                monkeypatch.setitem(dispatch.TILES, dtype, dispatch.Tile(16, 16, 16, warps=4, stages=1))

    @pytest.mark.parametrize(
        ("case", "frozen"),
        [
            ("troll", False),
            pytest.param("dppo on a support", False, marks=pytest.mark.slow),
            ("ppo_clip", False),
            ("troll", True),
        ],
    )
    def test_updates_are_those_of_the_torch_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, frozen: bool
    ) -> None:
        objective, config = OBJECTIVES[case]
        trainer = make_trainer(tmp_path, objective, objective_config=config)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        trainer.model.lm_head.weight.requires_grad_(not frozen)
        results = {}
        # On a GPU so small a vocabulary would take the torch path throughout.
        monkeypatch.setattr(corral.trl.scoring.PolicyHead, "one_implementation", lambda *_: {})
        fused = corral.trl.scoring.policy_loss_from_hidden
        for impl in ("torch", "triton"):
            monkeypatch.setattr(corral.trl.scoring, "policy_loss_from_hidden", functools.partial(fused, impl=impl))
            results[impl] = loss_and_gradient(trainer, inputs)
        got, wanted = results["triton"], results["torch"]
        assert_close(got[0], wanted[0], atol=2e-5)
        assert ("lm_head.weight" in got[1]) is not frozen
        for name, gradient in wanted[1].items():
            assert (got[1][name] - gradient).norm() <= 2e-3 * gradient.norm(), name
        (_, share), (_, dropped) = (measured(trainer)[f"head/{name}"] for name in ("dense_share", "dropped_max"))
        assert 0 <= share <= 1
        assert 0 <= dropped <= 1e-3


def test_every_token_passes_the_objective_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", use_cpu=True)
    inputs = rollouts(trainer)[0]
    nudge(trainer.model)
    function, seen = trainer.objective.function, []

    def counted(batch: Any, config: Any) -> Any:
        seen.append(batch.logp_old[batch.mask])
        return function(batch, config)

    trainer.objective = replace(trainer.objective, function=counted)
    loss_and_gradient(trainer, inputs)
    live = inputs["completion_mask"].bool()
    assert_close(torch.cat(seen).sort().values, inputs["corral_logp"][..., 0][live].sort().values)


@pytest.mark.supports("kept: the whole door on a GPU", door="TRL")
@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["troll", "dppo", "ppo_clip", "gspo"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_run_on_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture, objective: str, checkpointing: bool) -> None:
    """In bfloat16, with a vocabulary and a width that the kernels are made for."""
    model = tiny_model(vocab_size=40_000, hidden_size=64)
    given = {"bf16": True, "use_cpu": False, "gradient_checkpointing": checkpointing, "max_steps": 4, "support_size": 64}
    trainer = make_trainer(tmp_path, objective, model=model, **given)
    with caplog.at_level("INFO", logger="corral"):
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 4
    assert all(torch.tensor(losses).isfinite())
    assert not [record for record in caplog.records if "slower torch path" in record.message]
    assert any("head/dense_share" in line for line in trainer.state.log_history)
