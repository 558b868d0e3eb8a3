"""CorralTrainer against stock GRPOTrainer, and against corral's own maths on every logit of the same batch."""

import copy
import gc
import inspect
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import trl
import trl.trainer.utils as trl_utils
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import (
    ENDS,
    FAMILIES,
    RIGHT_REDUCTIONS,
    SIZES,
    FakeVLLM,
    Spy,
    dense_logp,
    even_words,
    fixed_rollout,
    gradients,
    loss_and_gradient,
    make_trainer,
    measured,
    nudge,
    prompts,
    rollouts,
    settings,
    tiny_model,
    tiny_tokenizer,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

import corral
import corral.trl.scoring
from corral import TokenBatch, gather_support, group_advantages, reduce_loss, top_k_support
from corral.llm import CorralConfig, CorralTrainer
from corral.objective import OBJECTIVES
from corral.objective.config import NEEDS_SUPPORT, ObjectiveConfig, TROLLConfig
from corral.objective.metrics import region_metrics
from corral.objective.projections import troll
from corral.objective.ratio import credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput
from corral.trl.api import FUSED, REDUCTIONS
from corral.trl.scoring import PolicyHead, ScoringPass, SupportRequest
from corral.validate import RewardError
from device import DEVICE, drawing_on_the_cpu
from policy_objectives import POLICY_OBJECTIVES
from tolerance import ROUNDING, TWENTY_UPDATES, assert_close

UNCLIPPED = {"epsilon": 1e9}
UNBOUNDED = {"objective_config": {"bound": float("inf"), "regression": 0.0}}


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a sparse backward pass may leave out a small share of a token's gradient; here it leaves out none."""
    monkeypatch.setattr("corral.trl.trainer.TOLERANCE", 0.0)


def stock(tmp: Path, *, model: Any = None, trainer_kwargs: dict[str, Any] | None = None, **given: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=even_words,
        args=GRPOConfig(**settings(tmp, **given)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        **(trainer_kwargs or {}),
    )


def run(trainer: GRPOTrainer) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What was logged at every update, and the weights at the end."""
    trainer.remove_callback(PrinterCallback)
    set_seed(7)  # generation draws from the global state
    with drawing_on_the_cpu():
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return logged, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same_run(ours: GRPOTrainer, theirs: GRPOTrainer, atol: float = ROUNDING) -> None:
    """Loss, gradient norm and every metric that both know, update by update; then the weights."""
    (mine, my_weights), (other, weights) = run(ours), run(theirs)
    assert len(mine) == len(other)
    assert {"loss", "grad_norm", "entropy", "reward"} <= mine[0].keys() & other[0].keys()
    for step, (a, b) in enumerate(zip(mine, other, strict=True)):
        for name in a.keys() & b.keys() - {"step_time"}:
            assert a[name] == pytest.approx(b[name], abs=atol, rel=atol), f"{name} at update {step}"
    for name, weight in weights.items():
        torch.testing.assert_close(
            my_weights[name], weight, atol=atol, rtol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


class TestSameAsStock:
    """Where an objective is PPO's, or a region never acts, the trainer is TRL's own."""

    @pytest.fixture(autouse=True)
    def equal_entropies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Completions of one prompt begin with one entropy, up to the last digit, which must not decide who is chosen."""
        choose = GRPOTrainer.get_high_entropy_mask
        monkeypatch.setattr(
            GRPOTrainer, "get_high_entropy_mask", lambda self, entropy, *how: choose(self, entropy.round(decimals=2), *how)
        )

    @pytest.mark.parametrize(
        ("objective", "given", "epsilon"),
        [
            ("ppo_clip", {}, {}),
            pytest.param("reinforce", {}, UNCLIPPED, marks=pytest.mark.slow),
            ("troll", UNBOUNDED, UNCLIPPED),
        ],
        ids=["ppo_clip", "reinforce", "troll"],
    )
    def test_twenty_updates(self, tmp_path: Path, objective: str, given: dict[str, Any], epsilon: dict[str, Any]) -> None:
        long = {"max_steps": 20, "num_iterations": 2, "learning_rate": 3e-3}
        theirs = stock(tmp_path, **long, **epsilon)
        ours = make_trainer(tmp_path, objective, **long, **given)
        assert_same_run(ours, theirs, TWENTY_UPDATES)
        moved = [row["tr/ratio_max"] for row in ours.state.log_history if "tr/ratio_max" in row]
        assert max(moved) > 1.2, "the policy must have moved, or nothing was compared"

    def test_what_the_clip_did_is_reported_under_another_name(self, tmp_path: Path) -> None:
        given = {"max_steps": 4, "num_iterations": 2, "learning_rate": 3e-2}
        (mine, _), (other, _) = run(make_trainer(tmp_path, "ppo_clip", **given)), run(stock(tmp_path, **given))
        clipped = [row["clip_ratio/region_mean"] for row in other]
        assert max(clipped) > 0
        assert [row["tr/active_frac"] for row in mine] == pytest.approx(clipped, abs=1e-6)
        assert not [name for row in mine for name in row if "clip_ratio" in name]

    FEATURES: ClassVar[dict[str, dict[str, Any]]] = {
        "gradient accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
        "iterations": {"num_iterations": 3, "steps_per_generation": 1},
        **{f"reduction {how}": {"loss_type": how, "gradient_accumulation_steps": 2} for how in RIGHT_REDUCTIONS},
        "several batches of rollouts per update": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        "kl to a reference": {"beta": 0.1},
        "kl without its correction": {"beta": 0.1, "use_bias_correction_kl": False},
        "LoRA": {"lora": True},
        "LoRA and kl": {"lora": True, "beta": 0.1},
        "entropy bonus": {"entropy_coef": 0.05},
        "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef_delta": 0.05},
        "entropy bonus, sequence by sequence": {"entropy_coef": 0.05, "loss_type": "grpo", "gradient_accumulation_steps": 2},
        "top entropy": {"top_entropy_quantile": 0.5},
        "truncated completions masked": {"mask_truncated_completions": True},
        "rewards scaled by the batch": {"scale_rewards": "batch"},
        "rewards not scaled": {"scale_rewards": "none"},
        "padded to a multiple": {"pad_to_multiple_of": 4},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "soft-capped head": {"family": "gemma2"},
        "scaled head": {"family": "cohere"},
        "divided head": {"family": "granite"},
        "experts and their auxiliary loss": {"family": "qwen3_moe"},
    }

    TOGETHER: ClassVar[dict[str, dict[str, Any]]] = {
        "reference, entropy bonus and quantile, experts": {
            "beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.3, "family": "qwen3_moe", "loss_type": "grpo",
            "gradient_accumulation_steps": 2, "steps_per_generation": 3,
        },
        "tokens corrected for vLLM, reference, LoRA, iterations, checkpointing": {
            "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05,
            "beta": 0.1, "lora": True, "num_iterations": 2, "loss_type": "bnpo", "gradient_checkpointing": True,
        },
        "sequences corrected for vLLM, tied and soft-capped, entropy quantile, truncated completions masked": {
            "use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.05,
            "family": "gemma2", "top_entropy_quantile": 0.4, "mask_truncated_completions": True, "loss_type": "dr_grpo",
            "gradient_accumulation_steps": 2,
        },
        "iterations that end within an update, scaled head, rewards not scaled": {
            "num_iterations": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 2, "family": "cohere",
            "loss_type": "dr_grpo", "scale_rewards": "none",
        },
    }  # fmt: skip

    @staticmethod
    def known(features: dict[str, dict[str, Any]]) -> list[str]:
        """Those that this release of TRL has: older ones have no entropy bonus."""
        fields = {"family", "lora", *GRPOConfig.__dataclass_fields__}
        return [name for name, given in features.items() if given.keys() <= fields]

    @staticmethod
    def same_with(tmp_path: Path, common: dict[str, Any], objective: str, given: dict[str, Any], epsilon: Any) -> CorralTrainer:
        common = {"max_steps": 3, **common}
        tiny_model(common.pop("family", "llama")).save_pretrained(tmp_path / "model")  # where a reference is loaded from, too
        lora = common.pop("lora", False)

        def one(make: Callable[..., GRPOTrainer], *args: Any, **more: Any) -> GRPOTrainer:
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
            peft = (
                {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)} if lora else {}
            )
            set_seed(1)  # adapters are random here
            return make(tmp_path, *args, model=model, trainer_kwargs=peft, **common, **more)

        ours = one(make_trainer, objective, **given)
        assert_same_run(ours, one(stock, **epsilon))
        return ours

    @pytest.mark.parametrize("features", known(TOGETHER))
    @pytest.mark.parametrize(
        ("objective", "given", "epsilon"),
        [pytest.param("ppo_clip", {}, {}, marks=pytest.mark.slow), ("troll", UNBOUNDED, UNCLIPPED)],
        ids=["ppo_clip", "troll"],
    )
    def test_and_many_of_them_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, objective: str, given: Any, epsilon: Any
    ) -> None:
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
        self.same_with(tmp_path, self.TOGETHER[features], objective, given, epsilon)

    @pytest.mark.supports("kept: {feature}", door="TRL")
    @pytest.mark.parametrize("feature", known(FEATURES))
    @pytest.mark.parametrize(
        ("objective", "given", "epsilon"),
        [pytest.param("ppo_clip", {}, {}, marks=pytest.mark.slow), ("troll", UNBOUNDED, UNCLIPPED)],
        ids=["ppo_clip", "troll"],
    )
    def test_every_feature_of_trl_is_kept(
        self, tmp_path: Path, feature: str, objective: str, given: dict[str, Any], epsilon: dict[str, Any]
    ) -> None:
        ours = self.same_with(tmp_path, self.FEATURES[feature], objective, given, epsilon)
        logged = [row for row in ours.state.log_history if "loss" in row][-1]
        assert ("kl" in logged) == ("kl" in feature)
        assert ("aux_loss" in logged) == ("experts" in feature)
        assert ("policy_loss" in logged) == ("entropy" in feature and "top" not in feature)


