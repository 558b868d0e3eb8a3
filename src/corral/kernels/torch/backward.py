"""The head's gradient: blocks of logits are recomputed, turned into their gradient in place, multiplied and dropped."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.kernels.logits import LogitSpec, Scratch, accumulate, block_size, operand, slices
from corral.kernels.torch.online import IMPOSSIBLE
from corral.kernels.torch.sharded import Shard


@dataclass(frozen=True, eq=False)
class HeadGradients:
    """Gradients of the loss with respect to what the head returned for n tokens."""

    logp: Tensor
    kept: Tensor
    rest: Tensor
    entropy: Tensor

    def nonzero(self) -> Tensor:
        """Rows [m] that have any: masked and blocked tokens cost nothing."""
        some = (self.logp != 0) | (self.entropy != 0) | (self.rest != 0) | (self.kept != 0).any(-1)
        return some.nonzero().squeeze(-1)

    def scaled(self, factor: float) -> "HeadGradients":
        """All of them times a constant."""
        if factor == 1.0:
            return self
        return HeadGradients(self.logp * factor, self.kept * factor, self.rest * factor, self.entropy * factor)


class Marks:
    """Token ids [n, M] wanted row by row, sorted by block once, so that each block looks at its own alone."""

    def __init__(self, ids: Tensor, blocks: Sequence[slice], first: int = 0) -> None:
        """The blocks cut up the vocabulary from token `first` on; ids elsewhere, and −1, are in none."""
        self.wanted, self.slot = ids.flatten().sort()
        self.row = self.slot // max(ids.shape[-1], 1)
        self.starts = [first + block.start for block in blocks]
        end = first + blocks[-1].stop if blocks else first  # a process may hold no part of the vocabulary
        edges = torch.tensor([*self.starts, end], device=ids.device)
        self.edges = torch.searchsorted(self.wanted, edges).tolist()

    def __getitem__(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slot in the flattened ids, row, and column of the block, of each one that lies in it."""
        here = slice(self.edges[block], self.edges[block + 1])
        return self.slot[here], self.row[here], self.wanted[here] - self.starts[block]


