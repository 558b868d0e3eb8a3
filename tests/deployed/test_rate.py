"""The rate controller, on a quadratic worked by hand and at its limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import RateController


def test_golden_on_a_quadratic():
    # D = rate², δ = 1, so the rate that is wanted is 1. From 4: (1/16)^.35 = e^(−.35 · 2.772589) = .378929, 4 · .378929 =
    # 1.515717, which is 4^.3; then 4^.09 = 1.132884, then 4^.027 = 1.038140: log rate shrinks by 1 − 2 · .35 = .3.
    controller, rate = RateController(), 4.0
    for expected in (4**0.3, 4**0.09, 4**0.027):
        rate *= controller.update(rate**2, 1.0)
        assert rate == pytest.approx(expected, rel=1e-12)
    assert rate == pytest.approx(1.038140, abs=1e-6)
    assert controller.scale == pytest.approx(rate / 4)


def test_golden_limits():
    # (1 / 1e6)^.35 = .0079 < ¼;  (1 / 1e-6)^.35 = 126 > 1.5.
    controller = RateController()
    assert controller.update(1e6, 1.0) == 0.25
    assert controller.update(1e-6, 1.0) == 1.5
    assert controller.update(0.0, 1.0) == 1.5
    assert controller.update(math.nan, 1.0) == controller.update(math.inf, 1.0) == 0.25
    assert controller.scale == pytest.approx(0.25 * 1.5 * 1.5 * 0.25 * 0.25)


@given(start=st.floats(1e-4, 1e4), curve=st.floats(1e-3, 1e3), bound=st.floats(1e-3, 1))
def test_any_quadratic_is_brought_to_its_bound(start, curve, bound):
    controller, rate = RateController(), start
    for _ in range(80):
        rate *= controller.update(curve * rate**2, bound)
    assert curve * rate**2 == pytest.approx(bound, rel=1e-6)


def test_a_saved_controller_goes_on():
    first, second = RateController(), RateController()
    first.update(7.0, 1.0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.update(3.0, 1.0) == first.update(3.0, 1.0)
    assert second.scale == first.scale


@pytest.mark.parametrize("state", [{}, {"scale": 0.0}, {"scale": math.nan}, {"scale": "1"}])
def test_a_broken_state_is_refused(state):
    with pytest.raises(ValueError, match="RateController: a saved `scale` is a number > 0"):
        RateController().load_state_dict(state)


@pytest.mark.parametrize("bad", [{"power": 0.0}, {"power": 1.0}, {"low": 0.0}, {"low": 2.0}, {"high": 0.5}, {"high": math.inf}])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError, match="RateController: "):
        RateController(**bad)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_to_aim_at_is_a_number(bound):
    with pytest.raises(ValueError, match="`bound` is a divergence > 0 and finite"):
        RateController().update(1.0, bound)