@dataclass(frozen=True, kw_only=True)
class OutsideConfig(ObjectiveConfig):
    pull: float = 0.3

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | NEEDS_SUPPORT


def outside(batch: TokenBatch, config: OutsideConfig) -> ObjectiveOutput:
    """An objective from outside: importance-weighted, with a pull to the old policy's tail that is there at rest too."""
    assert batch.dist_new is not None
    assert batch.dist_old is not None
    log_rho = log_ratio(batch)
    pull = config.pull * zero_padding(batch.dist_old.rest, batch.mask).exp() * zero_padding(batch.dist_new.rest, batch.mask)
    loss = torch.where(batch.mask, -log_rho.exp() * credit(batch) - pull, 0.0)
    return ObjectiveOutput(loss, {**region_metrics(batch, log_rho, torch.zeros_like(batch.mask)), "outside/pull": pull.mean()})


def twice_troll(batch: TokenBatch, config: TROLLConfig) -> ObjectiveOutput:
    """Another from outside, with settings that are known but a loss that is not."""
    out = troll(batch, config)
    return ObjectiveOutput(2 * out.loss, out.metrics)


@pytest.fixture
def outsider() -> Iterator[None]:
    corral.register_objective("outside", outside, OutsideConfig)
    corral.register_objective("twice_troll", twice_troll, TROLLConfig)
    yield
    del OBJECTIVES["outside"], OBJECTIVES["twice_troll"]


