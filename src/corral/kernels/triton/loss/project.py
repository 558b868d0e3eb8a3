"""Divergences and the projection on one row's registers: `divergence` and `projection.categorical_kl`, lane by lane.

Padding lanes hold −inf in both policies and count for nothing.
"""

from typing import no_type_check

import triton
import triton.language as tl

import corral.numerics as numerics
from corral.projection import categorical_kl as reference

RULED_OUT: tl.constexpr = tl.constexpr(reference.RULED_OUT)
LOG_RATIO_MAX: tl.constexpr = tl.constexpr(numerics.LOG_RATIO_MAX)
CERTAIN: tl.constexpr = tl.constexpr(numerics.CERTAIN)


@triton.jit
@no_type_check
def log_softmax(x):
    """x − log Σ eˣ."""
    top = tl.max(x, 0)
    return x - (top + tl.log(tl.sum(tl.exp(x - top), 0)))


@triton.jit
@no_type_check
def kl_term(p, q, gap):
    """p (eˣ − 1 − x) for x = log q − log p: by its series where that is small, as q − p − p x elsewhere."""
    near = tl.abs(gap) < 0.5
    x = tl.where(near, gap, 0.0)
    series = 1 / 40320 + x * (1 / 362880)
    series = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * series))
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * series))
    return tl.where(near, p * x * x * series, q - p - p * gap)


@triton.jit
@no_type_check
def kl_elements(log_p, log_q):
    """The terms of KL(p‖q): q where p = 0, inf where only q is."""
    both = (log_p > -float("inf")) & (log_q > -float("inf"))
    term = kl_term(tl.exp(log_p), tl.exp(log_q), tl.where(both, log_q - log_p, 1.0))
    return tl.where((log_p > -float("inf")) & (log_q == -float("inf")), float("inf"), term)


@triton.jit
@no_type_check
def expm1(x):
    """eˣ − 1, by its series where that is small."""
    near = tl.abs(x) < 0.5
    y = tl.where(near, x, 0.0)
    series = 1 / 5040 + y * (1 / 40320 + y * (1 / 362880 + y * (1 / 3628800)))
    series = 1.0 + y * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * series)))))
    return tl.where(near, y * series, tl.exp(x) - 1.0)


@triton.jit
@no_type_check
def log1p(x):
    """log(1 + x), with the rounding of 1 + x undone."""
    one_more = 1.0 + x
    off = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / off))


@triton.jit
@no_type_check
def abs_difference(log_p, log_q):
    """|p − q| as max(p, q) (1 − e^−|log p − log q|)."""
    neither = (log_p == -float("inf")) & (log_q == -float("inf"))
    gap = tl.where(neither, 0.0, log_p) - tl.where(neither, 0.0, log_q)
    return tl.exp(tl.maximum(log_p, log_q)) * -expm1(-tl.abs(gap))


@triton.jit
@no_type_check
def binary_kl(log_p, log_q):
    """KL between (p, 1 − p) and (q, 1 − q), as `divergence.binary_kl` has it."""
    sure_p, sure_q = log_p >= 0.0, log_q >= 0.0
    rest_p = tl.where(sure_p, -float("inf"), tl.log(-expm1(tl.where(sure_p, -1.0, log_p))))
    rest_q = tl.where(sure_q, -float("inf"), tl.log(-expm1(tl.where(sure_q, -1.0, log_q))))
    both = (rest_p > -float("inf")) & (rest_q > -float("inf"))
    gap = tl.where(both, rest_q - rest_p, 1.0)
    step = log_q - log_p
    near = both & (tl.abs(gap) < 0.5) & (tl.abs(step) < 0.5)  # further apart nothing cancels, and e^step may overflow
    p = tl.where(near, log_p, -1.0)
    step = tl.where(near, step, 0.0)
    gap = tl.where(near, log1p(tl.exp(p) * expm1(step) / expm1(p)), gap)
    other = kl_term(tl.exp(rest_p), tl.exp(rest_q), gap)
    other = tl.where((rest_p > -float("inf")) & (rest_q == -float("inf")), float("inf"), other)
    return kl_elements(log_p, log_q) + other


