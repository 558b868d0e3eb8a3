"""From hidden states to a loss per token: the head, the objective, and the way back, never holding the logits."""

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.kernels.batch_loss import NewRows
from corral.kernels.dispatch import choose, own_top_k
from corral.kernels.foreseen import foresee
from corral.kernels.head import lm_head
from corral.kernels.head_rows import HeadRequest
from corral.kernels.live import Live, advantages_of, fits
from corral.kernels.logits import LogitSpec
from corral.support import Limits
from corral.types import ObjectiveOutput, TokenBatch

TOLERANCE = 1e-3
"""Share of a token's gradient, in Σ |dz|, that the sparse backward may leave out: half of what rounding to bfloat16 costs."""

TokenObjective = Callable[[TokenBatch], ObjectiveOutput]
"""What `make_objective` returns: a batch of tokens → a loss per token."""


def policy_loss_from_hidden(
    hidden: Float[Tensor, "B T H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "B T"],
    batch: TokenBatch,
    objective: TokenObjective,
    *,
    exact: bool = False,
    weights: Float[Tensor, "B T"] | None = None,
    bias: Float[Tensor, " V"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> ObjectiveOutput:
    """An objective's loss of every token, from the last hidden states.

        hidden → log π, and π on the support of dist_old → objective → L_t          backward: dz → dH, dW, db

    Gradients reach `hidden`, `weight` and `bias` through autograd, for any weighting of the tokens afterwards. On a GPU a
    row's backward is sparse where what it leaves out is less than 10⁻³ of its own gradient Σ |dz|, or of the mean row's, and
    dense elsewhere. Masked tokens never enter the head, and blocked ones cost no backward. There, a loss that is not finite is
    refused in the backward pass, which has to wait for the device anyway.

    Args:
        hidden: last hidden states of the positions that predict `tokens` [B T H].
        weight, bias: the head's, [V H] and [V].
        tokens: sampled tokens [B T]; padding may hold anything.
        batch: all that the objective needs but the new policy: `logp_new` and `dist_new` are not read and may hold anything.
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        exact: leave nothing out of the gradient: every row's backward is dense. Right for flat policies.
        weights: what the reduction will multiply each token's loss with [B T]. The loss comes multiplied, ready to be summed.
            Gradients of the rows that will be dense, as `dist_old` lets foresee, are then formed in the forward pass, three
            products instead of four, and with `exact` those of all rows. They are used for every row whose loss is summed as
            it comes, or times one factor for all; any other use is correct too, but pays for it twice.
        scale, softcap, temperature: how the model and the sampler turn products into logits, as in `lm_head`.
        impl: "torch", "triton", or "auto" for the best there is.
    Returns:
        Unreduced loss [B T] and the objective's metrics, with two more: `head/dense_share`, of the tokens with a gradient, and
        `head/dropped`, the largest share of a row's gradient that was left out, at most. Where the backward pass fills them in,
        on a GPU, they are NaN until then.
    Ref:
        docs/performance.md. Invariant: with exact=True the loss and gradients of `lm_head` and the objective one by one.
    """
    _check(hidden, weight, tokens, batch, weights)
    spec = LogitSpec(scale, softcap, temperature)
    given = 0 if batch.dist_old is None else batch.dist_old.ids.shape[-1]
    chosen = choose("policy_loss_from_hidden", impl, hidden, weight, given=given)
    report = torch.full((2,), torch.nan, device=hidden.device)
    out = None
    if chosen == "triton":
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
            out = _fused(hidden, weight, bias, tokens, batch, objective, weights, spec, exact, report)
    if out is None:
        live = Live(batch.mask)
        picked, ids = live.pick(tokens), None if batch.dist_old is None else live.pick(batch.dist_old.ids)
        _check_support(ids, picked)
        head = lm_head(
            live.pick(hidden), weight, picked, bias=bias, scale=scale, softcap=softcap, temperature=temperature, ids=ids,
            impl=chosen, expect=foresee(objective, batch, live.pick, weights), tolerance=0.0 if exact else TOLERANCE,
        )  # fmt: skip
        # Without a report every row is dense, and nothing is left out.
        report = report.new_tensor([1.0, 0.0]) if head.report is None else head.report
        out = objective(NewRows(head.logp, head.dist, live).within(batch))
        if weights is not None:
            out = dataclasses.replace(out, loss=torch.where(batch.mask, out.loss * weights, 0.0))
    metrics = out.metrics | {"head/dense_share": report[0], "head/dropped": report[1]}
    return dataclasses.replace(out, metrics=metrics)


def _fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    batch: TokenBatch,
    objective: TokenObjective,
    weights: Tensor | None,
    spec: LogitSpec,
    exact: bool,
    report: Tensor,
) -> ObjectiveOutput | None:
    """Head and objective in a few kernels and one wait for the device.

    None for other objectives, and for a bad batch: the objective itself says what is wrong with it.
    """
    from corral.kernels.formed import start_early, start_formed
    from corral.kernels.fused_loss import Job, fused_loss
    from corral.kernels.inspect_batch import inspect_batch
    from corral.kernels.loss_rows import OldRows
    from corral.kernels.rule import rule_of
    from corral.kernels.select import HeadInput

    rule, old, mask = rule_of(objective), batch.dist_old, batch.mask
    if rule is None or not mask.numel() or (rule.needs_support and old is None) or not fits(batch):
        return None
    # Without a given support, the policy's own carries a sparse gradient.
    own = own_top_k(hidden, len(weight)) if old is None and not exact else None
    tolerance, request = 0.0 if exact else TOLERANCE, HeadRequest(top_k=own)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    form = trained and weights is not None and request.top_k is None
    limits = Limits.of(batch.logp_old, old) if getattr(objective, "check", True) else Limits()  # it has a rule: it is ours
    inspection = inspect_batch(batch, tokens, weights, weight, form=form, tolerance=tolerance, limits=limits)
    # Products do not wait for the host: not even to be told how many rows they have.
    ids = None if old is None else old.ids.flatten(0, 1).contiguous()
    source = HeadInput(hidden.detach().flatten(0, 1), weight, bias, tokens.flatten().contiguous(), ids, spec, request)
    early = start_early(source, inspection)
    first, count, refused = inspection.answer.numbers()
    if refused or not count:
        return None
    part = inspection.formed(first, count)
    early = start_formed(source, inspection, early, part)
    in_order = part in (slice(0, 0), slice(0, count))
    live = Live(mask, count, None if early is None else early.index[:count], in_order=in_order)
    kept, rest, rest_max = (None, None, None) if old is None else (old.logp, old.rest, old.rest_max)
    given = OldRows(batch.logp_old, kept, rest, advantages_of(batch), batch.logp_rollout, rest_max)
    job = Job(
        name=getattr(objective, "name", "the objective"), live=live, tokens=live.pick(tokens).long().contiguous(),
        ids=None if ids is None else ids if live.rows is None else ids[live.rows],
        old=given.each(lambda x: live.pick(x.detach()).contiguous()),
        weights=None if weights is None else live.pick(weights).float().contiguous(), rule=rule, spec=spec,
        request=request, tolerance=tolerance, part=part, report=report, early=early,
    )  # fmt: skip
    return fused_loss(hidden, weight, bias, job)


def _check(hidden: Tensor, weight: Tensor, tokens: Tensor, batch: TokenBatch, weights: Tensor | None) -> None:
    shape = batch.mask.shape
    if weights is not None and (weights.shape != shape or not weights.is_floating_point() or weights.requires_grad):
        raise ValueError(
            f"policy_loss_from_hidden: weights are constants [B T] like the mask, {list(shape)}; got {list(weights.shape)}, "
            f"{weights.dtype}{', with a gradient' if weights.requires_grad else ''}."
        )
    fit = tokens.shape == shape == hidden.shape[:-1] and hidden.ndim == 3 and weight.ndim == 2
    if not fit or hidden.shape[-1] != weight.shape[-1]:
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


def _check_support(ids: Tensor | None, tokens: Tensor) -> None:
    """Refuse a support [N K] of other tokens than those sampled [N]: nobody behind this sees both."""
    if ids is not None and (wrong := int((ids[:, :1] != tokens[:, None]).all(-1).sum())):
        raise ValueError(
            f"policy_loss_from_hidden: slot 0 of dist_old.ids is not the sampled token at {wrong} of {len(tokens)} live "
            f"tokens. Both follow the completion tokens; was one of them shifted twice? See docs/data-flow.md#shift."
        )
