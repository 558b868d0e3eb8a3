"""How good, and how sure: unbiased pass@k, and intervals that treat a problem, not a sample, as the unit."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from scipy.special import stdtrit

from corral.run.interval import LEVEL, Estimate, wilson

RIGHT = 1.0 - 1e-6
"""A completion with at least this reward is right. Rewards go from 0 to 1; what is between is partial credit."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from `samples` of which `right` are.

        pass@k = 1 − C(n−c, k) / C(n, k)          n samples, c right

    This is the share of the k-subsets of the samples that hold a right one. The plug-in 1 − (1 − c/n)^k is biased downwards.

    Args:
        samples: n ≥ 1.
        right: c in 0..n.
        k: how many may be tried, 1..n.
    Returns:
        A probability, exact up to its rounding: binomials are whole numbers here.
    Ref:
        Chen et al. 2021, arXiv:2107.03374, equation 1. Invariant: its mean over Binomial(n, p) is 1 − (1−p)^k.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass_at_k: needs 1 ≤ k ≤ samples and 0 ≤ right ≤ samples; got {samples=}, {right=}, {k=}.")
    subsets = math.comb(samples, k)
    return (subsets - math.comb(samples - right, k)) / subsets


def ladder(samples: int) -> list[int]:
    """The k's worth a row: 1, 2, 4, … and all samples."""
    powers = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def estimate(values: Sequence[float], *, draws: float = 1.0, level: float = LEVEL) -> Estimate:
    """The mean of one value per problem, and its interval: Wilson's, with the effective number of trials.

        n_eff = max(N, (z/t)² · min(m (1−m) / (v / N), N · draws))      N problems; m, v: mean and variance of their values

    Samples of one problem share its difficulty and are no independent trials; problems are. A problem counts as no more than
    its `draws` independent looks, and as at least one trial: values in 0..1 vary no more than 0 and 1 do. v is itself guessed
    from N problems, so trials shrink by (z/t)², normal over Student's quantile with N−1 degrees of freedom. With one 0-or-1
    value per problem this is Wilson's own interval.

    Args:
        values: one per problem, in 0..1: a success, a mean reward, a pass@k.
        draws: independent looks behind each value: 1 for greedy, n for the mean of n samples, n/k for pass@k from n samples.
        level: probability that the interval holds the mean over all problems like these.
    Ref:
        Korn and Graubard 1998 and Dean and Pagano 2015, for clustered surveys. Invariant: greedy intervals are plain Wilson.
    """
    if not values:
        raise ValueError("estimate: there are no problems to take a mean over.")
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"estimate: values are in 0..1; got {next(v for v in values if not 0 <= v <= 1)}.")
    count = len(values)
    mean = min(1.0, math.fsum(values) / count)
    trials = float(count)
    if count > 1 and mean * (1 - mean) >= 1e-12:  # else always or never right: nothing says how alike a problem's samples are
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        looks = min(count * draws, count * mean * (1 - mean) / variance if variance else math.inf)
        upper = 0.5 + level / 2
        trials = max(trials, looks * (NormalDist().inv_cdf(upper) / float(stdtrit(count - 1, upper))) ** 2)
    return Estimate(mean, *wilson(mean, trials, level))


def difference(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Estimate:
    """How much better `second` is than `first` on the same problems: the mean of the paired differences, and its interval.

        d' = Σd / (N+2),   v' = (Σd² + 1) / (N+2) − d'²,   interval d' ± z √(v' / (N+2))

    Pairing takes the problems' difficulty out, so that it sees differences that two separate intervals would hide. One pair
    more for each side (half a one in each of the four cells of a 2×2 table) keeps the width above 0 where no problem differs.

    Args:
        first, second: one value per problem in 0..1, in the same order.
    Ref:
        Agresti and Min 2005, for matched proportions; Miller 2024, arXiv:2411.00640, on pairing.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"difference: needs the same problems twice; got {len(first)} and {len(second)} values.")
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    total, count = math.fsum(gaps), len(gaps) + 2
    middle = total / count
    variance = (math.fsum(gap**2 for gap in gaps) + 1) / count - middle**2
    half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(variance / count)
    return Estimate(total / len(gaps), max(-1.0, middle - half), min(1.0, middle + half))


def sampled_estimates(rewards: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """avg@n and pass@k for every k of the ladder, from n rewards per problem."""
    samples = len(rewards[0])
    rights = [sum(reward >= RIGHT for reward in row) for row in rewards]
    found = {}
    for k in ladder(samples):
        found[f"pass@{k}"] = estimate([pass_at_k(samples, right, k) for right in rights], draws=samples / k)
    means = [min(1.0, math.fsum(row) / samples) for row in rewards]
    return {"pass@1": found.pop("pass@1"), f"avg@{samples}": estimate(means, draws=samples), **found}
