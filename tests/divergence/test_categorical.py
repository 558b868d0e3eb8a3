"""KL and total variation of whole distributions: closed forms, inequalities, and digits kept where p ≈ q."""

import itertools
import math
from fractions import Fraction

import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence.categorical import abs_difference, categorical_kl, categorical_tv, kl_terms
from tolerance import assert_close

DTYPES = [torch.float32, torch.float64]
INF = math.inf
SLACK = 1e-12
"""What rounding may add to either side of an inequality in float64."""


def log_probs(*p: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log().to(dtype)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shares(weights: list[int]) -> Tensor:
    return log_probs(*(w / sum(weights) for w in weights))


@st.composite
def weight_pairs(draw, *, at_least: int = 1, at_most: int = 9, lowest: int = 0) -> tuple[list[int], list[int]]:
    """Whole weights of two distributions on the same categories: ties and, where `lowest` is 0, zeros on either side."""
    size = draw(st.integers(at_least, at_most))
    weights = st.lists(st.integers(lowest, 30), min_size=size, max_size=size).filter(any)
    return draw(weights), draw(weights)


def reference_kl(logp_p: Tensor, logp_q: Tensor) -> Tensor:
    """SciPy's KL of the same numbers, renormalised in float64."""
    p, q = logp_p.double().softmax(-1), logp_q.double().softmax(-1)
    return torch.as_tensor(scipy.special.rel_entr(p.numpy(), q.numpy())).sum(-1)


def nearby(scale: float, *, rows: int = 16, size: int = 50) -> tuple[Tensor, Tensor]:
    """float32 log-softmaxes of logits that differ by about `scale`."""
    logits = 2 * torch.randn(rows, size)
    return logits.log_softmax(-1), (logits + scale * torch.randn(rows, size)).log_softmax(-1)


# ---------------------------------------------------------------------------------------------------- KL, golden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("p", "q", "kl"),
    [
        # ½ ln 2 + ¼ ln ½ + ¼ ln 1 = ¼ ln 2
        ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), math.log(2) / 4),
        # KL(p‖uniform) = ln 4 − H(p),  H = ½ ln 2 + ¼ ln 4 + 2 · ⅛ ln 8 = 1¾ ln 2
        ((0.5, 0.25, 0.125, 0.125), (0.25, 0.25, 0.25, 0.25), math.log(2) / 4),
        # .1 ln(.1/.6) + .3 ln(.3/.3) + .6 ln(.6/.1) = .5 ln 6
        ((0.1, 0.3, 0.6), (0.6, 0.3, 0.1), 0.5 * math.log(6)),
        # Far apart, |x| > ½ in every category: .9 ln 9 + .1 ln(1/9) = .8 ln 9
        ((0.9, 0.1), (0.1, 0.9), 0.8 * math.log(9)),
        # 0 · log 0 = 0: ½ ln 2 twice
        ((0.5, 0.5, 0.0), (0.25, 0.25, 0.5), math.log(2)),
        # A point mass pays −ln q of its token
        ((0.0, 1.0, 0.0), (0.5, 0.125, 0.375), math.log(8)),
        ((1.0, 0.0), (0.5, 0.5), math.log(2)),
        # Impossible in both: counts for nothing
        ((0.5, 0.0, 0.5, 0.0), (0.25, 0.0, 0.75, 0.0), 0.5 * math.log(4 / 3)),
        ((1.0, 0.0), (1.0, 0.0), 0.0),
        # p > 0 = q
        ((0.5, 0.5), (1.0, 0.0), INF),
        ((0.0, 0.001, 0.999), (0.5, 0.0, 0.5), INF),
        ((1.0, 0.0), (0.0, 1.0), INF),
        # One category
        ((1.0,), (1.0,), 0.0),
    ],
)
def test_golden_kl(p, q, kl, dtype):
    value = categorical_kl(log_probs(*p, dtype=dtype), log_probs(*q, dtype=dtype))
    assert value.dtype == dtype
    assert_close(value, torch.tensor(kl, dtype=torch.float64))


