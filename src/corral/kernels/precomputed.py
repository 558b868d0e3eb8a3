"""A number whose gradients are computed along with it: backward multiplies them by the one number that arrives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.packed import Packing
from corral.kernels.rows import Gradients, HeadRows
from corral.numerics import at_least_float32
from corral.types import ObjectiveOutput

Scale = Callable[[Tensor, Tensor], None]
"""(x, factor): x times the only element of a tensor, in place."""


def with_gradients(
    value: Tensor, inputs: tuple[Tensor | None, ...], finish: Callable[[], Gradients], unit: Tensor | None, scale: Scale
) -> Tensor:
    """`value`, differentiable in `inputs`: `unit`, or 1, times what `finish` hands over, once, are its gradients."""
    return _WithGradients.apply(value, finish, unit, scale, *inputs)


def scale_(x: Tensor, factor: Tensor) -> None:
    """In place, in float32; on a CPU nothing is touched where the factor is 1, as in a plain `backward()`."""
    if x.is_cuda or float(factor) != 1.0:
        x.mul_(factor)


@dataclass(frozen=True, eq=False)
class FusedLoss:
    """What a fused path finds of packed tokens."""

    packing: Packing
    total: Tensor
    """Σ w (c · policy + regression)."""
    rows: HeadRows
    output: ObjectiveOutput
    """[1 N], and metrics."""
    finish: Callable[[], Gradients] | None
    """Wait for the gradients of packed hidden states, weight and bias, those that are needed; None where none is."""
    scale: Scale = scale_


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, finish: Any, unit: Tensor | None, scale: Scale, *inputs: Tensor | None) -> Tensor:
        ctx.finish, ctx.unit, ctx.scale = finish, unit, scale
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # which autograd refuses if they were changed in place since: `finish` may read them
        finish, ctx.finish = ctx.finish, None  # gradients are handed over, not copied
        if finish is None:
            raise RuntimeError(
                "policy_loss_from_hidden: its gradients were handed over by the first backward pass. Call it again, or build "
                "the loss from corral.lm_head, which can be differentiated any number of times."
            )
        factor, gradients = at_least_float32(upstream), finish()
        factor = factor if ctx.unit is None else factor * ctx.unit
        for x in gradients:
            if x is not None:
                ctx.scale(x, factor)
        return (None, None, None, None, *gradients)
