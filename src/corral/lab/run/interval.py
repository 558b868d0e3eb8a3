"""Confidence intervals of proportions, means and medians."""

import math
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """Estimate of a statistic and its confidence interval at the confidence level LEVEL.
    A bound that cannot be computed is None."""

    value: float
    low: float | None
    high: float | None


def wilson(mean: float, count: float, level: float = LEVEL) -> tuple[float, float]:
    """Compute Wilson's score interval of a proportion in `count` independent trials. `count` may be fractional.

        all p with |mean − p| ≤ z √(p (1−p) / count)

    Unlike mean ± z·se it never leaves 0..1 and never has width 0, so that 0 of 30 reads as "up to 11 %".

    Ref:
        Wilson 1927; Brown, Cai and DasGupta 2001 on why.
    """
    z2 = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    middle = (mean + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (mean * (1 - mean) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)
