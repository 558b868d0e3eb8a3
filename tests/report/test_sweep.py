"""Which setting is best, and how wide the range is: worked by hand, and what holds for every sweep."""

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from corral.report.sweep.ranges import SweepRow, cells, choose_setting, usable_range, value_text


def rows(finals: dict[float, list[float]], contestant: str = "troll", **more: object) -> list[SweepRow]:
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
    # troll: best .60, so .57 is just inside and .56 is not. Best of all .64: .608 is wanted, which nothing of troll's has.
    troll = rows({1e-5: [0.56], 3e-5: [0.57], 1e-4: [0.60], 3e-4: [0.58], 1e-3: [0.0]})
    ppo = rows({1e-5: [0.62], 3e-5: [0.64], 1e-4: [0.1], 3e-4: [0.61], 1e-3: [0.0]}, "ppo_clip")
    first, second = usable_range(troll + ppo)
    assert first.tried == (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    assert (first.own, first.overall) == ((3e-5, 1e-4, 3e-4), ())
    assert first.sentence == "troll: 3e-5 … 3e-4 (3 of 5 rates)"
    assert first.text(first.overall) == "none (0 of 5 rates)"
    assert second.sentence == "ppo_clip: 1e-5, 3e-5, 3e-4 (3 of 5 rates)"  # with a gap: no range that hides it


def test_the_other_swept_settings_have_a_range_each_against_one_best() -> None:
    few = rows({1e-4: [0.6, 0.6], 3e-4: [0.58, 0.58]}, num_iterations=1)
    many = rows({1e-4: [0.4, 0.4], 3e-4: [0.0, 0.0]}, num_iterations=4)
    one, four = usable_range(many + few)
    assert (one.label, one.own) == ("troll, num_iterations=1", (1e-4, 3e-4))
    assert (four.label, four.own) == ("troll, num_iterations=4", ())
    assert choose_setting(many + few) == {"troll": {"learning_rate": 1e-4, "num_iterations": 1}}


def test_rewards_below_zero() -> None:
    # Best −10: within 5 % is down to −10.5.
    (found,) = usable_range(rows({1e-4: [-10.4], 3e-4: [-10.0], 1e-3: [-10.6]}))
    assert found.own == (1e-4, 3e-4)


def test_where_all_failed_nothing_is_usable_but_something_is_chosen() -> None:
    failed = rows({1e-4: [-math.inf], 3e-4: [-math.inf]})
    assert usable_range(failed)[0].own == ()
    assert choose_setting(failed) == {"troll": {"learning_rate": 1e-4}}


def test_where_nobody_solved_anything_nothing_is_usable() -> None:
    never, sometimes = rows({1e-4: [0.0, 0.0], 3e-4: [0.0, 0.0]}), rows({1e-4: [0.4, 0.4], 3e-4: [0.0, 0.0]}, "dppo")
    assert [(found.own, found.overall) for found in usable_range(never)] == [((), ())]
    assert [(found.own, found.overall) for found in usable_range(never + sometimes)] == [((), ()), ((1e-4,), (1e-4,))]
    # A return of 0 is good where others are below.
    (found,) = usable_range(rows({1e-4: [0.0, 0.0], 3e-4: [-1.0, -1.0]}))
    assert found.own == (1e-4,)


def test_cells_are_means_of_what_was_measured() -> None:
    # (.2 + .4)/2; one of two collapsed; greedy was measured once, KL once and once infinite.
    pair = [
        SweepRow("dppo", {"learning_rate": 1e-4}, 1, 0.2, 0.1, True, None, math.inf),
        SweepRow("dppo", {"learning_rate": 1e-4}, 0, 0.4, 0.3, False, 0.7, 0.01),
    ]
    (cell,) = cells(pair)
    assert (cell.final, cell.auc, cell.collapsed) == (pytest.approx(0.3), pytest.approx(0.2), 0.5)
    assert (cell.greedy, cell.kl, cell.seeds) == (0.7, 0.01, (0, 1))


def test_unfair_and_broken_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"seeds \[0, 1\] .* but \[0\] with"):
        choose_setting(rows({1e-4: [0.4, 0.5], 3e-4: [0.9]}))
    with pytest.raises(ValueError, match="seed 0 twice"):
        choose_setting(rows({1e-4: [0.4]}) * 2)
    with pytest.raises(ValueError, match="no best could be told"):
        rows({1e-4: [math.nan]})
    with pytest.raises(ValueError, match="must be a number in every row; troll has None"):
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
    ],
)
def test_values_for_people(value: object, expected: str) -> None:
    assert value_text(value) == expected


GRIDS = st.dictionaries(
    st.sampled_from([1e-5, 3e-5, 1e-4, 3e-4, 1e-3]), st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1
)


@given(GRIDS, GRIDS, st.randoms())
def test_the_chosen_setting_is_usable_and_order_does_not_matter(
    one: dict[float, tuple[float, float]], two: dict[float, tuple[float, float]], draw: random.Random
) -> None:
    assume(all(sum(values) for values in [*one.values(), *two.values()]))  # where all have 0, nothing is usable
    sweep = rows({rate: [*values] for rate, values in one.items()})
    sweep += rows({rate: [*values] for rate, values in two.items()}, "dppo")
    mixed = draw.sample(sweep, len(sweep))
    chosen = choose_setting(sweep)
    assert chosen == choose_setting(mixed)
    ranges = {found.contestant: found for found in usable_range(sweep)}
    assert ranges == {found.contestant: found for found in usable_range(mixed)}
    for contestant, setting in chosen.items():
        assert setting["learning_rate"] in ranges[contestant].own
        assert set(ranges[contestant].overall) <= set(ranges[contestant].own)
    assert any(found.overall for found in ranges.values())


@given(GRIDS, st.floats(0, 1), st.floats(0, 1))
def test_a_laxer_share_never_narrows_the_range(grid: dict[float, tuple[float, float]], a: float, b: float) -> None:
    sweep = rows({rate: [*values] for rate, values in grid.items()})
    lax, strict = (set(usable_range(sweep, share=share)[0].own) for share in sorted((a, b)))
    assert strict <= lax
