"""Loss and gradient together on a GPU: head, the objective's kernel, and the gradients of every row, before autograd sees them.

Sparse rows are streamed, one GEMM, and their gradient is made of single entries. Rows that the old policy shows to be dense
have their logits stored on the way, and their gradient read off them, three GEMMs. Streamed rows that turn out to be dense, and
stored ones that cannot be held, are recomputed.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.dispatch import own_top_k
from corral.kernels.packed import LossTerms, Packing, token_advantages
from corral.kernels.precomputed import FusedLoss
from corral.kernels.rows import Gradients, HeadInput, HeadRequest, HeadRows, join
from corral.kernels.triton.backward.dense import dense_rows
from corral.kernels.triton.backward.dense_forward import DenseRows, dense_forward, scale
from corral.kernels.triton.backward.route import PADDED
from corral.kernels.triton.backward.row_gradient import Upstream, row_gradient
from corral.kernels.triton.gathered import extend_rows
from corral.kernels.triton.gemm_stats import gemm_stats
from corral.kernels.triton.gradients import head_gradients
from corral.kernels.triton.loss.rows import ACTED, KL_AFTER, LOSS, REGRESSION, LossRows, OldRows, summarize
from corral.kernels.triton.loss.rule import rule_of
from corral.kernels.triton.plan_batch import plan_batch
from corral.kernels.triton.support.select import fits_at_once, stream_head
from corral.support import LogpTolerance
from corral.types import ObjectiveOutput


def fused_loss(
    source: HeadInput, terms: LossTerms, tolerance: float, needed: Sequence[bool], *, wait: bool = False
) -> FusedLoss | None:
    """Loss and gradients of a batch [B T …]; None for objectives without a kernel, and for a batch that they refuse.

    `wait` until the ranking of a union is known to be right. Otherwise all is queued, and done again in the rare case that it
    was not.
    """
    rule, old = rule_of(terms.objective), terms.batch.dist_old
    if rule is None or (rule.needs_support and old is None) or (rule.needs_rollout and terms.batch.logp_rollout is None):
        return None
    # Without a given support, the policy's own carries a sparse gradient.
    own = own_top_k(source.hidden, len(source.weight)) if old is None and tolerance > 0 and any(needed) else None
    checked = getattr(terms.objective, "check", True)  # an objective with a rule is ours, and has it
    limits = LogpTolerance.of(terms.batch.logp_old, old) if checked and not terms.on_policy else LogpTolerance()
    plan = plan_batch(
        terms, source.tokens, source.weight, own=own, dense=any(needed) and own is None, tolerance=tolerance, limits=limits
    )
    entropy, stats = source.request.entropy, None
    hidden, bias = source.hidden.flatten(0, 1)[plan.order], None if source.bias is None else source.bias.contiguous()
    if fits_at_once(len(hidden)):  # the GEMM, before the host knows how many rows it has: the device does not wait for that
        stats = gemm_stats(hidden, source.weight, bias, source.spec, entropy=entropy, counter=plan.counts)
    found = plan.wait()
    if found is None:
        return None
    sparse, count = found
    # A dense gradient needs no support of its own.
    request = source.request if terms.union is not None else HeadRequest(own if sparse else None, entropy=entropy)
    packing = Packing(terms.batch.mask, plan.order[:count], in_order=sparse in (0, count))
    ids = None if source.ids is None else packing.pack(source.ids).contiguous()
    tokens = packing.pack(source.tokens).long().contiguous()
    joins = None if source.joins is None else packing.pack(source.joins)
    # Where it is all of them, no copy is kept.
    hidden = source.hidden.flatten(0, 1).contiguous() if packing.rows is None else hidden[:count]
    packed = HeadInput(hidden, source.weight, bias, tokens, ids, source.spec, request, joins)
    first, second = slice(0, sparse), slice(sparse, count)
    overflows: list[AsyncCopy] | None = None if wait else []
    stats = None if stats is None else stats.first(sparse)
    ahead = packed if sparse == count else packed.rows(first)
    streamed = stream_head(ahead, stats, overflows=overflows) if sparse else None
    del stats  # 40 MB at 8192 tokens and a vocabulary of 152,000
    anchor, weights = _pack_anchor(terms, packing), packing.pack(terms.weights).float().contiguous()

    def loss_of(rows: HeadRows, old: OldRows) -> LossRows:
        if terms.union is not None:
            old = extend_rows(old, rows.ids, terms.union, source.spec)
            return replace(rule(rows, old), rest_old=old.rest)
        return rule(rows, replace(old, logp=rows.logp.contiguous()) if terms.on_policy else old)

    parts: list[tuple[HeadRows, LossRows]] = []
    if streamed is not None:
        parts.append((streamed, loss_of(streamed, anchor if sparse == count else anchor.each(operator.itemgetter(first)))))
    stored = None
    if second.start < second.stop:
        behind = anchor.each(operator.itemgetter(second))
        stored = dense_forward(packed.rows(second), behind, weights[second], loss_of, needed, overflows)
        parts.append((stored.rows, stored.loss))
    rows, loss = join([rows for rows, _ in parts]), LossRows.join([loss for _, loss in parts])
    anchor = anchor if loss.rest_old is None else replace(anchor, rest=loss.rest_old)
    metrics, total, flawed = summarize(loss, rows, anchor, weights, projects=rule.projects)
    flaws = AsyncCopy(flawed)
    finish, shares = _gradients(packed, parts[0] if streamed is not None else None, stored, weights, tolerance, needed)

    if overflows and any(overflow.wait()[0] for overflow in overflows):
        return fused_loss(source, terms, tolerance, needed, wait=True)

    def finish_finite() -> Gradients:
        _refuse_flaws(int(flaws.wait()))
        return finish()

    if not any(needed):
        finish_finite()
    metrics |= {"head/dense_share": shares[0], "head/dropped_max": shares[1]}
    fields = loss.fields[:, None].unbind()
    output = ObjectiveOutput(
        fields[LOSS], metrics, fields[ACTED] > 0, fields[KL_AFTER] if rule.projects else None,
        fields[REGRESSION] if rule.projects else None,
    )  # fmt: skip
    return FusedLoss(packing, total, rows, output, finish_finite if any(needed) else None, scale)


def _refuse_flaws(number: int) -> None:
    """Raise if the loss of so many tokens is not finite."""
    if number:
        raise ValueError(
            f"policy_loss_from_hidden: the loss is not finite at {number} unmasked tokens. NaN comes from the model, from a "
            f"union whose `place` is beyond its hidden states, or from a support with a token twice; an impossible token "
            f"means that both policies were not given the same logit masks. The objective on the output of corral.lm_head "
            f"says where."
        )


def _pack_anchor(terms: LossTerms, packing: Packing) -> OldRows:
    """The old policy's rows in the same order."""
    b, old = terms.batch, terms.batch.dist_old
    kept, rest, rest_max = (None, None, None) if old is None else (old.logp, old.rest, old.rest_max)
    ids, place = (None, None) if old is None or terms.union is None else (old.ids, terms.union.place)
    rows = OldRows(b.logp_old, kept, rest, token_advantages(b), b.logp_rollout, rest_max, terms.policy_weights, ids, place)
    return rows.each(lambda x: packing.pack(x.detach()).contiguous())


