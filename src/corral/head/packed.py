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
from corral.tensors import ObjectiveOutput, SparseDist, TokenBatch

TokenObjective = Callable[[TokenBatch], ObjectiveOutput]
"""What `make_objective` returns: a batch of tokens → a loss per token."""


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
        rest_max = None if dist.rest_max is None else self.unpack(dist.rest_max)
        return SparseDist(self.unpack(dist.ids, -1), self.unpack(dist.logp, -torch.inf), self.unpack(dist.rest), rest_max)


@dataclass(frozen=True, eq=False)
class LossTerms:
    """Σ w (c · policy + regression): all of a loss but the new policy."""

    objective: TokenObjective
    batch: TokenBatch
    """`logp_new` and `dist_new` are not read."""
    weights: Float[Tensor, "B T"]
    """w: what the reduction multiplies each token's loss with."""
    policy_weights: Float[Tensor, "B T"] | None
    """c: what the policy term alone is multiplied with; 1 where None."""
    on_policy: bool
    """The new policy is its own anchor: `logp_old` is whatever log-probs the head finds."""
    union: UnionSupport | None = None
    spec: LogitSpec = field(default_factory=LogitSpec)
    """Where the new policy's support joins that of `dist_old`: the old head, and how both heads make logits."""

    def pack(self, packing: Packing) -> "LossTerms":
        """Those of the unmasked tokens, as one sequence [1 N]."""

        def row(x: Tensor) -> Tensor:
            return packing.pack(x)[None]

        b = self.batch
        old, teacher = (None if dist is None else dist.map(row) for dist in (b.dist_old, b.dist_teacher))
        rollout = None if b.logp_rollout is None else row(b.logp_rollout)
        logp_old = row(b.logp_old)
        batch = TokenBatch(logp_old, logp_old, row(token_advantages(b)), row(b.mask), None, old, rollout, teacher)
        weights = None if self.policy_weights is None else row(self.policy_weights)
        union = None if self.union is None else replace(self.union, place=row(self.union.place))
        return LossTerms(self.objective, batch, row(self.weights), weights, self.on_policy, union, self.spec)

    def __call__(
        self, logp: Float[Tensor, "B t"], new: SparseDist | None, part: slice = slice(None)
    ) -> tuple[Float[Tensor, ""], ObjectiveOutput]:
        """The sum over `part` of the tokens, and the objective's output, given the new policy of these tokens."""
        b = self.batch
        old, teacher = (None if x is None else x.map(lambda y: y[:, part]) for x in (b.dist_old, b.dist_teacher))
        if self.union is not None and old is not None and new is not None:
            old = self.union.extend(old, new.ids, self.union.place[:, part], self.spec)
        logp_old = logp.detach() if self.on_policy else b.logp_old[:, part]
        advantages = b.advantages if b.advantages.ndim == 1 else b.advantages[:, part]
        rollout = None if b.logp_rollout is None else b.logp_rollout[:, part]
        out = self.objective(TokenBatch(logp, logp_old, advantages, b.mask[:, part], new, old, rollout, teacher))
        policy_weights = None if self.policy_weights is None else self.policy_weights[:, part]
        return out.total(torch.where(b.mask, self.weights, 0.0)[:, part], policy_weights), out


def has_token_shapes(batch: TokenBatch) -> bool:
    """Whether shapes and dtypes are what every objective asks for; where they are not, it says so itself."""
    shape = batch.mask.shape
    given = [batch.logp_old] if batch.logp_rollout is None else [batch.logp_old, batch.logp_rollout]
    if batch.advantages.shape not in (shape, shape[:1]) or any(x.shape != shape for x in given):
        return False
    return all(x.is_floating_point() for x in (*given, batch.advantages))


def token_advantages(batch: TokenBatch) -> Tensor:
    """One for each token [B T]: a sequence's own is that of all its tokens."""
    return batch.advantages[:, None].expand(batch.mask.shape) if batch.advantages.ndim == 1 else batch.advantages


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
