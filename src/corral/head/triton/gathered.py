"""Compute log-probs of a few given tokens per position on a GPU, without logits of the whole vocabulary.

`extend_rows` puts an old policy on a union of supports; `gather_logp` serves loops that do so themselves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.head.triton.gemm_stats import finish_logits, lanes, spec_arguments
from corral.head.union import UnionSupport
from corral.support import LEAST_LEFT
from corral.tensors import SparseDist

LEAST: tl.constexpr = tl.constexpr(LEAST_LEFT)


def gather_logp(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, tokens: Tensor, logp: Tensor, ids: Tensor
) -> Tensor:
    """Compute log-probs of given tokens `ids` [N, M] on a GPU, like `union.gather_logp`.

    Padding at the end costs nothing.
    """
    own, place = tokens[:, None], torch.arange(len(ids), device=ids.device)
    rest = torch.zeros(len(ids), device=ids.device)  # not used: nothing is taken from a tail
    return _extend(hidden, weight, bias, spec, place, own, logp[:, None], rest, torch.cat([own, ids], 1))[0][:, 1:]


def extend_rows(old: SparseDist, ids: Tensor, union: UnionSupport, spec: LogitSpec) -> SparseDist:
    """Compute the old policy's log-probs on a union `ids` [N, S], which begins with the old policy's own tokens.

    `UnionSupport.extend` is the reference; this one never waits for the device. A place beyond the old hidden states makes its
    row NaN, which is refused.
    """
    given = old.ids[0], old.logp[0], old.rest[0], ids
    logp, rest = _extend(union.hidden, union.weight, union.bias, spec, union.place[0], *given)
    return SparseDist(ids, logp, rest)[None]


def _extend(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, place: Tensor, ids: Tensor, kept: Tensor,
    rest: Tensor, wide: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute log-probs of the tokens `wide` and the log tail mass that remains, given log-probs of the tokens `ids`.

    `wide` is [N, S], `ids` is [N, K], and the log tail mass is [N].
    """
    out, out_rest = torch.empty(wide.shape, device=wide.device), torch.empty(len(wide), device=wide.device)
    given = (None if x is None else x.contiguous() for x in (hidden, weight, bias, place, ids, kept, rest, wide))
    _extend_kernel[(len(wide),)](
        *given, out, out_rest, *hidden.shape[:1], *weight.shape, ids.shape[1], wide.shape[1], *spec_arguments(spec),
        BLOCK=min(512, triton.next_power_of_2(hidden.shape[1])), SOME=8, SLOTS=lanes(ids.shape[1]), JOINED=lanes(wide.shape[1]),
        num_warps=4,
    )  # fmt: skip
    return out, out_rest


@triton.jit
def _logits(hidden, weight, bias, id, row, vocabulary, width, before, cap, after, BLOCK: tl.constexpr):
    """Compute the logits of n given tokens at one position [1, n]."""
    # One hidden state against n gathered rows of weights: bound by the traffic of n · H weights, and no matrix units are
    # needed.
    dots, member = tl.zeros(id.shape, tl.float32), (id >= 0) & (id < vocabulary)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        within = column < width
        h = tl.load(hidden + row * width + column, mask=within, other=0.0).to(tl.float32)
        at = weight + id.to(tl.int64)[:, None] * width + column[None, :]
        w = tl.load(at, mask=member[:, None] & within[None, :], other=0.0).to(tl.float32)
        dots += tl.sum(w * h[None, :], 1)
    return finish_logits(dots[None, :], tl.where(member, id, vocabulary), bias, vocabulary, before, cap, after)


@triton.jit
def _extend_kernel(
    hidden, weight, bias, row_of, ids, kept, rest, wide, out_kept, out_rest, count, vocabulary, width, slots, joined, before,
    cap, after, BLOCK: tl.constexpr, SOME: tl.constexpr, SLOTS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Extend the support at one position: copy known log-probs, compute those of added tokens, and reduce the tail mass."""
    # One position per program: positions differ in how many tokens they add, from none to dozens, and none waits for another.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    member = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1) >= 0
    members = tl.sum(member.to(tl.int32), 0)
    place = tl.arange(0, JOINED)
    last = tl.max(tl.where(tl.load(wide + row * joined + place, mask=place < joined, other=-1) >= 0, place + 1, 0), 0)
    # Padding ends a row, so that the number of tokens to evaluate is known, and rows without any cost no dot product.
    at = tl.load(row_of + row).to(tl.int64)
    known = (at >= 0) & (at < count)
    value = tl.load(kept + row * slots + slot, mask=member, other=0.0).to(tl.float32)
    value = tl.where(known | (last <= members), value, float("nan"))
    tl.store(out_kept + row * joined + tl.cumsum(member.to(tl.int32), 0) - 1, value, mask=member)
    padding = (place >= last) & (place < joined)
    tl.store(out_kept + row * joined + place, tl.full((JOINED,), -float("inf"), tl.float32), mask=padding)
    log_rest = tl.load(rest + row).to(tl.float32)
    if last > members:
        at = tl.where(known, at, 0)
        sampled = tl.load(wide + row * joined) + tl.zeros((1,), tl.int64)
        own = _logits(hidden, weight, bias, sampled, at, vocabulary, width, before, cap, after, BLOCK)
        # log p_v = log p_a + z_v − z_a: relative to the sampled token, whose log-prob is stored, and nothing is normalised.
        level = tl.load(kept + row * slots).to(tl.float32) - tl.max(tl.max(own, 1), 0)
        share = tl.zeros((1, SOME), tl.float32)
        for begin in range(members, last, SOME):
            some = begin + tl.arange(0, SOME)
            id = tl.load(wide + row * joined + some, mask=some < last, other=-1)
            z = _logits(hidden, weight, bias, id, at, vocabulary, width, before, cap, after, BLOCK)
            here = (some < last)[None, :]
            logp = z + level
            share += tl.where(here, tl.exp(logp - log_rest), 0.0)
            tl.store((out_kept + row * joined + some)[None, :], logp, mask=here)
        # The one place that subtracts mass. At least LEAST of the tail stays: below that the difference is rounding.
        taken = tl.sum(tl.sum(share, 1), 0)
        log_rest = tl.where(taken == 0.0, log_rest, log_rest + tl.log(tl.maximum(1.0 - taken, LEAST)))
    tl.store(out_rest + row, log_rest)
