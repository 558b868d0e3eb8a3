"""The audit of a dump: one pass over its completions, in constant memory."""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from corral.audit.dump.completion import LoggedCompletion
from corral.audit.dump.find import Dump, read_completions
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
    bounds = rules.clip.config.bounds
    assert bounds is not None, "whatever clips has a range"
    audited = clip_family(*bounds)
    tally, sample = Tally(rules.kl_bound, rules.tv_bound, audited), Sample(rules.kl_bound, audited)
    waiting: list[LoggedCompletion] = []
    size = 0

    def note(what: str) -> None:
        tally.left_out[what] += 1

    def count_waiting() -> None:
        tokens = join_completions(waiting)
        tally.add(tokens)
        sample.add(waiting, tokens)

    for completion in read_completions(dump, progress, note):
        tally.left_out.update(completion.left_out)
        if not len(completion.tokens):
            note("completions without a token to audit")
            continue
        tally.sequences += 1
        if completion.reward is not None:
            tally.add_reward(completion.step, completion.reward)
        waiting.append(completion)
        size += len(completion.tokens)
        if size >= _AT_ONCE:
            count_waiting()
            waiting, size = [], 0
    if waiting:
        count_waiting()
    return tally.summary(), sample.columns()
