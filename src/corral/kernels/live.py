"""The tokens that are trained on: picked out of a batch into rows, and spread out again."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


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
