"""Gradients formed in the forward pass, while its logits are still there: three products where making them again takes four.

That needs the loss that will follow. A caller who knows it says so; what the backward pass then really asks for is compared
with it, and the difference, if there is any, takes the usual way. A wrong guess costs time and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.kernels.head_backward import HeadGradients, HeadState, LogitGradient, head_backward
from corral.kernels.head_rows import HeadRequest, HeadRows, Outside, join, scan_rows
from corral.kernels.live import advantages_of, fits
from corral.kernels.logits import LogitSpec, Scratch, accumulate, block_size, operand, slices, working_dtype
from corral.kernels.parallel import Shard
from corral.types import SparseDist, TokenBatch

ROUNDING = 64
"""Units in the last place by which two computations of a row's gradient may differ."""

Expect = Callable[[Tensor, SparseDist | None, slice], Tensor]
"""(logp [n], policy on the support that was given, which rows) → the loss, summed as it will be: a scalar."""


@dataclass(frozen=True, eq=False)
class ExpectedLoss:
    """Σ w L of the rows that a head is given; torch calls it, kernels read it."""

    objective: Any
    batch: TokenBatch
    """The rows as one sequence [1 N], all but the new policy; the mask is True where the loss reads a row."""
    weights: Tensor | None
    """What each row's loss will be multiplied with [1 N]."""
    at_rest: bool
    """The new policy is its own anchor: `logp_old` is whatever log-probs the head finds."""

    def __call__(self, logp: Tensor, new: SparseDist | None, rows: slice) -> Tensor:
        """The loss of some rows, given log-probs [n] and the policy on the batch's support [n K]."""
        b, old = self.batch, self.batch.dist_old
        mask = b.mask[:, rows]
        if not bool(mask.any()):
            return logp.sum() * 0.0
        rollout, factor = (None if x is None else x[:, rows] for x in (b.logp_rollout, self.weights))
        anchor = None
        if new is not None and old is not None:
            new = new.map(lambda x: x[None])
            anchor = SparseDist(new.ids, old.logp[:, rows], old.rest[:, rows])
        logp_old = logp[None].detach() if self.at_rest else b.logp_old[:, rows]
        given = TokenBatch(logp[None], logp_old, b.advantages[:, rows], mask, new, anchor, rollout)
        try:
            loss = self.objective(given).loss
        except ValueError:  # it will refuse the whole batch too, and can say there which of its tokens is wrong
            return logp.sum() * 0.0
        return (loss if factor is None else loss * factor).sum()


def foresee(
    objective: Any,
    batch: TokenBatch,
    pick: Callable[[Tensor], Tensor],
    weights: Tensor | None = None,
    *,
    at_rest: bool = False,
) -> ExpectedLoss | None:
    """The loss that an objective will take of a batch, Σ w L; None where a token's loss depends on others.

    For `lm_head(…, ids=pick(batch.dist_old.ids), expect=foresee(…))`, or without `ids` where there is no `dist_old`. What the
    backward pass asks for may differ by one factor for all rows (gradient accumulation, loss scaling) at no cost.

    Args:
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput, of which nothing is foreseen.
        batch: all but the new policy, [B T]. On a GPU `dist_old`, with the sampled token in slot 0, also tells which rows
            will be dense: without it nothing is formed there, unless nothing may be left out of a gradient.
        pick: [B T …] → the rows [N …] that the head is given.
        weights: what the loss of each token will be multiplied with [B T]; all the same unless given.
        at_rest: the new policy is its own anchor, in the place of the batch's.
    """
    if not getattr(getattr(objective, "config", None), "tokenwise", False) or not fits(batch):
        return None
    advantages, old = advantages_of(batch), batch.dist_old

    def rows(x: Tensor | None) -> Any:
        return None if x is None else pick(x)[None]

    anchor = None if old is None else old.map(rows)
    logp_old = rows(batch.logp_old)
    picked = TokenBatch(logp_old, logp_old, rows(advantages), rows(batch.mask), None, anchor, rows(batch.logp_rollout))
    return ExpectedLoss(objective, picked, rows(weights), at_rest)


@dataclass(frozen=True, eq=False)
class Foreseen:
    """Gradients of the inputs, and of the head's results, for the loss that was expected."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    grads: HeadGradients

    def backward(self, spec: LogitSpec, state: HeadState, actual: HeadGradients, needed: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of hidden states, weight and bias for what is really asked; these are used up."""
        scale, difference = self.compare(actual, state)
        found = self.scaled(scale, state)
        if difference is None:
            return found
        missing = head_backward(spec, state, difference, needed)
        return [g if g is None or more is None else g.add_(more) for g, more in zip(found, missing, strict=True)]

    def compare(self, actual: HeadGradients, state: HeadState) -> tuple[float, HeadGradients | None]:
        """(s, difference): what is asked for is s times what was expected, and a difference, None where that is rounding."""
        expected, actual = self.grads, actual.settled(state.tokens, state.ids, state.rest)
        pairs = [(getattr(actual, x), getattr(expected, x)) for x in ("logp", "kept", "rest", "entropy")]
        scale = _usual_ratio(pairs)
        off = torch.stack([_by_row(a - scale * e) for a, e in pairs]).sum(0)
        size = torch.stack([_by_row(a) for a, _ in pairs]).sum(0)
        wrong = ~(off <= ROUNDING * torch.finfo(off.dtype).eps * size)
        if not bool(wrong.any()):
            return scale, None
        differences = (torch.where(wrong[:, None] if a.ndim > 1 else wrong, a - scale * e, 0.0) for a, e in pairs)
        return scale, HeadGradients(*differences)

    def scaled(self, factor: float, state: HeadState) -> list[Tensor | None]:
        """Gradients of hidden states, weight and bias in their own dtypes; these are used up."""
        found = ((self.hidden, state.hidden), (self.weight, state.weight), (self.bias, state.bias))
        return [None if g is None or x is None else (g if factor == 1.0 else g.mul_(factor)).to(x.dtype) for g, x in found]


