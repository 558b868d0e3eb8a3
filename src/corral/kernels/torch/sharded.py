"""The head with its vocabulary split over processes: each holds some rows of the weight, and all get the same result."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from corral.support import rank_top_k


@dataclass(frozen=True)
class Shard:
    """This process's part of the vocabulary: ids `start` … `start` + its own rows − 1, of `vocabulary` in all.

    The parts follow one another in the order of the ranks, and need not be of one size. A logit is known to one process alone
    and −inf to the others, so a maximum collects them.
    """

    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """None where the vocabulary is whole."""
    start: int = 0
    vocabulary: int = 0

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None) -> "Shard":
        """Learn from the other processes where this one's rows lie."""
        if group is None:
            return cls(vocabulary=len(weight))
        own = torch.tensor([len(weight)], device=weight.device)
        sizes = torch.cat(_gather(own, group)).tolist()
        return cls(group, sum(sizes[: dist.get_rank(group)]), sum(sizes))

    def sum_(self, x: Tensor) -> Tensor:
        """Add up over the processes, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def largest(self, z: Tensor) -> Tensor:
        """Of logits [n, v] the largest of each row; −inf where nothing is possible."""
        return self._maximum(z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf))

    def pick(self, z: Tensor, ids: Tensor) -> Tensor:
        """Logits [n, K] of some tokens, −inf where the id is −1."""
        place, here = self._places(z, ids)
        if not z.shape[-1]:
            return self._maximum(z.new_full(ids.shape, -torch.inf))
        return self._maximum(torch.where(here, z.gather(-1, torch.where(here, place, 0)), -torch.inf))

    def drop_(self, z: Tensor, ids: Tensor) -> None:
        """Make some tokens impossible, in place."""
        place, here = self._places(z, ids)
        row, slot = here.nonzero(as_tuple=True)
        z[row, place[row, slot]] = -torch.inf

    def rank(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and logits of the k largest of each row, largest first, ties by lower id."""
        ids = rank_top_k(z, min(k, z.shape[-1])) if z.shape[-1] else z.new_empty((len(z), 0), dtype=torch.int64)
        values, ids = z.gather(-1, ids), ids + self.start
        if self.group is None:
            return ids, values
        missing = k - ids.shape[-1]
        ids = pad(ids, (0, missing), value=torch.iinfo(ids.dtype).max)
        values = pad(values, (0, missing), value=-torch.inf)
        ids, values = torch.cat(_gather(ids, self.group), -1), torch.cat(_gather(values, self.group), -1)
        by_id = ids.argsort(dim=-1, stable=True)
        order = by_id.gather(-1, values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices)[:, :k]
        return ids.gather(-1, order), values.gather(-1, order)

    def _places(self, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of some tokens in this part, and whether they are in it."""
        place = ids - self.start
        return place, (ids >= 0) & (place >= 0) & (place < z.shape[-1])

    def _maximum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone
