"""Divergences of "this token or any other": the paper's numbers, the ends of the scale, and below the whole distribution's."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence import binary_kl, binary_tv, categorical_kl, categorical_tv
from corral.support import gather_support, top_k_support
from tolerance import assert_close

DTYPES = [torch.float32, torch.float64]
INF = math.inf
SLACK = 1e-12
"""What rounding may add to either side of an inequality in float64."""


def log_of(*p: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log().to(dtype)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exact_kl(logp_p: Tensor, logp_q: Tensor) -> Tensor:
    """p ln(p/q) + (1 − p) ln((1 − p)/(1 − q)) with 100 digits, rounded once at the end."""
    with localcontext() as context:
        context.prec = 100
        rows = [(Decimal(a).exp(), Decimal(b).exp()) for a, b in zip(logp_p.tolist(), logp_q.tolist(), strict=True)]
        return float64(*(float(p * (p / q).ln() + (1 - p) * ((1 - p) / (1 - q)).ln()) for p, q in rows))


PROBABILITIES = st.floats(1e-6, 1 - 1e-6)


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_examples_of_the_paper(dtype):
    # 1e-4 → 1e-2:  TV = .0099,  KL(old‖new) = 1e-4 ln .01 + .9999 ln(.9999/.99) = −.00046052 + .00994934 = .00948882.
    # .99 → .80:    TV = .19,    KL(old‖new) = .99 ln(.99/.8) + .01 ln(.01/.2) = .21096228 − .02995732 = .18100496.
    old, new = log_of(1e-4, 0.99, dtype=dtype), log_of(1e-2, 0.80, dtype=dtype)
    assert_close(binary_tv(old, new), float64(0.0099, 0.19))
    kl = float64(1e-4 * math.log(0.01) + 0.9999 * math.log(1.01), 0.99 * math.log(0.99 / 0.8) + 0.01 * math.log(0.05))
    assert_close(binary_kl(old, new), kl)
    torch.testing.assert_close(kl, float64(0.00948882, 0.18100496), atol=1e-8, rtol=0)


def test_the_other_direction_is_another_number():
    # KL(new‖old) of .99 → .80: .8 ln(.8/.99) + .2 ln(.2/.01) = −.17047457 + .59914645 = .42867188.
    value = binary_kl(log_of(0.80), log_of(0.99))
    assert_close(value, float64(0.8 * math.log(0.8 / 0.99) + 0.2 * math.log(20)))
    assert round(value.item(), 8) == 0.42867188


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [0.0, 0.01, 0.1, 0.3, 0.49])
def test_half_against_half_plus_or_minus_x(x, dtype):
    # ½ ln(½/(½+x)) + ½ ln(½/(½−x)) = −½ ln(1 − 4x²), the same for both signs.
    half, both = log_of(0.5, 0.5, dtype=dtype), log_of(0.5 + x, 0.5 - x, dtype=dtype)
    assert_close(binary_kl(half, both), torch.full((2,), -0.5 * math.log1p(-4 * x**2), dtype=torch.float64))
    assert_close(binary_tv(half, both), torch.full((2,), x, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_scale(dtype):
    # KL(1‖½) = KL(0‖½) = ln 2;  KL(½‖1) = KL(½‖0) = inf;  KL(1‖1) = KL(0‖0) = 0;  KL(1‖0) = KL(0‖1) = inf.
    p, q = (
        log_of(1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0, dtype=dtype),
        log_of(0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, dtype=dtype),
    )
    assert_close(binary_kl(p, q), float64(math.log(2), math.log(2), INF, INF, 0.0, 0.0, INF, INF))
    assert_close(binary_tv(p, q), float64(0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0))


def test_a_certain_token_against_a_likely_one():
    # KL(1‖q) = −ln q, however near q is to 1.
    q = torch.tensor([-1e-9, -1e-3, -0.5, -5.0, -50.0])
    assert_close(binary_kl(torch.zeros(5), q), -q, atol=0)


def test_a_log_probability_rounded_above_0_is_certain():
    assert_close(binary_kl(torch.tensor(1e-7), torch.tensor(0.5).log()), torch.tensor(math.log(2)))
    assert binary_kl(torch.tensor(1e-7), torch.tensor(0.0)) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_next_to_certain_keeps_its_digits(dtype):
    # log p = −1e-9 is 1 − p = 1e-9, which 1 − eˣ would round to 0 in float32.
    p = torch.tensor([-1e-9, -1e-9, -1e-6, -3e-8, -1e-20], dtype=dtype)
    q = torch.tensor([-1e-6, -0.5, -1e-9, -2e-8, -1e-15], dtype=dtype)
    assert_close(binary_kl(p, q), exact_kl(p, q), rtol=1e-5, atol=0)
    # First row: (1e-6 − 1e-9) − 1e-9 ln 1000 = 9.92092245e-7, up to 5e-13.
    torch.testing.assert_close(binary_kl(p, q)[0].item(), 9.92092245e-7, rtol=1e-5, atol=0)
    assert_close(binary_tv(p, q), (p.double().expm1() - q.double().expm1()).abs(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_next_to_each_other_and_to_certainty_keep_their_digits(dtype):
    # 1 − p and 1 − q are about 1e-4 or 1e-2 and 0.1 % apart: their logarithms would cancel to four of float32's seven digits.
    p = torch.tensor([-1e-4, -1e-2], dtype=dtype)
    assert_close(binary_kl(p, 1.001 * p), exact_kl(p, 1.001 * p), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_next_to_impossible_keeps_its_digits(dtype):
    p = torch.tensor([-80.0, -80.0, -3.0, -40.0], dtype=dtype)
    q = torch.tensor([-70.0, -1.0, -75.0, -41.0], dtype=dtype)
    assert_close(binary_kl(p, q), exact_kl(p, q), rtol=1e-5, atol=0)
    assert_close(binary_tv(p, q), (p.double().exp() - q.double().exp()).abs(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_rises_from_next_to_impossible_is_far_and_finite(dtype):
    # p is 0 in float32 (the first three) or in both, and q/p = e^90 … e^900 overflows: KL(0‖q) = −ln(1 − q).
    p = torch.tensor([-100.0, -105.0, -200.0, -900.0], dtype=dtype, requires_grad=True)
    q = torch.tensor([-9.0, -1.5, -1.0, -3.0], dtype=dtype, requires_grad=True)
    kl = binary_kl(p, q)
    assert_close(kl, -torch.log1p(-q.detach().double().exp()), atol=0)
    # ∂KL/∂log q = (q − p)/(1 − q) = q/(1 − q).
    gradient_p, gradient_q = torch.autograd.grad(kl.sum(), (p, q))
    assert_close(gradient_q, 1 / torch.expm1(-q.detach().double()), atol=0)
    assert_close(gradient_p, torch.zeros(4))


# ---------------------------------------------------------------------------------------------------- oracle and properties


@given(PROBABILITIES, PROBABILITIES)
def test_binary_kl_agrees_with_exact_arithmetic(p, q):
    for dtype in DTYPES:
        a, b = log_of(p, dtype=dtype), log_of(q, dtype=dtype)
        assert_close(binary_kl(a, b), exact_kl(a, b))


@given(PROBABILITIES, PROBABILITIES)
def test_binary_tv_is_the_absolute_difference(p, q):
    assert_close(binary_tv(log_of(p), log_of(q)), float64(abs(p - q)))


@given(PROBABILITIES, PROBABILITIES)
def test_the_complement_is_as_far(p, q):
    # For instance KL(.3‖.45) = KL(.7‖.55): "this token" and "any other" change places.
    assert_close(binary_kl(log_of(p), log_of(q)), binary_kl(log_of(1 - p), log_of(1 - q)))
    assert_close(binary_tv(log_of(p), log_of(q)), binary_tv(log_of(1 - p), log_of(1 - q)))


def test_golden_complement():
    # .3 ln(.3/.45) + .7 ln(.7/.55) = −.12163953 + .16881344 = .04717391
    expected = 0.3 * math.log(0.3 / 0.45) + 0.7 * math.log(0.7 / 0.55)
    assert_close(binary_kl(log_of(0.3, 0.7), log_of(0.45, 0.55)), float64(expected, expected))
    assert round(expected, 8) == 0.04717391


@given(PROBABILITIES, PROBABILITIES)
def test_pinskers_inequality_holds_for_two_ways(p, q):
    kl = binary_kl(log_of(p), log_of(q))
    assert (kl >= 0).all()
    assert (binary_tv(log_of(p), log_of(q)) ** 2 <= kl / 2 + SLACK).all()


@given(PROBABILITIES, st.sampled_from([torch.bfloat16, torch.float16, *DTYPES]))
def test_a_token_is_at_distance_0_from_itself(p, dtype):
    logp = log_of(p, 1.0, 0.0, dtype=dtype)
    assert binary_kl(logp, logp).tolist() == [0.0] * 3
    assert binary_tv(logp, logp).tolist() == [0.0] * 3


@given(st.integers(0, 2**20))
def test_binary_is_exact_for_a_vocabulary_of_two(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(2, 4, dtype=torch.float64, generator=generator)
    p, q = torch.nn.functional.logsigmoid(torch.stack([logits, -logits], dim=-1))  # both ends to full relative precision
    assert_close(binary_kl(p[:, 0], q[:, 0]), categorical_kl(p, q))
    assert_close(binary_tv(p[:, 0], q[:, 0]), categorical_tv(p, q))


@given(st.integers(0, 2**20), st.integers(1, 9))
def test_binary_is_below_top_k_with_rest_which_is_below_the_full_vocabulary(seed, k):
    generator = torch.Generator().manual_seed(seed)
    old, new = (3 * torch.randn(2, 4, 10, dtype=torch.float64, generator=generator)).log_softmax(-1)
    tokens = torch.randint(0, 10, (4,), generator=generator)
    dist_old = top_k_support(old, tokens, k)
    dist_new = gather_support(new, dist_old.ids)
    for binary, whole in ((binary_kl, categorical_kl), (binary_tv, categorical_tv)):
        sampled = binary(dist_old.logp[:, 0], dist_new.logp[:, 0])
        top_k = whole(dist_old.with_rest(), dist_new.with_rest())
        assert (sampled <= top_k + SLACK).all()
        assert (top_k <= whole(old, new) + SLACK).all()


@given(st.integers(0, 2**20), PROBABILITIES)
def test_binary_is_exact_where_the_other_tokens_keep_their_shares(seed, q):
    # The complement scaled as one has the same ratio everywhere, and merging tokens of one ratio loses nothing.
    old = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    new = torch.cat([float64(q), old[1:] * (1 - q) / (1 - old[0])])
    assert_close(binary_kl(old[:1].log(), log_of(q))[0], categorical_kl(old.log(), new.log()), rtol=1e-8)
    assert_close(binary_tv(old[:1].log(), log_of(q))[0], categorical_tv(old.log(), new.log()))


def test_golden_where_the_two_default_bounds_meet():
    # At p = ½, KL = −½ ln(1 − 4x²) is 0.05 at x = ½ √(1 − e^−0.1) = 0.15424.
    x = 0.5 * math.sqrt(-math.expm1(-0.1))
    assert round(x, 5) == 0.15424
    assert_close(binary_kl(log_of(0.5, 0.5), log_of(0.5 + x, 0.5 - x)), float64(0.05, 0.05))


@given(st.integers(0, 2**20), st.integers(1, 9))
def test_what_merging_into_the_rest_hides(seed, k):
    # Of the KL exactly p(rest) · KL(p‖q within the rest); of the total variation at most half of what both leave there.
    generator = torch.Generator().manual_seed(seed)
    old, new = (3 * torch.randn(2, 4, 10, dtype=torch.float64, generator=generator)).log_softmax(-1)
    dist_old = top_k_support(old, torch.randint(0, 10, (4,), generator=generator), k)
    dist_new = gather_support(new, dist_old.ids)
    outside = torch.ones(4, 11, dtype=torch.bool).scatter(-1, dist_old.ids % 11, False)[:, :10]  # −1 % 11 is one too far
    for row, (p, q, rest) in enumerate(zip(old, new, outside, strict=True)):
        p_rest, q_rest = dist_old.rest[row], dist_new.rest[row]
        seen = [f(dist_old.with_rest()[row], dist_new.with_rest()[row]) for f in (categorical_kl, categorical_tv)]
        within = categorical_kl(p[rest] - p_rest, q[rest] - q_rest) if rest.any() else torch.zeros(())
        assert_close(categorical_kl(p, q), seen[0] + p_rest.exp() * within)
        assert categorical_tv(p, q) - seen[1] <= 0.5 * (p_rest.exp() + q_rest.exp()) + SLACK


# ---------------------------------------------------------------------------------------------------- gradient, shape, dtype


def test_the_gradient_of_binary_kl_has_its_closed_form():
    # ∂KL/∂log p = p [ln(p/q) − ln((1−p)/(1−q))]:  .3 (ln ⅔ − ln(14/11));  ∂KL/∂log q = (q − p)/(1 − q) = .15/.55.
    p, q = log_of(0.3).requires_grad_(), log_of(0.45).requires_grad_()
    gradient_p, gradient_q = torch.autograd.grad(binary_kl(p, q).sum(), (p, q))
    assert_close(gradient_p, float64(0.3 * (math.log(2 / 3) - math.log(14 / 11))))
    assert_close(gradient_q, float64(0.15 / 0.55))


def test_the_gradient_of_binary_tv_has_its_closed_form():
    # |p − q|: ∂/∂log p = p sign(p − q), ∂/∂log q = −q sign(p − q).
    p, q = log_of(0.3, 0.8).requires_grad_(), log_of(0.45, 0.2).requires_grad_()
    gradient_p, gradient_q = torch.autograd.grad(binary_tv(p, q).sum(), (p, q))
    assert_close(gradient_p, float64(-0.3, 0.8))
    assert_close(gradient_q, float64(0.45, -0.2))


@pytest.mark.parametrize("divergence", [binary_kl, binary_tv])
def test_binary_gradcheck(divergence):
    # Both sides of log1mexp's switch at p = ½ and of the series' at |x| = ½.
    p = log_of(0.02, 0.4, 0.49, 0.6, 0.97, 0.9).requires_grad_()
    q = log_of(0.30, 0.6, 0.52, 0.7, 0.60, 0.1).requires_grad_()
    assert gradcheck(divergence, (p, q))


@pytest.mark.parametrize("divergence", [binary_kl, binary_tv])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_finite_at_the_ends_of_the_scale(divergence, dtype):
    p = log_of(1.0, 0.0, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0, dtype=dtype).requires_grad_()
    q = log_of(0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, dtype=dtype).requires_grad_()
    for gradient in torch.autograd.grad(divergence(p, q).sum(), (p, q)):
        assert gradient.isfinite().all()


def test_the_gradient_at_a_certain_token():
    # KL(1‖q) = −ln q: ∂/∂log q = −1 = (q − 1)/(1 − q).
    q = log_of(0.5, 0.9).requires_grad_()
    (gradient,) = torch.autograd.grad(binary_kl(torch.zeros(2, dtype=torch.float64), q).sum(), q)
    assert_close(gradient, float64(-1.0, -1.0))


@pytest.mark.parametrize("divergence", [binary_kl, binary_tv])
def test_log_probabilities_broadcast(divergence):
    p, q = -torch.rand(2, 1), -torch.rand(3)
    out = divergence(p, q)
    assert out.shape == (2, 3)
    assert_close(out[1, 2], divergence(p[1, 0], q[2]))
    assert divergence(p[0, 0], q[0]).shape == ()


@pytest.mark.parametrize("divergence", [binary_kl, binary_tv])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probabilities_are_computed_in_float32(divergence, dtype):
    p, q = -torch.rand(6).to(dtype), -torch.rand(6).to(dtype)
    out = divergence(p, q)
    assert out.dtype == torch.float32
    assert torch.equal(out, divergence(p.float(), q.float()))
