"""Fused LM head and loss in Triton, with gradients; a plan for each batch chooses sparse or dense logit gradients."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.head.dispatch import own_top_k
from corral.head.packed import FusedLoss, LossTerms, Packing, token_advantages
from corral.head.rows import AsyncCopy, Gradients, HeadInput, HeadRows, blank_gradients
from corral.head.triton.backward import can_store, dense_forward, head_gradients, recompute_rows, row_gradient, scale
from corral.head.triton.gathered import extend_rows
from corral.head.triton.gemm_stats import gemm_stats, lanes
from corral.head.triton.loss import TOLERATED, LossRows, kernel_rule, row_losses, summarize
from corral.head.triton.support import fits_at_once, stream_head
from corral.objective import Objective
from corral.support import LogpTolerance

FEWEST, SMALLEST_SHARE = 128, 0.03
"""Smallest number, and smallest share, of tokens for which sparse or dense logit gradients get a separate GEMM."""
SMALL = 10**12
"""Size of a GEMM, in operations, below which a batch is not split into sparse and dense logit gradients.
Splitting would cost more host time than it saves. All tokens then take one route."""
ROWS = 8


def plan_rows(
    terms: LossTerms, tokens: Tensor, weight: Tensor, *, own: int | None, dense: bool, tolerance: float, limits: LogpTolerance
) -> tuple[Tensor, Tensor]:
    """Validate a batch, and order its unmasked tokens: tokens with an expected sparse logit gradient come first.

    Rows of the first kind are called streamed, all others dense. A streamed row takes one GEMM and a gradient that is sparse
    unless `route_rows` finds otherwise, and then a fourth GEMM; a row planned to be dense takes three. Shapes have been
    checked. A row is invalid if a token id is outside the vocabulary, if slot 0 of its support is not the sampled token, or if
    `objective.check` would refuse it, its `limits` of log-probs included.
    Without `dense` no row is planned to be dense. With tolerance 0 all rows with a gradient are. If the gradient is to be
    carried by `own` tokens of the new policy's support, all rows of a flat policy are.

    Returns:
        Indices in the flattened batch, 0 after the last row [B · T], and the numbers of streamed rows, of all rows, and of
        invalid rows, on the device [3] int32.
    """
    batch, old, total = terms.batch, terms.batch.dist_old, terms.batch.mask.numel()
    small, device, every = 2 * total * weight.numel() < SMALL, batch.mask.device, dense and tolerance == 0
    counts = torch.empty(3, dtype=torch.int32, device=device)
    order = torch.zeros(total, dtype=torch.int64, device=device)
    off, size = (torch.empty(total, device=device) for _ in range(2))
    advantages, slots = token_advantages(batch), 0 if old is None else old.ids.shape[-1]
    given = terms.map(Tensor.contiguous)  # kernels read [B T …] one row behind the other
    b, old = given.batch, given.batch.dist_old
    _inspect_kernel[(triton.cdiv(total, ROWS),)](
        b.mask.view(torch.uint8), tokens.contiguous(), *((None,) * 3 if old is None else (old.ids, old.logp, old.rest)),
        b.logp_old, b.logp_rollout, advantages, given.weights, given.policy_weights, off, size, total, batch.mask.shape[1],
        *advantages.stride(), slots, len(weight), *limits, ANCHOR=not terms.on_policy, DENSE=dense, EVERY=every,
        SLOTS=lanes(slots), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    least = (1, 0.0, 0.0) if every else (FEWEST, SMALLEST_SHARE, 1.0 if small else SMALLEST_SHARE)
    flat = math.inf if own is None else math.log(own)
    _order_kernel[(1,)](
        off, size, order, counts, total, tolerance, flat, *least, BLOCK=min(4096, triton.next_power_of_2(total)), num_warps=8
    )
    return order, counts


@triton.jit
def _finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _inspect_kernel(
    mask, tokens, ids, kept, rest, logp_old, rollout, advantages, weights, policy_weights, off, size, total, length, stride_b,
    stride_t, slots, vocabulary, highest, slack, ANCHOR: tl.constexpr, DENSE: tl.constexpr, EVERY: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Validate each token, and compute the L1 norm of its logit gradient and of the part that a sparse gradient drops.

    The size −1 marks a masked row, and the dropped part −1 an invalid row.

    Without a support the size is −log p_a.
    """
    # The first kernel of a fused loss reads the batch once, for all checks and for the plan; the host waits for the second.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < total
    unmasked = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    token = tl.load(tokens + row, mask=unmasked, other=0)
    anchor = tl.load(logp_old + row, mask=unmasked & ANCHOR, other=0.0)
    advantage = tl.load(advantages + row // length * stride_b + row % length * stride_t, mask=unmasked, other=0.0)
    # Loads of masked rows are masked: padding may hold anything. Whatever an objective would refuse makes a row unfit, and the
    # objective is then called to say what is wrong; comparisons are written so that NaN fails them.
    fit = (token >= 0) & (token < vocabulary) & _finite(anchor) & _finite(advantage)
    fit = fit & ~(anchor.to(tl.float32) > highest)
    gain = tl.abs(advantage.to(tl.float32))
    if rollout is not None:
        sampled = tl.load(rollout + row, mask=unmasked, other=0.0)
        fit = fit & _finite(sampled) & ~(sampled.to(tl.float32) > highest)
    factor = tl.load(weights + row, mask=unmasked, other=0.0).to(tl.float32)
    if policy_weights is not None:
        c = tl.load(policy_weights + row, mask=unmasked, other=0.0).to(tl.float32)
        fit = fit & _finite(c)
        factor = tl.where(c != 0.0, factor * c, 0.0)
    fit = fit & _finite(factor)
    gain = tl.where(factor != 0.0, gain * tl.abs(factor), 0.0)
    whole, dropped = tl.maximum(-anchor.to(tl.float32), 0.0), tl.zeros((ROWS,), tl.float32)
    if ids is not None:
        whole = tl.zeros((ROWS,), tl.float32)
        slot = tl.arange(0, SLOTS)
        real = (slot < slots)[None, :]
        at = row[:, None] * slots + slot[None, :]
        id = tl.load(ids + at, mask=unmasked[:, None] & real, other=-1)
        value = tl.load(kept + at, mask=unmasked[:, None] & real, other=0.0).to(tl.float32)
        outer = tl.load(rest + row, mask=unmasked, other=0.0).to(tl.float32)
        misplaced = (slot == 0)[None, :] & unmasked[:, None] & (id != token[:, None])
        bad = (id < -1) | (id >= vocabulary) | ~(value < float("inf")) | misplaced
        fit = fit & (tl.max(bad.to(tl.int32), 1) == 0) & (outer < float("inf"))
        own = tl.sum(tl.where((slot == 0)[None, :], value, 0.0), 1)
        fit = fit & (tl.abs(own - anchor.to(tl.float32)) <= TOLERATED)
        mass = tl.sum(tl.where(real, tl.exp(value), 0.0), 1) + tl.exp(outer)
        fit = fit & ~(unmasked & (tl.abs(mass - 1.0) > slack))
        if DENSE:  # with p the old policy's, which stands for the new one: dz = g (e_a − p), Σ |dz| = 2 g (1 − p_a)
            whole = tl.where(gain > 0.0, gain * 2.0 * (1.0 - tl.exp(own)), 0.0)
            dropped = tl.where(gain > 0.0, gain * tl.exp(outer), 0.0)
    if EVERY:
        dropped = tl.where(gain > 0.0, float("inf"), 0.0)
    tl.store(size + row, tl.where(unmasked, whole, -1.0), mask=inside)
    tl.store(off + row, tl.where(fit, dropped, -1.0), mask=inside)


@triton.jit
def _ways(off, size, row, total, mean, tolerance):
    """Return two masks: the unmasked tokens, and the tokens planned to have a dense logit gradient."""
    whole = tl.load(size + row, mask=row < total, other=-1.0)
    dropped = tl.load(off + row, mask=row < total, other=0.0)
    unmasked = ~(whole < 0.0)
    return unmasked, unmasked & (dropped > 0.0) & (dropped >= tolerance * tl.maximum(whole, mean))


@triton.jit
def _order_kernel(off, size, order, counts, total, tolerance, flat, fewest, share, rest, BLOCK: tl.constexpr):
    """Order the tokens of a batch in one Triton program: tokens planned to have a sparse logit gradient come first.

    In one program the mean gradient, which separates sparse from dense, is deterministic.
    """
    sizes = tl.zeros((BLOCK,), tl.float32)
    rows, refused, dense = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        whole = tl.load(size + row, mask=row < total, other=-1.0)
        unmasked = ~(whole < 0.0)
        sizes += tl.where(unmasked, whole, 0.0)
        rows += unmasked.to(tl.int32)
        refused += (unmasked & (tl.load(off + row, mask=row < total, other=0.0) < 0.0)).to(tl.int32)
    # Three passes over two numbers per row, in cache: the mean, then how many rows it makes dense, then each row's place.
    every = tl.sum(rows, 0)
    mean = tl.sum(sizes, 0) / tl.maximum(every, 1).to(tl.float32)
    for begin in range(0, total, BLOCK):
        _unmasked, is_dense = _ways(off, size, begin + tl.arange(0, BLOCK), total, mean, tolerance)
        dense += is_dense.to(tl.int32)
    # A few rows by themselves are not worth two more GEMMs, neither dense ones nor streamed ones: then all go one way.
    planned = tl.sum(dense, 0)
    planned = tl.where((planned < fewest) | (planned.to(tl.float32) < share * every.to(tl.float32)), 0, planned)
    planned = tl.where((planned > 0) & ((every - planned).to(tl.float32) <= rest * every.to(tl.float32)), every, planned)
    planned = tl.where(mean > flat, every, planned)
    first = every - planned
    tl.store(counts, first)
    tl.store(counts + 1, every)
    tl.store(counts + 2, tl.sum(refused, 0))
    # Prefix sums keep the rows of each kind in their order: sums over rows, as in dW, repeat bit for bit.
    in_front, behind = first * 0, first
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        unmasked, is_dense = _ways(off, size, row, total, mean, tolerance)
        sooner = unmasked & ~((is_dense | (planned == every)) & (planned > 0))
        later = unmasked & ~sooner
        to = tl.where(
            sooner, in_front + tl.cumsum(sooner.to(tl.int32), 0) - 1, behind + tl.cumsum(later.to(tl.int32), 0) - 1
        )  # fmt: skip
        tl.store(order + to, row.to(tl.int64), mask=unmasked & (row < total))
        in_front += tl.sum(sooner.to(tl.int32), 0)
        behind += tl.sum(later.to(tl.int32), 0)


def fused_loss(
    source: HeadInput, terms: LossTerms, tolerance: float, needed: Sequence[bool], *, wait: bool = False
) -> FusedLoss | None:
    """Compute the policy loss and its gradients for a batch. Returns None if no kernel exists or the batch is invalid.

    An objective may lack a kernel. An empty batch counts as invalid.

    With `wait` the host waits until the ranking of a union is known to be right. Otherwise everything is queued, and computed
    again in the rare case that it was not.
    """
    objective, batch, spec, trained = terms.objective, terms.batch, source.spec, any(needed)
    rule = kernel_rule(objective, batch)
    if rule is None:
        return None
    # Without a given support, the policy's own carries a sparse gradient.
    own = own_top_k(source.hidden, len(source.weight)) if batch.dist_old is None and tolerance > 0 and trained else None
    checked = isinstance(objective, Objective) and objective.check and not terms.on_policy
    limits = LogpTolerance.of(batch.logp_old, batch.dist_old) if checked else LogpTolerance()
    dense = trained and own is None and can_store(source.hidden, spec)
    order, counts = plan_rows(terms, source.tokens, source.weight, own=own, dense=dense, tolerance=tolerance, limits=limits)
    planned = AsyncCopy(counts)
    # Rows are gathered into the planned order, all B · T of them; unused places at the end point at row 0. Streamed rows come
    # first: both kinds are then slices, of hidden states, of terms and of dH.
    hidden, stats = source.hidden.flatten(0, 1)[order], None
    source = replace(source, bias=None if source.bias is None else source.bias.contiguous())
    if fits_at_once(len(hidden)):  # the GEMM is queued before the host knows the number of rows: the device need not wait
        stats = gemm_stats(replace(source, hidden=hidden), counter=counts)
    streamed, count, invalid = planned.wait()
    if invalid or not count:
        return None

    packing = Packing(batch.mask, order[:count], in_order=streamed in (0, count))
    # If no row is masked, no copy of the hidden states is kept.
    hidden = source.hidden.flatten(0, 1).contiguous() if packing.rows is None else hidden[:count]
    tokens = packing.pack(source.tokens).long().contiguous()
    ids, joins = (None if x is None else packing.pack(x).contiguous() for x in (source.ids, source.joins))
    # A dense gradient needs no support of its own.
    top_k = source.top_k if terms.union is not None else own if streamed else None
    packed = replace(source, hidden=hidden, tokens=tokens, ids=ids, joins=joins, top_k=top_k)
    terms_packed = terms.pack(packing).map(lambda x: x.detach().contiguous())

    def loss_of(rows: HeadRows, some: LossTerms) -> LossRows:
        old = some.batch.dist_old
        if some.union is not None and old is not None:
            old = extend_rows(old, rows.ids, some.union, spec)
        new = None if old is None else rows.dist[None]
        return row_losses(rule, some.with_new(rows.logp[None], new, old), some.policy_weights)

    out, first, second = blank_gradients(packed, needed), slice(0, streamed), slice(streamed, count)
    overflows: list[AsyncCopy] | None = None if wait else []
    parts: list[tuple[HeadRows, LossRows]] = []
    if streamed:
        rows = stream_head(packed[first], None if stats is None else stats[first], overflows=overflows)
        parts.append((rows, loss_of(rows, terms_packed[:, first])))
    del stats  # 40 MB at 8192 tokens and a vocabulary of 152,000
    stored = None
    if streamed < count:
        stored = dense_forward(packed[second], terms_packed[:, second], loss_of, out[second], overflows)
        parts.append((stored.rows, stored.loss))
    rows, loss = HeadRows.cat([rows for rows, _ in parts]), LossRows.cat([loss for _, loss in parts])
    old = terms_packed.batch.dist_old
    both = terms_packed.with_new(rows.logp[None], None if old is None else rows.dist[None], old)
    weights = terms_packed.weights[0]
    metrics, total, flawed = summarize(rule, both, loss, weights, terms_packed.policy_weights)
    flaws = AsyncCopy(flawed)

    # Gradients: all that needs no number from the device is queued now, the rest in `finish`.
    shares, left_out, finish_streamed = weights.new_zeros(2), None, None  # of dense rows, and the largest share dropped
    if trained and stored is not None:
        left_out = AsyncCopy(stored.left_out.sum())
        stored.finish()
        shares[0].fill_(1.0)
    # Dense rows have written dW already, and sparse sums are added to it: in the other order a GEMM would read dW again.
    if trained and streamed:
        ahead, mean, (rows_ahead, loss_ahead) = packed[first], None, parts[0]
        gradient = row_gradient(rows_ahead, ahead.tokens, loss_ahead, spec, weights[first])
        if stored is not None:  # the error is measured against the mean row of both
            mean = (gradient.size.sum() + stored.sizes.sum()) / len(weights)
        (alive, dense_rows), shares, finish_streamed = head_gradients(
            ahead, rows_ahead, gradient, tolerance, out[first], mean=mean, add=stored is not None
        )
        if stored is not None:
            with_gradient = (stored.sizes > 0).sum()
            share = (dense_rows + with_gradient) / (alive + with_gradient).clamp(min=1)
            shares = torch.stack([share, shares[1]])

    if overflows and any(overflow.wait()[0] for overflow in overflows):
        return fused_loss(source, terms, tolerance, needed, wait=True)

    def check_finite() -> None:
        if number := int(flaws.wait()):
            raise ValueError(
                f"policy_loss_from_hidden: the loss is not finite at {number} unmasked tokens. NaN comes from the model, from "
                f"a union whose `place` is beyond its hidden states, or from a support with a token twice; an impossible token "
                f"means that both policies were not given the same logit masks. The objective on the output of corral.lm_head "
                f"says where."
            )

    def finish(factor: Tensor) -> Gradients:
        check_finite()  # here, where the host waits anyway: before, the device would idle
        if stored is not None and left_out is not None and left_out.wait():
            recompute_rows(packed[second], stored, weights[second], out[second])
        if finish_streamed is not None:
            finish_streamed()
        return out.map(lambda x: scale(x, factor), shared=True)

    if not trained:
        check_finite()
    metrics |= {"head/dense_share": shares[0], "head/dropped_max": shares[1]}
    return FusedLoss(packing, total, rows, loss.output(rule, metrics), finish if trained else None)
