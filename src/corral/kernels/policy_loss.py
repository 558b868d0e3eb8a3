"""From hidden states to a loss per token: the head, the objective, and the way back, never holding the logits."""

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.divergence import binary_tv
from corral.kernels.dispatch import choose
from corral.kernels.head import HeadOutput, lm_head
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRequest
from corral.support import check_ids
from corral.types import ObjectiveOutput, SparseDist, TokenBatch

TOLERANCE = 1e-3
"""Share of a token's gradient, in Σ |dz|, that the sparse backward may leave out: half of what rounding to bfloat16 costs."""
OWN_SUPPORT = 64
"""Tokens of the new policy that carry its gradient where the batch brings no support."""


TokenObjective = Callable[[TokenBatch], ObjectiveOutput]
"""What `make_objective` returns: a batch of tokens → a loss per token."""


class Live:
    """The tokens that are trained on: picked out of [B T …] into rows [N …], and spread out again."""

    def __init__(self, mask: Bool[Tensor, "B T"]) -> None:
        self.shape = mask.shape
        rows = mask.flatten().nonzero().squeeze(-1)
        self.count = len(rows)
        self.rows = None if self.count == mask.numel() else rows  # all of them: nothing to copy

    def pick(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def spread(self, x: Tensor) -> Tensor:
        """0 where nothing was picked."""
        if self.rows is not None:
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.rows, x)
        return x.reshape(*self.shape, *x.shape[1:])


