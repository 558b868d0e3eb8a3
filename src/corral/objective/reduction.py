"""Reductions of per-token losses to one number. With explicit totals, micro-batches sum to the loss of the whole batch."""

from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.numerics import at_least_float32, require_tensors
from corral.objective.config import Reduction
from corral.validate import number_in


def reduce_loss(
    loss: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    how: Reduction,
    *,
    total: float | Tensor | None = None,
    length: float | None = None,
) -> Float[Tensor, ""]:
    """Reduce per-token losses to one number: the sum over this batch, divided by a total over all micro-batches and ranks.

        token-mean                 Σ_bt L / N_tokens
        seq-mean-token-mean        Σ_b (Σ_t L / |o_b|) / N_sequences
        seq-mean-token-sum         Σ_b Σ_t L / N_sequences
        seq-mean-token-sum-norm    Σ_b Σ_t L / (length · N_sequences)

    Masked-out tokens count in neither; tokens that an objective blocked stay in the denominator, so that the step does not
    grow as more are blocked.

    Args:
        loss: per-token loss [B T]; anything at padding.
        mask: unmasked tokens [B T].
        how: one of the four.
        total: unmasked tokens ("token-mean") or sequences with an unmasked token (the others) in the whole batch, over all
            micro-batches and ranks; None takes this batch's own. Where gradients are averaged over ranks, multiply the
            result by their number.
        length: the fixed length that "seq-mean-token-sum-norm" divides by.
    Returns:
        The loss, a scalar.
    Ref:
        Liu et al. 2025, arXiv:2503.20783 (fixed length); Yu et al. 2025, arXiv:2503.14476 (token mean). Invariant: the
        micro-batches of a batch, each with the batch's total, sum to the batch's loss.
    """
    require_tensors("reduce_loss", loss=loss, mask=mask)
    if how not in get_args(Reduction):
        raise ValueError(f"reduce_loss: `how` is one of {', '.join(get_args(Reduction))}; got {how!r}.")
    if loss.shape != mask.shape or loss.ndim != 2:
        raise ValueError(f"reduce_loss: loss and mask are both [B T]; got {list(loss.shape)} and {list(mask.shape)}.")
    if mask.dtype != torch.bool:
        raise ValueError(f"reduce_loss: mask must be bool, True where a token counts; got {mask.dtype}. Use .bool().")
    if how == "seq-mean-token-sum-norm" and (length is None or not number_in(length, 0) or length in (0, torch.inf)):
        raise ValueError(
            f"reduce_loss: {how!r} divides by a fixed `length` > 0, the same for every batch (the longest completion "
            f"allowed, say); got {length!r}."
        )
    tokens = mask.sum(-1)
    if total is None:
        total = mask.sum() if how == "token-mean" else (tokens > 0).sum()
    elif not (total.numel() == 1 if isinstance(total, Tensor) else isinstance(total, int | float)):
        raise ValueError(f"reduce_loss: `total` is one number, over all micro-batches and ranks; got {total!r}.")
    if not torch.compiler.is_compiling() and not 0 < float(total) < torch.inf:
        raise ValueError(
            f"reduce_loss: the batch has no unmasked token to average over (total = {total}). Skip it, or pass `total` where "
            f"other micro-batches or ranks have some."
        )
    loss = torch.where(mask, at_least_float32(loss), 0.0)
    if how == "seq-mean-token-mean":
        loss = loss / tokens.clamp(min=1)[:, None]
    elif how == "seq-mean-token-sum-norm":
        assert length is not None
        loss = loss / length
    return (loss.sum() / total).reshape(())  # a total counted on the device may come as [1]


def reduction_weights(
    mask: Bool[Tensor, "B T"], how: Reduction, *, total: float | Tensor | None = None, length: float | None = None
) -> Float[Tensor, "B T"]:
    """Compute weights w [B T] such that `reduce_loss` of any per-token loss L equals Σ w L.

    Args:
        mask, how, total, length: as in `reduce_loss`.
    Returns:
        Weights in float32, 0 at masked tokens.
    Ref:
        A reduction is linear: these are its gradient.
    """
    require_tensors("reduction_weights", mask=mask)
    with torch.enable_grad():
        loss = torch.zeros(mask.shape, device=mask.device, requires_grad=True)
        (weights,) = torch.autograd.grad(reduce_loss(loss, mask, how, total=total, length=length), loss)
    return weights
