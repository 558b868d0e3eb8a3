"""Guard of a training run, which skips non-finite updates and detects a collapse of the policy."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from corral.lab.run.settings import GuardMode


@dataclass(frozen=True, kw_only=True)
class CollapseLimits:
    """Thresholds on training metrics for symptoms of a policy's collapse.
    Most count only after several successive lines of metrics, to ignore odd batches."""

    success_share: float = 0.5
    """Share of a run's best success below which success counts as collapsed, if it also fell by `success_margin`."""
    success_margin: float = 0.1
    """Smallest fall of success that can count as a collapse. Smaller falls are noise."""
    entropy_share: float = 0.01
    """Share of a run's best entropy below which the policy counts as collapsed.
    A Gaussian's standard deviation is treated alike. Healthy runs lose nine tenths of it and more."""
    kl: float = 1.0
    """Largest mean KL to the old policy, in nats per token, in a healthy run. Usual trust regions are smaller."""
    reference_kl: float = 10.0
    """Largest mean KL to the reference model, in nats per token, in a healthy run with a reference model."""
    ess: float = 0.7
    """Effective sample size, as a share of the tokens, below which the guard warns.
    A few importance ratios then decide an update, so that one line of metrics is enough. In the demo `troll` stays above
    .97; `reinforce` at five times the learning rate starts with .62 and has collapsed at step 4."""
    equal_share: float = 0.9
    """The guard warns when at least this share of prompts has the same reward for all their completions.
    Most samples are then wasted."""
    solved: float = 0.9
    """Smallest success at which low entropy and equal rewards count as normal, not as symptoms of a collapse."""
    patience: int = 3
    """Number of successive lines of metrics with success, entropy or KL beyond its threshold that count as a collapse.
    Success is counted in measurements, not steps."""
    truncated_patience: int = 10
    """Number of successive steps with every completion cut off, after which the guard warns."""
    equal_patience: int = 20
    """Number of successive steps with equal rewards for nearly all prompts before the guard reacts.
    Nothing can be learned from equal rewards."""
    skipped_patience: int = 10
    """Number of successive skipped updates that count as a collapse."""
    zero_patience: int = 10
    """Number of successive updates with a gradient of exactly 0, although rewards differ, after which the guard warns."""


class _Finding(NamedTuple):
    """Symptom found in a run's metrics: a sentence with advice, and whether it is a collapse or only a warning."""

    sentence: str
    collapse: bool = True