def test_the_order_of_the_arguments_is_kl_of_p_from_q():
    # KL((.5, .5)‖(.9, .1)) = ½ ln(25/9) = .5108;  the other way round .9 ln 1.8 + .1 ln .2 = .3681
    p, q = log_probs(0.5, 0.5), log_probs(0.9, 0.1)
    assert_close(categorical_kl(p, q), torch.tensor(0.5 * math.log(25 / 9), dtype=torch.float64))
    assert_close(categorical_kl(q, p), torch.tensor(0.9 * math.log(1.8) + 0.1 * math.log(0.2), dtype=torch.float64))


def test_a_geometric_family_has_its_closed_form():
    # p_i ∝ aⁱ on i ≥ 0 with ratio a = ½, b = ⅓:  KL = ln((1−a)/(1−b)) + a/(1−a) · ln(a/b) = ln ¾ + ln 1.5; 200 terms hold all.
    i = torch.arange(200, dtype=torch.float64)
    p, q = i * math.log(1 / 2) + math.log(1 / 2), i * math.log(1 / 3) + math.log(2 / 3)
    assert_close(categorical_kl(p, q), torch.tensor(math.log(0.75) + math.log(1.5), dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_p_has_all_but_ruled_out_does_not_overflow(dtype):
    # p = (1, e^−100), q = (1 − 1/e, 1/e): eˣ would be e^99. KL = −ln(1 − 1/e) + e^−100 (…) = .45867514538708193.
    p = torch.tensor([0.0, -100.0], dtype=dtype, requires_grad=True)
    q = torch.tensor([math.log1p(-math.exp(-1)), -1.0], dtype=dtype, requires_grad=True)
    value = categorical_kl(p, q)
    assert_close(value, torch.tensor(0.45867514538708193, dtype=torch.float64))
    # ∂/∂log q = q − p = (−1/e, 1/e);  ∂/∂log p = p (log p − log q) = (.4587, −99 e^−100).
    gradient_p, gradient_q = torch.autograd.grad(value, (p, q))
    assert_close(gradient_q, float64(-1 / math.e, 1 / math.e))
    assert_close(gradient_p, float64(0.45867514538708193, -99 * math.exp(-100)))


def test_a_token_that_q_has_all_but_ruled_out_is_dear_but_finite():
    # p = ½, ½ and q = 1, e^−300 (0 in float32): ½ ln ½ + ½ (ln ½ + 300) = 150 − ln 2.
    value = categorical_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, -300.0]))
    assert_close(value, torch.tensor(150 - math.log(2)))


# ---------------------------------------------------------------------------------------------------- KL, oracle


@given(weight_pairs())
def test_kl_agrees_with_scipy(pair):
    p, q = map(shares, pair)
    for dtype in DTYPES:
        assert_close(categorical_kl(p.to(dtype), q.to(dtype)), reference_kl(p, q))


