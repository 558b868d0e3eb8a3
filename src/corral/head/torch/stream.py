"""LM head in PyTorch, for a block of tokens at a time: the reference for the Triton kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from corral.head.logits import LogitSpec, Scratch, accumulate, block_size, operand, slices
from corral.head.rows import Gradients, HeadInput, HeadRows, Upstream, blank_gradients
from corral.numerics import common_dtype
from corral.support import check_ids, check_unique, choose_support, rank_top_k
from corral.tensors import Tensors


@dataclass(frozen=True)
class Shard:
    """Part of the vocabulary that this process holds: the token ids from `start` on, of `vocabulary` ids in total.

    The parts follow one another in the order of the ranks, and need not be of one size. A logit is known to one process alone
    and −inf to the others, so a maximum collects them.
    """

    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Process group over which the vocabulary is sharded; None if it is not sharded."""
    start: int = 0
    vocabulary: int = 0

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None) -> "Shard":
        """Compute this process's vocabulary shard from the number of weight rows in every process."""
        if group is None:
            return cls(vocabulary=len(weight))
        own = torch.tensor([len(weight)], device=weight.device)
        sizes = torch.cat(_gather(own, group)).tolist()
        return cls(group, sum(sizes[: dist.get_rank(group)]), sum(sizes))

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def largest(self, z: Tensor) -> Tensor:
        """Return the largest logit at each position over the whole vocabulary; −inf if all logits are −inf."""
        return self._maximum(z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf))

    def pick(self, z: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of given token ids from the whole vocabulary [n, K]; −inf where the token id is −1."""
        place, here = self._places(z, ids)
        if not z.shape[-1]:
            return self._maximum(z.new_full(ids.shape, -torch.inf))
        return self._maximum(torch.where(here, z.gather(-1, torch.where(here, place, 0)), -torch.inf))

    def drop_(self, z: Tensor, ids: Tensor) -> None:
        """Set the logits of given token ids to −inf, in place."""
        place, here = self._places(z, ids)
        row, slot = here.nonzero(as_tuple=True)
        z[row, place[row, slot]] = -torch.inf

    def rank(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return ids and logits of the k largest logits in each row, in descending order; on a tie the lower id comes first."""
        ids = rank_top_k(z, min(k, z.shape[-1])) if z.shape[-1] else z.new_empty((len(z), 0), dtype=torch.int64)
        values, ids = z.gather(-1, ids), ids + self.start
        if self.group is None:
            return ids, values
        missing = k - ids.shape[-1]
        ids = pad(ids, (0, missing), value=torch.iinfo(ids.dtype).max)
        values = pad(values, (0, missing), value=-torch.inf)
        ids, values = torch.cat(_gather(ids, self.group), -1), torch.cat(_gather(values, self.group), -1)
        by_id = ids.argsort(dim=-1, stable=True)
        order = by_id.gather(-1, values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices)[:, :k]
        return ids.gather(-1, order), values.gather(-1, order)

    def _places(self, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token id's column in this vocabulary shard, and a mask of the ids that belong to the shard."""
        place = ids - self.start
        return place, (ids >= 0) & (place >= 0) & (place < z.shape[-1])

    def _maximum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone


ROWS = 32
"""Multiple to which the number of rows in a GEMM is padded: with fewer than about 16 rows, BLAS rounds differently."""
MOST_ROWS = 2048
"""Largest number of tokens whose logits are computed together. It matters if the vocabulary is small."""
HELD = {"cpu": 2**24, "cuda": 2**27}
"""Largest number of logits in memory at once, for each device type: 64 MiB on a CPU and 512 MiB on a GPU, in float32."""
COLUMNS = 4096
"""Number of vocabulary columns that are exponentiated at once, so that they stay in the CPU's cache."""
IMPOSSIBLE = -1e4
"""Finite replacement for −inf in logits relative to the largest logit: eˣ is 0 for it, and 0 · x is 0, not NaN.
This holds for x = z − max z in every dtype; x eˣ is 0 too."""


Outside = tuple[Tensor, Tensor]
"""Exponentials of all logits outside the support [n, V], and the logit at each position that they are relative to [n].
They are e^(z − m), and 0 at tokens of the support; m is the position's largest logit outside the support. The next block of
tokens overwrites them."""


def check_tokens(where: str, source: HeadInput, vocabulary: int) -> HeadInput:
    """Check token ids and convert them to int64. Raises ValueError for ids outside the vocabulary and for repeated ids."""
    check_ids(where, "tokens", source.tokens, lowest=0, vocabulary=vocabulary)
    if source.ids is not None:
        check_ids(where, "ids", source.ids, lowest=-1, vocabulary=vocabulary)
        check_unique(where, "ids", source.ids)
    return replace(source, tokens=source.tokens.long(), ids=None if source.ids is None else source.ids.long())


def rows_at_once(weight: Tensor, share: int = 1) -> int:
    """Return the number of tokens whose logits are computed together: as many as fit in 1/`share` of the memory for logits."""
    held = HELD.get(weight.device.type, HELD["cpu"]) // share
    # Whole multiples of ROWS, so that only the last GEMM is padded.
    return max(ROWS, min(held // max(len(weight), 1) // ROWS * ROWS, MOST_ROWS))


def scan_rows(source: HeadInput, shard: Shard, *, outside: bool = False) -> Iterator[tuple[slice, HeadRows, Outside | None]]:
    """Yield the LM head's results for one block of tokens after another, each with the slice of the block.

    With `outside`, the exponentials outside the support are yielded too. The support is the policy's own with `top_k`, the
    given one with `ids`, and their union with both, in rows that `joins` marks.
    """
    hidden, weight = source.hidden, source.weight
    dtype, scratch, count = common_dtype(hidden, weight), Scratch(hidden.device), len(hidden)
    for part in slices(count, rows_at_once(weight)) if count else [slice(0, 0)]:
        real = part.stop - part.start
        missing = max(real, 1) + -max(real, 1) % ROWS - real
        h, t = pad(operand(hidden[part], dtype), (0, 0, 0, missing)), pad(source.tokens[part], (0, missing))
        given = None if source.ids is None else pad(source.ids[part], (0, 0, 0, missing), value=-1)
        joins = None if source.joins is None else pad(source.joins[part], (0, missing))
        z = make_logits(h, weight, source.bias, source.spec, dtype, scratch)
        rows, rest = read_logits(z, replace(source, tokens=t, ids=given, joins=joins), shard, scratch, outside)
        yield part, rows[:real] if missing else rows, rest


def head_forward(source: HeadInput, shard: Shard) -> HeadRows:
    """Compute the LM head's results for all tokens: log-probs, entropy, and the distribution on the support."""
    return HeadRows.cat([rows for _, rows, _ in scan_rows(source, shard)])


def make_logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, dtype: torch.dtype, scratch: Scratch
) -> Tensor:
    """Compute the logits [n, V] of the whole vocabulary, in memory from `scratch`.

    A weight in another precision is converted block by block.
    """
    z = scratch("z", (len(h), len(weight)), dtype)
    whole = operand(weight[:0], dtype).dtype == weight.dtype
    for block in slices(len(weight), len(weight) if whole else COLUMNS):
        w = weight if whole else operand(weight[block], dtype, scratch)
        spec.block(h, w, None if bias is None else bias[block], out=z[:, block])
    return z


def read_logits(
    z: Tensor, source: HeadInput, shard: Shard, scratch: Scratch, outside: bool = False
) -> tuple[HeadRows, Outside | None]:
    """Compute the LM head's results for n tokens from their logits z [n, V]; the logits are overwritten.

        T = Σ e^(z − m)          W = Σ e^(z − m) (z − m)          lse = m + log T          H = log T − W / T

    m is the largest logit. Both terms of the entropy H have one sign, so that nothing cancels.
    """
    tokens, support = source.tokens, source.ids
    peak = shard.largest(z)
    total = shard.sum_(sum_exp(z, peak, scratch))
    log_total, entropy = total.log(), torch.zeros_like(total)
    if source.entropy:
        # A gap of −∞ would make −∞ · 0 of its term; IMPOSSIBLE makes it 0.
        base, weighted = torch.where(peak > -torch.inf, peak, 0.0)[:, None], torch.zeros_like(peak)
        for block in slices(z.shape[-1], COLUMNS):
            gap = torch.sub(z[:, block], base, out=scratch("gap", z[:, block].shape, z.dtype)).clamp_(min=IMPOSSIBLE)
            weighted += torch.exp(gap, out=scratch("e", gap.shape, z.dtype)).mul_(gap).sum(-1)
        entropy = log_total - shard.sum_(weighted) / total

    def logp(z: Tensor) -> Tensor:
        # The largest logit is subtracted first: the normaliser is as large, and would cost the digits of the difference.
        return (z - peak[:, None]) - log_total[:, None]

    lse, sampled = peak + log_total, logp(shard.pick(z, tokens[:, None]))
    if support is None and source.top_k is None:
        nothing, everything = tokens.new_empty((len(tokens), 0)), torch.zeros_like(lse)
        rows = HeadRows(lse, sampled[:, 0], nothing, sampled[:, :0], everything, entropy, -log_total)
        if outside:
            sum_exp(z, peak, None)  # in place
        return rows, (z, peak) if outside else None
    if source.top_k is not None:
        ranked, values = shard.rank(z, source.top_k)
        ranked = ranked if source.joins is None else torch.where(source.joins[:, None], ranked, -1)
        support = choose_support(tokens, ranked, logp(values), source.mass, support)
    assert support is not None
    kept = logp(shard.pick(z, support))
    # The tail is summed by itself, relative to its own largest logit: 1 − Σ p of the support would lose its digits.
    shard.drop_(z, support)
    tail_peak = shard.largest(z)
    rest_max = logp(tail_peak[:, None])[:, 0]
    rest = rest_max + shard.sum_(sum_exp(z, tail_peak, None if outside else scratch)).log()
    return HeadRows(lse, sampled[:, 0], support, kept, rest, entropy, rest_max), (z, tail_peak) if outside else None


def sum_exp(z: Tensor, peak: Tensor, scratch: Scratch | None) -> Tensor:
    """Sum e^(z − peak) over the vocabulary, for each row [n]. Without `scratch`, the exponentials overwrite the logits."""
    base, total = torch.where(peak > -torch.inf, peak, 0.0)[:, None], torch.zeros_like(peak)
    for block in slices(z.shape[-1], COLUMNS):
        some = z[:, block]
        out = some if scratch is None else scratch("gap", some.shape, z.dtype)
        total += torch.sub(some, base, out=out).exp_().sum(-1)
    return total


@dataclass(frozen=True, eq=False)
class HeadGradients(Tensors):
    """Gradients of a loss with respect to the LM head's results for n tokens, with zeros for results without a gradient."""

    logp: Tensor
    kept: Tensor
    rest: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, upstream: Upstream, rows: HeadRows, factor: float = 1.0) -> "HeadGradients":
        """Multiply the `upstream` gradients by a constant `factor`, and use zeros for results without a gradient."""
        given, like = (
            (upstream.logp, upstream.kept, upstream.rest, upstream.entropy),
            (rows.logp, rows.kept, rows.rest, rows.logp),
        )
        return cls(*(torch.zeros_like(x) if g is None else g * factor for g, x in zip(given, like, strict=True)))

    def nonzero(self) -> Tensor:
        """Return the indices of tokens with a nonzero gradient [m]; masked and clipped tokens have none."""
        some = (self.logp != 0) | (self.entropy != 0) | (self.rest != 0) | (self.kept != 0).any(-1)
        return some.nonzero().squeeze(-1)


class Marks:
    """Lookup table of tokens whose logit gradients are computed one by one, such as top-k tokens, for each vocabulary block."""

    def __init__(self, ids: Tensor, blocks: Sequence[slice], first: int = 0) -> None:
        """Sort token ids [n, M] into vocabulary blocks; `first` is the token id at which the first block starts.

        −1 and other ids outside the blocks are in no block.
        """
        # One sort for all blocks; the host then reads their edges once, instead of searching a mask for each block.
        self.wanted, self.slot = ids.flatten().sort()
        self.row = self.slot // max(ids.shape[-1], 1)
        self.starts = [first + block.start for block in blocks]
        end = first + blocks[-1].stop if blocks else first  # a process may hold no part of the vocabulary
        edges = torch.tensor([*self.starts, end], device=ids.device)
        self.edges = torch.searchsorted(self.wanted, edges).tolist()

    def __getitem__(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return slot, row and column of every token in a vocabulary block; slots count through the flattened token ids."""
        here = slice(self.edges[block], self.edges[block + 1])
        return self.slot[here], self.row[here], self.wanted[here] - self.starts[block]


class LogitGradient:
    """Gradient with respect to the logits, block by block, from the gradients of log-probs, tail mass and entropy H.

        dz_v = g_v + g_a [v = a] − p_v (G + g_H (log p_v + H))                        v ∈ S
        dz_v = g_a [v = a] + c_v (g_rest − p_rest (G + g_H (log p_v + H)))            v ∉ S, c_v = p_v / p_rest
        G    = g_a + Σ_S g_v + g_rest

    S is the support, a the sampled token. Off the support all of a row shares one factor; c_v stays exact where p_rest is tiny.
    """

    def __init__(
        self, tokens: Tensor, rows: HeadRows, grads: HeadGradients, blocks: Sequence[slice], *, first: int = 0, entropy: bool
    ) -> None:
        """Precompute the factors of each token's logit gradient for vocabulary `blocks`; the first starts at token id `first`.

        With `entropy`, the entropy's gradient is included.
        """
        tokens, ids, g_logp = tokens[:, None], rows.ids, grads.logp[:, None]
        empty = rows.rest[:, None] == -torch.inf
        rest, g_rest = (torch.where(empty, 0.0, x[:, None]) for x in (rows.rest, grads.rest))
        in_support = ids == tokens
        g_kept = torch.where(ids < 0, 0.0, grads.kept)
        total = g_logp + g_kept.sum(-1, keepdim=True) + g_rest
        elsewhere = torch.where(in_support.any(-1, keepdim=True), -1, tokens)
        self.marks = Marks(torch.cat([ids, elsewhere], -1), blocks, first)
        self.value = torch.cat([g_kept + g_logp * in_support, g_logp], -1).flatten()
        self.slots = ids.shape[-1] + 1
        # e^(z − shift) is c_v = p_v / p_rest, which has its digits however small the tail is; on the support it may be huge,
        # and is replaced.
        self.shift, self.rest = rows.lse[:, None] + rest, rest
        self.outside, self.inside = g_rest - rest.exp() * total, -total
        self.g_entropy = grads.entropy[:, None]
        self.entropy = rows.entropy[:, None] if entropy else None

    def block(self, z: Tensor, block: int, spare: Tensor | None = None) -> Tensor:
        """Compute the gradient with respect to a block of logits [n, v]; the logits are overwritten.

        With the entropy's gradient, `spare` is overwritten too.
        """
        slot, row, column = self.marks[block]
        z.sub_(self.shift)
        single = self.value[slot] + self._marked(z[row, column] + self.rest[row, 0], slot % self.slots, row)
        if self.entropy is None:
            dz = z.exp_().mul_(self.outside)
        else:
            dz = torch.exp(z, out=spare)
            z.clamp_(min=IMPOSSIBLE).add_(self.rest + self.entropy).mul_(-self.g_entropy * self.rest.exp()).add_(self.outside)
            dz.mul_(z)
        # Members of the support are far above what is left of it: whatever c_v made of them is replaced.
        dz[row, column] = single
        return dz

    def singles(self, logp: Tensor) -> Tensor:
        """Compute the logit gradients of all marked tokens, such as top-k tokens, from their log-probs [n, slots].

        The support comes first, then the sampled token.
        """
        place = torch.arange(logp.numel(), device=logp.device)
        return self.value + self._marked(logp.flatten(), place % self.slots, place // self.slots)

    def of_mass(self, mass: Tensor, peak: Tensor, block: int, singles: Tensor) -> Tensor:
        """Replace a block of stored exponentials e^(z − m) [n, v] by the gradient with respect to the logits z.

        m is `peak` [n, 1]. The entropy's gradient is not included.
        """
        slot, row, column = self.marks[block]
        mass.mul_(self.outside * (peak - self.shift).exp())
        mass[row, column] = singles[slot]
        return mass

    def _marked(self, logp: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        """Compute the softmax part of the logit gradient at tokens of the support and at the sampled token.

        Marked tokens are the support and, in the last slot, a sampled token outside it.
        """
        inside, rest = slot < self.slots - 1, self.rest[row, 0]
        factor = torch.where(inside, self.inside[row, 0], self.outside[row, 0])
        if self.entropy is not None:
            surprise = self.g_entropy[row, 0] * (logp.clamp(min=IMPOSSIBLE) + self.entropy[row, 0])
            factor = factor - torch.where(inside, 1.0, rest.exp()) * surprise
        return torch.where(inside, logp, logp - rest).exp() * factor


def head_backward(source: HeadInput, rows: HeadRows, upstream: Upstream, needed: Sequence[bool], shard: Shard) -> Gradients:
    """Compute the LM head's gradients of hidden states, weight and bias, each only if needed.

    One part of the vocabulary at a time, over all tokens: its rows of dW are then finished once, and never held twice.
    """
    weight, bias, spec, dtype = source.weight, source.bias, source.spec, rows.lse.dtype
    grads = HeadGradients.of(upstream, rows, spec.slope)  # the constant part of dz / d(h Wᵀ + b)
    picked, out = grads.nonzero(), blank_gradients(source, needed)
    if not len(picked):
        return out.map(torch.zero_, shared=True)
    height, columns = block_size(weight.device, len(picked))
    hidden, scratch = operand(source.hidden[picked], dtype), Scratch(weight.device)
    blocks, makers = list(slices(len(weight), columns)), []
    for part in slices(len(picked), height):
        row = picked[part]
        given = source.tokens[row], rows[row], grads[row], blocks
        makers.append((part, LogitGradient(*given, first=shard.start, entropy=source.entropy)))
    d_hidden = None if out.hidden is None else torch.zeros_like(hidden, dtype=dtype)
    # Blocks of the vocabulary outside, rows inside: dW of a block is complete before the next begins, and weights in another
    # precision are converted once.
    for i, block in enumerate(blocks):
        w, b = operand(weight[block], dtype, scratch), None if bias is None else bias[block]
        d_w = d_b = None
        if out.weight is not None:
            d_w = out.weight[block] if weight.dtype == dtype else scratch("d_weight", w.shape, dtype)
        for part, make in makers:
            shape = (part.stop - part.start, len(w))
            z = spec.block(hidden[part], w, b, out=scratch("z", shape, dtype))
            capped = None if spec.softcap is None else scratch("capped", shape, dtype).copy_(z)
            dz = make.block(z, i, scratch("p", shape, dtype) if source.entropy else None)
            if capped is not None:
                spec.flatten(dz, capped)
            if d_hidden is not None:
                accumulate(d_hidden[part], dz, w)
            if d_w is not None:
                accumulate(d_w, dz.T, hidden[part], fresh=part.start == 0)
            if out.bias is not None:
                d_b = dz.sum(0) if d_b is None else d_b.add_(dz.sum(0))
        if out.weight is not None and d_w is not None and weight.dtype != dtype:
            out.weight[block] = d_w
        if out.bias is not None and d_b is not None:
            out.bias[block] = d_b
    if out.hidden is not None and d_hidden is not None:
        out.hidden.zero_().index_copy_(0, picked, shard.sum_(d_hidden).to(out.hidden.dtype))
    return out
