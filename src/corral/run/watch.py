"""A policy that falls apart is noticed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How bad is bad. A limit must be passed `patience` lines in a row: one odd batch is no collapse."""

    success_share: float = 0.5
    """Success below this share of its best is a collapse…"""
    success_margin: float = 0.1
    """…if it also lost this much: between .02 and .01 there is only noise."""
    entropy_share: float = 0.01
    """Entropy, or a Gaussian's standard deviation, below this share of its best is a collapse. Healthy runs lose nine tenths
    of it and more."""
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
            self._fell("std", None if solved else line.get("std"), self.limits.entropy_share, 0.0),
            self._exploded("tr/kl_before", line.get("tr/kl_before"), self.limits.kl),
            self._exploded("kl", line.get("kl"), self.limits.reference_kl),
            self._equal(None if solved else line.get("frac_reward_zero_std"), line.get("reward")),
        ]
        return [sentence for sentence in found if sentence is not None]

    def _fell(self, key: str, value: float | None, share: float, margin: float) -> str | None:
        if value is None:
            return None
        best = self.best[key] = max(self.best.get(key, -math.inf), value)  # in this order NaN is never the best
        fine = value >= share * best or best - value <= margin  # NaN is not
        if not self._lasts(key, not fine, self.limits.patience):
            return None
        return (
            f"{key} fell from {best:.3g} to {value:.3g} and stayed there: the policy is collapsing. Try a smaller learning "
            f"rate or bound, or fewer updates per batch."
        )

    def _exploded(self, key: str, value: float | None, limit: float) -> str | None:
        if value is None or not self._lasts(key, not value <= limit, self.limits.patience):  # NaN is beyond every limit
            return None
        return f"{key} is {value:.3g} nats, beyond {limit:g}: the policy runs away. Try a smaller learning rate."

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
