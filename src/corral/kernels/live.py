"""The tokens that are trained on: picked out of a batch into rows, and spread out again."""

from jaxtyping import Bool, Int
from torch import Tensor


class Live:
    """[B T …] → [N …] and back."""

    def __init__(self, mask: Bool[Tensor, "B T"], count: int | None = None, rows: Int[Tensor, " N"] | None = None) -> None:
        """`count` and `rows` where somebody has found them already."""
        self.shape, every = mask.shape, mask.numel()
        if rows is None and count != every:
            rows = mask.flatten().nonzero().squeeze(-1)
        self.count = every if rows is None else len(rows)
        self.rows = None if self.count == every else rows  # all of them: nothing to copy

    def pick(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def spread(self, x: Tensor) -> Tensor:
        """0 where nothing was picked."""
        if self.rows is not None:
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])
