"""Which setting is best, and how wide the range is: worked by hand, and what holds for every sweep."""

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from corral.lab.report.read import value_text
from corral.lab.report.sweep import SweepRow, Value, cells, choose_setting, ordered, usable_range


def rows(finals: Mapping[Value, Sequence[float]], contestant: str = "troll", **more: object) -> list[SweepRow]:
    """Final values by learning rate, one per seed."""
    return [
        SweepRow(contestant, {"learning_rate": rate, **more}, seed, final, final / 2, False)
        for rate, values in finals.items()
        for seed, final in enumerate(values)
    ]


def test_golden_choice() -> None:
    # Means .45, .55 and .5: the highest wins, though a single run at 1e-3 was the best of all.
    sweep = rows({1e-4: [0.4, 0.5], 3e-4: [0.55, 0.55], 1e-3: [0.9, 0.1]})
    sweep += rows({1e-4: [0.7, 0.7], 3e-4: [0.1, 0.1], 1e-3: [0.0, 0.0]}, "ppo_clip")
    assert choose_setting(sweep) == {"troll": {"learning_rate": 3e-4}, "ppo_clip": {"learning_rate": 1e-4}}


def test_of_equal_settings_the_one_with_more_area_then_the_smaller() -> None:
    def one(rate: float, auc: float) -> SweepRow:
        return SweepRow("troll", {"learning_rate": rate}, 0, 0.5, auc, False)

    assert choose_setting([one(1e-3, 0.3), one(1e-4, 0.2)]) == {"troll": {"learning_rate": 1e-3}}
    assert choose_setting([one(1e-3, 0.3), one(1e-4, 0.3)]) == {"troll": {"learning_rate": 1e-4}}


def test_golden_usable_range() -> None:
    # Every setting's two seeds are .01 from their mean: squares 8 · 1e-4 over 4 degrees of freedom, s = .01·√2, of a mean of
    # two .01; Student's one-sided 95 % at 4 is 2.1318, so bounds are ±.0213. The tuned setting has .610: .5795 is wanted.
    # 1e-4 .610 − .0213 = .5887, 3e-4 .605 − .0213 = .5837: usable. 1e-3 .590: .5687 no, but .6113 may be. 3e-3 .550: .5713 no.
    sweep = rows({1e-4: [0.60, 0.62], 3e-4: [0.595, 0.615], 1e-3: [0.58, 0.60], 3e-3: [0.54, 0.56]})
    (found,) = usable_range(sweep)
    assert found.tried == (1e-4, 3e-4, 1e-3, 3e-3)
    assert (found.own, found.possible) == ((1e-4, 3e-4), (1e-4, 3e-4, 1e-3))
    assert found.width == (pytest.approx(math.log10(3)), pytest.approx(1.0))
    assert found.sentence == "troll: 1e-4 … 3e-4 (2 of 4 rates), 0.5 to 1.0 decades, open below"


def test_golden_area_and_start_count_too() -> None:
    # Without any spread bounds are the means. Tuned: final .6 and area .3, so .57 and .285 are wanted.
    def one(rate: float, final: float, area: float, fell: bool = False) -> list[SweepRow]:
        return [SweepRow("troll", {"learning_rate": rate}, seed, final, area, False, fell_below_start=fell) for seed in (0, 1)]

    good, slow = one(1e-4, 0.6, 0.3) + one(3e-4, 0.58, 0.29), one(3e-5, 0.59, 0.28)  # slow: the final value alone would do
    through_zero = [*one(1e-3, 0.6, 0.3)[:1], *one(1e-3, 0.6, 0.3, fell=True)[1:]]  # one run of two
    (found,) = usable_range(good + slow + through_zero)
    assert found.own == found.possible == (1e-4, 3e-4)
    assert found.sentence == "troll: 1e-4 … 3e-4 (2 of 4 rates), 0.5 decades"