def direct(trainer: CorralTrainer, inputs: dict[str, Any], old_model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of the same micro-batch, from all logits, with corral's public functions alone."""
    args, mask = trainer.args, inputs["completion_mask"].bool()
    if "tool_mask" in inputs:
        mask = mask & inputs["tool_mask"].bool()
    with torch.no_grad():
        logp_old = dense_logp(old_model, inputs, args.temperature)
    logp_new = dense_logp(trainer.model, inputs, args.temperature)
    full = getattr(trainer.objective.config, "estimator", None) == "full"
    size, mass = (logp_old.shape[-1], 1.0) if full else (args.support_size, args.support_mass)
    old = top_k_support(logp_old, inputs["completion_ids"], k=size, mass=mass)
    new = gather_support(logp_new, old.ids)
    batch = TokenBatch.on_support(new, old, inputs["advantages"], mask)
    if not args.needs_support:
        batch = replace(batch, dist_new=None, dist_old=None)
    loss = trainer.objective(batch).loss
    rows, steps = len(loss), args.gradient_accumulation_steps
    reduced = {
        "grpo": lambda: reduce_loss(loss, mask, "seq-mean-token-mean", total=rows * steps),
        "bnpo": lambda: reduce_loss(loss, mask, "token-mean") / steps,
        "dr_grpo": lambda: reduce_loss(
            loss, mask, "seq-mean-token-sum-norm", total=rows * steps, length=args.max_completion_length
        ),
        "dapo": lambda: reduce_loss(
            loss, mask, "token-mean", total=inputs["num_items_in_batch"] * steps / args.steps_per_generation
        ),
        "luspo": lambda: reduce_loss(loss, mask, "seq-mean-token-sum", total=rows * steps),
    }[trainer.loss_type]()
    reduced.backward()
    return reduced.detach(), gradients(trainer.model)


def assert_parity(trainer: CorralTrainer, inputs: dict[str, Any], old_model: Any) -> Tensor:
    loss, gradient = loss_and_gradient(trainer, inputs)
    expected, expected_gradient = direct(trainer, inputs, old_model)
    assert expected_gradient.keys() == gradient.keys()
    assert max(float(g.abs().max()) for g in gradient.values()) > 1e-3
    torch.testing.assert_close(loss, expected, atol=ROUNDING, rtol=ROUNDING)
    for name, g in expected_gradient.items():
        torch.testing.assert_close(
            gradient[name], g, atol=ROUNDING, rtol=ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
        )
    return loss


class TestParity:
    """Every objective, the same loss and gradient as corral's maths on all logits of the buffered batch."""

    VARIANTS: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {
        **{name: (name, {}) for name in POLICY_OBJECTIVES if name != "decoupled_ppo"},  # needs another sampler
        "one that `register_objective` added": ("outside", {}),
        "dppo, topk kl, capped": ("dppo", {"estimator": "topk", "divergence": "kl", "ratio_cap": 1.1}),
        "dppo, full": ("dppo", {"estimator": "full", "bound": 0.02}),
        "cppo, topk": ("cppo", {"estimator": "topk", "bound": 0.02}),
        "troll, fill": ("troll", {"tail": "fill", "vocab_size": 40, "bound": 0.01}),
        "troll, sequence, unprojected": ("troll", {"level": "sequence", "gradient": "unprojected"}),
    }

    @pytest.mark.supports("objective: {variant}", door="TRL")
    @pytest.mark.supports("model: completions padded on the right, prompts on the left", door="TRL")
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_every_objective_with_every_reduction(self, tmp_path: Path, variant: str, outsider: None) -> None:
        name, config = self.VARIANTS[variant]
        given = {"objective_config": config, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
        trainer = make_trainer(tmp_path, name, **given)
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        lengths = inputs["completion_mask"].sum(-1)
        assert len(lengths.unique()) > 1, "completions must be padded on the right"
        assert len(inputs["prompt_mask"].sum(-1).unique()) > 1, "prompts must be padded on the left"
        nudge(trainer.model)
        losses = []
        for loss_type in REDUCTIONS:
            trainer.loss_type = loss_type
            losses.append(float(assert_parity(trainer, inputs, old)))
        assert len({round(loss, 6) for loss in losses}) == len(REDUCTIONS), (
            "the reductions must differ, or nothing was compared"
        )
        if name in ("troll", "ppo_clip"):
            assert measured(trainer)["tr/active_frac"][0] > 0

    @pytest.mark.supports("model: head of {family}", door="TRL")
    @pytest.mark.supports("model: tied embeddings", door="TRL")
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_kind_of_head(self, tmp_path: Path, family: str) -> None:
        trainer = make_trainer(tmp_path, "troll", model=tiny_model(family), objective_config={"bound": 0.01})
        assert trainer.model.config.tie_word_embeddings is (family in ("gemma2", "cohere"))
        if trainer.aux_loss_enabled:
            trainer.router_aux_loss_coef = 0.0  # kept, and compared with stock above
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        nudge(trainer.model)
        assert_parity(trainer, inputs, old)
        assert measured(trainer)["tr/active_frac"][0] > 0

    @pytest.mark.parametrize("objective", ["troll", "ppo_clip"])
    def test_a_head_with_a_bias(self, tmp_path: Path, objective: str) -> None:
        torch.manual_seed(0)
        model = PhiForCausalLM(PhiConfig(**SIZES))
        model.generation_config.eos_token_id = ENDS
        with torch.no_grad():
            model.lm_head.bias.normal_()
        trainer = make_trainer(tmp_path, objective, model=model)
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        nudge(trainer.model)
        assert_parity(trainer, inputs, old)

    @pytest.mark.skipif(not FUSED, reason="this TRL computes all logits")
    def test_on_a_gpu_trl_passes_the_scored_rows_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = make_trainer(tmp_path, "troll", objective_config={"bound": 0.01})
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)  # our head needs no Triton, only TRL's does
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        nudge(trainer.model)
        assert_parity(trainer, inputs, old)
        nothing = {**inputs, "completion_mask": torch.zeros_like(inputs["completion_mask"])}
        loss, gradient = loss_and_gradient(trainer, nothing)
        assert loss == 0
        assert "lm_head.weight" in gradient

    @pytest.mark.supports("kept: tool masks", door="TRL")
    def test_tokens_of_a_tool_are_left_out(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll")
        inputs, old = dict(rollouts(trainer)[0]), copy.deepcopy(trainer.model)
        inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
        inputs["tool_mask"][:, 1:3] = 0
        nudge(trainer.model)
        with_mask = assert_parity(trainer, inputs, old)
        del inputs["tool_mask"]
        assert not torch.isclose(with_mask, assert_parity(trainer, inputs, old))

    def test_padding_changes_nothing(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll", objective_config={"bound": 0.01})
        trainer.loss_type = "luspo"  # a mean over rows, whatever their lengths
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        loss, gradient = loss_and_gradient(trainer, inputs)
        alone = []
        for row in range(len(loss_rows := inputs["completion_ids"])):
            prompt, tokens = int(inputs["prompt_mask"][row].sum()), int(inputs["completion_mask"][row].sum())
            one = {"num_items_in_batch": inputs["num_items_in_batch"]}
            for key, value in inputs.items():
                if key.startswith("prompt"):
                    one[key] = value[row : row + 1, -prompt:]
                elif key == "advantages":
                    one[key] = value[row : row + 1]
                elif key != "num_items_in_batch":
                    one[key] = value[row : row + 1, :tokens]
            alone.append(loss_and_gradient(trainer, one))
        assert_close(torch.stack([x for x, _ in alone]).mean(), loss, atol=ROUNDING / 10)
        for name, g in gradient.items():
            assert_close(sum(gs[name] for _, gs in alone) / len(loss_rows), g, atol=ROUNDING)

    def test_gradient_accumulation_adds_up_to_the_whole(self, tmp_path: Path) -> None:
        given = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "objective_config": {"bound": 0.01}}
        trainer = make_trainer(tmp_path, "troll", **given)
        micro = rollouts(trainer)
        nudge(trainer.model)
        window = [loss_and_gradient(trainer, inputs) for inputs in micro[:2]]
        whole = {
            key: value if value.ndim == 0 else torch.cat([inputs[key] for inputs in micro[:2]])
            for key, value in micro[0].items()
        }
        trainer.current_gradient_accumulation_steps = 1
        trainer.args.steps_per_generation = 2
        loss, gradient = loss_and_gradient(trainer, whole)
        assert_close(window[0][0] + window[1][0], loss, atol=ROUNDING / 10)
        for name, g in gradient.items():
            assert_close(window[0][1][name] + window[1][1][name], g, atol=ROUNDING)

    @pytest.mark.supports("model: {what}", door="TRL")
    @pytest.mark.parametrize("what", ["LoRA", "LoRA and a whole head (`modules_to_save`)"])
    def test_lora_trains_what_it_is_told_to(self, tmp_path: Path, what: str) -> None:
        whole = ["lm_head"] if "head" in what else None
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=whole, init_lora_weights=False)
        trainer = make_trainer(tmp_path, "troll", trainer_kwargs={"peft_config": adapter}, objective_config={"bound": 0.01})
        inputs = rollouts(trainer)[0]
        merged_old = copy.deepcopy(trainer.model).merge_and_unload()
        nudge(trainer.model, 0.5)
        loss, gradient = loss_and_gradient(trainer, inputs)
        assert any("lora" in name for name in gradient)
        assert ("base_model.model.lm_head.modules_to_save.default.weight" in gradient) is (whole is not None)
        assert all("lora" in name or "lm_head.modules_to_save" in name for name in gradient)
        merged = copy.deepcopy(trainer.model).merge_and_unload()
        merged.requires_grad_(True)
        plain = make_trainer(tmp_path, "troll", model=merged, objective_config={"bound": 0.01})
        plain.current_gradient_accumulation_steps = 1
        expected, _ = direct(plain, inputs, merged_old)
        torch.testing.assert_close(loss, expected, atol=ROUNDING, rtol=ROUNDING)
        assert measured(trainer)["tr/active_frac"][0] > 0

    @pytest.mark.supports("model: bfloat16 autocast", door="TRL")
    def test_half_precision_stays_close(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll", bf16=True)
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        nudge(trainer.model)
        loss, gradient = loss_and_gradient(trainer, inputs)
        expected, expected_gradient = direct(trainer, inputs, old)
        assert inputs["corral_logp"].dtype == torch.float32
        assert_close(loss, expected, torch.bfloat16)
        for name, g in expected_gradient.items():
            assert (gradient[name] - g).norm() < 0.1 * g.norm(), name

    def test_half_precision_is_for_products_alone(self) -> None:
        hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
        tokens, scored = torch.arange(5), torch.ones(1, 5, dtype=torch.bool)
        scoring = ScoringPass(support=SupportRequest(top_k=4))
        scoring.policy_head, scoring.tokens = PolicyHead([], 0.7, SupportRequest(), union=False), 5
        scoring.scored = scoring.handed = scored
        with torch.autocast("cpu", torch.bfloat16):
            logp, entropy, *_ = scoring.apply(hidden, weight, None, tokens, 0.7, 32768, None, 1.0, ("log_probs", "entropy"))
        rounded = hidden.bfloat16().float() @ weight.bfloat16().float().T
        expected = (rounded / 0.7).log_softmax(-1)
        assert_close(logp, logp_of(expected, tokens))
        assert_close(entropy, -(expected.exp() * expected).sum(-1))
        assert_close(scoring.results[0][0].dist.logp, top_k_support(expected, tokens, k=4).logp)
        got = torch.autograd.grad(logp.sum(), (hidden, weight), retain_graph=True)
        for mine, other in zip(got, torch.autograd.grad(logp_of(expected, tokens).sum(), (hidden, weight)), strict=True):
            assert_close(mine, other, torch.bfloat16)  # gradients go back through half-precision weights


def logp_of(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(-1, tokens[..., None])[..., 0]


def completions_of(trainer: GRPOTrainer) -> Tensor:
    return torch.cat([inputs["completion_ids"] for inputs in trainer._buffered_inputs])


class CountedCalls:
    """How often a function was called, which runs as before."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


class CountedSupports(CountedCalls):
    """Calls of the head that make it find or read a support."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count -= kwargs["top_k"] is None and kwargs["ids"] is None
        return super().__call__(*args, **kwargs)


@pytest.fixture
def head_calls(monkeypatch: pytest.MonkeyPatch) -> CountedCalls:
    counted = CountedSupports(corral.trl.scoring.lm_head)
    monkeypatch.setattr(corral.trl.scoring, "lm_head", counted)
    return counted


def backbone_passes(trainer: GRPOTrainer) -> CountedCalls:
    backbone = trainer.model.get_decoder()
    backbone.forward = CountedCalls(backbone.forward)
    return backbone.forward


class TestNoNeedlessWork:
    @pytest.mark.parametrize("objective", ["troll", "ppo_clip", "dppo"])
    @pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
    def test_as_many_forward_passes_as_stock(self, tmp_path: Path, objective: str, accumulation: int) -> None:
        counts = []
        for trainer in (make_trainer(tmp_path, objective), stock(tmp_path, **UNCLIPPED)):
            trainer.args.gradient_accumulation_steps = accumulation
            passes = backbone_passes(trainer)
            for inputs in rollouts(trainer):
                trainer.compute_loss(trainer.model, inputs)
            counts.append(passes.count)
        assert counts[0] == counts[1]

    def test_the_old_support_comes_from_the_old_pass(self, tmp_path: Path, head_calls: CountedCalls) -> None:
        trainer = make_trainer(tmp_path, "troll")
        micro = rollouts(trainer)
        assert head_calls.count == 2 * FUSED, "the old pass is made in two pieces, and nothing else reads a support"
        for inputs in micro:
            old = dense_logp(trainer.model, inputs, 0.9).detach()
            expected = top_k_support(old, inputs["completion_ids"], k=8, mass=0.95)
            mask = inputs["completion_mask"].bool()
            assert torch.equal(inputs["corral_ids"][mask].long(), expected.ids[mask][..., : inputs["corral_ids"].shape[-1]])
            assert_close(inputs["corral_rest"][mask], expected.rest[mask])
            assert_close(inputs["corral_logp"][..., 0][mask], inputs["old_per_token_logps"][mask])
            assert inputs["corral_ids"].dtype == torch.int32
            trainer.compute_loss(trainer.model, inputs)
        assert head_calls.count == 2 * FUSED, "an update takes its loss at once"

    def test_a_reference_that_is_the_model_itself_gets_no_support(self, tmp_path: Path, head_calls: CountedCalls) -> None:
        adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        trainer = make_trainer(tmp_path, "troll", beta=0.1, trainer_kwargs={"peft_config": adapter})
        (inputs, _) = rollouts(trainer)
        assert head_calls.count == 2 * FUSED
        with trainer.model.disable_adapter():
            free = dense_logp(trainer.model.get_base_model(), inputs, 0.9)
        with_adapter = dense_logp(trainer.model.get_base_model(), inputs, 0.9)
        mask, tokens = inputs["completion_mask"].bool(), inputs["completion_ids"]
        assert_close(inputs["ref_per_token_logps"][mask], logp_of(free, tokens)[mask])
        assert_close(inputs["corral_logp"][..., 0][mask], logp_of(with_adapter, tokens)[mask])
        assert not torch.allclose(free, with_adapter)

    @pytest.mark.supports("kept: one update per batch of rollouts", door="TRL")
    @pytest.mark.parametrize(("objective", "config"), [("troll", {}), ("dppo", {"estimator": "topk"})])
    def test_one_update_per_batch_needs_no_support(
        self,
        tmp_path: Path,
        objective: str,
        config: dict[str, Any],
        head_calls: CountedCalls,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with caplog.at_level(logging.INFO, logger="corral"):
            trainer = make_trainer(tmp_path, objective, objective_config=config, gradient_accumulation_steps=2)
            inputs = rollouts(trainer)[0]
            loss, gradient = loss_and_gradient(trainer, inputs)
            loss_and_gradient(trainer, inputs)
        assert [record.message for record in caplog.records if "One update per batch" in record.message].__len__() == 1
        assert head_calls.count == 0
        assert "corral_ids" not in inputs
        assert "old_per_token_logps" not in inputs
        expected, expected_gradient = direct(trainer, inputs, copy.deepcopy(trainer.model))
        assert_close(loss, expected, atol=ROUNDING / 10)
        for name, g in expected_gradient.items():
            assert_close(gradient[name], g, atol=ROUNDING)

    @pytest.mark.parametrize(
        ("objective", "config"),
        [
            ("outside", {}),
            ("twice_troll", {}),
            ("troll", {"ratio_cap": 0.5}),
            ("troll", {"tail": "fill", "vocab_size": 40}),
            ("dppo", {"estimator": "topk", "ratio_cap": 0.5}),
        ],
    )
    def test_what_is_not_the_plain_gradient_on_policy_keeps_its_own(
        self, tmp_path: Path, objective: str, config: dict[str, Any], outsider: None
    ) -> None:
        trainer = make_trainer(tmp_path, objective, objective_config=config, gradient_accumulation_steps=2)
        inputs = rollouts(trainer)[0]
        assert "old_per_token_logps" not in inputs
        passes = backbone_passes(trainer)
        loss, gradient = loss_and_gradient(trainer, inputs)
        assert passes.count == 1
        expected, expected_gradient = direct(trainer, inputs, copy.deepcopy(trainer.model))
        assert_close(loss, expected, atol=ROUNDING / 10)
        for name, g in expected_gradient.items():
            assert_close(gradient[name], g, atol=ROUNDING)
        plain = make_trainer(tmp_path, "reinforce", model=trainer.model, gradient_accumulation_steps=2)
        plain.current_gradient_accumulation_steps = 2
        _, plain_gradient = loss_and_gradient(plain, inputs)
        assert max(float((plain_gradient[name] - g).abs().max()) for name, g in gradient.items()) > 1e-3

    def test_the_buffer_is_left_as_it_was(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll")
        inputs = rollouts(trainer)[0]
        before = {key: value.clone() for key, value in inputs.items()}
        nudge(trainer.model)
        loss_and_gradient(trainer, inputs)
        assert before.keys() == inputs.keys()
        assert all(torch.equal(before[key], inputs[key]) for key in before)

    def test_the_graph_of_a_micro_batch_does_not_outlive_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer, passes = make_trainer(tmp_path, "gspo"), []
        expect = trainer.policy_head.expect
        monkeypatch.setattr(
            trainer.policy_head, "expect", lambda scoring: passes.append(weakref.ref(scoring)) or expect(scoring)
        )
        inputs = rollouts(trainer)[0]
        gc.disable()  # a cycle would hold it until the next collection
        try:
            loss_and_gradient(trainer, inputs)
            assert len(passes) == 2
            assert [scoring() for scoring in passes] == [None, None]
        finally:
            gc.enable()

    def test_generation_is_left_alone(self, tmp_path: Path) -> None:
        ours, theirs = make_trainer(tmp_path, "troll"), stock(tmp_path)
        rollouts(ours)
        rollouts(theirs)
        assert torch.equal(completions_of(ours), completions_of(theirs))
        assert inspect.signature(ours.model.forward) == inspect.signature(tiny_model().forward)
        assert trl_utils._ChunkedLogProbFunction is trl_utils.__dict__["_ChunkedLogProbFunction"]
        assert "corral" not in trl_utils._ChunkedLogProbFunction.__module__


class TestMasked:
    @pytest.mark.parametrize("objective", ["troll", "ppo_clip", "gspo"])
    def test_a_micro_batch_without_a_live_token_gives_zeros(self, tmp_path: Path, objective: str) -> None:
        cut_off = {"rollout_func": fixed_rollout()}
        trainer = make_trainer(tmp_path, objective, mask_truncated_completions=True, trainer_kwargs=cut_off)
        micro = rollouts(trainer)
        assert not any(inputs["completion_mask"].any() for inputs in micro)
        for loss_type in REDUCTIONS:
            trainer.loss_type = loss_type
            loss, gradient = loss_and_gradient(trainer, micro[0])
            assert loss == 0
            assert "lm_head.weight" in gradient, "data parallelism waits for every weight"
            assert all(not g.any() for g in gradient.values())
        assert not [name for name in measured(trainer) if name.startswith("tr/")]

    def test_some_completions_masked(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll", mask_truncated_completions=True, objective_config={"bound": 0.01})
        inputs, old = rollouts(trainer)[0], copy.deepcopy(trainer.model)
        unmasked = inputs["completion_mask"].any(-1)
        assert unmasked.any()
        assert not unmasked.all()
        nudge(trainer.model)
        assert_parity(trainer, inputs, old)


class TestMetrics:
    def test_regions_are_reported_as_the_objective_has_them(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll")
        spy = Spy.on(trainer)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        trainer.compute_loss(trainer.model, inputs)
        (out,) = spy.outputs
        assert {
            "tr/active_frac",
            "tr/kl_before",
            "tr/kl_after",
            "tr/dual",
            "tr/rest_mass",
            "tr/unconverged",
        } <= out.metrics.keys()
        for name, value in out.metrics.items():
            assert measured(trainer)[name] == [pytest.approx(value.item(), abs=1e-6)]

    @pytest.mark.supports("kept: evaluation", door="TRL")
    def test_evaluation_has_its_own(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll", per_device_eval_batch_size=4, num_generations_eval=2)
        found = trainer.evaluate(prompts(4))
        assert found["eval_tr/active_frac"] == 0
        assert found["eval_tr/kl_max"] == pytest.approx(0, abs=1e-6)
        assert "eval_loss" in found


class TestAStockTrainerRefusesTheConfig:
    """GRPOTrainer knows nothing of `objective`: it would train with its own loss."""

    @pytest.mark.refuses("other: CorralConfig for a stock GRPOTrainer", door="TRL")
    @pytest.mark.parametrize("use_cache", [None, True])
    def test_before_and_after_a_corral_trainer(self, tmp_path: Path, use_cache: bool | None) -> None:
        args = CorralConfig(**settings(tmp_path, use_cache=use_cache))
        why = r"objective='troll' is computed by CorralTrainer alone.*give GRPOTrainer a GRPOConfig"
        for _ in range(2):
            with pytest.raises(ValueError, match=why):
                GRPOTrainer(tiny_model(), even_words, args=args, train_dataset=prompts(), processing_class=tiny_tokenizer())
            CorralTrainer(tiny_model(), even_words, args=args, train_dataset=prompts(), processing_class=tiny_tokenizer())

    def test_what_reads_and_copies_a_config_still_can(self, tmp_path: Path) -> None:
        args = CorralConfig(**settings(tmp_path))
        assert copy.deepcopy(args).to_dict() == args.to_dict()
        assert repr(args).startswith("CorralConfig(")
        assert "in_corral_trainer" not in args.to_dict()


class TestAdvantages:
    @pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo", "reinforce++"])
    @pytest.mark.supports("advantage: {how}", door="TRL")
    @pytest.mark.supports("kept: several rewards and their weights", door="TRL")
    def test_they_are_group_advantages_of_the_weighted_rewards(self, tmp_path: Path, how: str) -> None:
        seen: list[Tensor] = []

        def second(completions: list[str], **_: Any) -> list[float]:
            seen.append(torch.tensor(even_words(completions)) + 2 * torch.tensor([float(len(text)) for text in completions]))
            return [float(len(text)) for text in completions]

        trainer = make_trainer(
            tmp_path, "troll", rewards=[even_words, second], reward_weights=[1.0, 2.0], advantage=how, num_generations=2
        )
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        output = trainer._generate_and_score_completions(batch)
        expected = group_advantages(seen[0], torch.arange(8) // 2, how)
        assert expected.abs().max() > 0.1
        assert_close(output["advantages"], expected, atol=1e-5)
        assert list(trainer._logs["advantages"]) == pytest.approx(expected.tolist(), abs=1e-5)

    @pytest.mark.parametrize(("how", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
    def test_two_are_also_trls_own(self, tmp_path: Path, how: str, scale: str) -> None:
        ours, theirs = make_trainer(tmp_path, "troll", advantage=how), stock(tmp_path, scale_rewards=scale)
        for mine, other in zip(rollouts(ours), rollouts(theirs), strict=True):
            assert torch.equal(mine["completion_ids"], other["completion_ids"])
            assert_close(mine["advantages"], other["advantages"], atol=1e-5)

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_without_one_trl_scales_as_it_is_told(self, tmp_path: Path, scale: str) -> None:
        ours, theirs = make_trainer(tmp_path, "troll", scale_rewards=scale), stock(tmp_path, scale_rewards=scale)
        for mine, other in zip(rollouts(ours), rollouts(theirs), strict=True):
            assert torch.equal(mine["advantages"], other["advantages"])

    @pytest.mark.parametrize("how", ["grpo", "rloo"])
    def test_completions_that_nothing_scored_have_none(self, tmp_path: Path, how: str) -> None:
        given = [None, None, None, 1.0, None, 1.0, 2.0, 4.0]  # in groups of four: one left alone, then three
        trainer = make_trainer(tmp_path, "troll", advantage=how, rewards=lambda completions, **_: given[: len(completions)])
        trainer.model.train()
        output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        expected = group_advantages(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3, dtype=torch.long), how)
        assert_close(output["advantages"], torch.cat([torch.zeros(5), expected]))

    @pytest.mark.refuses("run: a reward that returns None for every completion", door="TRL")
    @pytest.mark.parametrize("advantage", [None, "rloo"])
    def test_nothing_scored_at_all_is_refused(self, tmp_path: Path, advantage: str | None) -> None:
        def silent(completions: list[str], **_: Any) -> list[None]:
            return [None] * len(completions)

        trainer = make_trainer(tmp_path, "troll", advantage=advantage, rewards=silent)
        with pytest.raises(
            RewardError, match=r"no reward function gave a number for any of 8 completions: silent returned None"
        ):
            trainer.train()

    def test_evaluation_groups_by_its_own_number(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "troll", advantage="rloo", num_generations_eval=1, per_device_eval_batch_size=4)
        assert trainer.evaluate(prompts(4))["eval_loss"] == pytest.approx(0, abs=1e-6)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM faked: a sampler that is a little off, and reports as vLLM does. Settings that switch it on."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
    return {"use_vllm": True, "vllm_importance_sampling_correction": False}


def sampled(trainer: GRPOTrainer) -> Tensor:
    """What the faked sampler drew with, padded as TRL pads it [B T]."""
    rows = [torch.tensor(row) for row in trainer.vllm_generation.sampled]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(DEVICE)


class TestSamplers:
    """Which numbers become the anchor; the whole table of docs/trl-details.md is walked in test_config.py."""

    @pytest.mark.supports("anchor: vLLM, faked", door="TRL")
    def test_vllm_reports_the_rollout_anchor(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, "dppo", steps_per_generation=1, num_iterations=2, **vllm)
        spy = Spy.on(trainer)
        (inputs,) = rollouts(trainer)
        trainer.compute_loss(trainer.model, inputs)
        (batch,) = spy.batches
        assert_close(batch.logp_old, inputs["sampling_per_token_logps"])
        mine, reported = batch.logp_old[batch.mask].sort().values, sampled(trainer)
        assert_close(mine, reported[reported != 0].sort().values, atol=1e-5)
        assert (batch.logp_old - inputs["old_per_token_logps"])[batch.mask].abs().max() > 0.05, "the sampler must be off"
        assert measured(trainer)["tr/mismatch"] == [0.0]

    def test_with_the_old_anchor_the_mismatch_is_reported(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, "troll", **vllm)
        trainer.compute_loss(trainer.model, rollouts(trainer)[0])
        assert measured(trainer)["tr/mismatch"][0] > 1e-3

    @pytest.mark.refuses("anchor: ranked log-probs from vLLM (`logprobs` > 0)", door="TRL")
    def test_vllms_ranking_would_mistake_the_sampled_token(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        # What TRL makes of ranked log-probs: those of the likeliest token, whichever was sampled.
        theirs = stock(tmp_path, **vllm)
        theirs.vllm_generation.logprobs = 3
        inputs = theirs._generate_and_score_completions(next(iter(theirs.get_train_dataloader())))
        mask, reported = inputs["completion_mask"].bool(), sampled(theirs)
        assert (inputs["sampling_per_token_logps"] - reported)[mask].max() > 0.1
        assert bool((inputs["sampling_per_token_logps"] >= reported - 1e-6)[mask].all())
        trainer = make_trainer(tmp_path, "dppo", **vllm)
        trainer.vllm_generation.logprobs = 3
        with pytest.raises(ValueError, match="ranks tokens by likelihood"):
            rollouts(trainer)

    def test_a_token_that_vllm_could_not_score_has_no_mismatch(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, "dppo", steps_per_generation=1, num_iterations=2, **vllm)
        spy = Spy.on(trainer)
        inputs = dict(rollouts(trainer)[0])
        inputs["sampling_per_token_logps"] = inputs["sampling_per_token_logps"].clone()
        inputs["sampling_per_token_logps"][0, 0] = torch.nan
        trainer.compute_loss(trainer.model, inputs)
        assert spy.batches[0].logp_old[0, 0] == inputs["old_per_token_logps"][0, 0]

    @pytest.mark.supports("correction: TRL's own, {mode}", door="TRL")
    @pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
    def test_trls_own_correction_is_kept(self, tmp_path: Path, vllm: dict[str, Any], mode: str) -> None:
        given = {**vllm, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
        given |= {"vllm_importance_sampling_clip_max": 1.05, "max_steps": 3}
        assert_same_run(make_trainer(tmp_path, "ppo_clip", **given), stock(tmp_path, **given))
        assert_same_run(make_trainer(tmp_path, "troll", **given, **UNBOUNDED), stock(tmp_path, **given, **UNCLIPPED))

    def test_one_update_with_trls_correction_needs_no_support(
        self, tmp_path: Path, vllm: dict[str, Any], head_calls: CountedCalls
    ) -> None:
        given = {**vllm, "vllm_importance_sampling_correction": True, "gradient_accumulation_steps": 2, "max_steps": 2}
        assert_same_run(make_trainer(tmp_path, "troll", **given, **UNBOUNDED), stock(tmp_path, **given, **UNCLIPPED))
        assert head_calls.count == 0

    @pytest.mark.supports("correction: {name}", door="TRL")
    @pytest.mark.parametrize("name", ["tis", "seq_tis", "icepop", "trm"])
    @pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
    def test_corrections_weigh_the_loss(
        self, tmp_path: Path, vllm: dict[str, Any], name: str, accumulation: int, head_calls: CountedCalls
    ) -> None:
        given = {"gradient_accumulation_steps": accumulation, **vllm}
        config = {"bound": 0.001} if name == "trm" else {}
        trainer = make_trainer(tmp_path, "troll", correction=name, correction_config=config, **given)
        trainer.loss_type = "luspo"  # a mean over rows, whatever their lengths
        inputs = rollouts(trainer)[0]
        loss = trainer.compute_loss(trainer.model, inputs)
        with torch.no_grad():
            old = logp_of(dense_logp(trainer.model, inputs, 0.9), inputs["completion_ids"])
        mask = inputs["completion_mask"].bool()
        batch = TokenBatch(old, old, inputs["advantages"], mask, logp_rollout=inputs["sampling_per_token_logps"])
        weight = corral.make_correction(name, **config)(batch)
        assert not torch.allclose(weight, mask.float(), atol=1e-3)
        per_token = -inputs["advantages"][:, None] * weight  # the ratio is 1: nothing was updated yet
        assert_close(loss, per_token.sum(-1).mean() / accumulation, atol=1e-5)
        assert (head_calls.count > 0) == (FUSED and accumulation == 1)

    @pytest.mark.parametrize("weighing", ["correction", "importance ratio", "top entropy"])
    def test_weights_of_the_policy_term_leave_the_regression_alone(
        self, tmp_path: Path, vllm: dict[str, Any], weighing: str
    ) -> None:
        # All weights 0: what is left is the pull back into the region, of every token, and it has a gradient.
        given = {"correction": "trm", "correction_config": {"bound": 1e-9}} if weighing == "correction" else {}
        if weighing == "importance ratio":
            vllm = {**vllm, "vllm_importance_sampling_correction": True}
        if weighing == "top entropy":
            given["top_entropy_quantile"] = 0.5
        trainer = make_trainer(tmp_path, "troll", objective_config={"bound": 0.01}, **given, **vllm)
        trainer.loss_type = "luspo"
        inputs = dict(rollouts(trainer)[0])
        if weighing == "importance ratio":
            inputs["importance_sampling_ratio"] = torch.zeros_like(inputs["importance_sampling_ratio"])
        if weighing == "top entropy":
            trainer.get_high_entropy_mask = lambda entropies, mask, _: torch.zeros_like(mask, dtype=torch.bool)
        nudge(trainer.model, 0.5)
        loss, gradient = loss_and_gradient(trainer, inputs)
        spy = Spy.on(trainer)
        trainer.compute_loss(trainer.model, inputs)
        regression = spy.outputs[0].regression
        assert regression[inputs["completion_mask"].bool()].max() > 0.1
        assert_close(loss, regression.detach().sum(-1).mean(), atol=1e-5)
        assert max(float(g.abs().max()) for g in gradient.values()) > 1e-3

    @pytest.mark.supports("anchor: a rollout function", door="TRL")
    def test_a_rollout_function_reports_the_anchor_too(self, tmp_path: Path) -> None:
        reporting = {"rollout_func": fixed_rollout([-1.0, -2.0, -3.0])}
        trainer = make_trainer(tmp_path, "dppo", trainer_kwargs=reporting)
        spy = Spy.on(trainer)
        trainer.compute_loss(trainer.model, rollouts(trainer)[0])
        assert spy.batches[0].logp_old[0].tolist() == [-1.0, -2.0, -3.0]
        corrected = make_trainer(tmp_path, "ppo_clip", correction="tis", trainer_kwargs=reporting)
        corrected.compute_loss(corrected.model, rollouts(corrected)[0])
        assert measured(corrected)["tr/mismatch"][0] > 0.1

    @pytest.mark.supports("objective: decoupled_ppo", door="TRL")
    def test_decoupled_ppo_is_ppo_with_an_uncapped_correction(self, tmp_path: Path) -> None:
        reporting, found = {"rollout_func": fixed_rollout([-3.0, -3.5, -4.0])}, []
        for objective, more in (("decoupled_ppo", {}), ("ppo_clip", {"correction": "tis", "correction_config": {"cap": 1e6}})):
            trainer = make_trainer(tmp_path, objective, trainer_kwargs=reporting, **more)
            inputs = rollouts(trainer)[0]
            inputs["advantages"] = torch.linspace(-1, 1, len(inputs["advantages"]), device=inputs["advantages"].device)
            nudge(trainer.model)
            found.append(loss_and_gradient(trainer, inputs))
        torch.testing.assert_close(*(loss for loss, _ in found))
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(gradient, found[1][1][name], atol=1e-6, rtol=1e-5)
        assert abs(float(found[0][0])) > 1e-3

    @pytest.mark.refuses("anchor: `rollout` from a rollout function that reports no log-probs", door="TRL")
    @pytest.mark.parametrize(
        ("objective", "correction", "why"), [("dppo", None, "reported none"), ("ppo_clip", "tis", r"tis: needs `logp_rollout`")]
    )
    def test_a_rollout_function_that_reports_nothing_is_refused(
        self, tmp_path: Path, objective: str, correction: str | None, why: str
    ) -> None:
        silent = {"rollout_func": fixed_rollout()}
        trainer = make_trainer(tmp_path, objective, correction=correction, trainer_kwargs=silent)
        inputs = rollouts(trainer)[0]
        with pytest.raises(ValueError, match=why):
            trainer.compute_loss(trainer.model, inputs)

    @pytest.mark.supports("anchor: transformers' generation", door="TRL")
    def test_with_transformers_the_old_pass_is_the_rollout_anchor(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="corral"):
            trainer = make_trainer(tmp_path, "dppo")
            spy = Spy.on(trainer)
            inputs = rollouts(trainer)[0]
            trainer.compute_loss(trainer.model, inputs)
        assert torch.equal(spy.batches[0].logp_old, inputs["old_per_token_logps"])
        assert sum("trainer's own model" in record.message for record in caplog.records) == 1


class TestRefusals:
    def test_a_plain_config_is_refused(self, tmp_path: Path, unchecked_shapes: None) -> None:
        with pytest.raises(ValueError, match="must be a CorralConfig; got GRPOConfig"):
            CorralTrainer(tiny_model(), even_words, GRPOConfig(**settings(tmp_path)), prompts())

    def test_without_one_the_defaults_are_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class OnTheCPU(CorralConfig):
            def __init__(self) -> None:
                super().__init__(**settings(tmp_path))

        monkeypatch.setattr("corral.trl.trainer.CorralConfig", OnTheCPU)
        trainer = CorralTrainer(tiny_model(), even_words, train_dataset=prompts(), processing_class=tiny_tokenizer())
        assert trainer.objective.name == "troll"

    @pytest.mark.refuses("model: LoRA on the head", door="TRL")
    @pytest.mark.skipif(not FUSED, reason="this TRL computes all logits, with whatever is on the head")
    def test_an_adapter_on_the_head_is_refused(self, tmp_path: Path) -> None:
        adapter = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
        with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):  # by TRL, whose head reads the weight
            make_trainer(tmp_path, trainer_kwargs={"peft_config": adapter})

    @pytest.mark.refuses("other: Unsloth", door="TRL")
    def test_unsloths_class_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GRPOTrainer, "__module__", "unsloth_compiled_cache.UnslothGRPOTrainer")
        with pytest.raises(ValueError, match="Unsloth has replaced GRPOTrainer"):
            make_trainer(tmp_path)

    def test_an_old_pass_that_never_came_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = make_trainer(tmp_path, "troll", gradient_accumulation_steps=2)
        monkeypatch.setattr(CorralTrainer, "off_policy", True)
        with pytest.raises(RuntimeError, match="TRL made no old-policy pass"):
            rollouts(trainer)


class TestContract:
    """What of TRL is leaned on. A failure here means that TRL has changed, and says where corral must follow."""

    SIGNATURES: ClassVar[dict[str, list[str]]] = {
        "__init__": ["self", "model", "reward_funcs", "args"],
        "create_accelerator_and_postprocess": ["self"],
        "_generate": ["self", "prompts"],
        "_generate_single_turn": ["self", "prompt_ids", "images", "multimodal_fields"],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
        "_compute_loss": ["self", "model", "inputs"],
        "training_step": ["self", "model", "inputs", "num_items_in_batch"],
        "log": ["self", "logs", "start_time"],
        "train": ["self", "resume_from_checkpoint", "trial"],
        "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
        "_prepare_inputs": ["self", "generation_batch"],
        "_maybe_log_save_evaluate": ["self", "tr_loss", "grad_norm", "model"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
        "create_model_card": ["self", "model_name", "dataset_name", "tags"],
    }

    @pytest.mark.skipif(trl.__version__.startswith("1.14."), reason="only 1.14 hides its parameters behind *args")
    @pytest.mark.parametrize("name", SIGNATURES)
    def test_overridden_methods_take_what_they_took(self, name: str) -> None:
        found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        expected = self.SIGNATURES[name]
        assert found[: len(expected)] == expected, (
            f"TRL changed GRPOTrainer.{name}: it takes {found}, corral's override passes {expected} on. Adapt "
            f"src/corral/trl/trainer.py, then widen TRL_RANGE in src/corral/trl/__init__.py."
        )
        assert name in vars(CorralTrainer), f"corral no longer overrides {name}; take it out of this list"

    def test_nothing_else_of_trls_is_overridden(self) -> None:
        overridden = {
            name for name in vars(CorralTrainer) if callable(vars(CorralTrainer)[name]) and hasattr(GRPOTrainer, name)
        }
        assert overridden - {"__doc__", "__module__"} == set(self.SIGNATURES)

    @pytest.mark.skipif(not FUSED, reason="this TRL computes all logits")
    def test_the_head_function_is_called_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        class Recorded:
            @staticmethod
            def apply(*args: Any) -> Any:
                result = original.apply(*args)
                calls.append((args, result))
                return result

        original = trl_utils._ChunkedLogProbFunction
        trainer = stock(tmp_path)
        inputs = rollouts(trainer)[0]
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Recorded)
        trainer.compute_loss(trainer.model, inputs)
        assert calls, "TRL no longer looks up trl.trainer.utils._ChunkedLogProbFunction; adapt src/corral/trl/scoring.py"
        ((hidden, weight, bias, tokens, temperature, chunk, softcap, scale, outputs), result) = calls[0]
        assert weight is trainer.model.lm_head.weight
        assert bias is None
        assert hidden.shape == (len(tokens), weight.shape[1])
        assert (temperature, softcap, scale, outputs) == (0.9, None, 1.0, ("log_probs", "entropy"))
        assert isinstance(chunk, int)
        assert [None if x is None else x.shape for x in result] == [tokens.shape, tokens.shape, None, None, None]

    @pytest.mark.skipif(not FUSED, reason="this TRL computes all logits")
    def test_trls_loss_begins_with_the_pass_that_corral_makes_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        signature = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(signature.bind(None, *args, **kwargs).arguments)
            logp = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
            return logp, logp, None

        trainer = make_trainer(tmp_path, "ppo_clip")
        names = [name for name in signature.parameters if name.startswith(("pixel_", "image_", "num_", "spatial_"))]
        inputs = {**rollouts(trainer)[0], **{name: object() for name in (*names, "token_type_ids")}}
        assert len(names) >= 6
        monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", record)
        trainer._score(trainer.model, inputs)
        GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        mine, theirs = ({key: value for key, value in call.items() if value is not None} for call in calls)
        assert theirs.pop("compute_aux_loss") is False
        assert mine.keys() == theirs.keys() >= {*names, "token_type_ids", "compute_entropy"}
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value is theirs[name], name

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    @pytest.mark.parametrize(("per_generation", "iterations"), [(1, 1), (1, 2), (2, 1), (2, 2)])
    def test_the_old_policy_is_kept_when_updates_follow(
        self, tmp_path: Path, accumulation: int, per_generation: int, iterations: int
    ) -> None:
        given = {
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": per_generation,
            "num_iterations": iterations,
        }
        trainer = make_trainer(tmp_path, "ppo_clip", **given)
        assert ("old_per_token_logps" in rollouts(trainer)[0]) == trainer.off_policy

    def test_the_passes_return_what_they_returned(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path)
        inputs = rollouts(trainer)[0]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        tokens = inputs["completion_ids"].shape[1]
        result = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, tokens, compute_entropy=True)
        assert len(result) == 3
        assert result[0].shape == result[1].shape == inputs["completion_ids"].shape


LOAD_WITHOUT_CORRAL = """
import sys, torch
sys.modules["corral"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
torch.save(model(torch.arange(12).reshape(2, 6)).logits, sys.argv[2])
try:
    import corral
except ImportError:
    print("corral was not there")
"""


@pytest.mark.supports("model: saved with the original's keys and configuration", door="TRL")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("how", ["path", "model"])
def test_a_saved_configuration_is_the_original_one(tmp_path: Path, how: str, cached: bool) -> None:
    model = tiny_model()
    model.config.use_cache = cached  # transformers' own Trainer writes its own there, whoever computes the loss
    model.save_pretrained(tmp_path / "before")
    trainer = make_trainer(tmp_path / "run", model=model if how == "model" else str(tmp_path / "before"))
    trainer.save_model(str(tmp_path / "after"))
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert before == after
    assert before["use_cache"] is cached


def test_a_cache_that_is_asked_for_is_written_down(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, use_cache=False)
    assert trainer.model.config.use_cache is False


@pytest.mark.supports("model: loaded without corral, with the same logits", door="TRL")
def test_inference_does_not_know_that_there_was_a_projection(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "before")
    trainer = make_trainer(tmp_path / "run", "troll", model=model, max_steps=4, objective_config={"bound": 0.01})
    logged, _ = run(trainer)
    assert max(row["tr/active_frac"] for row in logged) > 0
    trainer.save_model(str(tmp_path / "after"))
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_CORRAL, str(tmp_path / "after"), str(tmp_path / "logits.pt")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "corral was not there" in done.stdout
    with torch.no_grad():
        logits = trainer.model.cpu().eval()(torch.arange(12).reshape(2, 6)).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "before" / "config.json").read_text() == (tmp_path / "after" / "config.json").read_text()