@dataclass
class CollapseWatch:
    """Detector of a policy's collapse from a run's metrics. Equal metrics always give equal sentences."""

    limits: CollapseLimits
    best: dict[str, float] = field(default_factory=dict)
    """Best value so far of each metric that should not fall."""
    runs: dict[str, int] = field(default_factory=dict)
    """Number of successive lines of metrics, up to the newest line, that show a symptom, keyed by symptom."""
    newest: dict[str, float] = field(default_factory=dict)
    """Newest values of success and of equal rewards, since some lines of metrics lack them."""

    def observe(self, line: Mapping[str, Any]) -> list[_Finding]:
        """Return the symptoms in the newest metrics. Each symptom is reported once, until the run has recovered."""
        return list(self._find(line))

    def _find(self, line: Mapping[str, Any]) -> Iterator[_Finding]:
        limits, least_share = self.limits, {"success": self.limits.success_share}
        self.newest |= {key: line[key] for key in ("success", "frac_reward_zero_std") if line.get(key) is not None}
        solved = self.newest.get("success", 0.0) >= limits.solved
        for key in ("success",) if solved else ("success", "entropy", "std"):
            if (value := line.get(key)) is None:
                continue
            best = self.best[key] = max(self.best.get(key, -math.inf), value)  # in this order NaN is never the best
            margin = limits.success_margin if key == "success" else 0.0
            fine = value >= least_share.get(key, limits.entropy_share) * best or best - value <= margin  # NaN is not
            if self._lasts(key, not fine, limits.patience):
                yield _Finding(
                    f"{key} fell from {best:.3g} to {value:.3g} and stayed there: the policy is collapsing. Try a smaller "
                    f"learning rate or bound, or fewer updates per batch."
                )
        for key, limit in (("tr/kl_before", limits.kl), ("kl", limits.reference_kl)):
            value = line.get(key)
            if value is not None and self._lasts(key, not value <= limit, limits.patience):  # NaN is beyond every limit
                yield _Finding(
                    f"{key} is {value:.3g} nats, beyond {limit:g}: the policy runs away. Try a smaller learning rate."
                )
        ess = line.get("tr/ess")
        # At the first line: three of them may be all that a collapse takes. NaN is below every limit.
        if ess is not None and self._lasts("tr/ess", not ess >= limits.ess, 1):
            yield _Finding(
                f"tr/ess is {ess:.3g}, below {limits.ess:g}: a few tokens with large ratios decide the updates, which often "
                f"comes before a collapse; take fewer updates per batch, a smaller learning rate or bound, or fresher "
                f"rollouts.",
                collapse=False,
            )
        share, reward, patience = line.get("frac_reward_zero_std"), line.get("reward"), limits.equal_patience
        if share is not None and not solved:
            every = self._lasts("equal rewards", share >= 1.0, patience)
            most = self._lasts("mostly equal rewards", share >= limits.equal_share, patience)
            of = "" if reward is None else f" ({reward:.3g})"
            hint = "Try easier problems, more completions per prompt, or a reward with more than two values."
            if every:
                yield _Finding(
                    f"for {patience} steps all completions of a prompt had the same reward{of}: every advantage is 0, and "
                    f"there is nothing to learn from. {hint}"
                )
            elif most:
                yield _Finding(
                    f"for {patience} steps at least {limits.equal_share:.0%} of the groups had one reward for all completions "
                    f"({share:.0%} now): almost every sample is wasted. {hint}",
                    collapse=False,
                )
        cut = line.get("completions/clipped_ratio")
        if cut is not None and self._lasts("truncated", cut >= 1.0, limits.truncated_patience):
            yield _Finding(
                f"for {limits.truncated_patience} steps every completion was cut off before its end, so rewards are of "
                f"unfinished texts: raise max_completion_length, or check that the model can write its end-of-sequence token.",
                collapse=False,
            )
        # Where all rewards of each group are equal a gradient of 0 is right, and the line above says so in time.
        still, share = line.get("zero_gradients", 0), self.newest.get("frac_reward_zero_std", 0.0)
        if self._lasts("zero gradient", still >= limits.zero_patience and share < 1.0, 1):
            yield _Finding(
                f"the gradient was exactly 0 at each of the last {still} updates, though rewards differ in {1 - share:.0%} of "
                f"the groups: no weight moves. Check that what should be trained requires a gradient, that completions are not "
                f"all masked out, and that the trust region leaves some token (tr/active_frac below 1).",
                collapse=False,
            )

    def _lasts(self, key: str, bad: bool, patience: int) -> bool:
        """Return True once a symptom has held `patience` times in a row."""
        self.runs[key] = self.runs.get(key, 0) + 1 if bad else 0
        return self.runs[key] == patience


logger = logging.getLogger(__name__)


class Guard:
    """Guard that warns of a policy's collapse, or stops the run.
    Trainers call `judge` at every update and `observe` for every line of metrics.

    `select` chooses the metrics of a line that are watched, by default all.
    """

    def __init__(
        self,
        mode: GuardMode = "warn",
        limits: CollapseLimits | None = None,
        say: Callable[[str], object] = logger.warning,
        select: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        self.mode, self.limits, self.say, self.select = mode, limits or CollapseLimits(), say, select
        self.watch = CollapseWatch(self.limits)
        self.skipped = 0
        """Number of updates that were skipped in the run."""
        self.collapsed: str | None = None
        """Reason why the guard stopped the run, or None."""
        self.news: list[str] = []
        """Warnings that are not yet written to metrics.jsonl."""
        self._skipped_in_a_row = 0
        self.zero_gradients = 0
        """Number of successive updates, up to the newest update, whose gradient was exactly 0.
        A trainer that looks writes it."""

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Restore the guard's state from the metrics of a resumed run."""
        for line in lines:
            self.watch.observe(self.select(line))
            self.skipped = line.get("skipped", self.skipped)
            self.zero_gradients = line.get("zero_gradients", 0)

    def judge(self, update: str, *, poisoned: str | None) -> None:
        """Judge an update before the optimizer's step, and count it as skipped if a part of it is not finite.
        `poisoned` names that part; the caller then skips the update."""
        if poisoned is None:
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == 1:
            self.tell(f"{update} had a non-finite {poisoned} and was skipped ({self.skipped} so far).")
        if self._skipped_in_a_row == self.limits.skipped_patience:
            self._collapse(f"{self._skipped_in_a_row} updates in a row had to be skipped: nothing is being learned.")

    def observe(self, line: Mapping[str, Any]) -> None:
        """Check the newest metrics for a collapse, and warn or stop the run."""
        if self.mode != "off":
            for finding in self.watch.observe(self.select(line)):
                (self._collapse if finding.collapse else self.tell)(finding.sentence)

    def tell(self, sentence: str) -> None:
        """Show a warning, and store it for the next line of metrics."""
        self.news.append(sentence)
        self.say(sentence)

    def _collapse(self, sentence: str) -> None:
        self.tell(sentence)
        if self.mode == "stop":
            self.collapsed = self.collapsed or sentence