class LogitGradient:
    """Gradient of log-probs, support, rest and entropy H with respect to the logits, block by block.

        dz_v = g_v + g_a [v = a] − p_v (G + g_H (log p_v + H))                        v ∈ S
        dz_v = g_a [v = a] + c_v (g_rest − p_rest (G + g_H (log p_v + H)))            v ∉ S, c_v = p_v / p_rest
        G    = g_a + Σ_S g_v + g_rest

    S is the support, a the sampled token. Off the support all of a row shares one factor; c_v stays exact where p_rest is tiny.
    """

    def __init__(self, state: "HeadState", grads: HeadGradients, row: Tensor, blocks: Sequence[slice]) -> None:
        tokens, ids, g_logp = state.tokens[row, None], state.ids[row], grads.logp[row, None]
        empty = state.rest[row, None] == -torch.inf
        rest, g_rest = (torch.where(empty, 0.0, x[row, None]) for x in (state.rest, grads.rest))
        in_support = ids == tokens
        g_kept = torch.where(ids < 0, 0.0, grads.kept[row])
        total = g_logp + g_kept.sum(-1, keepdim=True) + g_rest
        elsewhere = torch.where(in_support.any(-1, keepdim=True), -1, tokens)
        self.marks = Marks(torch.cat([ids, elsewhere], -1), blocks, state.shard.start)
        self.value = torch.cat([g_kept + g_logp * in_support, g_logp], -1).flatten()
        self.slots = ids.shape[-1] + 1
        self.shift, self.rest = state.lse[row, None] + rest, rest
        self.outside, self.inside = g_rest - rest.exp() * total, -total
        self.g_entropy = grads.entropy[row, None]
        self.entropy = None if state.entropy is None else state.entropy[row, None]

    def block(self, z: Tensor, block: int, spare: Tensor | None = None) -> Tensor:
        """dz of one block of logits [n, v], in their place; with entropy in `spare`, and both are used up."""
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
        """dz of all marked tokens [n · slots], given their log-probs [n, slots]: the support's, then the sampled one's."""
        place = torch.arange(logp.numel(), device=logp.device)
        return self.value + self._marked(logp.flatten(), place % self.slots, place // self.slots)

    def of_mass(self, mass: Tensor, peak: Tensor, block: int, singles: Tensor) -> Tensor:
        """dz of one block from e^(z − m) [n, v] and m [n, 1], in its place; without entropy."""
        slot, row, column = self.marks[block]
        mass.mul_(self.outside * (peak - self.shift).exp())
        mass[row, column] = singles[slot]
        return mass

    def _marked(self, logp: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        """What the softmax adds at marked tokens: members of the support, and in the last slot a sampled token that is none."""
        inside, rest = slot < self.slots - 1, self.rest[row, 0]
        factor = torch.where(inside, self.inside[row, 0], self.outside[row, 0])
        if self.entropy is not None:
            surprise = self.g_entropy[row, 0] * (logp.clamp(min=IMPOSSIBLE) + self.entropy[row, 0])
            factor = factor - torch.where(inside, 1.0, rest.exp()) * surprise
        return torch.where(inside, logp, logp - rest).exp() * factor


@dataclass(frozen=True, eq=False)
class HeadState:
    """What the backward pass needs of the forward: its inputs and a few numbers per row."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    ids: Tensor
    lse: Tensor
    rest: Tensor
    entropy: Tensor | None
    """Entropy, where its gradient is wanted."""
    shard: Shard
    """Which part of the vocabulary the weight is."""


def head_backward(
    spec: LogitSpec, state: HeadState, grads: HeadGradients, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, those that are needed.

    One part of the vocabulary at a time, over all tokens: its rows of dW are then finished once, and never held twice.
    """
    weight, bias, dtype = state.weight, state.bias, state.lse.dtype
    grads = grads.scaled(spec.slope)  # the constant part of dz / d(h Wᵀ + b)
    picked = grads.nonzero()
    rows, columns = block_size(weight.device, len(picked))
    hidden = operand(state.hidden[picked], dtype)
    parts, blocks = list(slices(len(picked), rows)), list(slices(len(weight), columns))
    makers = [BlockGradient(spec, state, grads, picked[part], blocks) for part in parts]
    d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needed[0] else None
    make_weight = torch.empty_like if parts else torch.zeros_like  # every row of it is written, once there is any gradient
    d_weight = make_weight(weight) if needed[1] else None
    d_bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
    scratch = Scratch(hidden.device)
    for i, block in enumerate(blocks):
        w, b = operand(weight[block], dtype, scratch), None if bias is None else bias[block]
        d_w = d_b = None
        if d_weight is not None:
            d_w = d_weight[block] if weight.dtype == dtype else scratch("d_weight", w.shape, dtype)
        for part, make in zip(parts, makers, strict=True):
            dz = make(hidden[part], w, b, i, scratch)
            if d_hidden is not None:
                accumulate(d_hidden[part], dz, w)
            if d_w is not None:
                accumulate(d_w, dz.T, hidden[part], fresh=part.start == 0)
            if d_bias is not None:
                d_b = dz.sum(0) if d_b is None else d_b.add_(dz.sum(0))
        if d_weight is not None and d_w is not None and weight.dtype != dtype and parts:
            d_weight[block] = d_w
        if d_bias is not None and d_b is not None:
            d_bias[block] = d_b
    if d_hidden is not None:
        if len(picked) < len(state.hidden):
            d_hidden = torch.zeros(state.hidden.shape, dtype=dtype, device=hidden.device).index_copy_(0, picked, d_hidden)
        d_hidden = state.shard.sum_(d_hidden).to(state.hidden.dtype)
    return d_hidden, d_weight, d_bias


class BlockGradient:
    """Gradient of h Wᵀ + b of some rows, block by block."""

    def __init__(self, spec: LogitSpec, state: HeadState, grads: HeadGradients, row: Tensor, blocks: Sequence[slice]) -> None:
        self.spec, self.entropy = spec, state.entropy is not None
        self.logits = LogitGradient(state, grads, row, blocks)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, block: int, scratch: Scratch) -> Tensor:
        """d(h Wᵀ + b) [n, v] of one block, in scratch memory."""
        shape, dtype = (len(hidden), len(weight)), self.logits.shift.dtype
        z = self.spec.block(hidden, weight, bias, out=scratch("z", shape, dtype))
        capped = None if self.spec.softcap is None else scratch("capped", shape, dtype).copy_(z)
        dz = self.logits.block(z, block, scratch("p", shape, dtype) if self.entropy else None)
        if capped is not None:
            self.spec.flatten(dz, capped)
        return dz
