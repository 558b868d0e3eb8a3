"""Policy loss and its gradient from hidden states, in one fused pass through LM head, objective and reduction."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.head.dispatch import Chosen, choose
from corral.head.forward import check_weight, lm_head
from corral.head.logits import LogitSpec
from corral.head.packed import LossTerms, Packing, PrecomputedGradients, TokenObjective, has_token_shapes
from corral.head.rows import HeadInput
from corral.head.torch.fused import all_dense, check_sampled
from corral.head.torch.fused import fused_loss as fused_torch
from corral.head.union import UnionSupport
from corral.numerics import at_least_float32, require_tensors
from corral.tensors import SparseDist, TokenBatch

TOLERANCE = 1e-3
"""Largest share of a token's logit gradient, in L1 norm, that a sparse backward pass may drop.
It is half of bfloat16's rounding error."""


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Reduced policy loss, with per-token results [B T] that carry no gradient and are 0 at masked tokens."""

    loss: Float[Tensor, ""]
    """Reduced loss, a weighted sum over tokens; the only field that carries a gradient.
    Σ w (c · policy + regression), for the weights w and c of each token."""
    per_token: Float[Tensor, "B T"]
    """Loss of each token before weighting: policy-gradient term plus regression term."""
    logp: Float[Tensor, "B T"]
    """New policy's log-prob of the sampled token, at each position."""
    metrics: dict[str, Tensor]
    """Metrics of the objective, as a dictionary from name to tensor.
    `head/dense_share` and `head/dropped_max` are included unless `report` has them."""
    entropy: Float[Tensor, "B T"] | None = None
    dist: SparseDist | None = None
    """New policy's distribution on the old policy's top-k tokens, or on the union of both policies' top-k tokens."""
    acted: Bool[Tensor, "B T"] | None = None
    """True at tokens on which the trust region acted, by clipping, masking or projection; None if not recorded."""
    kl_after: Float[Tensor, "B T"] | None = None
    """KL(projected‖old) at each token, for objectives that project onto a trust region; None for other objectives."""
    regression: Float[Tensor, "B T"] | None = None
    """Part of each token's loss that pulls the new policy back into the trust region; None for objectives without this part."""
    report: Float[Tensor, "2"] | None = None
    """Share of tokens with a dense logit gradient, and largest share of a token's gradient that was dropped.
    Set only if the loss comes from `lm_head` with a sparse backward pass, which writes both; NaN until then."""


