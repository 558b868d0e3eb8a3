"""pass@k by hand, by brute force and in expectation; intervals by hand and by how often they hold the truth."""

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from corral.lab.jobs.llm.eval_results import Estimate, difference, estimate, ladder, pass_at_k, sampled_estimates, wilson

Z = 1.959963984540054


def numbers(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (4, 2, 1, 1 / 2),  # c/n
        (4, 2, 2, 5 / 6),  # of the 6 pairs only the two wrong ones together fail
        (4, 1, 3, 3 / 4),  # of the 4 triples one leaves the right one out
        (5, 2, 3, 9 / 10),  # of the 10 triples only the three wrong ones together fail
        (4, 3, 2, 1.0),  # one wrong sample makes no pair
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_golden_pass_at_k(samples: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, right, k) == pytest.approx(expected, rel=1e-15)


def test_pass_at_k_counts_subsets() -> None:
    for samples in range(1, 8):
        for right in range(samples + 1):
            marks = [True] * right + [False] * (samples - right)
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(marks, k))
                assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-15)


@given(st.integers(1, 40), st.floats(0, 1, allow_subnormal=False).map(lambda p: round(p, 6)), st.data())
def test_pass_at_k_has_no_bias(samples: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, samples))
    mean = sum(stats.binom.pmf(right, samples, p) * pass_at_k(samples, right, k) for right in range(samples + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_grows_with_k_and_with_right_ones(samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, samples - 1)), data.draw(st.integers(1, samples))
    assert pass_at_k(samples, right, k) <= pass_at_k(samples, right + 1, k) <= 1
    if k < samples:
        assert pass_at_k(samples, right, k) <= pass_at_k(samples, right, k + 1)
    assert pass_at_k(samples, right, 1) == pytest.approx(right / samples)


def test_pass_at_k_survives_large_numbers() -> None:
    # C(2000, 1000) is beyond every float; 1 − C(1999, 1000)/C(2000, 1000) = 1 − 1000/2000.
    assert pass_at_k(2000, 1, 1000) == 0.5


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k: needs"):
        pass_at_k(samples, right, k)


def test_the_ladder() -> None:
    assert [ladder(n) for n in (1, 2, 3, 4, 6, 32)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]


def test_wilson_by_hand() -> None:
    # 0 of 30: low 0, high z²/(30 + z²) = 3.8415/33.8415.
    assert wilson(0.0, 30) == pytest.approx((0.0, 3.841458820694124 / 33.841458820694124))
    assert wilson(1.0, 30) == pytest.approx((30 / 33.841458820694124, 1.0))
    # 5 of 10: middle ½, half √(z²·(.25/10 + z²/400)) / (1 + z²/10) = √(3.8415·.034604) / 1.38415 = .26341.
    assert wilson(0.5, 10) == pytest.approx((0.5 - 0.26341, 0.5 + 0.26341), abs=1e-5)


@given(st.integers(1, 500), st.data())
def test_wilson_agrees_with_scipy(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    expected = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=200), st.sampled_from([1.0, 8.0]))
def test_one_right_or_wrong_answer_per_problem_gets_the_plain_interval(values: list[float], draws: float) -> None:
    mean = sum(values) / len(values)
    assert numbers(estimate(values, draws=draws)) == pytest.approx((mean, *wilson(mean, len(values))))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(1, 64))
def test_an_interval_holds_its_value_and_is_no_wider_than_problems_alone_allow(values: list[float], draws: float) -> None:
    found = estimate(values, draws=draws)
    low, high = wilson(found.value, len(values))
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    assert low - 1e-9 <= found.low
    assert found.high <= high + 1e-9
    assert found.high - found.low > 0


def test_golden_effective_trials() -> None:
    # Four problems at ⅜, ½, ½ and ⅝ of 8 samples: m = ½, v = (2/64)/3 = 1/96, m(1−m)·4/v = 96 trials, but no more than the 32
    # samples. t = 3.18245 with 3 degrees of freedom: 32·(1.95996/3.18245)² = 12.1373.
    assert numbers(estimate([0.375, 0.5, 0.5, 0.625], draws=8.0)) == pytest.approx((0.5, *wilson(0.5, 12.1373)), abs=5e-4)
    # ⅛, ¼, ¾ and ⅞: v = (2·9/64 + 2·4/64)/3 = 13/96, ¼·4·96/13 = 7.38 trials, and with t 2.8: fewer than problems, so 4.
    assert numbers(estimate([0.125, 0.25, 0.75, 0.875], draws=8.0)) == pytest.approx((0.5, *wilson(0.5, 4)))
    # Equal values have v = 0: as many trials as there were samples, and no more: 32 again.
    assert numbers(estimate([0.5] * 4, draws=8.0)) == pytest.approx((0.5, *wilson(0.5, 12.1373)), abs=5e-4)
    # Never right: 2 trials, for all we know.
    assert numbers(estimate([0.0, 0.0], draws=8.0)) == pytest.approx((0.0, *wilson(0.0, 2)))