def test_golden_by_a_baseline_of_its_own() -> None:
    # By all rows .60 is the best, so .57 is wanted, and .55 is not usable; by the second rate alone .55 is: .5225 is wanted.
    sweep = rows({1e-4: [0.60] * 2, 3e-4: [0.55] * 2, 1e-3: [0.53] * 2, 3e-3: [0.52] * 2})
    (found,), (against,) = usable_range(sweep), usable_range(sweep, baseline=rows({3e-4: [0.55] * 2}))
    assert (found.own, against.own, against.overall) == ((1e-4,), (1e-4, 3e-4, 1e-3), (1e-4, 3e-4, 1e-3))


def test_golden_by_the_best_of_all() -> None:
    # troll: best .60, so .575 is inside and .56 is not. Best of all .64: .608 is wanted, which nothing of troll's has.
    troll = rows({1e-5: [0.56] * 2, 3e-5: [0.575] * 2, 1e-4: [0.60] * 2, 3e-4: [0.58] * 2, 1e-3: [0.0] * 2})
    ppo = rows({1e-5: [0.62] * 2, 3e-5: [0.64] * 2, 1e-4: [0.1] * 2, 3e-4: [0.61] * 2, 1e-3: [0.0] * 2}, "ppo_clip")
    first, second = usable_range(troll + ppo)
    assert (first.own, first.overall) == ((3e-5, 1e-4, 3e-4), ())
    assert first.text(first.overall) == "none (0 of 5 rates)"
    # With a gap: no range that hides it, and the width is that of the wider side.
    assert second.sentence == "ppo_clip: 1e-5, 3e-5, 3e-4 (3 of 5 rates), 0.5 decades, open below"


def test_auto_is_beside_the_axis() -> None:
    sweep = rows({1e-4: [0.6] * 2, 3e-4: [0.59] * 2, 1e-3: [0.1] * 2}) + rows({"auto": [0.6] * 2})
    (found,) = usable_range(sweep)
    assert (found.tried, found.own) == ((1e-4, 3e-4, 1e-3, "auto"), (1e-4, 3e-4, "auto"))
    assert found.sentence == "troll: 1e-4 … 3e-4, auto (3 of 4 rates), 0.5 decades, open below"
    assert ordered(["auto", 3e-4, 1e-4, 3e-4]) == (1e-4, 3e-4, "auto")


def test_one_run_each_tells_nothing() -> None:
    (found,) = usable_range(rows({1e-4: [0.6], 3e-4: [0.5]}))
    assert (found.own, found.possible) == ((), ())
    assert found.sentence == "troll: cannot be told from one run each (2 rates)"
    assert usable_range(rows({1e-4: [0.6]}))[0].sentence == "troll: cannot be told from one run"


def test_the_other_swept_settings_have_a_range_each_against_one_best() -> None:
    few = rows({1e-4: [0.6, 0.6], 3e-4: [0.58, 0.58]}, num_iterations=1)
    many = rows({1e-4: [0.4, 0.4], 3e-4: [0.0, 0.0]}, num_iterations=4)
    one, four = usable_range(many + few)
    assert (one.label, one.own) == ("troll, num_iterations=1", (1e-4, 3e-4))
    assert (four.label, four.own) == ("troll, num_iterations=4", ())
    assert choose_setting(many + few) == {"troll": {"learning_rate": 1e-4, "num_iterations": 1}}


def test_rewards_below_zero() -> None:
    # Best −10: within 5 % is down to −10.5, and of the mean over the run, −5, down to −5.25.
    (found,) = usable_range(rows({1e-4: [-10.4] * 2, 3e-4: [-10.0] * 2, 1e-3: [-10.6] * 2}))
    assert found.own == (1e-4, 3e-4)


def test_where_all_failed_nothing_is_usable_but_something_is_chosen() -> None:
    failed = rows({1e-4: [-math.inf], 3e-4: [-math.inf]})
    assert usable_range(failed)[0].sentence == "troll: none (0 of 2 rates)"
    assert choose_setting(failed) == {"troll": {"learning_rate": 1e-4}}


