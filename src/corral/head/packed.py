"""Batches as packed rows: unmasked tokens alone, with what a loss precomputes for them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.head.logits import LogitSpec
from corral.head.rows import Gradients, HeadRows
from corral.head.union import UnionSupport
from corral.numerics import at_least_float32
from corral.tensors import ObjectiveOutput, SparseDist, Tensors, TokenBatch

TokenObjective = Callable[[TokenBatch], ObjectiveOutput]
"""The type of `make_objective`'s result: a batch of tokens → a loss per token."""


class Packing:
    """[B T …] → packed rows [N …] of the unmasked tokens, and back."""

    def __init__(self, mask: Bool[Tensor, "B T"], rows: Int[Tensor, " N"] | None = None, *, in_order: bool = True) -> None:
        """`rows` are the unmasked tokens' places in the flattened mask, where they are known; `in_order` if they ascend."""
        self.shape = mask.shape
        if rows is None:
            rows = mask.flatten().nonzero().squeeze(-1)
        self.count = len(rows)
        self.rows = None if self.count == mask.numel() and in_order else rows  # all of them: nothing to copy

    def pack(self, x: Tensor) -> Tensor:
        """[B T …] → [N …]."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """[N …] → [B T …], with `fill` at masked tokens."""
        if self.rows is not None:
            out = x.new_full((self.shape.numel(), *x.shape[1:]), fill)
            x = out.index_copy_(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])

    def unpack_dist(self, dist: SparseDist) -> SparseDist:
        """[N K] → [B T K], with an empty support at masked tokens."""
        return replace(dist.map(self.unpack), ids=self.unpack(dist.ids, -1), logp=self.unpack(dist.logp, -torch.inf))


@dataclass(frozen=True, eq=False)
class LossTerms(Tensors):
    """All parts of a loss Σ w (c · policy + regression) but the new policy."""

    objective: TokenObjective
    batch: TokenBatch
    """`logp_new` and `dist_new` are not read."""
    weights: Float[Tensor, "B T"]
    """w: the reduction's factor of each token's loss."""
    policy_weights: Float[Tensor, "B T"] | None
    """c: the factor of the policy term alone; 1 where None."""
    on_policy: bool
    """The new policy is its own anchor: the head's log-probs take the place of `logp_old`."""
    union: UnionSupport | None = None
    spec: LogitSpec = field(default_factory=LogitSpec)
    """For a union of supports: the old head, and how both heads make logits."""

    def pack(self, packing: Packing) -> "LossTerms":
        """The terms of the unmasked tokens, as one sequence [1 N]."""
        b = self.batch
        given = replace(b, logp_new=b.logp_old, dist_new=None, advantages=token_advantages(b))
        return replace(self, batch=given).map(lambda x: packing.pack(x)[None])

    def __call__(self, logp: Float[Tensor, "B T"], new: SparseDist | None) -> tuple[Float[Tensor, ""], ObjectiveOutput]:
        """The sum over the tokens, and the objective's output, given the new policy."""
        b, old = self.batch, self.batch.dist_old
        if self.union is not None and old is not None and new is not None:
            old = self.union.extend(old, new.ids, self.spec)
        logp_old = logp.detach() if self.on_policy else b.logp_old
        out = self.objective(replace(b, logp_new=logp, logp_old=logp_old, dist_new=new, dist_old=old))
        return out.total(torch.where(b.mask, self.weights, 0.0), self.policy_weights), out


def has_token_shapes(batch: TokenBatch) -> bool:
    """True if shapes and dtypes are as every objective wants them; otherwise the objective refuses them in its own words."""
    shape, given = batch.mask.shape, [x for x in (batch.logp_old, batch.logp_rollout) if x is not None]
    fit = batch.advantages.shape in (shape, shape[:1]) and all(x.shape == shape for x in given)
    return fit and all(x.is_floating_point() for x in (*given, batch.advantages))


def token_advantages(batch: TokenBatch) -> Tensor:
    """Advantages of the tokens [B T]; every token of a sequence gets the sequence's own."""
    return batch.advantages[:, None].expand(batch.mask.shape) if batch.advantages.ndim == 1 else batch.advantages


Scale = Callable[[Tensor, Tensor], None]
"""(x, factor): x times the only element of a tensor, in place."""


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place; on a CPU nothing is touched where the factor is 1, as in a plain `backward()`."""
    if x.is_cuda or float(factor) != 1.0:
        x.mul_(factor)


@dataclass(frozen=True, eq=False)
class FusedLoss:
    """The results of a fused path for packed tokens."""

    packing: Packing
    total: Tensor
    """Σ w (c · policy + regression)."""
    rows: HeadRows
    output: ObjectiveOutput
    """[1 N], and metrics."""
    finish: Callable[[], Gradients] | None
    """Waits for the gradients of packed hidden states, weight and bias, and returns them; None where none is needed."""
    scale: Scale = scale_


class PrecomputedGradients(torch.autograd.Function):
    """A value whose gradients in `inputs` are `unit`, or 1, times those that `finish` returns, once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, finish: Any, unit: Tensor | None, scale: Scale, *inputs: Tensor | None) -> Tensor:
        ctx.finish, ctx.unit, ctx.scale = finish, unit, scale
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # autograd raises if an input was changed in place since: `finish` may read them
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