def _gradients(
    source: HeadInput,
    streamed: tuple[HeadRows, LossRows] | None,
    stored: DenseRows | None,
    weights: Tensor,
    tolerance: float,
    needed: Sequence[bool],
) -> tuple[Callable[[], Gradients], Tensor]:
    """Gradients of streamed rows, which come first, and of stored ones; the share of dense rows, and the most dropped [2].

    All is queued that needs no host; the rest follows where they are handed over.
    """
    if not any(needed):
        return (lambda: (None, None, None)), weights.new_zeros(2)
    count = 0 if streamed is None else len(streamed[0].lse)
    first, second = slice(0, count), slice(count, len(weights))
    if stored is None:
        assert streamed is not None
        gradient = row_gradient(streamed[0], source.tokens, _upstream(streamed[1], weights), source.spec)
        pending = head_gradients(source, streamed[0], gradient, tolerance, needed)
        return pending.finish, pending.routes.shares
    left_out, finished = AsyncCopy(stored.left_out.sum()), stored.finish()

    def finish_stored() -> Gradients:
        if left_out.wait():
            _add_left_out(source.rows(second), stored, weights[second], finished)
        return finished

    if streamed is None:
        shares = weights.new_zeros(2)
        shares[0].fill_(1.0)
        return finish_stored, shares
    rows, loss = streamed
    gradient = row_gradient(rows, source.tokens[first], _upstream(loss, weights[first]), source.spec)
    mean = (gradient.size.sum() + stored.sizes.sum()) / len(weights)
    pending = head_gradients(
        source.rows(first), rows, gradient, tolerance, needed, mean=mean, add_to=(finished[1], finished[2])
    )

    def finish_both() -> Gradients:
        d_stored, (d_hidden, d_weight, d_bias) = finish_stored()[0], pending.finish()
        return None if d_hidden is None or d_stored is None else torch.cat([d_hidden, d_stored]), d_weight, d_bias

    with_gradient = (stored.sizes > 0).sum()
    alive, dense = pending.routes.counts
    share = (dense + with_gradient) / (alive + with_gradient).clamp(min=1)
    return finish_both, torch.stack([share, pending.routes.shares[1]])


def _upstream(loss: LossRows, weights: Tensor) -> Upstream:
    return Upstream(logp=loss.own, kept=loss.kept, rest=loss.rest, weights=weights)


def _add_left_out(source: HeadInput, stored: DenseRows, weights: Tensor, gradients: Gradients) -> None:
    """Recompute the gradients of stored rows that could not be held, and add them to the others', in place."""
    picked = stored.left_out.nonzero().squeeze(-1)
    padded = torch.nn.functional.pad(picked, (0, -len(picked) % PADDED), value=-1)
    gradient = row_gradient(stored.rows, source.tokens, _upstream(stored.loss, weights), source.spec)
    dense_rows(source, stored.rows, None, gradient, padded, len(picked), *gradients, add=True)
