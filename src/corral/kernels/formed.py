"""Gradients of some rows formed in the forward pass, while their logits are there, for the loss that is expected of them.

Rows lie in two parts, one behind the other. One has a product of its own and comes back with its gradients, three products in
all; the other takes the streamed product, and its gradients are made in the backward pass. What is then asked for of the formed
rows is compared with what was expected (`difference`): one factor for all of them, and where a row still differs, what is left
takes the way of the other part. A wrong guess costs time and nothing else.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.kernels.dense_backward import dense_rows
from corral.kernels.dense_forward import Begun, Rule, begin, dense_forward, scale
from corral.kernels.difference import difference
from corral.kernels.few_rows import few_rows
from corral.kernels.head_rows import HeadRows, join
from corral.kernels.inspect_batch import Inspection, compact
from corral.kernels.later import Later
from corral.kernels.loss_rows import LossRows, OldRows
from corral.kernels.route import FEW, Routes, route_rows
from corral.kernels.row_gradient import DENSE, Upstream, row_gradient
from corral.kernels.select import ROWS_AT_ONCE, HeadInput, given_rows, stream_head
from corral.kernels.sparse_backward import sort_by_token, sparse_hidden, sparse_weight
from corral.kernels.stream import TileStatistics, stream

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden states, weight and bias, those that are needed."""


@dataclass(frozen=True, eq=False)
class Expected:
    """The loss that will follow, Σ weights · rule, of N rows; as anybody may have guessed it."""

    rule: Rule
    old: OldRows
    weights: Tensor | None

    def each(self, pick: Callable[[Tensor], Tensor]) -> "Expected":
        """Something done to every field."""
        return Expected(self.rule, self.old.each(pick), None if self.weights is None else pick(self.weights))


@dataclass(frozen=True, eq=False)
class Formed:
    """The gradients of some rows, for the loss that was expected of them."""

    part: slice
    """Which of the rows, as they were packed."""
    index: Tensor | None
    """Where each packed row belongs [N]; None where that is its place."""
    loss: LossRows
    """What was expected: gradients of the formed rows' log-probs [M] and supports [M, K]."""
    weights: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    left_out: Tensor
    """Where a row's gradient could not be formed, and is not in the sums [M] bool."""
    number_left_out: Later

    def is_all_of(self, count: int) -> bool:
        """Whether every row is formed, out of so many. The host waits for the forward pass to know."""
        return self.part == slice(0, count) and not self.number_left_out.number()

    def times(self, factor: Tensor) -> Gradients:
        """All gradients, in place, with one factor."""
        for x in (self.hidden, self.weight, self.bias):
            if x is not None:
                scale(x, factor)
        return self.hidden, self.weight, self.bias

    def expected(self) -> Upstream:
        """The gradients that these were formed for."""
        return Upstream(logp=self.loss.own, kept=self.loss.kept, rest=self.loss.rest, weights=self.weights)

    def gradients(
        self, source: HeadInput, rows: HeadRows, asked: Upstream, tolerance: float, needed: Sequence[bool]
    ) -> tuple[Gradients, Routes]:
        """Those of all rows, as `head_gradients` has them, on top of these, which are used up."""
        found = difference(asked, self.expected(), self.part.start, self.index, self.left_out, rows, source.tokens)
        left = found.left
        self.times(found.factor)
        hidden, weight, spec = source.hidden, source.weight, source.spec
        gradient = row_gradient(rows, source.tokens, left, spec)
        gradient = dataclasses.replace(gradient, size=gradient.size + found.size)  # the mean row is that of the whole batch
        routes = route_rows(gradient, spec, len(weight), tolerance)
        numbers = Later(routes.counts)
        every, flat = (routes.counts + found.met).float().unbind()
        routes = dataclasses.replace(routes, shares=torch.stack([flat / every.clamp(min=1), routes.shares[1]]))
        if self.part == slice(0, len(hidden)) and not numbers.numbers()[0]:
            return (self.hidden, self.weight, self.bias), routes
        d_hidden = (torch.zeros_like if tolerance == 0 else torch.empty_like)(hidden) if needed[0] else None
        if tolerance > 0:
            few = few_rows(source, rows, left.entropy, gradient, routes, want_hidden=d_hidden is not None)
            if d_hidden is not None:
                sparse_hidden(weight, gradient, routes, few, d_hidden)
            if self.weight is not None or self.bias is not None:
                by_token = sort_by_token(routes, len(weight))
                sparse_weight(hidden, gradient, routes, by_token, None, self.weight, self.bias)
        _, dense = numbers.numbers()
        if dense:
            picked = (routes.route != DENSE).byte().argsort(stable=True)[:dense]
            written = d_hidden is not None and tolerance > 0 and dense <= FEW
            dense_rows(
                source, rows, left.entropy, gradient, picked, None if written else d_hidden, self.weight, self.bias, add=True
            )  # fmt: skip
        if d_hidden is not None:
            self._add_rows(d_hidden)
        return (d_hidden, self.weight, self.bias), routes

    def _add_rows(self, d_hidden: Tensor) -> None:
        """To the gradients of all hidden states."""
        assert self.hidden is not None
        if self.index is None:
            d_hidden[self.part] += self.hidden
        else:
            rows = self.index[self.part]
            d_hidden.index_copy_(0, rows, d_hidden[rows] + self.hidden)


