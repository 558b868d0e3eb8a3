"""log(1 − eˣ), log Σ eˣ and eˣ − 1 − x: exact at both ends, with gradients that are never NaN."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.numerics import NEAR, at_least_float32, expm1_minus, in_one_dtype, log1mexp, logsumexp, without_autocast
from tolerance import assert_close

DTYPES = [torch.float32, torch.float64]
INF = math.inf


def exactly(formula: str, x: Tensor) -> Tensor:
    """The formula at each x with 100 digits, rounded to float64 once at the end."""
    formulas = {
        "log(1 − eˣ)": lambda d: (1 - d.exp()).ln(),
        "−eˣ / (1 − eˣ)": lambda d: -d.exp() / (1 - d.exp()),
        "eˣ − 1 − x": lambda d: d.exp() - 1 - d,
        "eˣ − 1": lambda d: d.exp() - 1,
    }
    with localcontext() as context:
        context.prec = 100
        return torch.tensor([float(formulas[formula](Decimal(v))) for v in x.tolist()], dtype=torch.float64)


def gradient(f, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def magnitudes(lowest: float, highest: float, dtype: torch.dtype) -> Tensor:
    """Several points in every decade."""
    decades = math.log10(highest / lowest)
    return torch.logspace(math.log10(lowest), math.log10(highest), int(4 * decades), dtype=torch.float64).to(dtype)


def around(x: float, dtype: torch.dtype) -> Tensor:
    """x as that dtype has it, and its neighbours on both sides."""
    middle = torch.tensor(x, dtype=dtype)
    return torch.stack([torch.nextafter(middle, torch.tensor(-INF, dtype=dtype)), middle, torch.nextafter(middle, -middle)])


# ---------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_everything_is_computed_in_float32_or_better(given_dtype, computed):
    x = torch.tensor([-0.75, 3.5, -INF], dtype=given_dtype)  # exact in every dtype
    out = at_least_float32(x)
    assert out.dtype == computed
    assert out.tolist() == [-0.75, 3.5, -INF]


def test_the_best_precision_is_that_of_all():
    half, single, double = (torch.tensor([0.75], dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert [x.dtype for x in in_one_dtype(half, half)] == [torch.float32] * 2
    assert [x.dtype for x in in_one_dtype(half, single, double)] == [torch.float64] * 3


def test_products_stay_exact_under_autocast_and_the_caller_s_do_not_change():
    # 1 + 2⁻¹⁰ is no bfloat16.
    x = torch.tensor([[1 + 2.0**-10]])
    square = without_autocast(torch.matmul)
    with torch.autocast("cpu", torch.bfloat16):
        assert square(x, x).item() == 1 + 2.0**-9 + 2.0**-20
        assert square(input=x, other=x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------- log(1 − eˣ)


def test_golden_log1mexp():
    # 1 − ¼ = ¾.   1 − e^−1e-12 = 1e-12 (1 − 5e-13), whose log is −12 ln 10 − 5e-13.   log(1 − e^−50) = −e^−50 (1 + 1e-22).
    x = torch.tensor([math.log(0.25), -1e-12, -50.0], dtype=torch.float64)
    expected = torch.tensor([math.log(0.75), -27.631021115928547 - 5e-13, -1.9287498479639178e-22], dtype=torch.float64)
    assert_close(log1mexp(x), expected, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log1mexp_keeps_its_digits_at_every_magnitude(dtype):
    # Both forms, each next to the other's end at −ln 2; −80 is as far as eˣ has all its digits in float32.
    x = torch.cat([-magnitudes(1e-30, 80.0, dtype), around(-math.log(2), dtype)])
    assert_close(log1mexp(x), exactly("log(1 − eˣ)", x), atol=0)


@given(st.floats(-80.0, -(2.0**-100), width=32))
def test_log1mexp_agrees_with_exact_arithmetic(x):
    for dtype in DTYPES:
        t = torch.tensor([x], dtype=dtype)
        assert_close(log1mexp(t), exactly("log(1 − eˣ)", t), atol=0)


@given(st.floats(-30.0, -1e-8))
def test_log1mexp_is_its_own_inverse(x):
    t = torch.tensor(x, dtype=torch.float64)
    assert_close(log1mexp(log1mexp(t)), t, atol=0)


@given(st.floats(-30.0, -1e-8))
def test_a_token_and_any_other_make_one(x):
    t = torch.tensor(x, dtype=torch.float64)
    assert_close(t.exp() + log1mexp(t).exp(), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [0.0, 1e-7, 3.0])
def test_log1mexp_of_a_certain_token_is_minus_infinity_with_gradient_0(x, dtype):
    t = torch.tensor([x, -1.0], dtype=dtype)
    assert log1mexp(t)[0] == -INF
    assert gradient(log1mexp, t)[0] == 0


def test_log1mexp_of_an_impossible_token_is_0_with_gradient_0():
    t = torch.tensor([-INF, -1.0])
    assert log1mexp(t)[0] == 0
    assert gradient(log1mexp, t)[0] == 0


def test_log1mexp_gradcheck():
    x = torch.tensor([-1e-2, -0.3, -0.69, -0.70, -5.0, -20.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(log1mexp, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_log1mexp_keeps_its_digits_at_every_magnitude(dtype):
    # d/dx log(1 − eˣ) = −eˣ / (1 − eˣ): −1e9 at x = −1e-9, −e^−80 at x = −80.
    x = torch.cat([-magnitudes(1e-30, 80.0, dtype), around(-math.log(2), dtype)])
    assert_close(gradient(log1mexp, x), exactly("−eˣ / (1 − eˣ)", x), atol=0)


# ---------------------------------------------------------------------------------------------------- log Σ eˣ


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_logsumexp(dtype):
    # 1 + 2 + 3 = 6;  e^1000 + e^1000 = 2 e^1000;  the same at −1000;  e^−inf adds nothing;  one entry is itself.
    rows = torch.tensor(
        [[0.0, math.log(2), math.log(3)], [1000.0, 1000.0, -INF], [-1000.0, -1000.0, -INF]], dtype=torch.float64
    )
    expected = torch.tensor([math.log(6), 1000 + math.log(2), -1000 + math.log(2)], dtype=torch.float64)
    assert_close(logsumexp(rows.to(dtype)), expected)
    assert logsumexp(torch.tensor([-INF, -3.5, -INF], dtype=dtype)) == -3.5
    assert logsumexp(torch.tensor([-200.0], dtype=dtype)) == -200


ENTRIES = st.lists(st.floats(-200.0, 200.0, width=32) | st.just(-INF), min_size=1, max_size=12)


@given(ENTRIES)
def test_logsumexp_agrees_with_scipy(entries):
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = torch.tensor(scipy.special.logsumexp(np.array(entries, dtype=np.float64)))
    for dtype in DTYPES:
        assert_close(logsumexp(torch.tensor(entries, dtype=dtype)), expected)


@given(ENTRIES, st.integers(-100, 100))
def test_a_constant_added_to_every_entry_is_added_to_logsumexp(entries, constant):
    x = torch.tensor(entries, dtype=torch.float64)
    assert_close(logsumexp(x + constant), logsumexp(x) + constant)


def test_logsumexp_reduces_the_last_axis_only():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    rows = [[math.log(sum(math.exp(v) for v in row)) for row in block] for block in x.tolist()]
    assert_close(logsumexp(x), torch.tensor(rows, dtype=torch.float64))


def test_logsumexp_of_nothing_is_minus_infinity_with_gradient_0():
    x = torch.tensor([[-INF, -INF], [0.0, -INF]])
    assert logsumexp(x).tolist() == [-INF, 0.0]
    assert gradient(logsumexp, x).tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_the_gradient_of_logsumexp_is_the_softmax():
    # e^x ∝ 1, 3, 0, 4 → shares ⅛, ⅜, 0, ½, however large the entries are.
    x = torch.tensor([[1.0, 3.0, 0.0, 4.0]], dtype=torch.float64).log() + torch.tensor([[0.0], [700.0], [-900.0]])
    assert_close(gradient(logsumexp, x), torch.tensor([0.125, 0.375, 0.0, 0.5]).expand(3, 4))


def test_logsumexp_gradcheck():
    assert gradcheck(logsumexp, torch.randn(3, 5, dtype=torch.float64, requires_grad=True))


# ---------------------------------------------------------------------------------------------------- eˣ − 1 − x


def test_golden_expm1_minus():
    # x = 1: e − 2.   x = −1: 1/e.   x = 1e-8: x²/2 (1 + x/3 + …) = 5e-17 (1 + 3.3e-9), all lost in e^x − 1 − x = 0 or 2e-16.
    x = torch.tensor([1.0, -1.0, 1e-8], dtype=torch.float64)
    expected = torch.tensor([math.e - 2, 1 / math.e, 5e-17 * (1 + 1e-8 / 3)], dtype=torch.float64)
    assert_close(expm1_minus(x), expected, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_expm1_minus_keeps_its_digits_at_every_magnitude(sign, dtype):
    # The series and the plain form, each next to the other's end at ±½; 1e-18² is still a normal float32.
    x = torch.cat([sign * magnitudes(1e-18, 80.0, dtype), around(sign * NEAR, dtype)])
    assert_close(expm1_minus(x), exactly("eˣ − 1 − x", x), atol=0)


@given(st.floats(-80.0, 80.0, width=32).filter(lambda x: x == 0 or abs(x) > 1e-18))
def test_expm1_minus_agrees_with_exact_arithmetic(x):
    for dtype in DTYPES:
        t = torch.tensor([x], dtype=dtype)
        assert_close(expm1_minus(t), exactly("eˣ − 1 − x", t), atol=0)


@given(st.floats(-1e3, 80.0, width=32))
def test_expm1_minus_is_never_negative_and_0_at_0_alone(x):
    value = expm1_minus(torch.tensor(x)).item()
    assert value >= 0
    assert value > 0 or abs(x) < 1e-22  # x² underflows there


def test_expm1_minus_overflows_to_infinity_and_not_to_nan():
    # −inf is the log-ratio of a token that q cannot draw: eˣ − 1 − x → −1 + inf.
    assert expm1_minus(torch.tensor([1000.0, -INF])).tolist() == [INF, INF]


def test_expm1_minus_gradcheck():
    x = torch.tensor([-30.0, -1.0, -0.501, -0.499, -1e-3, 0.0, 1e-3, 0.499, 0.501, 3.0], dtype=torch.float64)
    assert gradcheck(expm1_minus, x.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_gradient_of_expm1_minus_keeps_its_digits_at_every_magnitude(sign, dtype):
    # d/dx (eˣ − 1 − x) = eˣ − 1
    x = torch.cat([sign * magnitudes(1e-18, 80.0, dtype), around(sign * NEAR, dtype)])
    assert_close(gradient(expm1_minus, x), exactly("eˣ − 1", x), atol=0)


@pytest.mark.parametrize("f", [log1mexp, expm1_minus, lambda x: logsumexp(torch.stack([x, x - 1], dim=-1))])
def test_nan_stays_nan(f):
    assert f(torch.tensor([math.nan])).isnan().all()
