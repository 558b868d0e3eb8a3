"""Log-histograms: quantiles of any number of values within 1 %, in constant memory."""

import math

import numpy as np
from numpy.typing import NDArray

ACCURACY = 0.01
"""Relative error of a quantile at most."""

_LOWEST, _HIGHEST = 1e-9, 1e9
_GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))
_BINS = math.ceil(math.log(_HIGHEST / _LOWEST) / _GROWTH)


class LogHistogram:
    """Values ≥ 0, of which bins count how many there are: bin i holds (a γⁱ⁻¹, a γⁱ] with γ = (1 + α)/(1 − α).

    Mean and maximum are exact, a quantile is within α = 1 % of a value that occurs; what is below 1e-9 counts as 0.

    Ref:
        Masson et al. 2019, "DDSketch", with fixed bins. Invariant: |quantile − exact| ≤ 0.01 · exact.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS + 1, dtype=np.int64)  # bin 0 is for what counts as 0
        self.total, self.largest = 0.0, 0.0

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    def add(self, values: NDArray[np.float64]) -> None:
        """Count some more; infinities are above every number."""
        if not len(values):
            return
        place = np.ceil(np.log(np.clip(values, _LOWEST, _HIGHEST) / _LOWEST) / _GROWTH).astype(np.int64).clip(0, _BINS)
        self.counts += np.bincount(place, minlength=_BINS + 1)
        self.total += float(values.sum())
        self.largest = max(self.largest, float(values.max()))

    def quantile(self, share: float) -> float:
        """The smallest value that is not below this share of the others, up to 1 %."""
        rank = math.ceil(share * (self.count - 1))
        place = int(np.searchsorted(self.counts.cumsum(), rank, side="right"))
        if place in (0, _BINS):
            return self.largest if place else 0.0
        upper = _LOWEST * math.exp(place * _GROWTH)
        return min(upper * (1 - ACCURACY), self.largest)

    def spread(self) -> dict[str, float]:
        """Mean, percentiles and largest."""
        count = self.count
        return {
            "mean": self.total / count if count else 0.0,
            "p50": self.quantile(0.5) if count else 0.0,
            "p99": self.quantile(0.99) if count else 0.0,
            "p999": self.quantile(0.999) if count else 0.0,
            "max": self.largest,
        }
