"""Packed batches: unmasked tokens only, with the loss terms that can be precomputed for them."""

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
"""Type of `make_objective`'s result: a batch of tokens → a loss per token."""


class Packing:
    """Conversion of [B T …] to packed rows [N …] of the unmasked tokens, and back."""

    def __init__(self, mask: Bool[Tensor, "B T"], rows: Int[Tensor, " N"] | None = None, *, in_order: bool = True) -> None:
        """Store the shape and the indices of unmasked tokens.

        `rows` are these indices in the flattened mask, if known; `in_order` is true if they ascend.
        """
        self.shape = mask.shape
        if rows is None:
            rows = mask.flatten().nonzero().squeeze(-1)
        self.count = len(rows)
        # Without padding nothing has to be copied: packing is then a view, and hidden states of 64 MB stay where they are.
        self.rows = None if self.count == mask.numel() and in_order else rows

    def pack(self, x: Tensor) -> Tensor:
        """Pack [B T …] into [N …]."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Unpack [N …] into [B T …], with `fill` at masked tokens."""
        if self.rows is not None:
            out = x.new_full((self.shape.numel(), *x.shape[1:]), fill)
            x = out.index_copy_(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])

    def unpack_dist(self, dist: SparseDist) -> SparseDist:
        """Unpack supports [N K] into [B T K], empty at masked tokens."""
        return replace(dist.map(self.unpack), ids=self.unpack(dist.ids, -1), logp=self.unpack(dist.logp, -torch.inf))


@dataclass(frozen=True, eq=False)
class LossTerms(Tensors):
    """Every term of a loss Σ w (c · policy + regression) except the new policy."""

    objective: TokenObjective
    batch: TokenBatch
    """The batch; its `logp_new` and `dist_new` are ignored."""
    weights: Float[Tensor, "B T"]
    """w: the reduction's weight of each token's loss."""
    policy_weights: Float[Tensor, "B T"] | None
    """c: the weight of the policy term alone; None means 1 everywhere."""
    on_policy: bool
    """True on-policy: the head's log-probs replace `logp_old`."""
    union: UnionSupport | None = None
    spec: LogitSpec = field(default_factory=LogitSpec)
    """Transformation from the GEMM's result to logits, for both heads. A union of supports needs it and the old head."""

    def pack(self, packing: Packing) -> "LossTerms":
        """Pack the terms of the unmasked tokens into one sequence [1 N]."""
        b = self.batch
        given = replace(b, logp_new=b.logp_old, dist_new=None, advantages=token_advantages(b))
        return replace(self, batch=given).map(lambda x: packing.pack(x)[None])

    def with_new(self, logp: Float[Tensor, "B T"], new: SparseDist | None, old: SparseDist | None) -> TokenBatch:
        """The batch with both policies on one support. On-policy, the new policy is its own anchor, as a constant."""
        logp_old = logp.detach() if self.on_policy else self.batch.logp_old
        return replace(self.batch, logp_new=logp, logp_old=logp_old, dist_new=new, dist_old=old)

    def __call__(self, logp: Float[Tensor, "B T"], new: SparseDist | None) -> tuple[Float[Tensor, ""], ObjectiveOutput]:
        """Compute the weighted sum over tokens and the objective's output for a new policy."""
        old = self.batch.dist_old
        if self.union is not None and old is not None and new is not None:
            old = self.union.extend(old, new.ids, self.spec)
        out = self.objective(self.with_new(logp, new, old))
        return out.total(torch.where(self.batch.mask, self.weights, 0.0), self.policy_weights), out


def has_token_shapes(batch: TokenBatch) -> bool:
    """True if shapes and dtypes fit every objective; if not, the objective raises its own error."""
    shape, given = batch.mask.shape, [x for x in (batch.logp_old, batch.logp_rollout) if x is not None]
    fit = batch.advantages.shape in (shape, shape[:1]) and all(x.shape == shape for x in given)
    return fit and all(x.is_floating_point() for x in (*given, batch.advantages))


def token_advantages(batch: TokenBatch) -> Tensor:
    """Advantages of the tokens [B T]; an advantage per sequence is repeated for each of its tokens."""
    return batch.advantages[:, None].expand(batch.mask.shape) if batch.advantages.ndim == 1 else batch.advantages


@dataclass(frozen=True, eq=False)
class FusedLoss:
    """Results of a fused path for packed tokens."""

    packing: Packing
    total: Tensor
    """Weighted sum of the loss, Σ w (c · policy + regression)."""
    rows: HeadRows
    output: ObjectiveOutput
    """Output of the objective for packed tokens [1, N], with metrics."""
    finish: Callable[[Tensor], Gradients] | None
    """Waits for the gradients of packed hidden states, weight and bias, and multiplies them in place by a number on the device;
    None if no gradient is needed."""


class PrecomputedGradients(torch.autograd.Function):
    """Autograd function with precomputed gradients: the upstream gradient, times `unit` or 1, scales them in `finish`.

    It can be used once.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, finish: Any, unit: Tensor | None, *inputs: Tensor | None) -> Tensor:
        ctx.finish, ctx.unit = finish, unit
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
        factor = at_least_float32(upstream)
        return (None, None, None, *finish(factor if ctx.unit is None else factor * ctx.unit))
