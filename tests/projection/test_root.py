"""Batched Newton that cannot leave its bracket: roots, safeguards, and the status of each row."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from corral.projection.root import Root, find_root
from tolerance import assert_close

NAN = math.nan
DTYPES = [torch.float32, torch.float64]
real = partial(torch.tensor, dtype=torch.float64)
Function = Callable[[Tensor], tuple[Tensor, Tensor]]


def solve(function: Function, start: Tensor, scale: float = 1.0, **options: int) -> Root:
    return find_root(function, start, scale=torch.full_like(start, scale), **options)


def recorded(function: Function, trials: list[Tensor]) -> Function:
    """The same function, which also keeps every x that it is asked about."""

    def and_keep(x: Tensor) -> tuple[Tensor, Tensor]:
        trials.append(x)
        return function(x)

    return and_keep


def switch_on(steepness: Tensor, at: Tensor) -> Function:
    """arctan: flat, steep, flat. Newton's step from either flat end overshoots."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        u = steepness * (x - at)
        return u.atan(), steepness / (1 + u**2)

    return function


# ---------------------------------------------------------------------------------------------------- known roots


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_square_roots(dtype):
    c = torch.tensor([0.81, 0.25, 1e-2, 1e-6, 1e-10], dtype=dtype)
    root = find_root(lambda x: (x**2 - c, 2 * x), torch.full_like(c, 0.5), scale=c)
    assert_close(root.x, real([0.9, 0.5, 0.1, 1e-3, 1e-5]), atol=0)
    assert root.converged.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_exponentials(dtype):
    # e^{kx} = e^{k/3} at x = ⅓, whatever k: gentle at k = 0.1, steep at k = 40. Divided by e^{k/3}, its terms are of size 1.
    k = torch.tensor([0.1, 1.0, 8.0, 20.0, 40.0], dtype=dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        ratio = (k * (x - 1 / 3)).exp()
        return ratio - 1, k * ratio

    root = solve(function, torch.full_like(k, 0.5), max_steps=40)
    # The search may stop once |f| ≤ 4 eps, so x is known to 4 eps / k.
    assert_close(root.x, torch.full_like(k, 1 / 3))
    assert root.converged.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_root_without_a_slope_is_found_to_the_rounding_of_f(dtype):
    # (x − r)³: Newton shortens the error by a third each time, and f drowns in rounding long before x settles.
    r = torch.tensor([0.2, 0.7], dtype=dtype)
    root = solve(lambda x: ((x - r) ** 3, 3 * (x - r) ** 2), torch.full_like(r, 0.5), max_steps=60)
    assert root.converged.all()
    assert ((root.x - r).abs() ** 3 <= 4 * torch.finfo(dtype).eps).all()
    # From an error of 0.3, (⅔)ⁿ·0.3 ≤ (4 eps)^⅓ at n = 9 in float32, 26 in float64; one more evaluation sees it.
    assert root.steps.max() <= {torch.float32: 10, torch.float64: 27}[dtype]


def test_the_error_is_squared_by_each_step():
    # e ← e²/2x with x = √0.3 = 0.5477, from 0.549: e = 1.3e-3, 1.5e-6, 2e-12. The third step is that short, and the last.
    root = solve(lambda x: (x**2 - 0.3, 2 * x), real([0.549]))
    assert root.steps.tolist() == [3]
    assert_close(root.x, real([math.sqrt(0.3)]), atol=0, rtol=4e-16)


# ---------------------------------------------------------------------------------------------------- safeguards


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_newton_would_leave_the_bracket_it_is_halved(dtype):
    # From x = 1 the first Newton step lands at 1 − atan(35)(1 + 35²)/50 = −36; unsafe Newton then diverges.
    trials: list[Tensor] = []
    function = switch_on(torch.tensor([50.0], dtype=dtype), torch.tensor([0.3], dtype=dtype))
    root = solve(recorded(function, trials), torch.ones(1, dtype=dtype))
    assert_close(root.x, real([0.3]))
    assert root.converged.all()
    assert trials[1].item() == 0.5  # the middle of (0, 1)
    assert root.steps.item() <= 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_the_slope_vanishes_the_bracket_is_halved(dtype):
    # tanh saturates: both slopes are exactly 0 a quarter away from the root, and the Newton step is ±inf.
    at = torch.tensor([0.37, 0.12, 0.93], dtype=dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        value = (200 * (x - at)).tanh()
        return value, 200 * (1 - value**2)

    assert function(torch.ones(3, dtype=dtype))[1][0] == 0
    root = solve(function, torch.ones(3, dtype=dtype))
    assert_close(root.x, at)
    assert root.converged.all()


def test_every_trial_lies_in_the_bracket_left_by_the_ones_before_it():
    torch.manual_seed(1)
    steepness = 10 ** (3 * torch.rand(200, dtype=torch.float64))
    at = torch.rand(200, dtype=torch.float64).clamp(0.01, 0.99)
    trials: list[Tensor] = []
    function = switch_on(steepness, at)
    root = solve(recorded(function, trials), torch.rand(200, dtype=torch.float64).clamp(min=0.01), max_steps=60)
    low, high = torch.zeros(200, dtype=torch.float64), torch.ones(200, dtype=torch.float64)
    for step, x in enumerate(trials):
        searching = step < root.steps
        assert ((low <= x) & (x <= high) | ~searching).all()
        value = function(x)[0]
        low = torch.where(searching & (value < 0), x, low)
        high = torch.where(searching & (value > 0), x, high)
    assert root.converged.all()
    assert_close(root.x, at, atol=1e-9)


def test_newton_steps_that_jump_back_and_forth_are_cut_short():
    # Newton on atan(u) swaps ±1.39174520027073 for ever; from just inside, each pair of steps shrinks u − u* only 7 times,
    # so from 1e-10 inside it takes 24 evaluations to leave the neighbourhood. Every step stays inside the bracket.
    steepness, at = real([8.0]), real([0.4])
    root = solve(switch_on(steepness, at), at + (1.3917452002707346 - 1e-10) / steepness)
    assert root.converged.all()
    assert_close(root.x, at)
    assert root.steps.item() <= 12


# ---------------------------------------------------------------------------------------------------- rows


def quadratics(c: Tensor) -> Function:
    return lambda x: (x**2 - c, 2 * x)


def test_golden_steps_are_counted_row_by_row():
    # f = m (x − r) in both rows: at its root after 1 evaluation; one Newton step away, seen by the 2nd evaluation.
    r = real([0.5, 0.25])
    root = solve(lambda x: (4 * (x - r), torch.full_like(x, 4.0)), real([0.5, 0.5]))
    assert root.steps.tolist() == [1, 2]
    assert root.x.tolist() == [0.5, 0.25]


def test_a_row_is_solved_in_a_batch_as_it_is_alone():
    # Easy rows stop early and stay frozen while the hard ones go on: bit for bit, steps included.
    c = real([0.25, 0.26, 0.5, 1e-4, 1e-9, 0.99])
    start = torch.full_like(c, 0.5)
    together = solve(quadratics(c), start)
    alone = [solve(quadratics(c[i : i + 1]), start[i : i + 1]) for i in range(len(c))]
    assert torch.equal(together.x, torch.cat([root.x for root in alone]))
    assert torch.equal(together.steps, torch.cat([root.steps for root in alone]))
    assert len(together.steps.unique()) > 3


def test_a_done_row_is_frozen_whatever_the_function_says_later():
    # Row 0 is at its root at once. Later its function turns to garbage, as it may once a bracket has collapsed.
    c = real([0.16, 1e-6])
    calls: list[Tensor] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(x)
        value, slope = quadratics(c)(x)
        return (value if len(calls) == 1 else torch.stack([real(NAN), value[1]])), slope

    root = find_root(function, real([0.4, 0.5]), scale=c)
    assert root.x[0] == 0.4
    assert root.converged.all()
    assert root.steps[0] == 1
    assert root.steps[1] == len(calls) > 5


def test_the_search_ends_with_its_last_row():
    trials: list[Tensor] = []
    root = solve(recorded(quadratics(real([0.25, 0.3])), trials), real([0.5, 0.5]))
    assert len(trials) == root.steps.max() < 24


def test_rows_that_run_out_of_steps_say_so():
    # √1e-10 from ½ halves x some 15 times before it squares any error.
    c = real([0.25, 1e-10])
    root = find_root(quadratics(c), torch.full_like(c, 0.5), scale=c, max_steps=6)
    assert root.converged.tolist() == [True, False]
    assert root.steps.tolist() == [1, 6]
    assert 0 < root.x[1] < 0.5


def test_a_nan_row_is_not_converged_and_harms_no_other():
    c = real([NAN, 0.36])
    root = solve(quadratics(c), torch.full_like(c, 0.5))
    assert root.converged.tolist() == [False, True]
    assert root.steps[0] == 24
    assert 0 <= root.x[0] <= 1
    assert_close(root.x[1], real(0.6))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (2, 0)])
def test_rows_may_have_any_shape(shape):
    c = torch.full(shape, 0.36, dtype=torch.float64)
    root = solve(quadratics(c), torch.full_like(c, 0.5))
    assert root.x.shape == root.converged.shape == root.steps.shape == shape
    assert_close(root.x, torch.full_like(c, 0.6))
    assert root.converged.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_root_keeps_the_dtype_of_the_start(dtype):
    c = torch.tensor([0.36], dtype=dtype)
    assert solve(quadratics(c), torch.full_like(c, 0.5)).x.dtype == dtype