def test_one_problem_is_one_trial_however_often_it_is_sampled() -> None:
    """Its samples tell how hard it is, and nothing of how hard others are."""
    assert numbers(estimate([0.5], draws=64.0)) == pytest.approx((0.5, *wilson(0.5, 1)))


@pytest.mark.parametrize("values", [[], [0.5, 1.5], [-0.1], [math.nan]])
def test_estimates_of_nothing_or_of_no_proportion_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="estimate: "):
        estimate(values)


def coverage(truth: float, draw: Callable[[np.random.Generator], Estimate], repeats: int = 400) -> float:
    generator = np.random.default_rng(0)
    drawn = [draw(generator) for _ in range(repeats)]
    return sum(found.low <= truth <= found.high for found in drawn) / repeats


DIFFICULTIES = {"even": (1.0, 1.0), "easy or hopeless": (0.2, 0.2), "hard": (0.3, 3.0), "all alike": (300.0, 300.0)}


@pytest.mark.parametrize("name", DIFFICULTIES)
@pytest.mark.parametrize(
    ("problems", "samples", "k"), [(100, 1, 1), (100, 8, 1), (100, 8, 4), (30, 16, 1), (10, 8, 1), (3, 8, 1)]
)
def test_95_percent_of_intervals_hold_the_truth(name: str, problems: int, samples: int, k: int) -> None:
    """Problems have success rates from a Beta distribution: E[1 − (1−p)^k] in closed form is the truth to be covered."""
    a, b = DIFFICULTIES[name]
    truth = 1 - math.exp(math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k))
    table = [pass_at_k(samples, right, k) for right in range(samples + 1)]

    def draw(generator: np.random.Generator) -> Estimate:
        rights = generator.binomial(samples, generator.beta(a, b, problems))
        return estimate([table[right] for right in rights], draws=samples / k)

    # 400 repeats have a standard error of .011. 30 hard problems are covered least: .93 in 2,000 repeats (a bootstrap: .92).
    assert coverage(truth, draw) >= 0.91


def test_samples_taken_for_trials_would_lie() -> None:
    """What this is for: an interval from all samples, as if each were a problem of its own, misses the truth half the time."""

    def naive(generator: np.random.Generator) -> Estimate:
        rights = generator.binomial(16, generator.beta(0.2, 0.2, 100)).sum()
        return Estimate(rights / 1600, *wilson(rights / 1600, 1600))

    assert coverage(0.5, naive) < 0.6


def test_golden_difference() -> None:
    # d = 1, 1, 0, −1, 0, 0: Σd = 1, Σd² = 3, N+2 = 8. d' = 1/8, v' = 4/8 − 1/64 = 31/64, half = z √(31/512).
    found = difference([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    half = Z * math.sqrt(31 / 512)
    assert numbers(found) == pytest.approx((1 / 6, 1 / 8 - half, 1 / 8 + half))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_a_difference_turned_round_changes_its_sign(pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*pairs, strict=True)
    there, back = difference(first, second), difference(second, first)
    assert there.value == pytest.approx(-back.value, abs=1e-12)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-12)
    assert there.high > there.low, "even where no problem differs"
    with pytest.raises(ValueError, match="the same problems twice"):
        difference(first, [*second, 0.0])


@pytest.mark.parametrize("gain", [0.0, 0.1])
def test_95_percent_of_differences_hold_the_truth_and_pairing_is_narrower(gain: float) -> None:
    def draw(generator: np.random.Generator) -> Estimate:
        p = 0.9 * generator.beta(0.3, 0.3, 100)
        pair = [(generator.binomial(8, q) / 8).tolist() for q in (p, p + gain)]
        found = difference(*pair)
        both = [estimate(values, draws=8.0) for values in pair]
        assert found.high - found.low < sum(one.high - one.low for one in both) / 2
        return found

    assert coverage(gain, draw) >= 0.93


def test_what_is_reported_of_samples() -> None:
    # Problem 1: right, half right, wrong, right. Problem 2: all wrong. c = 2 and 0 of 4.
    found = sampled_estimates([[1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert list(found) == ["pass@1", "avg@4", "pass@2", "pass@4"]
    assert found["pass@1"].value == pytest.approx((2 / 4 + 0) / 2)
    assert found["avg@4"].value == pytest.approx((2.5 / 4 + 0) / 2), "partial credit counts here, and only here"
    assert found["pass@2"].value == pytest.approx((5 / 6 + 0) / 2)
    assert found["pass@4"].value == pytest.approx(1 / 2)


def test_with_rewards_of_0_and_1_the_average_is_pass_at_1() -> None:
    drawn = random.Random(0)
    found = sampled_estimates([[float(drawn.random() < 0.3) for _ in range(6)] for _ in range(20)])
    assert found["avg@6"].value == pytest.approx(found["pass@1"].value)
    assert list(found) == ["pass@1", "avg@6", "pass@2", "pass@4", "pass@6"]