def _usual_ratio(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """What most rows were multiplied with: the median over rows of ⟨actual, expected⟩ / ⟨expected, expected⟩."""
    actual, expected = (torch.cat([x[i].reshape(len(x[i]), -1).double() for x in pairs], -1) for i in range(2))
    norm = expected.square().sum(-1)
    some = norm > 0
    if not bool(some.any()):
        return 0.0
    ratio = float(((actual * expected).sum(-1)[some] / norm[some]).nanmedian())  # a row that went wrong spoils no other
    return 1.0 if abs(ratio - 1) < torch.finfo(pairs[0][0].dtype).eps else ratio


def _by_row(x: Tensor) -> Tensor:
    return x.abs() if x.ndim == 1 else x.abs().sum(-1)


def can_foresee(spec: LogitSpec, request: HeadRequest, shard: Shard) -> bool:
    """Whether gradients can be formed on the way: not through a soft cap, nor for an own support or a split vocabulary."""
    return spec.softcap is None and request.top_k is None and shard.group is None


def head_foreseen(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    ids: Tensor | None,
    spec: LogitSpec,
    request: HeadRequest,
    expect: Expect,
    needed: Sequence[bool],
) -> tuple[HeadRows, Foreseen]:
    """What `head_forward` finds, and the gradients that are needed; some rows at a time, over the whole vocabulary."""
    into = GradientSum(hidden, weight, bias, needed, working_dtype(hidden, weight))
    found: list[HeadRows] = []
    asked: list[HeadGradients] = []
    for part, rows, outside in scan_rows(hidden, weight, bias, tokens, ids, spec, request, Shard(), outside=True):
        assert outside is not None
        grads = _expected(rows, tokens[part], ids is not None, expect, part)
        found.append(rows)
        asked.append(grads)
        into.add(part, hidden[part], tokens[part], rows, grads.scaled(spec.slope), outside)
    return join(found), Foreseen(*into.all(), join(asked))


def _expected(rows: HeadRows, tokens: Tensor, given: bool, expect: Expect, part: slice) -> HeadGradients:
    """Gradients of the loss that is expected of some rows."""
    leaves = [x.detach().requires_grad_() for x in (rows.logp, rows.kept, rows.rest)]
    with torch.enable_grad():
        logp, *support = leaves
        loss = expect(logp, SparseDist(rows.ids, *support) if given else None, part)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    logp, kept, rest = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return HeadGradients(logp, kept, rest, torch.zeros_like(logp)).settled(tokens, rows.ids, rows.rest)


class GradientSum:
    """dH, dW and db of the rows so far, in the working dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weight, dtype
        self.hidden = torch.zeros_like(hidden, dtype=dtype) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None
        self.fresh = True
        self.scratch = Scratch(hidden.device)

    def add(self, part: slice, hidden: Tensor, tokens: Tensor, rows: HeadRows, grads: HeadGradients, outside: Outside) -> None:
        """Those of some rows; what is outside their support is used up."""
        picked = grads.live()
        if not len(picked):
            return
        blocks = list(slices(len(self.weights), block_size(hidden.device, len(picked))[1]))
        state = HeadState(hidden, self.weights, None, tokens, rows.ids, rows.lse, rows.rest, nats=None, shard=Shard())
        gradient = LogitGradient(state, grads, picked, blocks)
        singles = gradient.singles(torch.cat([rows.kept, rows.logp[:, None]], -1)[picked])
        h = operand(hidden[picked], self.dtype)
        d_hidden = None if self.hidden is None else torch.zeros_like(h, dtype=self.dtype)
        for i, block in enumerate(blocks):
            shape = (len(picked), block.stop - block.start)
            mass = torch.index_select(outside.mass[:, block], 0, picked, out=self.scratch("mass", shape, self.dtype))
            dz = gradient.of_mass(mass, outside.peak[picked, None], i, singles)
            if d_hidden is not None:
                accumulate(d_hidden, dz, operand(self.weights[block], self.dtype, self.scratch))
            if self.weight is not None:
                accumulate(self.weight[block], dz.T, h, fresh=self.fresh)
            if self.bias is not None:
                self.bias[block] += dz.sum(0)
        if self.hidden is not None and d_hidden is not None:
            self.hidden[part.start + picked] = d_hidden
        self.fresh = False

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dH, dW, db, those that are needed."""
        if self.fresh and self.weight is not None:
            self.weight.zero_()
        return self.hidden, self.weight, self.bias
