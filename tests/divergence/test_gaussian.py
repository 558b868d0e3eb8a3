"""Divergences of Gaussians: by hand, against torch.distributions and SciPy, and what holds for all of them."""

import itertools
import math
from functools import partial

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal, kl_divergence

from corral.divergence import gaussian_entropy, gaussian_frobenius, gaussian_kl, gaussian_wasserstein
from corral.divergence.gaussian import symmetric_root
from tolerance import assert_close

INF, NAN = math.inf, math.nan
real = partial(torch.tensor, dtype=torch.float64)
FORMS = list(itertools.product(["commuting", "bures"], [False, True]))
DIVERGENCES = {
    "kl": gaussian_kl,
    "frobenius": gaussian_frobenius,
    **{f"w2 {form} {scaled}": partial(gaussian_wasserstein, form=form, scaled=scaled) for form, scaled in FORMS},
}
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)


def gaussians(*rows: int, dimension: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean_p, chol_p, mean_q, chol_q."""
    noise = torch.randn(2, *rows, dimension, dimension, dtype=torch.float64)
    chol_p, chol_q = torch.linalg.cholesky(noise @ noise.mT / dimension + 0.2 * torch.eye(dimension))
    mean_p, mean_q = torch.randn(2, *rows, dimension, dtype=torch.float64)
    return mean_p, chol_p, mean_q, chol_q


@st.composite
def pairs(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dimension = draw(st.integers(1, 4))
    entries = st.lists(st.floats(-2, 2), min_size=dimension, max_size=dimension)

    def policy() -> tuple[Tensor, Tensor]:
        below = real([draw(entries) for _ in range(dimension)]).tril(-1)
        return real(draw(entries)), below + torch.diag(real(draw(entries)).exp())

    return *policy(), *policy()


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_one_dimension():
    # p = N(1, 2²), q = N(0, 3²): KL = 1/18 + ½ (4/9 − 1 − ln 4/9); W2² = 1 + 1, in units of q 1/9 + 1/9; Frobenius (4 − 9)².
    p_and_q = real([1.0]), real([[2.0]]), real([0.0]), real([[3.0]])
    kl = gaussian_kl(*p_and_q)
    assert_close(kl.mean, real(1 / 18))
    assert_close(kl.cov, real(0.5 * (4 / 9 - 1 - math.log(4 / 9))))
    assert_close(kl.total, kl.mean + kl.cov)
    for form in ("commuting", "bures"):
        assert_close(torch.stack(gaussian_wasserstein(*p_and_q, form=form)), real([1.0, 1.0]))
        assert_close(torch.stack(gaussian_wasserstein(*p_and_q, form=form, scaled=True)), real([1 / 9, 1 / 9]))
    assert_close(torch.stack(gaussian_frobenius(*p_and_q)), real([1 / 9, 25.0]))
    assert_close(gaussian_entropy(real([[2.0]])), real(0.5 * math.log(2 * math.pi * math.e * 4)))


def test_golden_two_dimensions():
    # L_p = [[1, 0], [1, 1]], q standard: Σ_p = [[1, 1], [1, 2]] has trace 3 and determinant 1, so KL = ½ (3 − 2 − 0) = ½.
    # Eigenvalues of Σ_p are (3 ± √5)/2, their roots (√5 ± 1)/2: W2² = tr Σ_p + 2 − 2·√5 = 5 − 2√5.
    # Σ_p − I = [[0, 1], [1, 1]]: Frobenius 3. H = log 2πe + 0.
    chol, eye, zero = real([[1.0, 0.0], [1.0, 1.0]]), torch.eye(2, dtype=torch.float64), real([0.0, 0.0])
    assert_close(gaussian_kl(zero, chol, zero, eye).cov, real(0.5))
    for form, scaled in FORMS:
        distance = gaussian_wasserstein(zero, chol, zero, eye, form=form, scaled=scaled)
        assert_close(distance.cov, real(5 - 2 * math.sqrt(5)))
    assert_close(gaussian_frobenius(zero, chol, zero, eye).cov, real(3.0))
    assert_close(gaussian_entropy(chol), real(math.log(2 * math.pi * math.e)))


def test_golden_diagonal():
    # σ_p = (1, 2), σ_q = (2, 2): KL ½ (¼ − 1 − ln ¼), W2² 1 (scaled ¼), Frobenius 9; means 2 apart: KL ½·1, W2² 4.
    p_and_q = real([2.0, 0.0]), real([1.0, 2.0]), real([0.0, 0.0]), real([2.0, 2.0])
    assert_close(torch.stack(gaussian_kl(*p_and_q, diagonal=True)), real([0.5, 0.5 * (0.25 - 1 + math.log(4))]))
    assert_close(torch.stack(gaussian_wasserstein(*p_and_q, diagonal=True)), real([4.0, 1.0]))
    assert_close(torch.stack(gaussian_wasserstein(*p_and_q, scaled=True, diagonal=True)), real([1.0, 0.25]))
    assert_close(torch.stack(gaussian_frobenius(*p_and_q, diagonal=True)), real([1.0, 9.0]))
    assert_close(gaussian_entropy(real([1.0, 2.0]), diagonal=True), real(math.log(2 * math.pi * math.e * 2)))


# ---------------------------------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("dimension", [1, 2, 9])
def test_oracle_torch_distributions(dimension):
    mean_p, chol_p, mean_q, chol_q = gaussians(16, dimension=dimension)
    p, q = MultivariateNormal(mean_p, scale_tril=chol_p), MultivariateNormal(mean_q, scale_tril=chol_q)
    assert_close(gaussian_kl(mean_p, chol_p, mean_q, chol_q).total, kl_divergence(p, q))
    assert_close(gaussian_entropy(chol_p), p.entropy())


def test_oracle_matrix_roots_of_scipy():
    for mean_p, chol_p, mean_q, chol_q in zip(*gaussians(8), strict=True):
        p, q = (chol_p @ chol_p.T).numpy(), (chol_q @ chol_q.T).numpy()
        root_p, root_q = scipy.linalg.sqrtm(p), scipy.linalg.sqrtm(q)
        bures = (p + q - 2 * scipy.linalg.sqrtm(root_q @ p @ root_q)).trace()
        assert_close(gaussian_wasserstein(mean_p, chol_p, mean_q, chol_q).cov, real(bures), rtol=1e-9)
        commuting = partial(gaussian_wasserstein, mean_p, chol_p, mean_q, chol_q, form="commuting")
        assert_close(commuting().cov, real(((root_p - root_q) ** 2).sum()), rtol=1e-9)
        scaled = root_p @ scipy.linalg.inv(root_q) - torch.eye(4).numpy()
        assert_close(commuting(scaled=True).cov, real((scaled**2).sum()), rtol=1e-9)


@each_divergence
def test_diagonal_equals_full(divergence):
    mean_p, mean_q = torch.randn(2, 6, 5, dtype=torch.float64)
    std_p, std_q = torch.randn(2, 6, 5, dtype=torch.float64).exp()
    full = divergence(mean_p, torch.diag_embed(std_p), mean_q, torch.diag_embed(std_q))
    for a, b in zip(divergence(mean_p, std_p, mean_q, std_q, diagonal=True), full, strict=True):
        assert_close(a, b)
    assert_close(gaussian_entropy(std_p, diagonal=True), gaussian_entropy(torch.diag_embed(std_p)))


# ---------------------------------------------------------------------------------------------------- properties


@given(pairs())
def test_distances_are_never_negative_and_0_from_itself(pair):
    mean, chol, *_ = pair
    for name, divergence in DIVERGENCES.items():
        assert all(part >= 0 for part in divergence(*pair))
        itself = divergence(mean, chol, mean, chol)
        assert itself.mean == 0
        assert itself.cov <= (1e-24 if name.startswith("w2") else 0)  # the square of the rounding of a root


@given(pairs(), pairs())
def test_affine_maps_change_neither_part_of_kl_nor_the_scaled_bures_distance(pair, other):
    mean_p, chol_p, mean_q, chol_q = (x[..., : len(other[0])] for x in pair)
    n = len(mean_p)
    shift, a = (x[:n] for x in other[:2])
    a, chol_p, chol_q = a[:n, :n], chol_p[:n, :n], chol_q[:n, :n]
    a = a[:, [*range(1, n), 0]]  # invertible and not triangular
    moved = (a @ mean_p + shift, lower(a @ chol_p), a @ mean_q + shift, lower(a @ chol_q))
    for divergence in (gaussian_kl, partial(gaussian_wasserstein, scaled=True)):
        for after, before in zip(divergence(*moved), divergence(mean_p, chol_p, mean_q, chol_q), strict=True):
            assert_close(after, before, rtol=1e-6, atol=1e-8)  # a may have a condition number of 1e4


def lower(root: Tensor) -> Tensor:
    r = torch.linalg.qr(root.mT).R.mT
    return (r * torch.where(r.diagonal() < 0, -1.0, 1.0)).tril()


@given(pairs())
def test_the_commuting_form_is_an_upper_bound(pair):
    bures, commuting = (gaussian_wasserstein(*pair, form=form).cov for form in ("bures", "commuting"))
    assert bures <= commuting * (1 + 1e-9) + 1e-12


def test_the_commuting_form_is_exact_where_covariances_commute():
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    chol_p, chol_q = (lower(rotation * torch.rand(5, dtype=torch.float64)) for _ in range(2))
    zero = torch.zeros(5, dtype=torch.float64)
    bures, commuting = (gaussian_wasserstein(zero, chol_p, zero, chol_q, form=form).cov for form in ("bures", "commuting"))
    assert_close(bures, commuting)


@given(pairs())
def test_wasserstein_and_frobenius_are_symmetric(pair):
    p, q = pair[:2], pair[2:]
    for form in ("bures", "commuting"):
        there, back = gaussian_wasserstein(*p, *q, form=form), gaussian_wasserstein(*q, *p, form=form)
        assert_close(there.total, back.total, rtol=1e-8, atol=1e-10)
    assert_close(gaussian_frobenius(*p, *q).cov, gaussian_frobenius(*q, *p).cov, rtol=1e-8)


@given(pairs(), st.floats(0.1, 10))
def test_scaling_adds_to_the_entropy(pair, scale):
    _, chol, *_ = pair
    assert_close(gaussian_entropy(scale * chol), gaussian_entropy(chol) + len(chol) * math.log(scale))


@pytest.mark.parametrize("scale", [1.0, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("dimension", [2, 63])
def test_kl_keeps_its_digits_in_float32_as_p_approaches_q(scale, dimension):
    # At 1e-3 and D = 2, KL is 1e-6: trace and log-determinant, both known to 1e-7, would leave nothing of it.
    _, chol, _, _ = gaussians(8, dimension=dimension)
    q = chol.float()
    p = (chol + scale * 0.1 * torch.randn_like(chol).tril() * chol.diagonal(dim1=-2, dim2=-1)[..., None, :]).float()
    zero = torch.zeros(8, dimension)
    exact = gaussian_kl(zero.double(), p.double(), zero.double(), q.double()).cov
    assert_close(gaussian_kl(zero, p, zero, q).cov, exact, rtol=1e-4, atol=0)


# ---------------------------------------------------------------------------------------------------- gradients


@each_divergence
def test_gradcheck(divergence):
    mean_p, chol_p, mean_q, chol_q = gaussians(2, dimension=3)
    chol_p[1] = 1.5 * chol_q[1]  # every eigenvalue alike

    def parts(mean_p: Tensor, chol_p: Tensor, mean_q: Tensor, chol_q: Tensor) -> tuple[Tensor, ...]:
        return tuple(divergence(mean_p, chol_p.tril(), mean_q, chol_q.tril()))

    assert gradcheck(parts, [x.requires_grad_() for x in (mean_p, chol_p, mean_q, chol_q)])


@each_divergence
def test_gradcheck_diagonal(divergence):
    mean_p, mean_q = torch.randn(2, 2, 3, dtype=torch.float64)
    std_p, std_q = torch.randn(2, 2, 3, dtype=torch.float64).exp()
    inputs = [x.requires_grad_() for x in (mean_p, std_p, mean_q, std_q)]
    assert gradcheck(lambda *x: tuple(divergence(*x, diagonal=True)), inputs)
    assert gradcheck(lambda x: gaussian_entropy(x, diagonal=True), inputs[1])


def test_the_gradient_of_kl_at_equality_is_0():
    mean, chol, *_ = gaussians(3)
    inputs = [x.clone().requires_grad_() for x in (mean, chol, mean, chol)]
    kl = gaussian_kl(*inputs)
    assert (kl.total == 0).all()
    for gradient in torch.autograd.grad(kl.total.sum(), inputs):
        assert (gradient == 0).all()


def test_the_symmetric_root_squares_to_its_matrix():
    factor = torch.randn(6, 5, 5, dtype=torch.float64)
    root = symmetric_root(factor)
    assert_close(root @ root, factor @ factor.mT)
    assert_close(root, root.mT)
    assert (torch.linalg.eigvalsh(root) > 0).all()


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0], [2.0, 2.0, 0.5]])
def test_gradcheck_of_the_symmetric_root_with_repeated_values(values):
    u, v = (torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q for _ in range(2))
    assert gradcheck(symmetric_root, ((u * real(values)) @ v).requires_grad_())


def test_a_second_derivative_of_the_symmetric_root_is_refused():
    factor = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(symmetric_root(factor).square().sum(), factor, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---------------------------------------------------------------------------------------------------- shapes and bad rows


@each_divergence
def test_one_shared_factor_serves_all_means(divergence):
    mean_p, chol_p, mean_q, chol_q = gaussians(2, 3)
    shared = divergence(mean_p, chol_p[0, 0], mean_q, chol_q[0, 0])
    assert shared.mean.shape == (2, 3)
    assert shared.cov.shape == ()
    apart = divergence(mean_p, chol_p[:1, :1].expand(2, 3, 4, 4), mean_q, chol_q[:1, :1].expand(2, 3, 4, 4))
    assert_close(shared.mean, apart.mean)
    assert_close(shared.cov.expand(2, 3), apart.cov)


@each_divergence
def test_a_bad_row_spoils_no_other(divergence):
    p_and_q = gaussians(3)
    good = divergence(*p_and_q)
    p_and_q[1][1, 2, 1] = NAN
    out = divergence(*p_and_q)
    assert out.cov[1].isnan()
    assert torch.equal(out.cov[[0, 2]], good.cov[[0, 2]])
    assert torch.equal(out.mean, good.mean)


def test_a_flat_policy_is_infinitely_far_and_a_negative_diagonal_is_none():
    mean, chol, *_ = gaussians(2)
    flat, negative = chol.clone(), chol.clone()
    flat[0, 1, 1], negative[0, 1, 1] = 0.0, -1.0
    assert gaussian_kl(mean, flat, mean, chol).cov.tolist() == [INF, 0.0]
    assert gaussian_entropy(flat)[0] == -INF
    assert gaussian_kl(mean, negative, mean, chol).cov[0].isnan()
    assert gaussian_entropy(negative)[0].isnan()


@each_divergence
def test_half_precision_is_computed_in_float32(divergence):
    mean_p, mean_q = torch.randn(2, 3, 4).bfloat16()
    std = torch.rand(2, 3, 4).bfloat16() + 1
    out = divergence(mean_p, std[0], mean_q, std[1], diagonal=True)
    assert out.mean.dtype == out.cov.dtype == torch.float32
    assert torch.equal(out.cov, divergence(mean_p.float(), std[0].float(), mean_q.float(), std[1].float(), diagonal=True).cov)


@each_divergence
def test_autocast_does_not_round_it(divergence):
    problem = [x.float() for x in gaussians(5)]
    with torch.autocast("cpu", torch.bfloat16):
        out = divergence(*problem)
    for got, expected in zip(out, divergence(*problem), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("single", range(4))
@each_divergence
def test_the_best_precision_of_the_inputs_is_that_of_the_result(divergence, single):
    problem = [x.float().double() for x in gaussians()]  # exact in float32 too
    mixed = [x.float() if index == single else x for index, x in enumerate(problem)]
    for got, expected in zip(divergence(*mixed), divergence(*problem), strict=True):
        assert got.dtype == torch.float64
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_form_is_named():
    with pytest.raises(ValueError, match="commuting, bures; got 'exact'"):
        gaussian_wasserstein(*gaussians(1), form="exact")