@triton.jit
@no_type_check
def tilt(t, log_old, p, d, common):
    """r_t ∝ old · e^{t d}: log r, KL(r‖old) and Var_r(d)."""
    step = t * d
    x = tl.where(common, log_old + step, -float("inf"))
    top = tl.max(x, 0)
    log_normaliser = top + tl.log(tl.sum(tl.exp(x - top), 0))
    gap = tl.where(common, log_normaliser - step, 0.0)
    log_r = tl.where(common, log_old - gap, -float("inf"))
    r = tl.exp(log_r)
    mean = tl.sum(r * d, 0)
    return log_r, tl.sum(kl_term(r, p, gap), 0), tl.sum(r * (d - mean) * (d - mean), 0)


@triton.jit
@no_type_check
def project(new, old, bound):
    """The row's projection: log r, t, whether the bound binds, KL(r‖old), converged. `find_root` and `_project_rows` in one."""
    common = (new > RULED_OUT) & (old > RULED_OUT)
    overlap = tl.max(common.to(tl.int32), 0) > 0
    lost = tl.max(((old > RULED_OUT) & ~common).to(tl.int32), 0) > 0
    old_common = tl.where(common, old, -float("inf"))
    top = tl.where(overlap, tl.max(old_common, 0), 0.0)
    held = top + tl.log(tl.sum(tl.exp(old_common - top), 0))
    cost = tl.where(lost, -held, 0.0)
    slack = bound - cost
    log_old = tl.where(common, old - held, -float("inf"))
    p = tl.exp(log_old)
    d = tl.where(common, new - old, 0.0)
    # Less a likely token's, as the reference does it, or the mean of several that are equally likely.
    guess = tl.where(common, log_old + d / 8, -float("inf"))
    likeliest = guess == tl.max(guess, 0)
    d = tl.where(common, d - tl.sum(tl.where(likeliest, d, 0.0), 0) / tl.sum(likeliest.to(tl.float32), 0), 0.0)
    _end_r, kl_common, _end_variance = tilt(1.0, log_old, p, d, common)
    fits = kl_common <= slack
    binding = overlap & (slack > 0.0) & (kl_common > slack)

    target = tl.sqrt(2.0 * tl.maximum(slack, 0.0))
    x = tl.where(binding, tl.sqrt(slack / kl_common), 1.0)
    low, high, last, older = x * 0.0, x * 0.0 + 1.0, x * 0.0 + 1.0, x * 0.0 + 1.0
    todo = tl.where(binding, 24, 0)
    converged = ~binding
    while todo > 0:
        _trial_r, kl, variance = tilt(x, log_old, p, d, common)
        log_slope = x * variance / kl
        root_kl = tl.sqrt(2.0 * kl)
        steep = log_slope * x > 4.0
        value = tl.where(steep, 0.5 * target * tl.log(kl / slack), root_kl - target)
        slope = tl.where(steep, 0.5 * target * log_slope, 0.5 * root_kl * log_slope)
        low = tl.where(value < 0.0, tl.maximum(low, x), low)
        high = tl.where(value > 0.0, tl.minimum(high, x), high)
        newton = x - value / slope
        exact = tl.abs(value) <= 4 * 1.1920929e-07 * target
        short = tl.abs(newton - x) <= 2.4222e-05 * x  # eps^⅔
        good = (newton > low) & (newton < high) & (tl.abs(newton - x) <= 0.5 * older)
        proposal = tl.where(good, newton, tl.where(short, x, 0.5 * (low + high)))
        older = last
        last = tl.abs(proposal - x)
        x = tl.where(exact, x, proposal)
        converged = exact | short
        todo = tl.where(converged, 0, todo - 1)

    t = tl.where(binding, x, tl.where(fits & overlap, 1.0, 0.0))
    log_r, kl_after, _last_variance = tilt(t, log_old, p, d, common)
    log_r = tl.where(overlap, log_r, old)
    return log_r, t, binding, tl.where(overlap, kl_after + cost, 0.0), converged & overlap & (slack >= 0.0)
