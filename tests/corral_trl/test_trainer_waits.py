"""What the trainer asks of the host between two updates: fewer waits for the device than TRL's own."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils as trl_utils
from tiny_models import even_words, make_trainer, measured, nudge, prompts, rollouts, settings, tiny_model, tiny_tokenizer
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

import corral.trl.scoring
from corral.head.rows import AsyncCopy
from corral.llm import CorralTrainer
from corral.trl.api import FUSED
from interpreted import DEVICE

from corral.head import dispatch  # isort: skip
from waits import Waits  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.skipif(not FUSED, reason="this TRL computes all logits"),
    pytest.mark.skipif(DEVICE != "cpu", reason="waits are counted where nobody has to wait"),
]

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "troll": ("troll", {"bound": 0.01}),
    "dppo on a support": ("dppo", {"estimator": "topk", "bound": 0.01}),
    "dppo": ("dppo", {}),
    "ppo_clip": ("ppo_clip", {}),
}
UPDATE = 10
"""Waits of an update: five of TRL's and transformers' own scoring pass, four of the head's at most, the last to see that the
loss is finite, and one for the metrics, after the backward pass, when the device has long been there."""


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on TRL passes the scored rows alone, and corral's kernels run, in Triton's interpreter."""
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    for dtype in dispatch.TILES:
        monkeypatch.setitem(dispatch.TILES, dtype, dispatch.Tile(16, 16, 16, warps=4, stages=1))
    for name in ("lm_head", "policy_loss_from_hidden"):
        function = getattr(corral.trl.scoring, name)
        monkeypatch.setattr(corral.trl.scoring, name, functools.partial(function, impl="triton"))


def stock(folder: Path) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=tiny_model(), reward_funcs=even_words, args=GRPOConfig(**settings(folder)), train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    return trainer


def waits_of(trainer: GRPOTrainer, inputs: dict[str, Any]) -> Waits:
    """One update, all but the optimizer's step."""
    with Waits() as waits:
        trainer.compute_loss(trainer.model, inputs).backward()
        if isinstance(trainer, CorralTrainer):
            trainer.flush_metrics()
    return waits


@pytest.mark.parametrize(("objective", "config"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_update_waits_less_often_than_trls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, config: dict[str, Any]
) -> None:
    trainer = make_trainer(tmp_path, objective, objective_config=config)
    inputs = rollouts(trainer)[0]
    nudge(trainer.model)
    assert not inputs["completion_mask"].all(), "rows have to be picked"
    as_on_a_gpu(monkeypatch)
    mine, theirs = waits_of(trainer, inputs), waits_of(stock(tmp_path), inputs)
    assert mine.places.total() < theirs.places.total()
    assert mine.places.total() <= UPDATE, mine.places
    own = {place for place in mine.places if place.startswith(("trainer.py", "scoring.py", "ledger.py", "packed.py"))}
    assert own <= {"ledger.py: lines"}, "metrics are read once, when they are logged"
    assert measured(trainer)["entropy"] == [pytest.approx(measured_of_trl(tmp_path, inputs), rel=1e-4)]


def measured_of_trl(folder: Path, inputs: dict[str, Any]) -> float:
    """The entropy that TRL itself would have written down."""
    trainer = stock(folder)
    trainer.model.train()
    nudge(trainer.model)
    trainer.compute_loss(trainer.model, inputs)
    (entropy,) = trainer._metrics["train"]["entropy"]
    return entropy


class TestCounting:
    """The counter sees what it is for."""

    @pytest.mark.parametrize(
        "ask",
        [
            lambda x: x.sum().item(),
            lambda x: bool(x.any()),
            lambda x: x.tolist(),
            lambda x: x[x > 0],
            lambda x: (x > 0).nonzero(),
            lambda x: x.masked_select(x > 0),
            lambda x: AsyncCopy(x).wait(),
        ],
    )
    def test_one_wait(self, ask: Callable[[Tensor], Any]) -> None:
        with Waits() as waits:
            ask(torch.ones(3))
        assert waits.places.total() == 1

    def test_none(self) -> None:
        x, mask = torch.ones(3), torch.tensor([True, False, True])
        with Waits() as waits:
            torch.where(mask, x, 0.0).index_select(0, torch.tensor([2, 0]))
            x.new_zeros(3).index_copy(0, mask.byte().argsort(stable=True), x)
        assert waits.places == {}


def test_a_loss_that_is_not_finite_is_refused_before_the_optimizer_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip")
    inputs = dict(rollouts(trainer)[0])
    as_on_a_gpu(monkeypatch)
    old = inputs["old_per_token_logps"] = inputs["old_per_token_logps"].clone()
    old[0, 0] = torch.nan
    assert inputs["completion_mask"][0, 0]
    with pytest.raises(ValueError, match="ppo_clip: logp_old is not finite at an unmasked token"):
        trainer.compute_loss(trainer.model, inputs)
