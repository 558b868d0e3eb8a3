"""Gradients of packed rows for hidden states, weight and bias: sparse where a row's own bound allows, dense elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.rows import Gradients, HeadInput, HeadRows
from corral.kernels.triton.backward.dense import dense_rows
from corral.kernels.triton.backward.route import Routes, route_rows
from corral.kernels.triton.backward.row_gradient import RowGradient
from corral.kernels.triton.backward.sparse import sort_by_token, sparse_hidden, sparse_weight


@dataclass(frozen=True, eq=False)
class PendingGradients:
    """Gradients of which all is queued that the host need not know of."""

    routes: Routes
    finish: Callable[[], Gradients]
    """Wait until the number of dense rows is known, recompute those, and hand over dH, dW and db, those that are needed."""


def head_gradients(
    source: HeadInput,
    rows: HeadRows,
    gradient: RowGradient,
    tolerance: float,
    needed: Sequence[bool],
    *,
    g_entropy: Tensor | None = None,
    mean: Tensor | None = None,
    add_to: tuple[Tensor | None, Tensor | None] | None = None,
) -> PendingGradients:
    """Gradients of hidden states, weight and bias, those that are needed.

    `mean` is the mean row's Σ |dz| where there are other rows; those of weight and bias are added to `add_to`.
    """
    hidden, weight, bias = source.hidden, source.weight, source.bias
    routes = route_rows(gradient, source.spec, len(weight), tolerance, mean)
    counts = AsyncCopy(routes.counts)
    d_hidden = torch.empty_like(hidden) if needed[0] else None
    if add_to is None:
        d_weight = torch.empty_like(weight) if needed[1] else None
        d_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    else:
        d_weight, d_bias = add_to
    if tolerance > 0:
        by_token = None if d_weight is None and d_bias is None else sort_by_token(routes, len(weight))
        if d_hidden is not None:
            sparse_hidden(weight, gradient, routes, d_hidden)
        if by_token is not None:
            sparse_weight(hidden, gradient, routes, by_token, d_weight, d_bias, add=add_to is not None)
    elif d_hidden is not None:
        d_hidden.zero_()
    written = tolerance > 0 or add_to is not None

    def finish() -> Gradients:
        _, dense = counts.wait()
        if dense:
            dense_rows(source, rows, g_entropy, gradient, routes.dense, dense, d_hidden, d_weight, d_bias, add=written)
        elif not written:  # no row has a gradient
            for x in (d_weight, d_bias):
                if x is not None:
                    x.zero_()
        return d_hidden, d_weight, d_bias

    return PendingGradients(routes, finish)
