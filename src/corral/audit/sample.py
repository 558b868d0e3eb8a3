"""A few completions of a stream to look at token by token: those that clipping is most often wrong about."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.audit.dump.completion import LoggedCompletion
from corral.audit.threshold import RuleFamily
from corral.audit.tokens import Tokens

_MOST = 24
_LONGEST = 600
"""Tokens of one completion that are kept."""


class Sample:
    """The completions with the most errors so far: tokens blocked inside the KL ball, and tokens missed outside it."""

    def __init__(self, kl_bound: float, rule: RuleFamily) -> None:
        self.kl_bound, self.rule = kl_bound, rule
        self._kept: list[tuple[int, int, dict[str, NDArray[Any]]]] = []
        self._seen = 0

    def add(self, completions: Sequence[LoggedCompletion], tokens: Tokens) -> None:
        """Completions, and their tokens joined."""
        score = self.rule.score(tokens)
        assert score is not None
        blocked, outside = score > self.rule.bounds[0], tokens.kl > self.kl_bound
        outward = (tokens.logp_new - tokens.logp_old) * tokens.advantage > 0
        wrong = np.where(blocked, ~outside, outside & outward)
        start = 0
        for one in completions:
            stop = start + len(one.tokens)
            errors, order = int(wrong[start:stop].sum()), -self._seen  # of equals the first
            if len(self._kept) < _MOST or (errors, order) > self._kept[0][:2]:
                last = min(stop, start + _LONGEST)
                item = (errors, order, self._columns(one, tokens, blocked, slice(start, last)))
                (heapq.heappush if len(self._kept) < _MOST else heapq.heapreplace)(self._kept, item)
            self._seen += 1
            start = stop

    def _columns(
        self, one: LoggedCompletion, tokens: Tokens, blocked: NDArray[np.bool_], here: slice
    ) -> dict[str, NDArray[Any]]:
        count = here.stop - here.start
        positions = np.arange(count) if one.positions is None else one.positions[:count] - one.positions[0]
        fixed = {"update": np.full(count, one.step), "sequence": np.full(count, self._seen), "position": positions}
        # Copies: a view would keep all tokens of its batch in memory.
        columns = {
            name: getattr(tokens, name)[here].copy() for name in ("token", "advantage", "logp_old", "logp_new", "kl", "tv")
        }
        return {**fixed, **columns, "clipped": blocked[here].copy()}

    def columns(self) -> dict[str, NDArray[Any]]:
        """All of them one after the other, as an audit's table has its columns, but for `text`."""
        kept = [columns for _, _, columns in sorted(self._kept, key=lambda item: -item[1])]
        return {name: np.concatenate([columns[name] for columns in kept]) for name in kept[0]} if kept else {}


def with_texts(columns: Mapping[str, NDArray[Any]], texts: Mapping[int, str] | None) -> dict[str, NDArray[Any]]:
    """The columns and what each token says; without a tokenizer its id."""
    ids = columns["token"].tolist()
    said = [f"{token} " if texts is None else texts[token] for token in ids]
    return {**columns, "text": np.array(said, dtype=object)}
