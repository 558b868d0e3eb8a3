"""Metrics of micro-batches: copied to the host asynchronously, and combined over all processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate.utils import gather_object
from torch import Tensor

from corral.head.rows import AsyncCopy
from corral.objective.ratio import clamp_log_ratio, log_ratio
from corral.tensors import TokenBatch, metric_kind

_RATIO_SUMS = ("Σρ", "Σρ²")
"""Names of the sums from which the metric `tr/ess` (effective sample size) is computed, over all micro-batches of an update."""


@torch.no_grad()
def ratio_sums(batch: TokenBatch) -> dict[str, Tensor]:
    """Compute Σρ and Σρ² of the policy ratios ρ over the unmasked tokens, for the effective sample size."""
    rho = torch.where(batch.mask, clamp_log_ratio(log_ratio(batch)).exp(), 0.0)
    return dict(zip(_RATIO_SUMS, (rho.sum(), rho.square().sum()), strict=True))


_Line = tuple[str, int, dict[str, float]]
"""Metrics of one micro-batch: the mode (train or eval), the number of unmasked tokens, and the values by name."""


@dataclass(eq=False)
class Ledger:
    """Store for the metrics of all micro-batches since the last `flush`."""

    _entries: list[tuple[str, int, list[str], AsyncCopy | None, AsyncCopy | None, bool]] = field(default_factory=list)
    """Metrics as one tuple per micro-batch, or per piece of a micro-batch.
    A tuple holds the mode, the number of unmasked tokens, the metrics' names and values, reports of earlier backward passes,
    and whether further pieces follow."""
    _reports: list[Tensor] = field(default_factory=list)
    """Tensors that the backward pass of the newest entry fills with statistics of the LM head's gradient."""

    def add(
        self, mode: str, tokens: int, metrics: dict[str, Tensor], reports: list[Tensor], *, more: bool = False
    ) -> None:  # fmt: skip
        """Add the metrics of one micro-batch. Every process must call this for every micro-batch, even without metrics.

        With `more` it is the entry of a piece, and further pieces of the micro-batch follow.

        `reports` [2] each are written by the backward pass that follows, and go into the next entry: share of dense rows, and
        largest dropped share of a gradient.
        """
        backward = AsyncCopy(torch.stack(self._reports)) if self._reports else None
        self._reports = reports
        values = AsyncCopy(torch.stack([value.detach().float() for value in metrics.values()])) if metrics else None
        self._entries.append((mode, tokens, list(metrics), values, backward, more))

    def lines(self) -> list[_Line]:
        """Remove and return the metrics of all micro-batches, once their copies to the host are done."""
        lines, pieces, self._entries, entries = list[_Line](), list[_Line](), [], self._entries
        for mode, tokens, names, values, backward, more in entries:
            found = {} if values is None else dict(zip(names, values.wait(), strict=True))
            reports = [] if backward is None else backward.wait()
            if over := [report for report in reports if not math.isnan(report[0])]:  # a pass may have had no backward
                dense, dropped = zip(*over, strict=True)
                found |= {"head/dense_share": sum(dense) / len(dense), "head/dropped_max": max(dropped)}
            pieces.append((mode, tokens, found))
            if not more:
                lines.append(pieces[0] if len(pieces) == 1 else (mode, sum(x for _, x, _ in pieces), _joined(pieces)))
                pieces = []
        return lines

    def flush(self) -> list[tuple[str, str, float]]:
        """Return (mode, name, value) of every metric, combined over all processes. `tr/ess` spans all micro-batches."""
        everyone: list[list[_Line]] = gather_object([self.lines()]) if self._entries else []
        found = [
            (lines[0][0], name, value)
            for lines in zip(*everyone, strict=True)
            for name, value in sorted(_joined(lines).items())
            if name not in _RATIO_SUMS
        ]
        for mode in dict.fromkeys(mode for lines in everyone for mode, _, _ in lines):
            own = [(tokens, x) for lines in everyone for of, tokens, x in lines if of == mode and _RATIO_SUMS[0] in x]
            if own:  # (Σρ)²/(N Σρ²): the share of the tokens that the ratios leave to count, in (0, 1]
                count = sum(tokens for tokens, _ in own)
                first, second = (sum(x[name] for _, x in own) for name in _RATIO_SUMS)
                size = first**2 / (count * second) if second else 0.0  # where every ratio has underflown
                found.append((mode, "tr/ess", min(size, 1.0)))  # in this order NaN stays NaN
        return found


def _joined(lines: Sequence[_Line]) -> dict[str, float]:
    """Combine each metric over several processes or pieces of a micro-batch, by maximum, sum, or mean over unmasked tokens."""
    joined = dict[str, float]()
    for name in dict.fromkeys(name for _, _, found in lines for name in found):
        values = [(tokens, found[name]) for _, tokens, found in lines if name in found]
        kind, total = "sum" if name in _RATIO_SUMS else metric_kind(name), sum(tokens for tokens, _ in values)
        if kind == "mean" and total:
            joined[name] = sum(tokens * value for tokens, value in values) / total
        elif kind == "mean":
            joined[name] = sum(value for _, value in values) / len(values)
        else:
            joined[name] = (max if kind == "max" else sum)(value for _, value in values)
    return joined
