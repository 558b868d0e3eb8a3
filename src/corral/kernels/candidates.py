"""The k largest logits of every row while the vocabulary passes by in blocks: exact, and mostly without a sort."""

import math

import torch
from torch import Tensor

from corral.support import rank_top_k

GROUP = 32
"""Neighbouring logits whose largest is compared first, in the place of all of them."""
ROOM = 1024
"""Candidates a row can hold beside its k best, at most; else 3 k, so that the logits seen quadruple from sort to sort."""


class RunningTopK:
    """The k largest of each row so far, ties by lower id. Blocks come in the order of their ids.

    A row's bar is its k-th largest logit when its pool was last sorted. Only what lies above can still be among the k largest:
    of logits in no particular order, k in m after the m-th. What equals the bar has a higher id and comes too late. Candidates
    are moved from their block to the pool, and what leaves the pool is handed back, so that every logit stays in one place.
    """

    def __init__(self, rows: int, k: int, like: Tensor) -> None:
        self.k, self.width = k, k + min(3 * k, ROOM)
        self.values = like.new_full((rows, self.width), -torch.inf)
        self.ids = torch.full(self.values.shape, -1, device=like.device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=like.device)
        """Slots in use; the others hold −inf."""
        self.bar: Tensor | None = None
        """[n, 1]; None until every row has k finite logits."""

    def fold(self, z: Tensor, start: int) -> Tensor:
        """Move candidates out of the logits [n, v] of tokens `start`, …; returns those that left the pool [n, m]."""
        if self.bar is None:
            return self._rank(z, start)
        if self._join(z, start, self.bar):
            return z[:, :0]
        lost = self.sort()
        if self._join(z, start, self.bar):
            return lost
        return torch.cat([lost, self._rank(z, start)], -1)  # more than a pool in one block: logits that rise with their id

    def sort(self) -> Tensor:
        """Put the k largest first, in order; returns the others [n, m], which have left the pool."""
        used = self._used()
        return self._keep(self.values[:, :used], self.ids[:, :used])

    def best(self) -> tuple[Tensor, Tensor]:
        """Ids and logits of the k largest, in order, after `sort`; fewer where fewer have passed."""
        used = self._used()
        return self.ids[:, :used], self.values[:, :used]

    def _used(self) -> int:
        return int(self.count.max()) if len(self.count) else 0

    def _keep(self, values: Tensor, ids: Tensor) -> Tensor:
        """Make the k largest of these the pool; returns the others. Of equal ones, those with lower ids come first."""
        values, order = values.sort(dim=-1, descending=True, stable=True)
        kept = min(self.k, values.shape[-1])
        self.ids[:, :kept] = ids.gather(-1, order[:, :kept])
        self.values[:, :kept], self.values[:, kept:] = values[:, :kept], -torch.inf
        self.count.fill_(kept)
        if kept == self.k:
            bar = values[:, self.k - 1 : self.k].clone()
            self.bar = bar if bool((bar > -torch.inf).all()) else None
        return values[:, kept:]

    def _rank(self, z: Tensor, start: int) -> Tensor:
        """The block's own k largest into the pool, −inf included; returns what left it."""
        best, used = rank_top_k(z, min(self.k, z.shape[-1])), self._used()
        values = torch.cat([self.values[:, :used], z.gather(-1, best)], -1)
        z.scatter_(-1, best, -torch.inf)
        return self._keep(values, torch.cat([self.ids[:, :used], best + start], -1))

    def _join(self, z: Tensor, start: int, bar: Tensor) -> bool:
        """Move what is above the bar into the pool, unless some row has no room for its own."""
        row, column, value = self._above(z, bar)
        new = torch.bincount(row, minlength=len(z))
        if len(row) and int((self.count + new).max()) > self.width:
            return False
        slot = self.count[row] + torch.arange(len(row), device=z.device) - (new.cumsum(0) - new)[row]
        self.values[row, slot], self.ids[row, slot] = value, column + start
        self.count += new
        z[row, column] = -torch.inf
        return True

    def _above(self, z: Tensor, bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and value of every logit above its row's bar, in order: by groups first, then inside the few with any."""
        size = math.gcd(z.shape[-1], GROUP)
        groups = z.unflatten(-1, (z.shape[-1] // size, size))
        peak = (groups.amax(-1) > bar).flatten().nonzero().squeeze(-1)
        row, first = peak // groups.shape[1], peak % groups.shape[1] * size
        values = groups.flatten(0, 1).index_select(0, peak)
        group, place = (values > bar[row]).nonzero(as_tuple=True)
        return row[group], first[group] + place, values[group, place]
