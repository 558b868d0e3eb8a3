"""One head scores every policy of a ratio: at unchanged weights every ratio is exactly 1, for every objective and precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import Spy, make_trainer, measured, nudge, rollouts, tiny_model

from corral.trl.api import FUSED
from device import DEVICE
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*may slow down:UserWarning"),
    pytest.mark.skipif(not FUSED, reason="this TRL computes all logits, in every pass alike"),
]

OBJECTIVES: dict[str, dict[str, Any]] = {
    # decoupled_ppo wants another sampler, and clip_cov acts on-policy too.
    **{name: {"objective": name} for name in POLICY_OBJECTIVES if name not in ("clip_cov", "decoupled_ppo")},
    "dppo on a support": {"objective": "dppo", "objective_config": {"estimator": "topk"}},
    "dppo, kl": {"objective": "dppo", "objective_config": {"divergence": "kl"}},
    "troll on a union": {"objective": "troll", "support": "union"},
    "troll as published": {
        "objective": "troll", "support": "union", "objective_config": {"tail": "fill", "vocab_size": 40},
    },
}  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16 autocast": {"bf16": True},
    "bf16 weights": {"dtype": torch.bfloat16},
}

PATHS = ("ppo_clip", "gspo", "dppo on a support", "troll", "troll on a union")
"""One objective for each way through the head, a ratio of whole sequences among them: the others differ behind it."""
CELLS = [
    pytest.param(given, precision, id=f"{name}-{kind}", marks=[] if kind == "float32" or name in PATHS else pytest.mark.slow)
    for name, given in OBJECTIVES.items()
    for kind, precision in PRECISIONS.items()
]


def unmoved(tmp: Path, *, dtype: torch.dtype = torch.float32, bf16: bool = False, **given: Any) -> Any:
    """A trainer whose updates change no weight: four micro-batches, each an update, of one batch of rollouts."""
    given = {"learning_rate": 1e-12, "steps_per_generation": 4, "max_steps": 4, "bf16": bf16, **given}
    return make_trainer(tmp, model=tiny_model().to(dtype), **given)


@pytest.mark.supports("model: ratios of exactly 1 at unchanged weights, float32, bf16 autocast and bf16 weights", door="TRL")
@pytest.mark.parametrize(("given", "precision"), CELLS)
def test_at_unchanged_weights_every_ratio_is_one(tmp_path: Path, given: dict[str, Any], precision: dict[str, Any]) -> None:
    trainer = unmoved(tmp_path, **given, **precision)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "tr/ratio_max" in line]
    assert len(lines) == 4
    assert [line["tr/ratio_max"] for line in lines] == [1.0] * 4
    assert [line["tr/active_frac"] for line in lines] == [0.0] * 4
    assert lines[0]["tr/drift_max"] == 0.0
    assert "tr/drift_max" not in lines[1], "it is of the first update alone"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("given", OBJECTIVES.values(), ids=OBJECTIVES)
def test_with_kernels_too(tmp_path: Path, given: dict[str, Any], precision: dict[str, Any]) -> None:
    # A support of one token: of more, a vocabulary of 40 has too few tiles, and the torch path runs.
    test_at_unchanged_weights_every_ratio_is_one(tmp_path, {**given, "support_size": 1}, precision)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("objective", ["ppo_clip", "troll"])
def test_log_probs_of_the_old_pass_are_those_of_the_update_to_the_last_bit(
    tmp_path: Path, objective: str, precision: dict[str, Any]
) -> None:
    trainer = unmoved(tmp_path, objective=objective, **precision)
    spy = Spy.on(trainer)
    for inputs in rollouts(trainer):
        trainer.compute_loss(trainer.model, inputs)
    assert len(spy.batches) == 4
    # TRL shuffles between the passes, and in float32 cuBLAS rounds some rows of the network's own GEMMs by their place.
    atol = 3e-6 if DEVICE == "cuda" and not precision else 0.0
    for batch in spy.batches:
        assert_close(batch.logp_new[batch.mask], batch.logp_old[batch.mask], atol=atol, rtol=0.0)
        if batch.dist_new is not None:  # on a GPU an own tail is summed in another order than a given one
            new, old = (x.with_rest()[batch.mask] for x in (batch.dist_new, batch.dist_old))
            assert_close(new, old, atol=3e-6 if DEVICE == "cuda" else 0.0, rtol=0.0)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("lora", [False, True], ids=["reference model", "adapter switched off"])
def test_a_reference_that_is_the_policy_has_no_kl(tmp_path: Path, lora: bool, precision: dict[str, Any]) -> None:
    kwargs = {"peft_config": LoraConfig(r=2, target_modules="all-linear")} if lora else {}
    model = tiny_model().to(precision.get("dtype", torch.float32))
    if not lora:  # a reference is loaded from where the policy came from
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    given = {"learning_rate": 1e-12, "beta": 0.1, "bf16": precision.get("bf16", False), "max_steps": 2}
    if isinstance(model, str):
        given["model_init_kwargs"] = {"dtype": str(precision.get("dtype", torch.float32)).removeprefix("torch.")}
    trainer = make_trainer(tmp_path, "ppo_clip", model=model, trainer_kwargs=kwargs, **given)
    trainer.train()
    assert [line["kl"] for line in trainer.state.log_history if "kl" in line] == [0.0, 0.0]


@pytest.mark.supports("kept: dropout, off unless asked for", door="TRL")
@pytest.mark.parametrize("asked", [True, False])
def test_dropout_moves_no_ratio_unless_it_is_asked_for(tmp_path: Path, asked: bool) -> None:
    adapter = LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    given = {"disable_dropout": False} if asked else {}
    trainer = make_trainer(tmp_path, "gspo", learning_rate=1e-12, trainer_kwargs={"peft_config": adapter}, max_steps=2, **given)
    trainer.train()
    ratios = [line["tr/ratio_max"] for line in trainer.state.log_history if "tr/ratio_max" in line]
    assert (max(ratios) > 1.0) == asked


def test_unequal_micro_batches_move_ratios_by_rounding_and_nothing_acts(tmp_path: Path) -> None:
    # The old pass scores 8 completions at once, the update 4: the network's own GEMMs may round differently.
    trainer = unmoved(tmp_path, objective="gspo", bf16=True, per_device_train_batch_size=4)
    trainer.args.per_device_train_batch_size = 8
    for inputs in rollouts(trainer):
        trainer.compute_loss(trainer.model, inputs)
    found = measured(trainer)
    assert max(found["tr/drift_max"]) < 1e-2
    assert max(found["tr/active_frac"]) == 0.0


def test_weights_that_move_are_seen(tmp_path: Path) -> None:
    trainer = unmoved(tmp_path, objective="gspo")
    inputs = rollouts(trainer)[0]
    nudge(trainer.model)
    trainer.compute_loss(trainer.model, inputs)
    assert measured(trainer)["tr/ratio_max"][0] > 1.0