@pytest.mark.parametrize("scale", [3.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_kl_keeps_its_digits_in_float32_as_q_approaches_p(scale):
    # At scale 1e-4 KL is 5e-9, and Σ p (log p − log q) would be rounding noise of size 1e-7. That noise, the error in the
    # normalisation of p and q, is let in squared: ½ (3e-7)² = 5e-14.
    p, q = nearby(scale)
    assert_close(categorical_kl(p, q), reference_kl(p, q), rtol=1e-5, atol=5e-14)


def test_a_shift_of_one_logit_has_its_second_order_kl():
    # q ∝ p · (e^s on a token of probability p₀): KL = log(1 + p₀ (e^s − 1)) − p₀ s = ½ p₀ (1 − p₀) s² + O(s³).
    # p₀ = ½ and s = 2⁻¹⁰: log cosh(s/2) = s²/8 − s⁴/192.
    s = 2.0**-10
    p = torch.tensor([0.0, 0.0]).log_softmax(-1)
    q = torch.tensor([s / 2, -s / 2]).log_softmax(-1)
    assert_close(categorical_kl(p, q), torch.tensor(s**2 / 8 - s**4 / 192), rtol=1e-5, atol=0)


@given(st.floats(-30.0, 0.0, width=32), st.floats(-8.0, 8.0, width=32))
def test_each_term_is_exact_near_and_far(logp, gap):
    # p (eˣ − 1 − x): `math` loses digits for small x, so the series to x⁵ takes over there.
    p, x = math.exp(logp), gap
    excess = math.expm1(x) - x if abs(x) > 1e-3 else x**2 / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120
    for dtype in DTYPES:
        args = [torch.tensor(v, dtype=torch.float64).to(dtype) for v in (p, p * math.exp(x), x)]
        assert_close(kl_terms(*args), torch.tensor(p * excess, dtype=torch.float64), atol=1e-40)


# ---------------------------------------------------------------------------------------------------- KL, properties


@given(weight_pairs())
def test_kl_is_never_negative_and_0_only_between_equals(pair):
    p, q = map(shares, pair)
    kl = categorical_kl(p, q)
    equal = all(Fraction(a, sum(pair[0])) == Fraction(b, sum(pair[1])) for a, b in zip(*pair, strict=True))
    assert kl >= 0
    assert (kl < SLACK) == equal


@given(weight_pairs(), st.sampled_from([torch.bfloat16, torch.float16, *DTYPES]))
def test_kl_of_a_policy_from_itself_is_exactly_0(pair, dtype):
    p = shares(pair[0]).to(dtype).requires_grad_()
    q = p.detach().clone().requires_grad_()
    kl = categorical_kl(p, q)
    assert kl == 0
    for gradient in torch.autograd.grad(kl, (p, q)):
        assert (gradient == 0).all()


@given(weight_pairs())
def test_kl_is_infinite_exactly_where_q_rules_out_what_p_may_draw(pair):
    escapes = any(a > 0 and b == 0 for a, b in zip(*pair, strict=True))
    kl = categorical_kl(*map(shares, pair))
    assert bool(kl == INF) == escapes
    assert not kl.isnan()


@given(weight_pairs())
def test_pinskers_inequality(pair):
    p, q = map(shares, pair)
    assert categorical_tv(p, q) ** 2 <= categorical_kl(p, q) / 2 + SLACK


@given(weight_pairs())
def test_the_bretagnolle_huber_inequality(pair):
    p, q = map(shares, pair)
    assert categorical_tv(p, q) ** 2 <= 1 - (-categorical_kl(p, q)).exp() + SLACK


@given(weight_pairs(at_least=2), st.randoms(use_true_random=False))
def test_merging_two_categories_never_takes_policies_apart(pair, random):
    into, gone = random.sample(range(len(pair[0])), 2)
    merged = [[w + weights[gone] * (i == into) for i, w in enumerate(weights) if i != gone] for weights in pair]
    for divergence in (categorical_kl, categorical_tv):
        assert divergence(*map(shares, merged)) <= divergence(*map(shares, pair)) + SLACK


@given(weight_pairs(), st.randoms(use_true_random=False))
def test_the_order_of_the_categories_does_not_matter(pair, random):
    order = list(range(len(pair[0])))
    random.shuffle(order)
    p, q = map(shares, pair)
    for divergence in (categorical_kl, categorical_tv):
        assert_close(divergence(p[order], q[order]), divergence(p, q))


@given(weight_pairs(at_most=4), weight_pairs(at_most=4))
def test_kl_of_independent_pairs_adds_up(pair, other):
    p, q = map(shares, pair)
    s, t = map(shares, other)
    joint = categorical_kl((p[:, None] + s).flatten(), (q[:, None] + t).flatten())
    assert_close(joint, categorical_kl(p, q) + categorical_kl(s, t))


@given(weight_pairs(lowest=1), st.floats(1e-4, 3.0))
def test_an_error_in_the_normalisation_enters_only_squared(pair, relative):
    # p and q scaled to masses e^a, e^b: Σ p (eˣ − 1 − x) = e^a [KL + (e^{b−a} − 1 − (b − a))]: ½ (b − a)² and no first order.
    p, q = map(shares, pair)
    drift = 1e-6 * relative
    kl = categorical_kl(p, q)
    assert_close(categorical_kl(p, q + drift), kl + drift**2 / 2, atol=1e-15, rtol=1e-12)


# ---------------------------------------------------------------------------------------------------- KL, gradient and shape


def test_the_gradient_of_kl_has_its_closed_form():
    # Through softmaxes: ∂KL/∂z_p = p (log p − log q − KL),  ∂KL/∂z_q = q − p.
    z_p, z_q = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True).unbind()
    p, q = z_p.softmax(-1), z_q.softmax(-1)
    kl = categorical_kl(z_p.log_softmax(-1), z_q.log_softmax(-1))
    gradient_p, gradient_q = torch.autograd.grad(kl.sum(), (z_p, z_q))
    assert_close(gradient_p, p * (p.log() - q.log() - kl[:, None]))
    assert_close(gradient_q, q - p)


def test_kl_gradcheck():
    # Rows: p ≈ q (the series), far apart (multiplied out), equal.
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.2, 0.2, 0.6]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.45, 0.33, 0.22], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]], dtype=torch.float64).log().requires_grad_()
    assert gradcheck(categorical_kl, (p, q))
    assert gradcheck(lambda a, b: categorical_kl(a.log_softmax(-1), b.log_softmax(-1)), (p, q))


def test_kl_gradcheck_with_ruled_out_tokens():
    # −inf on p's side, then on both: a step away from −inf is −inf, so its derivative is 0.
    p = log_probs(0.5, 0.5, 0.0, 0.0).requires_grad_()
    q = log_probs(0.25, 0.25, 0.5, 0.0).requires_grad_()
    assert gradcheck(categorical_kl, (p, q))
    gradient_p, gradient_q = torch.autograd.grad(categorical_kl(p, q), (p, q))
    # ∂/∂log p = p (log p − log q) = ½ ln 2;  ∂/∂log q = q − p.
    assert_close(gradient_p, float64(0.5 * math.log(2), 0.5 * math.log(2), 0.0, 0.0))
    assert_close(gradient_q, float64(-0.25, -0.25, 0.5, 0.0))


def test_an_infinite_row_leaves_finite_gradients_everywhere():
    # The infinite term is a constant: no NaN in its own row, and the other row has its own gradient q − p.
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64).log().requires_grad_()
    kl = categorical_kl(p, q)
    assert kl[0] == INF
    gradient_p, gradient_q = torch.autograd.grad(kl.sum(), (p, q))
    assert gradient_p.isfinite().all()
    assert gradient_q.isfinite().all()
    assert_close(gradient_q[1], float64(-0.25, 0.25))


@pytest.mark.parametrize("divergence", [categorical_kl, categorical_tv])
def test_nan_on_either_side_stays_nan(divergence):
    good, bad = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[-1.0, math.nan]])
    assert divergence(bad, good).isnan().all()
    assert divergence(good, bad).isnan().all()


@pytest.mark.parametrize("divergence", [categorical_kl, categorical_tv])
def test_leading_axes_broadcast(divergence):
    p, q = torch.randn(2, 1, 4).log_softmax(-1), torch.randn(3, 4).log_softmax(-1)
    out = divergence(p, q)
    assert out.shape == (2, 3)
    for i, j in itertools.product(range(2), range(3)):
        assert_close(out[i, j], divergence(p[i, 0], q[j]))


@pytest.mark.parametrize("divergence", [categorical_kl, categorical_tv])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(divergence, dtype):
    p, q = (x.to(dtype) for x in torch.randn(2, 5, 6).log_softmax(-1))
    out = divergence(p, q)
    assert out.dtype == torch.float32
    assert torch.equal(out, divergence(p.float(), q.float()))


# ---------------------------------------------------------------------------------------------------- TV


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("p", "q", "tv"),
    [
        ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), 0.25),  # ½ (¼ + ¼ + 0)
        ((0.1, 0.3, 0.6), (0.6, 0.3, 0.1), 0.5),  # ½ (.5 + 0 + .5)
        ((0.5, 0.5, 0.0), (0.25, 0.25, 0.5), 0.5),  # ½ (¼ + ¼ + ½)
        ((1.0, 0.0), (0.0, 1.0), 1.0),  # disjoint
        ((1.0, 0.0), (1.0, 0.0), 0.0),
        ((1.0,), (1.0,), 0.0),
    ],
)
def test_golden_tv(p, q, tv, dtype):
    value = categorical_tv(log_probs(*p, dtype=dtype), log_probs(*q, dtype=dtype))
    assert value.dtype == dtype
    assert_close(value, torch.tensor(tv))


