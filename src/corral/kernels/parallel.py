"""The head with its vocabulary split over processes: each holds some rows of the weight, and all get the same result."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from corral.kernels.online import HeadRows, OnlineHead, settle


@dataclass(frozen=True)
class Shard:
    """This process's part of the vocabulary: ids `start` … `start` + its own rows − 1, of `vocabulary` in all.

    The parts follow one another in the order of the ranks, and need not be of one size.
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
        """Add up a gradient over the processes, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


def merge(online: OnlineHead, shard: Shard) -> HeadRows:
    """What the processes found in their parts of the vocabulary, put together: the same on each of them.

    A logit is known to one process alone and −inf to the others, so a maximum collects them. The mass of the others is summed
    relative to the largest of all. Of each part's k largest the k largest are kept; the losers join that mass.
    """
    if shard.group is None:
        return online.finish()
    ids, kept = online.candidates()
    rest, slots = online.rest, online.marked.shape[-1]
    known = torch.cat([online.marked, rest.peak[:, None]], -1)
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=shard.group)
    rest.move_to(known[:, -1])
    rest.total = shard.sum_(rest.total.clone())
    if rest.weighted is not None:
        rest.weighted = shard.sum_(rest.weighted.clone())
    if online.best is not None:
        ids, kept = _merge_top_k(ids, kept, online.best.k, shard.group)
        rest.fold(kept[:, online.best.k :].clone())
        ids, kept = ids[:, : online.best.k], kept[:, : online.best.k]
    else:
        kept = known[:, 1:slots]
    return settle(online.tokens, known[:, 0], ids, kept, rest, online.request, online.fixed is not None)


def _merge_top_k(ids: Tensor, kept: Tensor, k: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Every process's k largest, in order, ties by lower id; the padding of parts with fewer than k comes last."""
    missing = k - ids.shape[-1]
    ids = torch.nn.functional.pad(ids, (0, missing), value=torch.iinfo(ids.dtype).max)
    kept = torch.nn.functional.pad(kept, (0, missing), value=-torch.inf)
    ids, kept = torch.cat(_gather(ids, group), -1), torch.cat(_gather(kept, group), -1)
    by_id = ids.argsort(dim=-1, stable=True)
    order = by_id.gather(-1, kept.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices)
    return ids.gather(-1, order), kept.gather(-1, order)


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone
