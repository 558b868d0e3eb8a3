"""The audit of a dump: one pass over its completions, in constant memory; a dump that grows is read on from where it ended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from corral.audit.dump.completion import LoggedCompletion
from corral.audit.dump.find import Dump, read_completions
from corral.audit.dump.lines import FilePlace
from corral.audit.rules import Rules
from corral.audit.sample import Sample
from corral.audit.tally import StreamSummary, Tally
from corral.audit.threshold import clip_family
from corral.audit.tokens import join_completions

Columns = dict[str, NDArray[Any]]

_AT_ONCE = 1 << 16
"""Tokens whose statistics are computed together."""


def audit_dump(dump: Dump, rules: Rules, progress: Callable[[int], object]) -> tuple[StreamSummary, Columns]:
    """Statistics of everything that was logged, and a few completions as columns of their tokens.

    Args:
        rules: the clip range that is audited, and the radii of the balls that tokens are held against.
        progress: told how many bytes were read.
    """
    audit = DumpAudit(rules)
    audit.read(dump, progress)
    return audit.result()


class DumpAudit:
    """What was counted of a dump so far, and how far its files were read."""

    def __init__(self, rules: Rules) -> None:
        bounds = rules.clip.config.bounds
        assert bounds is not None, "whatever clips has a range"
        self.rules, self._audited = rules, clip_family(*bounds)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._tally = Tally(self.rules.kl_bound, self.rules.tv_bound, self._audited)
        self._sample = Sample(self.rules.kl_bound, self._audited)
        self._places: dict[Path, FilePlace] = {}
        self._format: str | None = None

    def read(self, dump: Dump, progress: Callable[[int], object], *, growing: bool = False) -> bool:
        """Count what was not read yet; whether there was any. A dump whose files were replaced is read anew.

        Args:
            growing: whether more is to come, so that what is only half written is left for the next time.
        """
        if self._format not in (None, dump.format) or any(
            path in self._places and path.stat().st_size < self._places[path].bytes for path in dump.files
        ):
            self.clear()
        self._format = dump.format
        before, waiting, size = self._tally.sequences, list[LoggedCompletion](), 0
        for completion in read_completions(dump, progress, self._note, self._places, growing=growing):
            self._tally.left_out.update(completion.left_out)
            if not len(completion.tokens):
                self._note("completions without a token to audit")
                continue
            self._tally.sequences += 1
            if completion.reward is not None:
                self._tally.add_reward(completion.step, completion.reward)
            waiting.append(completion)
            size += len(completion.tokens)
            if size >= _AT_ONCE:
                self._count(waiting)
                waiting, size = [], 0
        if waiting:
            self._count(waiting)
        return self._tally.sequences != before

    def result(self) -> tuple[StreamSummary, Columns]:
        """Statistics so far, and a few completions as columns of their tokens; `NothingYet` if there are none."""
        return self._tally.summary(), self._sample.columns()

    def _note(self, what: str) -> None:
        self._tally.left_out[what] += 1

    def _count(self, completions: list[LoggedCompletion]) -> None:
        tokens = join_completions(completions)
        self._tally.add(tokens)
        self._sample.add(completions, tokens)
