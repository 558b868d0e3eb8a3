"""The tokens that are trained on: picked out of a batch into rows, and spread out again."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from corral.types import TokenBatch


class Live:
    """[B T …] → [N …] and back."""

    def __init__(
        self,
        mask: Bool[Tensor, "B T"],
        count: int | None = None,
        rows: Int[Tensor, " N"] | None = None,
        *,
        in_order: bool = True,
    ) -> None:
        """`count` and `rows` where somebody has found them already, perhaps in another order."""
        self.shape, every = mask.shape, mask.numel()
        if rows is None and count != every:
            rows = mask.flatten().nonzero().squeeze(-1)
        self.count = every if rows is None else len(rows)
        self.rows = None if self.count == every and in_order else rows  # all of them: nothing to copy

    def pick(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def spread(self, x: Tensor) -> Tensor:
        """0 where nothing was picked."""
        if self.rows is not None:
            blank = torch.empty if self.count == self.shape.numel() else torch.zeros
            out = blank(self.shape.numel(), *x.shape[1:], dtype=x.dtype, device=x.device)
            x = out.index_copy_(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])


def fits(batch: TokenBatch) -> bool:
    """Whether shapes and dtypes are what every objective asks for; where they are not, it says so itself."""
    shape = batch.mask.shape
    given = [batch.logp_old] if batch.logp_rollout is None else [batch.logp_old, batch.logp_rollout]
    if batch.advantages.shape not in (shape, shape[:1]) or any(x.shape != shape for x in given):
        return False
    return all(x.is_floating_point() for x in (*given, batch.advantages))


def advantages_of(batch: TokenBatch) -> Tensor:
    """One for each token [B T]: a sequence's own is that of all its tokens."""
    return batch.advantages[:, None].expand(batch.mask.shape) if batch.advantages.ndim == 1 else batch.advantages
