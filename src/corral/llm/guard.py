"""Guards: steps that would poison the weights are skipped, and a policy that falls apart is noticed."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How bad is bad. A limit must be passed `patience` lines in a row: one odd batch is no collapse."""

    success_share: float = 0.5
    """Success below this share of its best is a collapse…"""
    success_margin: float = 0.1
    """…if it also lost this much: between .02 and .01 there is only noise."""
    entropy_share: float = 0.01
    """Entropy below this share of its best is a collapse. Healthy runs lose nine tenths of it and more."""
    kl: float = 1.0
    """Mean KL to the old policy, in nats per token, that no trust region would allow."""
    reference_kl: float = 10.0
    """The same for the KL to a reference model, where there is one."""
    solved: float = 0.9
    """From this success on, a policy may be certain of itself, and rewards may all be equal."""
    patience: int = 3
    """Lines in a row before success, entropy or KL is taken seriously; measurements of success count, not steps."""
    equal_patience: int = 20
    """Steps in a row with no difference in any group's rewards, so with nothing to learn from."""
    skipped_patience: int = 10
    """Skipped updates in a row."""


class CollapseWatch:
    """Reads lines of metrics, and says what is going wrong. The same lines always give the same words."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.best: dict[str, float] = {}
        self.runs: dict[str, int] = {}
        self.success: float | None = None

    def observe(self, line: Mapping[str, Any]) -> list[str]:
        """What this line shows, in sentences; each kind once until it has recovered."""
        self.success = line["success"] if line.get("success") is not None else self.success
        solved = self.success is not None and self.success >= self.limits.solved
        found = [
            self._fell("success", line.get("success"), self.limits.success_share, self.limits.success_margin),
            self._fell("entropy", None if solved else line.get("entropy"), self.limits.entropy_share, 0.0),
            self._exploded("tr/kl_before", line.get("tr/kl_before"), self.limits.kl),
            self._exploded("kl", line.get("kl"), self.limits.reference_kl),
            self._equal(None if solved else line.get("frac_reward_zero_std"), line.get("reward")),
        ]
        return [sentence for sentence in found if sentence is not None]

    def _fell(self, key: str, value: float | None, share: float, margin: float) -> str | None:
        if value is None:
            return None
        best = self.best[key] = max(value, self.best.get(key, value))
        if not self._lasts(key, value < share * best and best - value > margin, self.limits.patience):
            return None
        return (
            f"{key} fell from {best:.3g} to {value:.3g} and stayed there: the policy is collapsing. Try a smaller learning "
            f"rate or bound, or fewer updates per batch."
        )

    def _exploded(self, key: str, value: float | None, limit: float) -> str | None:
        if value is None or not self._lasts(key, not value <= limit, self.limits.patience):  # NaN is beyond every limit
            return None
        return f"{key} is {value:.3g} nats per token, beyond {limit:g}: the policy runs away. Try a smaller learning rate."

    def _equal(self, share: float | None, reward: float | None) -> str | None:
        if share is None or not self._lasts("equal rewards", share >= 1.0, self.limits.equal_patience):
            return None
        of = "" if reward is None else f" ({reward:.3g})"
        return (
            f"for {self.limits.equal_patience} steps all completions of a prompt had the same reward{of}: there is nothing to "
            f"learn from. Try easier problems, more completions per prompt, or a reward with more than two values."
        )

    def _lasts(self, key: str, bad: bool, patience: int) -> bool:
        """Whether it is bad for the `patience`-th time in a row."""
        self.runs[key] = self.runs.get(key, 0) + 1 if bad else 0
        return self.runs[key] == patience


def finite_gradients(model: nn.Module) -> bool:
    """Whether every gradient is finite; one number comes off the device."""
    flags = [parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


def drop_gradients(model: nn.Module) -> None:
    """Take the gradients away. Optimizers pass over parameters that have none: weights, moments and counts stay as they are."""
    for parameter in model.parameters():
        parameter.grad = None


def on_any_process(flag: bool) -> bool:
    """Whether it is so on any process; all of them must ask, and all get the same answer."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return flag
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor([float(flag)], device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return bool(shared.item())


class GuardCallback(TrainerCallback):
    """Skips updates with a non-finite loss or gradient, and watches the metrics for a collapse. For any CorralTrainer."""

    def __init__(
        self,
        mode: Literal["warn", "stop", "off"] = "warn",
        limits: Limits | None = None,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        self.mode, self.limits, self.say = mode, limits or Limits(), say
        self.watch = CollapseWatch(self.limits)
        self.skipped = 0
        """Updates skipped so far."""
        self.collapsed: str | None = None
        """Why the run was stopped, if it was."""
        self.loss_is_finite = True
        """Of the losses since the last update; a trainer that can tell says so here."""
        self.news: list[str] = []
        """Warnings since they were last fetched."""
        self._skipped_in_a_row = 0
        self._mismatch_said = False

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Be where a run was after these lines."""
        for line in lines:
            self.watch.observe(line)
            self.skipped = line.get("skipped", self.skipped)
            self._mismatch_said |= any("before any update" in text for text in line.get("warnings", ()))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """Gradients are clipped by now, which spreads a NaN to all of them. fp16 has a scaler that skips such steps itself."""
        if self.mode == "off" or args.fp16:
            return
        poisoned = on_any_process(not (self.loss_is_finite and finite_gradients(model)))
        loss_is_finite, self.loss_is_finite = self.loss_is_finite, True
        if not poisoned:
            self._skipped_in_a_row = 0
            return
        drop_gradients(model)
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1:
            what = "gradient" if loss_is_finite else "loss"
            self._tell(f"update {state.global_step + 1} had a non-finite {what} and was skipped ({self.skipped} so far).")
        if self._skipped_in_a_row == self.limits.skipped_patience:
            self._collapse(f"{self._skipped_in_a_row} updates in a row had to be skipped: nothing is being learned.")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """A line of metrics; a collapse ends the run with a checkpoint if that was asked for."""
        if self.mode == "off" or "loss" not in logs:
            return
        for sentence in self.watch.observe(logs):
            self._collapse(sentence)
        if self.collapsed is not None:
            control.should_save = control.should_training_stop = True

    def check_first_update(self, active: Iterable[float]) -> None:
        """Tokens acted on while the new policy was still the old one: somebody else did the sampling."""
        active = list(active)
        share = sum(active) / len(active) if active else 0.0
        if self.mode == "off" or self._mismatch_said or not share > 0:
            return
        self._mismatch_said = True
        self._tell(
            f"the trust region acted on {share:.2%} of the tokens before any update, when the new policy should equal its "
            f"anchor: the sampler, or dropout, differs from the trainer. Use anchor='old', a correction, or no dropout."
        )

    def _collapse(self, sentence: str) -> None:
        self._tell(sentence)
        if self.mode == "stop":
            self.collapsed = self.collapsed or sentence

    def _tell(self, sentence: str) -> None:
        self.news.append(sentence)
        self.say(sentence)
