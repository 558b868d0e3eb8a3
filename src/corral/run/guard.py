"""The guard of a run: skips updates that are not finite, and notices a collapse."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from corral.run.settings import GuardMode
from corral.run.watch import CollapseLimits, CollapseWatch

logger = logging.getLogger(__name__)


class Guard:
    """Warns of collapse, or stops the run. Trainers call `judge` at every update and `observe` for every line of metrics."""

    def __init__(
        self,
        mode: GuardMode = "warn",
        limits: CollapseLimits | None = None,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        self.mode, self.limits, self.say = mode, limits or CollapseLimits(), say
        self.watch = CollapseWatch(self.limits)
        self.skipped = 0
        """Updates skipped so far."""
        self.collapsed: str | None = None
        """Why the run was stopped, if it was."""
        self.news: list[str] = []
        """Warnings since they were last fetched."""
        self._skipped_in_a_row = 0

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The state after these lines, for a run that is resumed."""
        for line in lines:
            self.watch.observe(line)
            self.skipped = line.get("skipped", self.skipped)

    def judge(self, update: str, *, poisoned: str | None) -> None:
        """Before an update: `poisoned` names what of it is not finite. The caller skips the update."""
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
        """A line of metrics."""
        if self.mode != "off":
            for finding in self.watch.observe(line):
                (self._collapse if finding.collapse else self.tell)(finding.sentence)

    def tell(self, sentence: str) -> None:
        """Say it, and keep it for the next line of metrics."""
        self.news.append(sentence)
        self.say(sentence)

    def _collapse(self, sentence: str) -> None:
        self.tell(sentence)
        if self.mode == "stop":
            self.collapsed = self.collapsed or sentence
