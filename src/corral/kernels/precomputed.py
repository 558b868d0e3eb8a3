"""A number whose gradients were computed along with it: backward multiplies them by the one number that arrives."""

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
    value: Tensor, inputs: tuple[Tensor | None, ...], gradients: Gradients, unit: Tensor, scale: Scale
) -> Tensor:
    """`value`, differentiable in `inputs`: `unit` · `gradients` are its gradients, which the backward pass uses up."""
    return _WithGradients.apply(value, gradients, unit, scale, *inputs)


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
    gradients: Gradients
    """Of packed hidden states, weight and bias."""
    scale: Scale = scale_


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Gradients, unit: Tensor, scale: Scale, *inputs: Tensor | None) -> Tensor:
        ctx.gradients, ctx.unit, ctx.scale = gradients, unit, scale
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # handed over, not copied
        if gradients is None:
            raise RuntimeError(
                "policy_loss_from_hidden: its gradients were handed over by the first backward pass. Call it again, or build "
                "the loss from corral.lm_head, which can be differentiated any number of times."
            )
        factor = at_least_float32(upstream) * ctx.unit
        for x in gradients:
            if x is not None:
                ctx.scale(x, factor)
        return (None, None, None, None, *gradients)
