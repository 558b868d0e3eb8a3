"""Packed batches: the unmasked tokens in one sequence, and the inputs of the loss that are known before the new policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.head.logits import LogitSpec
from corral.head.rows import Gradients, HeadRows
from corral.head.union import UnionSupport
from corral.tensors import ObjectiveOutput, SparseDist, Tensors, TokenBatch

TokenObjective = Callable[[TokenBatch], ObjectiveOutput]
"""Type of an objective from `make_objective`: a function from a batch of tokens to a loss per token."""


class Packing:
    """Conversion between padded tensors [B T …] and packed tensors [N …] of the unmasked tokens."""

    def __init__(self, mask: Bool[Tensor, "B T"], rows: Int[Tensor, " N"] | None = None, *, in_order: bool = True) -> None:
        """Store the mask's shape and the indices of its unmasked tokens.

        `rows` are these indices in the flattened mask, if known; `in_order` is true if they ascend.
        """
        self.shape = mask.shape
        if rows is None:
            rows = mask.flatten().nonzero().squeeze(-1)
        self.count = len(rows)
        # Without padding nothing has to be copied: packing is then a view, and hidden states of 64 MB stay where they are.
        self.rows = None if self.count == mask.numel() and in_order else rows

    def pack(self, x: Tensor) -> Tensor:
        """Gather the unmasked tokens of a padded tensor [B T …] into a packed tensor [N …]."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, x: Tensor, fill: float = 0) -> Tensor:
        """Scatter a packed tensor [N …] into a padded tensor [B T …], with `fill` at masked tokens."""
        if self.rows is not None:
            out = x.new_full((self.shape.numel(), *x.shape[1:]), fill)
            x = out.index_copy_(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])

    def unpack_dist(self, dist: SparseDist) -> SparseDist:
        """Scatter packed sparse distributions [N K] into a padded tensor [B T K]; masked positions hold only padding."""
        return replace(dist.map(self.unpack), ids=self.unpack(dist.ids, -1), logp=self.unpack(dist.logp, -torch.inf))


@dataclass(frozen=True, eq=False)
class LossTerms(Tensors):
    """Inputs of a reduced loss that are known before the new policy: objective, batch, and weights of the tokens.

    The loss is Σ w (c · policy + regression).
    """

    objective: TokenObjective
    batch: TokenBatch
    """Batch of tokens with the old policy's log-probs; the batch's `logp_new` and `dist_new` are ignored."""
    weights: Float[Tensor, "B T"]
    """Weight w of each token's loss in the reduced loss, which is a weighted sum over tokens."""
    policy_weights: Float[Tensor, "B T"] | None
    """Weight c of each token's policy-gradient loss, but not of its regression loss; None means 1 everywhere."""
    on_policy: bool
    """True if the old policy equals the new policy: the new log-probs then replace `logp_old`."""
    union: UnionSupport | None = None
    spec: LogitSpec = field(default_factory=LogitSpec)
    """Scale, soft cap and temperature of the logits, the same for the LM heads of the new and the old policy."""

    def pack(self, packing: Packing) -> "LossTerms":
        """Pack the loss inputs of all unmasked tokens into one sequence [1 N]."""
        b = self.batch
        given = replace(b, logp_new=b.logp_old, dist_new=None, advantages=token_advantages(b))
        return replace(self, batch=given).map(lambda x: packing.pack(x)[None])

    def with_new(self, logp: Float[Tensor, "B T"], new: SparseDist | None, old: SparseDist | None) -> TokenBatch:
        """Return the batch with the new policy's log-probs and distribution. On-policy, its log-probs also replace `logp_old`.

        The replacement is detached: no gradient flows through it. The old policy's distribution is `old`.
        """
        logp_old = logp.detach() if self.on_policy else self.batch.logp_old
        return replace(self.batch, logp_new=logp, logp_old=logp_old, dist_new=new, dist_old=old)

    def __call__(self, logp: Float[Tensor, "B T"], new: SparseDist | None) -> tuple[Float[Tensor, ""], ObjectiveOutput]:
        """Compute the objective's reduced loss and per-token output from the new policy's log-probs and distribution."""
        old = self.batch.dist_old
        if self.union is not None and old is not None and new is not None:
            old = self.union.extend(old, new.ids, self.spec)
        out = self.objective(self.with_new(logp, new, old))
        return out.total(torch.where(self.batch.mask, self.weights, 0.0), self.policy_weights), out


def has_token_shapes(batch: TokenBatch) -> bool:
    """True if advantages and log-probs of the batch have shapes and dtypes that every objective accepts.

    If not, the objective itself is called, and raises its own error.
    """
    shape, given = batch.mask.shape, [x for x in (batch.logp_old, batch.logp_rollout) if x is not None]
    fit = batch.advantages.shape in (shape, shape[:1]) and all(x.shape == shape for x in given)
    return fit and all(x.is_floating_point() for x in (*given, batch.advantages))


def token_advantages(batch: TokenBatch) -> Tensor:
    """Advantage of each token [B T]; an advantage per sequence [B] is repeated for all tokens of its sequence."""
    return batch.advantages[:, None].expand(batch.mask.shape) if batch.advantages.ndim == 1 else batch.advantages


@dataclass(frozen=True, eq=False)
class FusedLoss:
    """Results of the fused LM head and loss for packed tokens: loss, log-probs, and a function that returns gradients."""

    packing: Packing
    total: Tensor
    """Reduced loss: the weighted sum of all token losses, each a policy-gradient loss plus a regression loss."""
    rows: HeadRows
    output: ObjectiveOutput
    """Output of the objective for packed tokens [1, N], with its metrics."""
    finish: Callable[[Tensor], Gradients] | None
    """Function that returns the gradients of hidden states, weight and bias times a scalar; None if no gradient is needed.
    The hidden states are packed. It waits for the gradients, multiplies them in place by the scalar tensor, and is called
    once."""


class PrecomputedGradients(torch.autograd.Function):
    """Autograd function whose forward pass computes the gradients; its backward pass only multiplies by the upstream gradient.

    `finish` does so.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, finish: Callable[[Tensor], Iterable[Tensor | None]], *inputs: Tensor | None) -> Tensor:
        ctx.finish = finish
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # autograd raises if an input was changed in place since: `finish` may read them
        return (None, None, *ctx.finish(upstream))