@dataclass(frozen=True, eq=False)
class Early:
    """Rows in order, and which they were; and what was begun of their products."""

    packed: Tensor
    index: Tensor
    stats: TileStatistics | None = None
    rows: HeadRows | None = None
    """Of the other part, the first ones: what the tiles left, or all of it but the ids."""
    begun: Begun | None = None
    """Of the part whose gradients are formed."""


def start_early(source: HeadInput, inspection: Inspection) -> Early | None:
    """The first part's product, before the host has counted it. Rows [R, H] in whatever order; None of too many at once.

    What follows the product on a given support is queued with it, so that the device is still busy when the host knows more.
    """
    if len(source.hidden) > ROWS_AT_ONCE:
        return None
    early = Early(*compact(source.hidden, inspection.position))
    counts, entropy = inspection.counts, source.request.entropy
    how = early.packed, source.weight, source.bias, source.spec
    if inspection.formed_first:
        return dataclasses.replace(early, begun=begin(*how, counts, source.tokens, early.index, entropy=entropy))
    stats = stream(*how, entropy=entropy, counter=counts)
    if source.request.top_k is not None or inspection.small:
        return dataclasses.replace(early, stats=stats)
    packed = dataclasses.replace(source, hidden=early.packed)
    return dataclasses.replace(early, rows=given_rows(packed, stats, early.index, counts))


def start_formed(source: HeadInput, inspection: Inspection, early: Early | None, part: slice) -> Early | None:
    """The product of the formed part, now that the host knows it: before anything else, so that the device has work."""
    in_order = part.stop - part.start == len(source.tokens) or part == slice(0, 0)
    if early is None and not in_order:
        early = Early(*compact(source.hidden, inspection.position))
    if early is None or early.begun is not None or part == slice(0, 0):
        return early
    how = early.packed[part], source.weight, source.bias, source.spec, None, source.tokens, early.index[part]
    return dataclasses.replace(early, begun=begin(*how, entropy=source.request.entropy))


def _streamed(source: HeadInput, early: Early | None) -> HeadRows:
    """The other part, as far as that was begun."""
    count = len(source.tokens)
    if early is None or early.rows is None:
        return stream_head(source, None if early is None or early.stats is None else early.stats.first(count))
    rows = HeadRows(*(x[:count] for x in vars(early.rows).values()))
    return dataclasses.replace(rows, ids=source.tokens[:, None] if source.ids is None else source.ids)


def head_in_parts(
    source: HeadInput,
    part: slice,
    early: Early | None,
    expected: Expected,
    needed: Sequence[bool],
    index: Tensor | None = None,
    known: Callable[[HeadRows, LossRows | None], None] = lambda *_: None,
) -> tuple[HeadRows, Formed | None]:
    """What the head knows of packed rows; of those in `part` gradients are formed.

    `known` is told of all rows, and of their losses where all are formed, before the last two products: what the host asks
    for then is answered while the device is still busy.
    """
    count = len(source.tokens)
    other = slice(0, part.start) if part.start else slice(part.stop, count)
    found: list[HeadRows] = []
    if other.start < other.stop:
        found.append(_streamed(source.rows(other), early))
    if part.start == part.stop:
        known(found[0], None)
        return found[0], None
    e, begun = expected.each(operator.itemgetter(part)), None if early is None else early.begun
    number: list[Later] = []

    def told(rows: HeadRows, loss: LossRows, left_out: Tensor) -> None:
        number.append(Later(left_out.sum()))
        found[:] = [join([*found, rows] if part.start else [rows, *found])]
        known(found[0], loss if part == slice(0, count) else None)

    _, loss, gradients, left_out = dense_forward(source.rows(part), e.old, e.weights, e.rule, needed, begun, told)
    return found[0], Formed(part, index, loss, e.weights, *gradients, left_out, number[0])