def policy_loss_from_hidden(
    hidden: Float[Tensor, "B T H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "B T"],
    batch: TokenBatch,
    objective: TokenObjective,
    *,
    weights: Float[Tensor, "B T"],
    policy_weights: Float[Tensor, "B T"] | None = None,
    exact: bool = False,
    on_policy: bool = False,
    entropy: bool = False,
    union: UnionSupport | None = None,
    bias: Float[Tensor, " V"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> PolicyLoss:
    """Compute an objective's reduced loss and its gradient from a model's last hidden states.

        hidden → log π, and π on the support of dist_old → objective → L = Σ w_t (c_t · policy_t + regression_t) → dH, dW, db

    Loss and gradient are computed together, and every token passes the objective once. With a GPU's kernels a token's gradient
    is sparse, one GEMM in all, where what that leaves out is less than 10⁻³ of its own Σ |dz| or of the mean token's; tokens
    that `dist_old` shows to be dense, and with `exact` all, take three GEMMs. Dense tokens that it does not show take four, and
    so do dense tokens in float16 or under a soft cap. Objectives without a kernel, objectives of sequences, functions of your
    own, and a soft cap on the torch path take four too: there this is `lm_head`, the objective and autograd. Masked tokens
    never enter the head. On a GPU a loss that is not finite is refused in the backward pass, which waits for the device anyway.

    Args:
        hidden: last hidden states of the positions that predict `tokens` [B T H].
        weight, bias: the head's, [V H] and [V].
        tokens: sampled tokens [B T]; padding may hold anything.
        batch: all that the objective needs but the new policy: `logp_new` and `dist_new` are not read and may hold anything.
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        weights: w, the reduction's factor of each token's loss [B T].
        policy_weights: c, the factor of the policy term alone [B T]: a sampler correction, importance weights.
        exact: leave nothing out of the gradient. Right for flat policies.
        on_policy: the new policy is its own anchor; `logp_old` is not read, and there is no `dist_old`.
        entropy: compute it too; a constant here.
        union: with the old head: the new policy's likeliest tokens join the support of `dist_old`. Both heads have the same
            `scale`, `softcap` and `temperature`.
        scale, softcap, temperature: how the model and the sampler turn h Wᵀ into logits, as in `lm_head`.
        impl: "torch", "triton", or "auto" for the best there is.
    Returns:
        PolicyLoss. Its gradient can be taken once; accumulation and a gradient scaler multiply it by one number.
    Ref:
        docs/performance.md. Invariant: with exact=True the loss and gradients of `lm_head` and the objective one by one.
    """
    check_weight("policy_loss_from_hidden", weight)
    require_tensors("policy_loss_from_hidden", hidden=hidden, tokens=tokens)
    if isinstance(objective, str):
        raise ValueError(
            f"policy_loss_from_hidden: `objective` is a function; got the name {objective!r}. Pass corral.make_objective("
            f"{objective!r})."
        )
    spec = LogitSpec(scale, softcap, temperature)
    terms = LossTerms(objective, batch, weights, policy_weights, on_policy, union, spec)
    if (problem := _problem(hidden, weight, tokens, terms)) is not None:
        raise ValueError(f"policy_loss_from_hidden: {problem}")
    weights, unit = at_least_float32(weights), None
    if hidden.dtype == torch.float16 and weights.numel():
        # A token's weight is about 1/N, and float16 ends at 6e-8: gradients are formed with the largest weight as 1, and
        # multiplied by it in the backward pass, together with a gradient scaler's factor.
        largest = torch.where(batch.mask, weights.abs(), 0.0).amax()
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        weights = weights / unit
    terms = replace(terms, weights=weights)
    ids = None if batch.dist_old is None else batch.dist_old.ids
    source = HeadInput(hidden, weight, bias, tokens, ids, spec, entropy=entropy)
    if union is not None:
        source = replace(source, top_k=min(union.top_k, len(weight)), mass=union.mass, joins=union.place >= 0)
    chosen = choose("policy_loss_from_hidden", impl, hidden, weight, source.top_k, 0 if ids is None else ids.shape[-1])
    tolerance = 0.0 if exact else TOLERANCE
    inputs = (hidden, weight, bias)
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    fused = None
    if has_token_shapes(batch) and tokens.numel():
        if chosen == "torch":
            fused = fused_torch(source.detach(), terms, needed)
        else:
            from corral.head.triton.fused import fused_loss  # Triton is an optional dependency

            with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
                fused = fused_loss(source.detach(), terms, tolerance, needed)
    if fused is None:
        return _from_blocks(source, terms if unit is None else replace(terms, weights=weights * unit), tolerance, chosen)

    packing, rows, finish = fused.packing, fused.rows, fused.finish
    loss = fused.total if unit is None else fused.total * unit

    def gradients(upstream: Tensor) -> Iterable[Tensor | None]:
        nonlocal finish
        if finish is None:
            raise RuntimeError(
                "policy_loss_from_hidden: its gradients were handed over by the first backward pass. Call it again, or build "
                "the loss from corral.lm_head, which can be differentiated any number of times."
            )
        hand_over, finish = finish, None  # gradients are handed over, not copied
        factor = at_least_float32(upstream)
        return vars(hand_over(factor if unit is None else factor * unit).map(packing.unpack)).values()

    if finish is not None:
        loss = PrecomputedGradients.apply(loss, gradients, *inputs)
    out = fused.output.map(lambda x: packing.unpack(x[0]))
    entropies = packing.unpack(rows.entropy) if entropy else None
    dist = None if ids is None else packing.unpack_dist(rows.dist)
    return PolicyLoss(
        loss, out.loss, packing.unpack(rows.logp), out.metrics, entropies, dist, out.acted, out.kl_after, out.regression
    )


def _from_blocks(source: HeadInput, terms: LossTerms, tolerance: float, impl: Chosen) -> PolicyLoss:
    """Compute the policy loss without fusion: call `lm_head`, then the objective on the whole batch, with autograd."""
    packing = Packing(terms.batch.mask)
    packed = source.map(packing.pack)
    check_sampled(packed.ids, packed.tokens)
    head = lm_head(
        packed.hidden, packed.weight, packed.tokens, bias=packed.bias, ids=packed.ids, joins=packed.joins, top_k=packed.top_k,
        mass=packed.mass, entropy=packed.entropy, impl=impl, tolerance=tolerance, **vars(packed.spec),
    )  # fmt: skip
    logp, dist = packing.unpack(head.logp), None if head.dist is None else packing.unpack_dist(head.dist)
    loss, out = terms(logp, dist)
    constant = out.detach()
    return PolicyLoss(
        loss, torch.where(terms.batch.mask, constant.loss, 0.0), logp.detach(),
        out.metrics if head.report is not None else out.metrics | all_dense(logp),
        None if head.entropy is None else packing.unpack(head.entropy.detach()), None if dist is None else dist.detach(),
        out.acted, out.kl_after, constant.regression, head.report,
    )  # fmt: skip


def _problem(hidden: Tensor, weight: Tensor, tokens: Tensor, terms: LossTerms) -> str | None:
    """Return a message about the first wrong shape, dtype, device or `union` among the inputs; None if all are valid."""
    batch, union, shape = terms.batch, terms.union, terms.batch.mask.shape
    for name, x in (("weights", terms.weights), ("policy_weights", terms.policy_weights)):
        if x is not None and (x.shape != shape or not x.is_floating_point() or x.requires_grad):
            more = ", with a gradient" if x.requires_grad else ""
            return f"{name} are constants [B T] like the mask, {list(shape)}; got {list(x.shape)}, {x.dtype}{more}."
    fit = tokens.shape == shape == hidden.shape[:-1] and hidden.ndim == 3 and weight.ndim == 2
    if not fit or hidden.shape[-1] != weight.shape[-1]:
        return (
            f"hidden is [B T H], tokens and mask are [B T], weight is [V H]; got hidden {list(hidden.shape)}, tokens "
            f"{list(tokens.shape)}, mask {list(shape)}, weight {list(weight.shape)}. Hidden states are those that predict the "
            f"tokens: one position before them."
        )
    if batch.mask.dtype != torch.bool:
        return f"mask must be bool, True where a token is trained on; got {batch.mask.dtype}."
    if batch.dist_old is not None and batch.dist_old.rest.shape != shape:
        return f"dist_old describes {list(batch.dist_old.rest.shape)} positions, the mask {list(shape)}."
    if terms.on_policy and batch.dist_old is not None:
        return "on_policy=True takes the new policy for the anchor, and a dist_old was given. Pass one."
    if union is None:
        return None
    if batch.dist_old is None:
        return "a `union` joins the support of `dist_old`, and there is none. Pass both."
    if union.weight.shape != weight.shape or union.place.shape != shape:
        return (
            f"union.weight is [V H] like the weight, {list(weight.shape)}, and union.place [B T] like the mask, {list(shape)}; "
            f"got {list(union.weight.shape)} and {list(union.place.shape)}."
        )
    if where := {str(x.device) for x in (union.hidden, union.weight, union.place)} - {str(weight.device)}:
        return (
            f"the tensors of a union lie where the weight does, on {str(weight.device)!r}; got one on {where.pop()!r}. Move it "
            f"with .to()."
        )
    return None