@given(weight_pairs(at_most=6))
def test_tv_is_the_largest_difference_any_event_shows(pair):
    p, q = ([Fraction(w, sum(ws)) for w in ws] for ws in pair)
    events = itertools.chain.from_iterable(itertools.combinations(range(len(p)), n) for n in range(len(p) + 1))
    largest = max(abs(sum(p[i] - q[i] for i in event)) for event in events)
    assert_close(categorical_tv(*map(shares, pair)), torch.tensor(float(largest), dtype=torch.float64))


@given(weight_pairs())
def test_tv_is_symmetric_and_lies_between_0_and_1(pair):
    p, q = map(shares, pair)
    assert torch.equal(categorical_tv(p, q), categorical_tv(q, p))
    assert 0 <= categorical_tv(p, q) <= 1 + SLACK
    assert categorical_tv(p, p) == 0


@given(weight_pairs(lowest=1))
def test_tv_is_half_the_mean_distance_of_the_ratio_from_1(pair):
    # ½ E_p |q/p − 1|
    p, q = map(shares, pair)
    assert_close(categorical_tv(p, q), 0.5 * (p.exp() * (torch.exp(q - p) - 1).abs()).sum())


@given(weight_pairs(), st.randoms(use_true_random=False))
def test_tv_obeys_the_triangle_inequality(pair, random):
    p, q = map(shares, pair)
    between = shares([random.randint(1, 30) for _ in pair[0]])
    assert categorical_tv(p, q) <= categorical_tv(p, between) + categorical_tv(between, q) + SLACK


@pytest.mark.parametrize("scale", [3.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_tv_keeps_its_digits_in_float32_as_q_approaches_p(scale):
    p, q = nearby(scale)
    expected = 0.5 * (p.double().exp() - q.double().exp()).abs().sum(-1)
    assert_close(categorical_tv(p, q), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("logp", "logq"), [(-1e-9, -3e-9), (-5.0, -5.000001), (-60.0, -2.0), (-80.0, -80.00001), (-1.0, -INF)])
def test_a_difference_of_probabilities_keeps_its_digits_in_float32(logp, logq):
    a, b = torch.tensor(logp), torch.tensor(logq)
    expected = (a.double().exp() - b.double().exp()).abs()
    assert expected > 0
    assert_close(abs_difference(a, b), expected, atol=0)
    assert_close(abs_difference(b, a), expected, atol=0)


def test_the_gradient_of_tv_has_its_closed_form():
    # ∂TV/∂log p = ½ p sign(p − q):  ½ · .5, −½ · .2, −½ · .3;  ∂TV/∂log q = −½ q sign(p − q).
    p = log_probs(0.5, 0.2, 0.3).requires_grad_()
    q = log_probs(0.2, 0.4, 0.4).requires_grad_()
    gradient_p, gradient_q = torch.autograd.grad(categorical_tv(p, q), (p, q))
    assert_close(gradient_p, float64(0.25, -0.1, -0.15))
    assert_close(gradient_q, float64(-0.1, 0.2, 0.2))


def test_tv_gradcheck():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.45, 0.33, 0.22], [0.1, 0.1, 0.8]], dtype=torch.float64).log().requires_grad_()
    assert gradcheck(categorical_tv, (p, q))


def test_the_gradient_of_tv_is_finite_where_tokens_are_ruled_out():
    # Impossible for p, for q, for both, and equal: p's gradient is ½ p, q's ½ q, where they alone draw the token.
    p = log_probs(0.0, 0.4, 0.0, 0.6).requires_grad_()
    q = log_probs(0.4, 0.0, 0.0, 0.6).requires_grad_()
    gradient_p, gradient_q = torch.autograd.grad(categorical_tv(p, q), (p, q))
    assert_close(gradient_p, float64(0.0, 0.2, 0.0, 0.0))
    assert_close(gradient_q, float64(0.2, 0.0, 0.0, 0.0))
