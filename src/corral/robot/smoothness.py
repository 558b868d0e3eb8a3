"""Smoothness of motion: jerk, spectral arc length, torque rate, and the autocorrelation of exploration."""

import numpy as np

from corral.robot.tracking import Array

_PADDING = 16
"""Zeros behind a motion, in multiples of its length: the arc of the spectrum is then resolved to a per mille."""


def log_dimensionless_jerk(velocities: Array, dt: float) -> Array:
    """Minus the logarithm of the squared jerk, freed of duration and size; nearer to 0 is smoother.

        LDJ = − log( (duration³ / peak²) ∫ ‖v̈‖² dt )          peak = max ‖v‖

    −∞ never occurs but for noise without end; a robot that does not move has NaN.

    Args:
        velocities: [* T D], T ≥ 4.
        dt: seconds from one to the next.
    Returns:
        [*].
    Ref:
        Balasubramanian et al. 2015, J. NeuroEng. Rehab. 12:112. Invariant: a minimum-jerk motion has −log 204.8.
    """
    _check("log_dimensionless_jerk", velocities, 4)
    jerk = np.diff(velocities, 2, axis=-2) / dt**2
    peak = np.linalg.norm(velocities, axis=-1).max(-1)
    duration = dt * velocities.shape[-2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(-np.log(duration**3 / peak**2 * np.square(jerk).sum((-2, -1)) * dt))


def spectral_arc_length(velocities: Array, dt: float, *, cutoff: float = 10.0, threshold: float = 0.05) -> Array:
    """Minus the length of the speed's normalised spectrum up to where it has faded; nearer to 0 is smoother.

        SPARC = − ∫₀^ω_c √( 1/ω_c² + (dV̂/dω)² ) dω          V̂ = |V(ω)| / V(0)
        ω_c: the highest frequency at most `cutoff` where V̂ ≥ `threshold`

    Args:
        velocities: [* T D], T ≥ 4.
        dt: seconds from one to the next.
        cutoff: Hz; human and robot motion lies below 10.
        threshold: V̂ below which a spectrum counts as faded.
    Returns:
        [*]; NaN for a robot that does not move.
    Ref:
        Balasubramanian et al. 2015, J. NeuroEng. Rehab. 12:112. Invariant: size and duration do not matter.
    """
    _check("spectral_arc_length", velocities, 4)
    speed = np.linalg.norm(velocities, axis=-1)
    size = _PADDING * speed.shape[-1]
    frequency = np.fft.rfftfreq(size, dt)
    spectrum = np.abs(np.fft.rfft(speed, size, axis=-1))
    with np.errstate(invalid="ignore"):
        spectrum = spectrum / spectrum[..., :1]
    lengths = [_arc(row, frequency, cutoff, threshold) for row in spectrum.reshape(-1, len(frequency))]
    return np.asarray(-np.array(lengths).reshape(speed.shape[:-1]))


def torque_rate(actions: Array, dt: float) -> Array:
    """Mean ‖Δu‖ / Δt [*] of actions [* T D]: what motors and gears suffer from."""
    _check("torque_rate", actions, 2)
    return np.asarray(np.linalg.norm(np.diff(actions, axis=-2), axis=-1).mean(-1) / dt)


def lag_autocorrelation(deviations: Array, lag: int) -> float:
    """Correlation of exploration with itself `lag` steps later, over episodes, times and joints.

        Σ x_t x_{t+lag} / √( Σ x_t² Σ x_{t+lag}² )

    Args:
        deviations: [E T D], executed minus mean motion.
        lag: steps, 1 ≤ lag < T.
    """
    _check("lag_autocorrelation", deviations, lag + 1)
    if lag < 1:
        raise ValueError(f"lag_autocorrelation: `lag` is a number of steps ≥ 1; got {lag}.")
    early, late = deviations[..., :-lag, :], deviations[..., lag:, :]
    return float((early * late).sum() / np.sqrt(np.square(early).sum() * np.square(late).sum()))


def _arc(spectrum: Array, frequency: Array, cutoff: float, threshold: float) -> float:
    if not np.isfinite(spectrum).all():
        return np.nan
    last = np.flatnonzero((frequency <= cutoff) & (spectrum >= threshold))[-1]
    return float(np.hypot(np.diff(frequency[: last + 1]) / frequency[last], np.diff(spectrum[: last + 1])).sum())


def _check(name: str, values: Array, least: int) -> None:
    if values.ndim < 2 or values.shape[-2] < least:
        raise ValueError(f"{name}: needs [* T D] with T ≥ {least}; got {list(values.shape)}.")
