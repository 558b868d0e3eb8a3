"""What a handful of seeds lets one say: worked by hand, against SciPy and numpy, and how often the claims would be false."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rliable import metrics
from scipy import stats

from corral.lab.report.statistics import (
    Difference,
    Estimate,
    area_under_curve,
    difference,
    has_collapsed,
    holm,
    interquartile_curve,
    interquartile_mean,
    is_significant,
    middle_mean,
    plain,
    plains,
    probability_of_improvement,
    sentence,
    share_above,
    signed,
    steps_to,
)


def test_golden_interquartile_mean() -> None:
    # Of 8 runs the two smallest and the two largest go: (3 + 4 + 5 + 6) / 4 = 4.5; 1000 has no say.
    found = interquartile_mean(np.array([1.0, 2, 3, 4, 5, 6, 7, 1000]))
    assert found.value == pytest.approx(4.5)
    assert found.low is not None
    assert found.high is not None
    assert 1 <= found.low < 4.5 < found.high


def test_one_run_has_no_interval() -> None:
    assert interquartile_mean(np.array([0.3])) == Estimate(0.3, None, None)


def test_the_bootstrap_is_the_same_each_time_and_leaves_numpys_state_alone() -> None:
    scores = np.random.default_rng(0).normal(size=6)
    np.random.seed(7)
    first = interquartile_mean(scores)
    after = np.random.random()
    np.random.seed(7)
    assert np.random.random() == after
    assert interquartile_mean(scores) == first


def test_oracle_bootstrap_interval() -> None:
    """An own bootstrap with other draws comes to the same ends, up to what 2000 draws leave open."""
    scores = np.random.default_rng(1).normal(size=8)
    drawn = np.random.default_rng(2).choice(scores, (20_000, 8))
    low, high = np.percentile(stats.trim_mean(drawn, 0.25, axis=1), [2.5, 97.5])
    found = interquartile_mean(scores)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.06), pytest.approx(high, abs=0.06))


def test_the_bootstrap_is_stratified_by_task() -> None:
    """Two tasks far apart, no spread within either: drawing within tasks leaves no spread; drawing over them would."""
    found = interquartile_mean(np.array([[0.0, 1.0]] * 4))
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_oracle_our_fast_forms_are_rliables(x: list[float], y: list[float]) -> None:
    a, b = np.array(x)[:, None], np.array(y)[:, None]
    assert middle_mean(a)[0] == pytest.approx(metrics.aggregate_iqm(a), abs=1e-12)
    if len(x) + len(y) > 2:  # SciPy's test wants more than one of each
        assert share_above(a, b)[0] == pytest.approx(metrics.probability_of_improvement(a, b))


def test_a_curve_is_the_interquartile_mean_at_each_point() -> None:
    scores = np.random.default_rng(3).normal(size=(5, 7))
    value, low, high = interquartile_curve(scores)
    np.testing.assert_allclose(value, [interquartile_mean(column).value for column in scores.T])
    assert (low <= value).all()
    assert (value <= high).all()
    value, low, high = interquartile_curve(scores[:1])
    assert value.tolist() == low.tolist() == high.tolist() == scores[0].tolist()


def test_golden_probability_of_improvement() -> None:
    # Pairs (2,1) (2,2) (3,1) (3,2): above in 3, a tie counts half: 3.5 / 4.
    assert probability_of_improvement(np.array([2.0, 3]), np.array([1.0, 2])).value == pytest.approx(3.5 / 4)
    assert probability_of_improvement(np.array([2.0]), np.array([1.0])) == Estimate(1.0, None, None)


def test_golden_paired_difference() -> None:
    # d = 1, 2, 3: mean 2, sd 1, se 1/√3; t_{2, .975} = 4.302653: 2 ± 2.484. Seeds 3 and 9 have no partner.
    found = difference({"0": 11.0, "1": 22.0, "2": 33.0, "3": 99.0}, {"2": 30.0, "0": 10.0, "1": 20.0, "9": 0.0})
    assert found.paired
    assert found.mean.value == pytest.approx(2)
    assert found.mean.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.mean.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.seeds == 3
    assert found.p == pytest.approx(stats.ttest_1samp([1, 2, 3], 0).pvalue)


def test_golden_difference_of_groups_without_common_seeds() -> None:
    a, b = [1.0, 2, 3, 4], [0.0, 0.5, 1]
    found = difference(dict(zip("abcd", a, strict=True)), dict(zip("xyz", b, strict=True)))
    # Welch: s²/n = (5/3)/4 and .25/3; df = (Σ)² / (Σ²/(n−1)).
    u, v = (5 / 3) / 4, 0.25 / 3
    df = (u + v) ** 2 / (u**2 / 3 + v**2 / 2)
    assert not found.paired
    assert found.mean.low == pytest.approx(2 - stats.t.ppf(0.975, df) * math.sqrt(u + v))


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_seeds_give_no_interval(count: int) -> None:
    ours, theirs = {str(seed): 0.5 + 0.1 * seed for seed in range(count)}, {str(seed): 0.1 for seed in range(count)}
    found = difference(ours, theirs)
    assert (found.mean.low, found.mean.high, found.p) == (None, None, None)
    assert "No difference can be claimed" in sentence("a", "b", "final", found, holds=True)


def test_equal_differences_claim_nothing() -> None:
    """A spread of zero is a coarse measurement, not certainty."""
    found = difference({"0": 0.5, "1": 0.6, "2": 0.7}, {"0": 0.25, "1": 0.35, "2": 0.45})
    assert found.p is None
    assert "all seeds differ by the same amount" in sentence("a", "b", "final success", found, holds=True)


@pytest.mark.parametrize("scale", [1.0, 1e5, 1e9])
def test_rounding_is_no_spread(scale: float) -> None:
    """Large returns whose differences are equal but for their last digits."""
    theirs = {str(seed): scale * value for seed, value in enumerate((1.123, 1.456, 1.789, 1.314))}
    assert difference({seed: value + 0.3 for seed, value in theirs.items()}, theirs).p is None


def test_golden_holm() -> None:
    # m = 4: .01 · 4 = .04 is significant; .02 · 3, then .03 · 2 = .06 are not; .04 · 1 is no less than what comes before it.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    # m = 2: .02 and .04, which Bonferroni's .08 would refuse.
    assert holm([0.01, 0.04]) == pytest.approx([0.02, 0.04])
    # m = 3, since a comparison is made also where nothing can come of it.
    assert holm([0.01, 0.04, None]) == pytest.approx([0.03, 0.08, 1.0])
    assert holm([0.7, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    assert [is_significant(p) for p in (0.05, 0.0501)] == [True, False]


def estimate(value: float, low: float | None, high: float | None, count: int = 5, p: float = 0.01) -> Difference:
    return Difference(mean=Estimate(value, low, high), seeds=count, p=p, paired=True)


def test_the_sentences() -> None:
    better = "troll beats ppo_clip on final success: +6.1 points, 95 % interval 2.0…10.3, 5 seeds."
    assert sentence("troll", "ppo_clip", "final success", estimate(6.1, 2.0, 10.3), holds=True) == better
    assert sentence("ppo_clip", "troll", "final success", estimate(-6.1, -10.3, -2.0), holds=True) == better
    tie = sentence("dppo", "troll", "final success", estimate(-0.4, -2.9, 2.1, p=0.7), holds=False)
    assert tie == (
        "No difference can be claimed between troll and dppo on final success: +0.4 points, 95 % interval −2.1…2.9, 5 seeds."
    )
    among = sentence("a", "b", "final success", estimate(2.0, 0.1, 3.9, p=0.04), holds=False, among=6)
    assert among.endswith("95 % interval 0.1…3.9, 5 seeds; among 6 comparisons one may stray as far.")
    one = Difference(mean=Estimate(3.0, None, None), seeds=1, p=None, paired=True)
    assert sentence("a", "b", "final success", one, holds=False).endswith("+3.0 points, one seed; that is too few.")
    apart = Difference(mean=Estimate(3.0, 1.0, 5.0), seeds=4, p=0.01, paired=False)
    said = sentence("a", "b", "reward", apart, holds=True, unit="")
    assert said == "a beats b on reward: +3.0, 95 % interval 1.0…5.0, 4 seeds or more each, none of them shared."


def test_equal_objectives_are_seldom_told_apart() -> None:
    """Four equal objectives, three seeds, 400 times: about 5 % may claim any difference. The bootstrap would in most."""
    draw, false = np.random.default_rng(0), 0
    for _ in range(400):
        runs = [{str(seed): value for seed, value in enumerate(draw.normal(size=3))} for _ in range(4)]
        found = [difference(runs[i], runs[j]) for i in range(4) for j in range(i)]
        false += any(map(is_significant, holm([one.p for one in found])))
    assert false / 400 < 0.08


def test_golden_area() -> None:
    # Trapezia (0 + .4)/2·10 + (.4 + .6)/2·10 = 2 + 5 = 7 over 20 steps.
    points = [(0.0, 0.0), (10.0, 0.4), (20.0, 0.6)]
    assert area_under_curve(points, 20) == pytest.approx(0.35)
    # Stopped at 20 of 40: .6 to the end: (7 + 12) / 40.
    assert area_under_curve(points, 40) == pytest.approx(19 / 40)
    assert area_under_curve(points[:1], 0) == 0.0
    assert area_under_curve([], 10) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.integers(1, 50))
def test_the_area_lies_between_the_smallest_and_the_largest_value(values: list[float], more: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    area = area_under_curve(points, len(values) - 1 + more)
    assert area is not None
    assert min(values) - 1e-9 <= area <= max(values) + 1e-9


def test_steps_to_a_threshold() -> None:
    points = [(0.0, 0.1), (10.0, 0.5), (20.0, 0.4), (30.0, 0.7)]
    assert steps_to(points, 0.5) == 10
    assert steps_to(points, 0.6) == 30
    assert steps_to(points, 0.8) == math.inf


def test_collapse() -> None:
    assert has_collapsed([(0.0, 0.2), (1.0, 0.6), (2.0, 0.2)], "finished")
    assert not has_collapsed([(0.0, 0.2), (1.0, 0.6), (2.0, 0.4)], "finished")
    assert not has_collapsed([(0.0, 0.02), (1.0, 0.01)], "finished")  # half is lost, but that is noise
    # A return that came from −50 to 5 and ends with 2 lost 3 of 55; with −30 it lost 35, more than half of the way.
    assert not has_collapsed([(0.0, -50.0), (1.0, 5.0), (2.0, 2.0)], "finished")
    assert has_collapsed([(0.0, -50.0), (1.0, 5.0), (2.0, -30.0)], "finished")
    assert has_collapsed([(0.0, 0.5)], "collapsed")
    assert not has_collapsed([], "failed")


def test_numbers_for_people() -> None:
    assert [plain(x) for x in (0.0, -0.0, 6.06, -2.04, 0.034, -0.00012)] == ["0.0", "0.0", "6.1", "−2.0", "0.034", "−0.00012"]
    assert [signed(x) for x in (0.0, 1.0, -1.0)] == [["+0.0"], ["+1.0"], ["−1.0"]]
    # Together they have the decimals of the largest.
    assert signed(0.034, -0.5, 6.06) == ["+0.0", "−0.5", "6.1"]
    assert plains(0.034, 0.0012) == ["0.034", "0.001"]
    assert plains(-42.284, -42.8, -0.00001, digits=4) == ["−42.28", "−42.80", "0.00"]
    assert plains(0.0, 0.0) == ["0.0", "0.0"]
    assert plains(math.inf, 1.0, digits=3) == ["inf", "1.0"]
