"""Metrics on their way to the log: whose numbers they are, and how those of several processes are put together."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import dense_logp, make_trainer, measured, nudge, rollouts

from corral.tensors import TokenBatch
from corral.trl import ledger
from corral.trl.ledger import Ledger, ratio_sums

NAN = math.nan


def metrics(**values: float) -> dict[str, torch.Tensor]:
    return {name.replace("__", "/"): torch.tensor(value, requires_grad=True) for name, value in values.items()}


def test_every_micro_batch_has_its_own_numbers_and_gives_them_once() -> None:
    book = Ledger()
    book.add("train", 3, metrics(tr__kl_before=0.5), [])
    book.add("eval", 2, metrics(tr__kl_before=0.25, entropy=1.5), [])
    assert book.flush() == [("train", "tr/kl_before", 0.5), ("eval", "entropy", 1.5), ("eval", "tr/kl_before", 0.25)]
    assert book.flush() == []


def test_a_pass_without_a_way_back_says_nothing() -> None:
    book = Ledger()
    # Dense shares 0.25 and 0.75: 0.5 in the mean; the most that was left out is 2⁻¹⁰. The third never went back.
    book.add("train", 3, {}, list(torch.tensor([[0.25, 2**-12], [0.75, 2**-10], [NAN, NAN]])))
    assert book.flush() == [], "a backward pass comes after its micro-batch, and is told of with the next"
    book.add("train", 0, {}, [torch.tensor([NAN, NAN])])
    book.add("train", 0, {}, [])
    assert book.flush() == [("train", "head/dense_share", 0.5), ("train", "head/dropped_max", 2**-10)]


def test_golden_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mean by tokens, (1 · 0.5 + 3 · 0.1) / 4 = 0.2; the larger of two largest; a count; the third has no live token.
    others = [
        [("train", 3, {"tr/kl_before": 0.1, "tr/kl_max": 0.7, "tr/unconverged": 2.0})],
        [("train", 0, {})],
    ]
    monkeypatch.setattr(ledger, "gather_object", lambda mine: [*mine, *others])
    book = Ledger()
    book.add("train", 1, metrics(tr__kl_before=0.5, tr__kl_max=0.6, tr__unconverged=1.0), [])
    assert book.flush() == [
        ("train", "tr/kl_before", pytest.approx(0.2)),
        ("train", "tr/kl_max", 0.7),
        ("train", "tr/unconverged", 3.0),
    ]


def test_an_update_is_written_down_after_its_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "troll")
    inputs: dict[str, Any] = rollouts(trainer)[0]
    nudge(trainer.model)
    trainer.compute_loss(trainer.model, inputs).backward()
    assert "tr/active_frac" not in trainer._metrics["train"]
    monkeypatch.setattr(trainer, "_prepare_inputs", lambda given: given)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters())
    trainer.training_step(trainer.model, inputs, None)
    assert len(trainer._metrics["train"]["tr/active_frac"]) == 2
    assert len(measured(trainer)["entropy"]) == 2


def token_batch(logp_new: list[float], mask: list[bool]) -> TokenBatch:
    """One sequence whose old policy gave every token e⁻⁵."""
    new = torch.tensor([logp_new])
    return TokenBatch(new, torch.full_like(new, -5.0), torch.ones(1), torch.tensor([mask]))


def test_golden_effective_sample_size_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    # ρ = 1, 1 | 2 | 4 of two micro-batches here and one there; the masked token has anything.
    # (Σρ)² / (N Σρ²) = (1 + 1 + 2 + 4)² / (4 · (1 + 1 + 4 + 16)) = 64 / 88. A mean of 1, 1 and 1 would hide all of it.
    book, other = Ledger(), Ledger()
    book.add("train", 2, ratio_sums(token_batch([-5.0, -5.0, math.nan], [True, True, False])), [])
    book.add("train", 1, ratio_sums(token_batch([-5.0 + math.log(2), 1e30], [True, False])), [])
    book.add("eval", 1, ratio_sums(token_batch([-4.0], [True])), [])
    other.add("train", 1, ratio_sums(token_batch([-5.0 + math.log(4)], [True])), [])
    theirs = [*other.lines(), ("train", 0, {}), ("eval", 0, {})]
    monkeypatch.setattr(ledger, "gather_object", lambda mine: [*mine, theirs])
    assert book.flush() == [("train", "tr/ess", pytest.approx(64 / 88)), ("eval", "tr/ess", pytest.approx(1.0))]


@pytest.mark.parametrize(("logp_new", "size"), [(math.nan, math.nan), (-500.0, 0.0)])
def test_ratios_that_are_no_numbers_or_all_0_are_not_full_size(logp_new: float, size: float) -> None:
    book = Ledger()
    book.add("train", 2, ratio_sums(token_batch([logp_new] * 2, [True, True])), [])
    assert book.flush() == [("train", "tr/ess", pytest.approx(size, nan_ok=True))]


@pytest.mark.parametrize("objective", ["troll", "ppo_clip"])
def test_the_effective_sample_size_is_that_of_the_dense_policies(objective: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objective, gradient_accumulation_steps=2, steps_per_generation=4)
    batches: list[dict[str, Any]] = rollouts(trainer)[:2]
    trainer.compute_loss(trainer.model, batches[0])
    assert measured(trainer)["tr/ess"] == [pytest.approx(1.0)]
    old = [dense_logp(trainer.model, inputs, trainer.temperature).detach() for inputs in batches]
    nudge(trainer.model)
    rho = []
    for inputs, before in zip(batches, old, strict=True):
        trainer.compute_loss(trainer.model, inputs)
        moved = dense_logp(trainer.model, inputs, trainer.temperature).detach() - before
        sampled = moved.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        rho.append(sampled.exp()[inputs["completion_mask"].bool()])
    ratios = torch.cat(rho).double()
    expected = ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())
    assert expected < 0.99
    assert measured(trainer)["tr/ess"][1:] == [pytest.approx(expected.item(), rel=1e-4)]
