"""The audit of a dump: one pass over its completions, in constant memory."""

from collections.abc import Callable

from corral.audit.dump.completion import LoggedCompletion
from corral.audit.dump.find import Dump, read_completions
from corral.audit.rules import Rules
from corral.audit.tally import StreamSummary, Tally
from corral.audit.threshold import clip_family
from corral.audit.tokens import join_completions

_AT_ONCE = 1 << 16
"""Tokens whose statistics are computed together."""


def audit_dump(dump: Dump, rules: Rules, progress: Callable[[int], object]) -> StreamSummary:
    """Statistics of everything that was logged.

    Args:
        rules: the clip range that is audited, and the radii of the balls that tokens are held against.
        progress: told how many bytes were read.
    """
    bounds = rules.clip.config.bounds
    assert bounds is not None, "whatever clips has a range"
    tally = Tally(rules.kl_bound, rules.tv_bound, clip_family(*bounds))
    waiting: list[LoggedCompletion] = []
    size = 0

    def note(what: str) -> None:
        tally.left_out[what] += 1

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
            tally.add(join_completions(waiting))
            waiting, size = [], 0
    if waiting:
        tally.add(join_completions(waiting))
    return tally.summary()
