"""Sampling with top-p, top-k or min-p: both policies are conditioned on the tokens that the sampler kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Spy, dense_logp, loss_and_gradient, make_trainer, measured, nudge, rollouts
from torch import Tensor

from corral import TokenBatch, make_objective
from corral.support import condition_on_support, gather_support
from corral.tensors import SparseDist
from tolerance import ROUNDING, assert_close

TRUNCATED = {"top_p": 0.8, "top_k": 9}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip": ("ppo_clip", {}, "old"),
    "clip on the sampler": ("ppo_clip", {}, "rollout"),
    "dppo": ("dppo", {}, "auto"),
    "gspo": ("gspo", {}, "old"),
    "troll": ("troll", {"bound": 0.01}, "old"),
    "troll on the sampler": ("troll", {"bound": 0.01}, "rollout"),
    "dppo on a support": ("dppo", {"estimator": "topk", "bound": 0.01}, "old"),
    "dppo in full": ("dppo", {"estimator": "full", "divergence": "kl", "bound": 0.001}, "old"),
}


def kept_of(p: Tensor, how: dict[str, Any]) -> Tensor:
    """The tokens that transformers keeps: top-k first, then the fewest of those that reach top-p, or all near the likeliest."""
    ranked = p.sort(-1, descending=True)
    kept = p >= ranked.values[..., how["top_k"] - 1 : how["top_k"]] if "top_k" in how else torch.ones_like(p, dtype=torch.bool)
    if "min_p" in how:
        return kept & (p >= how["min_p"] * ranked.values[..., :1])
    some = torch.where(kept, p, 0.0) / torch.where(kept, p, 0.0).sum(-1, keepdim=True)
    ranked = some.sort(-1, descending=True)
    below = ranked.values.cumsum(-1) - ranked.values < how["top_p"]
    return kept & torch.zeros_like(kept).scatter(-1, ranked.indices, below)


@pytest.mark.supports("anchor: any with top_p, top_k or min_p, with transformers' generation", door="TRL")
@pytest.mark.parametrize("how", [TRUNCATED, {"top_k": 5, "top_p": 1.0}, {"min_p": 0.1}], ids=str)
def test_the_old_policy_is_conditioned_on_the_tokens_that_were_kept(tmp_path: Path, how: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", anchor="old", **how)
    for inputs in rollouts(trainer):
        mask, tokens = inputs["completion_mask"].bool(), inputs["completion_ids"]
        with torch.no_grad():
            logp = dense_logp(trainer.model, inputs, 0.9)
        kept = kept_of(logp.exp(), how)
        ids = inputs["corral_kept"]
        found = torch.zeros(*kept.shape[:2], kept.shape[2] + 1, dtype=torch.bool).scatter(-1, ids.long() + 1, True)[..., 1:]
        assert (found == kept)[mask].float().mean() > 0.999  # but for ties of rounding
        expected = logp.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        assert_close(inputs["old_per_token_logps"][mask], expected[mask], atol=1e-4)
        assert "sampling_per_token_logps" not in inputs, "nothing reads them"


@pytest.mark.parametrize("name", CASES)
def test_ratios_loss_and_gradient_are_those_of_the_policies_that_sampling_uses(tmp_path: Path, name: str) -> None:
    objective, config, anchor = CASES[name]
    trainer = make_trainer(tmp_path, objective, objective_config=config, anchor=anchor, loss_type="bnpo", **TRUNCATED)
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[0]
    with torch.no_grad():
        old = condition_on_support(gather_support(dense_logp(trainer.model, inputs, 0.9), inputs["corral_kept"]))
    loss_and_gradient(trainer, inputs)
    first = spy.batches[-1]
    if anchor != "rollout":
        assert torch.equal(first.logp_new[first.mask], first.logp_old[first.mask]), "every ratio is exactly 1"
        assert measured(trainer)["tr/drift_max"] == [0.0]
    nudge(trainer.model)
    loss, gradient = loss_and_gradient(trainer, inputs)
    batch = spy.batches[-1]
    assert_close(batch.logp_old[batch.mask], old.logp[..., 0][batch.mask], atol=1e-4)

    trainer.model.zero_grad()
    new = condition_on_support(gather_support(dense_logp(trainer.model, inputs, 0.9), inputs["corral_kept"]))
    mask = inputs["completion_mask"].bool()
    assert_close(batch.logp_new[mask], new.logp[..., 0][mask], atol=1e-4)
    assert ((new.logp[..., 0] - old.logp[..., 0]).abs()[mask] > 1e-3).any()
    sampled = TokenBatch(new.logp[..., 0], batch.logp_old, inputs["advantages"], mask, logp_rollout=batch.logp_rollout)
    if trainer.needs_support:
        assert batch.dist_old is not None
        assert isinstance(batch.dist_old, SparseDist)
        assert (batch.dist_old.rest[mask] == -torch.inf).all()
        held = inputs["corral_kept"].long()
        anchored = SparseDist(held, batch.dist_old.logp, batch.dist_old.rest, batch.dist_old.rest_max)
        sampled = TokenBatch.on_support(
            SparseDist(held, new.logp, new.rest, new.rest_max), anchored, inputs["advantages"], mask, batch.logp_rollout
        )
    per_token = make_objective(objective, **config)(sampled).loss
    expected = per_token[mask].mean() / trainer.current_gradient_accumulation_steps
    assert_close(loss, expected.detach(), atol=10 * ROUNDING, rtol=1e-3)
    expected.backward()
    for key, weight in trainer.model.named_parameters():
        if key in gradient and weight.grad is not None:
            assert_close(gradient[key], weight.grad, atol=1e-3 * float(weight.grad.abs().max()) + 1e-7, rtol=1e-2)


def test_half_precision_has_ratios_of_exactly_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True, **TRUNCATED)
    inputs = rollouts(trainer)[0]
    loss_and_gradient(trainer, inputs)
    found = measured(trainer)
    assert found["tr/drift_max"] == [0.0]
    assert found["tr/kl_before"] == [0.0]


def test_one_update_per_batch_and_padded_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", packed_batches="off", num_iterations=1, steps_per_generation=1, **TRUNCATED)
    trainer.train()
    assert all(entry.get("tr/ratio_max", 1.0) == 1.0 for entry in trainer.state.log_history)


@pytest.mark.parametrize("objective", ["ppo_clip", "troll"])
def test_a_run_with_evaluation_finishes_and_logs_the_conditioned_policy(tmp_path: Path, objective: str) -> None:
    trainer = make_trainer(tmp_path, objective, max_steps=4, **TRUNCATED)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "tr/drift_max" in line]
    assert lines
    assert all(line["tr/drift_max"] == 0 for line in lines)
    assert all(line["entropy"] < 2.2 for line in lines), "of at most nine tokens"


@pytest.mark.refuses("anchor: top_p, top_k or min_p beside a union, distill, `beta` or tools", door="TRL")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"objective": "troll", "support": "union"}, "there is no union"),
        ({"objective": "distill"}, "reads tokens that top_p, top_k or min_p cut off"),
        ({"objective": "troll", "objective_config": {"tail": "fill", "vocab_size": 100}}, "cut off"),
        ({"objective": "ppo_clip", "top_entropy_quantile": 0.5}, "which read whole policies"),
    ],
    ids=str,
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_trainer(tmp_path, **{"anchor": "auto", **TRUNCATED, **given})


def test_a_large_vocabulary_needs_a_bound(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", **TRUNCATED)
    trainer._check_replay(150_000)
    trainer.args.top_k = 0
    with pytest.raises(ValueError, match=r"may keep up to 150,000 tokens.*such as 512"):
        trainer._check_replay(150_000)
