"""Smoothness of motions, against closed forms and an independent integral."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from corral.lab.jobs.robot.evaluate import lag_autocorrelation, log_dimensionless_jerk, spectral_arc_length, torque_rate


def minimum_jerk(steps: int = 2000, duration: float = 1.0, size: float = 1.0) -> tuple[np.ndarray, float]:
    """Velocities [T 1] of x = size (10 s³ − 15 s⁴ + 6 s⁵), s = t / duration, at the middles of steps."""
    s = (np.arange(steps) + 0.5) / steps
    return (size / duration * 30 * s**2 * (1 - s) ** 2)[:, None], duration / steps


def test_golden_jerk_of_a_minimum_jerk_motion() -> None:
    # ∫₀¹ (60 − 360 s + 360 s²)² ds = 720, peak velocity 1.875: 720 / 1.875² = 204.8.
    assert log_dimensionless_jerk(*minimum_jerk(20_000)) == pytest.approx(-np.log(204.8), abs=1e-3)


@given(st.floats(0.2, 5.0), st.floats(0.1, 10.0))
def test_size_and_duration_do_not_matter(duration: float, size: float) -> None:
    plain, changed = minimum_jerk(500), minimum_jerk(500, duration, size)
    assert log_dimensionless_jerk(*changed) == pytest.approx(log_dimensionless_jerk(*plain), abs=1e-9)
    # Frequencies stretch with the duration, so the cutoff must not bind.
    arcs = [spectral_arc_length(*motion, cutoff=np.inf) for motion in (plain, changed)]
    assert arcs[0] == pytest.approx(arcs[1], abs=1e-9)


def test_spectral_arc_length_against_the_integral() -> None:
    # V̂(f) = |∫ v(t) e^{−2πift} dt| by quadrature; arc length of (f/f_c, V̂) on a fine grid up to the same f_c.
    velocity, dt = minimum_jerk(400)

    def part(function: Callable[[float], float], f: float) -> float:
        return quad(lambda t: 30 * t**2 * (1 - t) ** 2 * function(2 * np.pi * f * t), 0, 1, epsabs=1e-12)[0]

    grid = np.linspace(0, 5, 2001)
    spectrum = np.array([np.hypot(part(np.cos, f), part(np.sin, f)) for f in grid])
    last = np.flatnonzero(spectrum >= 0.05)[-1]
    expected = -np.hypot(np.diff(grid[: last + 1]) / grid[last], np.diff(spectrum[: last + 1])).sum()
    assert spectral_arc_length(velocity, dt) == pytest.approx(expected, rel=2e-2)


def test_shaking_is_less_smooth() -> None:
    velocity, dt = minimum_jerk(200, 2.0)
    shaken = velocity + 0.2 * np.sin(2 * np.pi * 6 * dt * np.arange(200))[:, None]
    assert log_dimensionless_jerk(shaken, dt) < log_dimensionless_jerk(velocity, dt) - 1
    assert spectral_arc_length(shaken, dt) < spectral_arc_length(velocity, dt) - 0.1


def test_batches_are_rows() -> None:
    velocity = np.random.default_rng(0).normal(size=(3, 4, 20, 2)).cumsum(-2)
    for measure in (log_dimensionless_jerk, spectral_arc_length, torque_rate):
        whole = measure(velocity, 0.02)
        assert whole.shape == (3, 4)
        assert whole[1, 2] == pytest.approx(measure(velocity[1, 2], 0.02))


def test_a_robot_that_does_not_move_has_no_smoothness() -> None:
    still = np.zeros((2, 10, 3))
    assert np.isnan(log_dimensionless_jerk(still, 0.1)).all()
    assert np.isnan(spectral_arc_length(still, 0.1)).all()


def test_golden_torque_rate() -> None:
    # Steps of (3, 4) and then none: ‖Δu‖ = 5, 0; mean 2.5, over 0.1 s: 25.
    assert torque_rate(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]), 0.1) == pytest.approx(25.0)


def test_golden_autocorrelation() -> None:
    x = np.array([[[1.0], [2.0], [-1.0]]])
    # Lag 1: (1·2 + 2·−1) / √(5 · 5) = 0. Lag 2: −1 / 1 = −1.
    assert lag_autocorrelation(x, 1) == pytest.approx(0.0)
    assert lag_autocorrelation(x, 2) == pytest.approx(-1.0)
    smooth = np.ones((2, 8, 3))
    assert lag_autocorrelation(smooth, 3) == pytest.approx(1.0)