def policy_loss_from_hidden(
    hidden: Float[Tensor, "B T H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "B T"],
    batch: TokenBatch,
    objective: TokenObjective,
    *,
    exact: bool = False,
    bias: Float[Tensor, " V"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> ObjectiveOutput:
    """An objective's loss of every token, from the last hidden states.

        hidden → log π, and π on the support of dist_old → objective → L_t          backward: dz → dH, dW, db

    Gradients reach `hidden`, `weight` and `bias` through autograd, for any weighting of the tokens afterwards. On a GPU a
    row's backward is sparse where the logits outside its support carry at most 10⁻³ of its own gradient Σ |dz|, or of the mean
    row's, and dense elsewhere. Masked tokens never enter the head, and blocked ones cost no backward.

    Args:
        hidden: last hidden states of the positions that predict `tokens` [B T H].
        weight, bias: the head's, [V H] and [V].
        tokens: sampled tokens [B T]; padding may hold anything.
        batch: all that the objective needs but the new policy: `logp_new` and `dist_new` are not read and may hold anything.
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        exact: leave nothing out of the gradient: every row's backward is dense.
        scale, softcap, temperature: how the model and the sampler turn products into logits, as in `lm_head`.
        impl: "torch", "triton", or "auto" for the best there is.
    Returns:
        Unreduced loss [B T] and the objective's metrics, with two more that the backward pass fills in and that are NaN until
        then: `head/dense_share`, of the tokens with a gradient, and `head/dropped`, the largest share of a row's gradient that
        was left out, at most.
    Ref:
        docs/performance.md. Invariant: with exact=True the loss and gradients of `lm_head` and the objective one by one.
    """
    _check(hidden, weight, tokens, batch)
    spec = LogitSpec(scale, softcap, temperature)
    live = Live(batch.mask)
    ids = None if batch.dist_old is None else live.pick(batch.dist_old.ids)
    rows, picked = live.pick(hidden), live.pick(tokens).long()
    report = torch.full((2,), torch.nan, device=hidden.device)
    chosen = choose("policy_loss_from_hidden", impl, hidden, weight)
    if not live.count:
        head = _no_rows(rows, ids)
    elif chosen == "triton":
        head = _triton_head(rows, weight, bias, picked, ids, spec, 0.0 if exact else TOLERANCE, report)
    else:
        report.copy_(torch.tensor([1.0, 0.0]))  # the torch path's backward is dense and leaves nothing out
        head = lm_head(
            rows, weight, picked, bias=bias, scale=scale, softcap=softcap, temperature=temperature, ids=ids, impl="torch"
        )
    out = _fused(batch, head, objective, live) if chosen == "triton" else None
    if out is None:
        out = objective(_with_new_policy(batch, head, live))
    return ObjectiveOutput(out.loss, out.metrics | {"head/dense_share": report[0], "head/dropped": report[1]})


def _fused(batch: TokenBatch, head: HeadOutput, objective: TokenObjective, live: Live) -> ObjectiveOutput | None:
    """TROLL in one kernel; None for other objectives, and for a bad batch: the objective itself says what is wrong with it."""
    from corral.kernels.troll_loss import TrollSettings, troll_loss

    settings, shape = TrollSettings.of(objective), batch.mask.shape
    advantages, old, rollout = batch.advantages, batch.dist_old, batch.logp_rollout
    if settings is None or head.dist is None or old is None or not live.count:
        return None
    if advantages.shape == shape[:1]:
        advantages = advantages[:, None].expand(shape)
    given = (advantages, batch.logp_old) if rollout is None else (advantages, batch.logp_old, rollout)
    if any(x.shape != shape or not x.is_floating_point() for x in given):
        return None
    advantages, logp_old, *sampler = (live.pick(x.detach()) for x in given)
    old = SparseDist(head.dist.ids, live.pick(old.logp.detach()), live.pick(old.rest.detach()))
    rows = troll_loss(head.dist, old, logp_old, advantages, settings)
    flawed = rows.flawed | (old.ids[:, 0] < 0)
    metrics = rows.metrics(old.rest)
    if sampler:
        flawed = flawed | ~sampler[0].isfinite()
        metrics["tr/mismatch"] = binary_tv(sampler[0], logp_old).mean()
    if bool(flawed.any()):  # asked last, when the device has everything else to do
        return None
    return ObjectiveOutput(live.spread(rows.loss), metrics)


def _no_rows(hidden: Tensor, ids: Tensor | None) -> HeadOutput:
    """What a head says of no tokens at all, still connected to the hidden states."""
    logp = hidden.sum(-1).float()
    return HeadOutput(logp, None, None if ids is None else SparseDist(ids, ids.float(), logp))


def _triton_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    ids: Tensor | None,
    spec: LogitSpec,
    tolerance: float,
    report: Tensor,
) -> HeadOutput:
    """The head with a backward that may be sparse. Without a given support, the policy's own carries the gradient."""
    from corral.kernels.triton_head import Plan, TritonHead, most_top_k

    check_ids("policy_loss_from_hidden", "tokens", tokens, lowest=0, vocabulary=len(weight))
    if ids is not None:
        check_ids("policy_loss_from_hidden", "dist_old.ids", ids, lowest=-1, vocabulary=len(weight))
    own = ids is None and tolerance > 0
    request = HeadRequest(top_k=min(OWN_SUPPORT, most_top_k(hidden, len(weight)))) if own else HeadRequest()
    logp, _, kept, rest, _ = TritonHead.apply(hidden, weight, bias, tokens, ids, Plan(spec, request, tolerance, report))
    return HeadOutput(logp, None, None if ids is None else SparseDist(ids, kept, rest))


def _with_new_policy(batch: TokenBatch, head: HeadOutput, live: Live) -> TokenBatch:
    """The batch with the new policy in it: live rows [N] back in their places, 0 elsewhere."""
    dist = None
    if head.dist is not None and batch.dist_old is not None:
        dist = SparseDist(
            batch.dist_old.ids, live.spread(head.dist.logp), live.spread(head.dist.rest)
        )  # fmt: skip
    return dataclasses.replace(batch, logp_new=live.spread(head.logp), dist_new=dist)


def _check(hidden: Tensor, weight: Tensor, tokens: Tensor, batch: TokenBatch) -> None:
    shape = batch.mask.shape
    if tokens.shape != shape or hidden.shape[:-1] != shape or hidden.ndim != 3 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"policy_loss_from_hidden: hidden is [B T H], tokens and mask are [B T], weight is [V H]; got hidden "
            f"{list(hidden.shape)}, tokens {list(tokens.shape)}, mask {list(shape)}, weight {list(weight.shape)}. Hidden "
            f"states are those that predict the tokens: one position before them."
        )
    if batch.mask.dtype != torch.bool:
        raise ValueError(
            f"policy_loss_from_hidden: mask must be bool, True where a token is trained on; got {batch.mask.dtype}."
        )
    if batch.dist_old is not None and batch.dist_old.rest.shape != shape:
        raise ValueError(
            f"policy_loss_from_hidden: dist_old describes {list(batch.dist_old.rest.shape)} positions, the mask {list(shape)}."
        )
