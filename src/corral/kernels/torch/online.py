"""What the head knows of some tokens, read off their logits over the whole vocabulary.

A token's log-prob is the same to the last bit whatever else is asked for and whatever other rows are in the call: every GEMM
has a multiple of `ROWS` rows, and the normaliser is summed over all logits in one fixed order, with a support and without.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from corral.kernels.logits import LogitSpec, Scratch, operand, slices, working_dtype
from corral.kernels.rows import HeadInput, HeadRequest, HeadRows, join
from corral.kernels.torch.sharded import Shard
from corral.support import choose_support

ROWS = 32
"""Rows of a GEMM are padded to a multiple of this: below about 16 BLAS takes other kernels, which round differently."""
MOST_ROWS = 2048
"""Rows at once where the vocabulary is small."""
HELD = {"cpu": 2**24, "cuda": 2**27}
"""Logits that are held at once: 64 MiB on a CPU, 512 MiB on a GPU."""
COLUMNS = 4096
"""Logits of a row that are exponentiated at once, in memory that stays in the cache."""
IMPOSSIBLE = -1e4
"""A gap to the largest logit at which eˣ and x eˣ are 0 in every dtype, and 0 · x is still 0: it stands for −inf."""


@dataclass(frozen=True, eq=False)
class Outside:
    """The logits outside the support, exponentiated; memory that the next rows overwrite."""

    mass: Tensor
    """e^(z − m) [n, V]; 0 on the support, if there is one."""
    peak: Tensor
    """m [n]."""


def scan_rows(source: HeadInput, shard: Shard, *, outside: bool = False) -> Iterator[tuple[slice, HeadRows, Outside | None]]:
    """Some rows at a time, with the logits outside their support if those are wanted.

    The support is the policy's own with `request.top_k`, the one given with `ids`, and with both their union, where that
    `joins`.
    """
    hidden, weight, spec, request = source.hidden, source.weight, source.spec, source.request
    dtype, scratch, count = working_dtype(hidden, weight), Scratch(hidden.device), len(hidden)
    at_once = HELD.get(hidden.device.type, HELD["cpu"]) // max(len(weight), 1) // ROWS * ROWS
    at_once = max(ROWS, min(at_once, MOST_ROWS))
    for part in slices(count, at_once) if count else [slice(0, 0)]:
        real = part.stop - part.start
        missing = max(real, 1) + -max(real, 1) % ROWS - real
        h, t = pad(operand(hidden[part], dtype), (0, 0, 0, missing)), pad(source.tokens[part], (0, missing))
        given = None if source.ids is None else pad(source.ids[part], (0, 0, 0, missing), value=-1)
        joins = None if source.joins is None else pad(source.joins[part], (0, missing))
        z = make_logits(h, weight, source.bias, spec, dtype, scratch)
        rows, rest = _read(z, t, given, joins, request, shard, scratch, outside)
        if missing:
            rows = HeadRows(*(x[:real] for x in vars(rows).values()))
            rest = None if rest is None else Outside(rest.mass[:real], rest.peak[:real])
        yield part, rows, rest


def head_forward(source: HeadInput, shard: Shard) -> HeadRows:
    """What the head knows of all rows."""
    return join([rows for _, rows, _ in scan_rows(source, shard)])


def make_logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, dtype: torch.dtype, scratch: Scratch
) -> Tensor:
    """[n, V], in memory that the next rows overwrite; a weight in another precision is converted a piece at a time."""
    z = scratch("z", (len(h), len(weight)), dtype)
    whole = operand(weight[:0], dtype).dtype == weight.dtype
    for block in slices(len(weight), len(weight) if whole else COLUMNS):
        w = weight if whole else operand(weight[block], dtype, scratch)
        spec.block(h, w, None if bias is None else bias[block], out=z[:, block])
    return z


def _read(
    z: Tensor,
    tokens: Tensor,
    given: Tensor | None,
    joins: Tensor | None,
    request: HeadRequest,
    shard: Shard,
    scratch: Scratch,
    outside: bool,
) -> tuple[HeadRows, Outside | None]:
    """What logits [n, V] say of n tokens; they are used up."""
    whole = _Normaliser(z, request.entropy, shard, scratch)
    sampled = whole.logp(shard.pick(z, tokens[:, None]))
    if given is None and request.top_k is None:
        nothing, everything = tokens.new_empty((len(tokens), 0)), torch.zeros_like(whole.lse)
        rows = HeadRows(whole.lse, sampled[:, 0], nothing, sampled[:, :0], everything, whole.entropy, -whole.log_total)
        if not outside:
            return rows, None
        _mass(z, whole.peak, None)
        return rows, Outside(z, whole.peak)
    support = given
    if request.top_k is not None:
        ranked, values = shard.rank(z, request.top_k)
        ranked = ranked if joins is None else torch.where(joins[:, None], ranked, -1)
        support = choose_support(tokens, ranked, whole.logp(values), request.mass, given)
    assert support is not None
    kept = whole.logp(shard.pick(z, support))
    shard.drop_(z, support)
    peak = shard.largest(z)
    rest_max = whole.logp(peak[:, None])[:, 0]
    rest = rest_max + shard.sum_(_mass(z, peak, None if outside else scratch)).log()
    rows = HeadRows(whole.lse, sampled[:, 0], support, kept, rest, whole.entropy, rest_max)
    return rows, Outside(z, peak) if outside else None


class _Normaliser:
    """log Σ eᶻ of all logits [n, V] and, if asked for, their entropy, in one fixed order of summation.

        T = Σ e^(z − m)          W = Σ e^(z − m) (z − m)          lse = m + log T          H = log T − W / T

    m is the largest logit. Both terms of the entropy have one sign, so that nothing cancels.
    """

    def __init__(self, z: Tensor, entropy: bool, shard: Shard, scratch: Scratch) -> None:
        self.peak = shard.largest(z)
        total = shard.sum_(_mass(z, self.peak, scratch))
        self.log_total, self.lse = total.log(), self.peak + total.log()
        self.entropy = torch.zeros_like(total)
        if entropy:
            self.entropy = self.log_total - shard.sum_(self._weighted(z, scratch)) / total

    def _weighted(self, z: Tensor, scratch: Scratch) -> Tensor:
        """W."""
        base, weighted = torch.where(self.peak > -torch.inf, self.peak, 0.0)[:, None], torch.zeros_like(self.peak)
        for block in slices(z.shape[-1], COLUMNS):
            gap = torch.sub(z[:, block], base, out=scratch("gap", z[:, block].shape, z.dtype)).clamp_(min=IMPOSSIBLE)
            weighted += torch.exp(gap, out=scratch("e", gap.shape, z.dtype)).mul_(gap).sum(-1)
        return weighted

    def logp(self, z: Tensor) -> Tensor:
        """Log-probabilities of logits [n, m]: relative to the largest first, since a normaliser is as large as they are."""
        return (z - self.peak[:, None]) - self.log_total[:, None]


def _mass(z: Tensor, peak: Tensor, scratch: Scratch | None) -> Tensor:
    """Σ e^(z − peak) [n], a block at a time; the logits become their exponentials where there is no scratch memory for them."""
    base, total = torch.where(peak > -torch.inf, peak, 0.0)[:, None], torch.zeros_like(peak)
    for block in slices(z.shape[-1], COLUMNS):
        some = z[:, block]
        out = some if scratch is None else scratch("gap", some.shape, z.dtype)
        total += torch.sub(some, base, out=out).exp_().sum(-1)
    return total
