"""k1, k2 and k3: their means under p by enumeration, their signs, and digits kept where the ratio is 1."""

import math

import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence import kl_k1, kl_k2, kl_k3
from tolerance import assert_close

DTYPES = [torch.float32, torch.float64]
INF = math.inf
ESTIMATES = [kl_k1, kl_k2, kl_k3]


def log_probs(*p: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log().to(dtype)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(estimate, logp_p: Tensor, logp_q: Tensor) -> Tensor:
    """The exact mean of an estimate over tokens drawn from p."""
    return (logp_p.exp() * estimate(logp_p, logp_q)).sum(-1)


@st.composite
def policies(draw) -> tuple[Tensor, Tensor]:
    """Two distributions that may both draw every token."""
    size = draw(st.integers(2, 8))
    weights = st.lists(st.integers(1, 30), min_size=size, max_size=size)
    return tuple(log_probs(*(w / sum(ws) for w in ws)) for ws in (draw(weights), draw(weights)))


LOG_RATIOS = st.floats(-20.0, 20.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_estimates(dtype):
    # Tokens with p/q = 2, ½, 1:  k1 = ln 2, −ln 2, 0;  k2 = ½ (ln 2)²;  k3 = q/p − 1 − ln(q/p) = −½ + ln 2, 1 − ln 2, 0.
    p, q = log_probs(0.5, 0.25, 0.25, dtype=dtype), log_probs(0.25, 0.5, 0.25, dtype=dtype)
    ln2 = math.log(2)
    assert_close(kl_k1(p, q), float64(ln2, -ln2, 0.0))
    assert_close(kl_k2(p, q), float64(ln2**2 / 2, ln2**2 / 2, 0.0))
    assert_close(kl_k3(p, q), float64(ln2 - 0.5, 1 - ln2, 0.0))


def test_golden_means():
    # p = (½, ½), q = (¼, ¾): KL = −½ ln(1 − 4/16) = .14384104.
    # The mean of k2 is ¼ (ln² 2 + ln² ⅔) = ¼ (.48045301 + .16440195) = .16121374.
    p, q = log_probs(0.5, 0.5), log_probs(0.25, 0.75)
    kl = torch.tensor(-0.5 * math.log(0.75), dtype=torch.float64)
    assert_close(mean(kl_k1, p, q), kl)
    assert_close(mean(kl_k3, p, q), kl)
    assert round(mean(kl_k2, p, q).item(), 8) == 0.16121374


@given(policies())
def test_the_means_of_k1_and_k3_are_the_kl(pair):
    p, q = pair
    kl = torch.tensor(scipy.special.rel_entr(p.exp().numpy(), q.exp().numpy()).sum())
    assert_close(mean(kl_k1, p, q), kl)
    assert_close(mean(kl_k3, p, q), kl)


def test_k3_misses_what_p_never_draws():
    # p = (1, 0), q = (½, ½): KL = ln 2, yet the one token p draws says ½ − 1 + ln 2. The gap is q's mass beyond p's support.
    k3 = kl_k3(torch.tensor(0.0), torch.tensor(0.5).log())
    assert_close(k3, torch.tensor(math.log(2) - 0.5))


@given(policies())
def test_the_mean_of_k2_is_off_at_third_order_only(pair):
    # Mixing q towards p by t shrinks x to O(t), and the bias |mean k2 − KL| to O(t³): at most ⅙ e^|x| E|x|³.
    p, q = pair
    for t in (1.0, 0.1, 0.01):
        mixed = torch.log((1 - t) * p.exp() + t * q.exp())
        x = mixed - p
        bias = (mean(kl_k2, p, mixed) - mean(kl_k3, p, mixed)).abs()
        assert bias <= x.abs().max().exp() / 6 * (p.exp() * x.abs() ** 3).sum() + 1e-15


@given(LOG_RATIOS, st.floats(-50.0, 0.0))
def test_k2_and_k3_are_never_negative(x, logp):
    p, q = float64(logp), float64(logp + x)
    assert (kl_k2(p, q) >= 0).all()
    assert (kl_k3(p, q) >= 0).all()


@given(LOG_RATIOS)
def test_the_estimates_are_functions_of_the_ratio_alone(x):
    p, shifted = float64(-1.0), float64(-33.0)
    for estimate in ESTIMATES:
        assert_close(estimate(shifted, shifted + x), estimate(p, p + x))


@given(LOG_RATIOS)
def test_k1_changes_sign_and_k2_does_not_when_the_policies_change_places(x):
    p, q = float64(0.0), float64(x)
    assert torch.equal(kl_k1(p, q), -kl_k1(q, p))
    assert torch.equal(kl_k2(p, q), kl_k2(q, p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [1e-2, -1e-2, 1e-4, -1e-4, 1e-7, -1e-7, 1e-12])
def test_k3_keeps_its_digits_where_the_ratio_is_1(x, dtype):
    # k3(x) = x²/2 + x³/6 + x⁴/24 + …; written as a ratio minus 1 minus a log it is 0 or 6e-8 in float32 from x = 1e-4 on.
    q = torch.tensor(x, dtype=dtype)
    rounded = q.item()
    expected = rounded**2 / 2 + rounded**3 / 6 + rounded**4 / 24 + rounded**5 / 120
    assert_close(kl_k3(torch.zeros((), dtype=dtype), q), torch.tensor(expected, dtype=torch.float64), atol=0)


@given(st.floats(-60.0, 60.0))
def test_k3_agrees_with_its_formula_far_from_1(x):
    expected = math.exp(x) - 1 - x
    for dtype in DTYPES:
        out = kl_k3(torch.zeros(1, dtype=dtype), float64(x).to(dtype))
        # float32 rounds x itself by up to 2e-6, and eˣ with it.
        assert_close(out, float64(expected), atol=1e-6 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_on_policy_every_estimate_is_exactly_0_and_so_is_its_slope_but_for_k1(estimate):
    logp = torch.tensor([-0.1, -3.0, -70.0])
    q = logp.clone().requires_grad_()
    value = estimate(logp, q)
    assert value.tolist() == [0.0] * 3
    (gradient,) = torch.autograd.grad(value.sum(), q)
    assert gradient.tolist() == [-1.0 if estimate is kl_k1 else 0.0] * 3


def test_a_token_that_q_cannot_draw_is_infinitely_far():
    assert [estimate(torch.tensor(-1.0), torch.tensor(-INF)).item() for estimate in ESTIMATES] == [INF] * 3


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_estimates_gradcheck(estimate):
    p = float64(-1.0, -2.0, -0.5, -3.0).requires_grad_()
    q = float64(-1.3, -0.2, -0.500001, -9.0).requires_grad_()
    assert gradcheck(estimate, (p, q))


def test_the_gradients_have_their_closed_forms():
    # In log q, with x = log q − log p: k1 → −1;  k2 → x;  k3 → eˣ − 1.  Here eˣ = 2 and ½.
    p, q = log_probs(0.25, 0.5), log_probs(0.5, 0.25).requires_grad_()
    expected = {kl_k1: float64(-1.0, -1.0), kl_k2: float64(math.log(2), -math.log(2)), kl_k3: float64(1.0, -0.5)}
    for estimate in ESTIMATES:
        (gradient,) = torch.autograd.grad(estimate(p, q).sum(), q)
        assert_close(gradient, expected[estimate])


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_samples_are_computed_in_float32(estimate, dtype):
    p, q = -torch.rand(6).to(dtype), -torch.rand(6).to(dtype)
    out = estimate(p, q)
    assert out.dtype == torch.float32
    assert torch.equal(out, estimate(p.float(), q.float()))


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_estimates_broadcast(estimate):
    p, q = -torch.rand(2, 1), -torch.rand(3)
    out = estimate(p, q)
    assert out.shape == (2, 3)
    assert_close(out[1, 2], estimate(p[1, 0], q[2]))