def test_where_nobody_solved_anything_nothing_is_usable() -> None:
    never, sometimes = rows({1e-4: [0.0, 0.0], 3e-4: [0.0, 0.0]}), rows({1e-4: [0.4, 0.4], 3e-4: [0.0, 0.0]}, "dppo")
    assert [(found.own, found.overall) for found in usable_range(never)] == [((), ())]
    assert [(found.own, found.overall) for found in usable_range(never + sometimes)] == [((), ()), ((1e-4,), (1e-4,))]
    # A return of 0 is good where others are below.
    (found,) = usable_range(rows({1e-4: [0.0, 0.0], 3e-4: [-1.0, -1.0]}))
    assert found.own == (1e-4,)


def test_cells_are_means_of_what_was_measured() -> None:
    # (.2 + .4)/2; one of two collapsed; greedy and KL were measured once.
    pair = [
        SweepRow("dppo", {"learning_rate": 1e-4}, 1, 0.2, 0.1, True, None, None),
        SweepRow("dppo", {"learning_rate": 1e-4}, 0, 0.4, 0.3, False, 0.7, 0.01),
    ]
    (cell,) = cells(pair)
    assert (cell.final, cell.auc, cell.collapsed) == (pytest.approx(0.3), pytest.approx(0.2), 0.5)
    assert (cell.greedy, cell.kl, len(cell.rows)) == (0.7, 0.01, 2)


def test_an_axis_needs_a_value_in_every_row() -> None:
    with pytest.raises(ValueError, match="must be a number or 'auto' in every row; got None"):
        usable_range(rows({1e-4: [0.4]}), key="bound")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3e-05, "3e-5"),
        (0.0003, "3e-4"),
        (0.00316, "3.16e-3"),
        (0.05, "0.05"),
        (4, "4"),
        (0.0, "0"),
        ("tv", "tv"),
        (True, "True"),
        ([], "default"),
        (["rewards.py:short", "rewards.py:right"], "rewards.py:short,rewards.py:right"),
        ([64, 64], "[64, 64]"),
    ],
)
def test_values_for_people(value: object, expected: str) -> None:
    assert value_text(value) == expected


GRIDS = st.dictionaries(
    st.sampled_from([1e-5, 3e-5, 1e-4, 3e-4, 1e-3]), st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1
)


@given(GRIDS, GRIDS, st.randoms())
def test_what_is_usable_is_possible_and_order_does_not_matter(
    one: dict[float, tuple[float, float]], two: dict[float, tuple[float, float]], draw: random.Random
) -> None:
    sweep = rows(one) + rows(two, "dppo")
    mixed = draw.sample(sweep, len(sweep))
    assert choose_setting(sweep) == choose_setting(mixed)
    ranges = {found.contestant: found for found in usable_range(sweep)}
    assert {name: found.tried for name, found in ranges.items()} == {"troll": ordered([*one]), "dppo": ordered([*two])}
    for name, found in {one.contestant: one for one in usable_range(mixed)}.items():
        assert set(found.own) <= set(found.possible) <= set(found.tried)
        assert (found.own, found.overall, found.possible) == (ranges[name].own, ranges[name].overall, ranges[name].possible)
        if found.width is not None:
            assert 0 <= found.width[0] <= found.width[1] <= math.log10(100) + 1e-9


@given(GRIDS, st.floats(0, 1), st.floats(0, 1))
def test_a_laxer_share_never_narrows_the_range(grid: dict[float, tuple[float, float]], a: float, b: float) -> None:
    lax, strict = (set(usable_range(rows(grid), share=share)[0].own) for share in sorted((a, b)))
    assert strict <= lax


@given(st.lists(st.floats(0.2, 0.8), min_size=2, max_size=6), st.floats(0.5, 1))
def test_bounds_are_those_of_a_t_test(finals: list[float], share: float) -> None:
    """One setting alone: its spread is that of its own seeds, and its lower bound that of SciPy's 90 % interval."""
    assume(max(finals) - min(finals) > 1e-6)
    low = stats.ttest_1samp(finals, 0.0).confidence_interval(0.90).low
    wanted = share * sum(finals) / len(finals)
    assume(abs(low - wanted) > 1e-9)
    (found,) = usable_range(rows({1e-4: finals}), share=share)
    assert found.own == ((1e-4,) if low > wanted else ())
