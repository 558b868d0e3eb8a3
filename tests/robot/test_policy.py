"""The Gaussian policy, its covariance, the critic and its normaliser."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.robot.policy import Critic, GaussianPolicy, Normaliser


def test_it_starts_near_zero_with_the_asked_spread() -> None:
    policy = GaussianPolicy(4, 6, std=0.7).double()
    mean, chol = policy(torch.randn(10, 4, dtype=torch.float64))
    assert mean.abs().max() < 0.2
    torch.testing.assert_close(chol, 0.7 * torch.eye(6, dtype=torch.float64))


def test_a_wide_start_does_not_overflow() -> None:
    chol = GaussianPolicy(1, 2, std=1000.0).cholesky()  # e^1000 is no float
    torch.testing.assert_close(chol, 1000.0 * torch.eye(2))


def test_golden_cholesky() -> None:
    # softplus(0) = log 2; the strict lower part is filled row by row.
    policy = GaussianPolicy(1, 3, min_std=0.1).double()
    with torch.no_grad():
        policy.log_diagonal.zero_()
        policy.lower.copy_(torch.tensor([1.0, 2.0, 3.0]))
    d = torch.log(torch.tensor(2.0, dtype=torch.float64)).item() + 0.1
    torch.testing.assert_close(policy.cholesky(), torch.tensor([[d, 0, 0], [1, d, 0], [2, 3, d]], dtype=torch.float64))


def test_a_covariance_that_is_set_is_returned() -> None:
    policy = GaussianPolicy(2, 5, min_std=1e-3).double()
    chol = torch.randn(5, 5, dtype=torch.float64).tril(-1) + torch.diag(torch.tensor([1e-2, 0.1, 1.0, 10.0, 60.0]).double())
    policy.set_cholesky(chol)
    torch.testing.assert_close(policy.cholesky(), chol, rtol=1e-12, atol=1e-12)
    policy.set_cholesky(torch.diag(torch.full((5,), 1e-5, dtype=torch.float64)))  # below min_std
    torch.testing.assert_close(policy.cholesky().diagonal(), torch.full((5,), 1e-3, dtype=torch.float64))


def test_gradients_reach_every_entry_of_the_covariance() -> None:
    policy = GaussianPolicy(2, 4).double()
    policy.cholesky().square().sum().backward()
    assert (policy.log_diagonal.grad != 0).all()
    torch.testing.assert_close(policy.lower.grad, 2 * policy.lower.detach())


def test_the_normaliser_knows_all_it_has_seen() -> None:
    values = torch.randn(60, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.0]) + 5
    normaliser = Normaliser(3).double()
    for part in values.split([1, 20, 39]):
        normaliser.update(part)
    torch.testing.assert_close(normaliser.mean, values.mean(0))
    torch.testing.assert_close(normaliser.variance, values.var(0, unbiased=False), atol=1e-12, rtol=1e-10)
    assert (normaliser(values)[:, 2] == 0).all()


def test_the_normaliser_keeps_its_digits_in_float32() -> None:
    # 0.1 is no float32: a float32 mean of many would not be that number, and the difference would be divided by nearly 0.
    critic = Critic(1)
    for _ in range(3):
        critic.normaliser.update(torch.full((1000, 1), 0.1))
    assert critic.normaliser(torch.full((5, 1), 0.1)).abs().max() < 1e-6
    critic.normaliser.count.fill_(2.0**24)
    critic.normaliser.update(torch.full((1, 1), 0.1))
    assert critic.normaliser.count == 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_critic_gives_one_value_per_state(dtype: torch.dtype) -> None:
    critic = Critic(3)
    critic.value.to(dtype)
    values = critic(torch.randn(2, 7, 3, dtype=torch.float64))
    assert values.shape == (2, 7)
    assert values.dtype == dtype


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="0 < min_std < std"):
        GaussianPolicy(1, 1, std=1e-5)


def test_a_contextual_covariance_begins_as_the_shared_one_and_learns_to_differ() -> None:
    policy, context = GaussianPolicy(4, 6, (8,), std=0.7, contextual_covariance=True).double(), torch.randn(10, 4).double()
    mean, chol = policy(context)
    assert mean.shape == (10, 6)
    torch.testing.assert_close(chol, (0.7 * torch.eye(6, dtype=torch.float64)).expand(10, 6, 6))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (policy.cholesky(context) * torch.randn(10, 6, 6).double()).sum().backward()
        optimizer.step()
    chol = policy.cholesky(context)
    assert (chol.triu(1) == 0).all()
    assert (chol.diagonal(dim1=-2, dim2=-1) > 1e-4).all()
    assert (chol[0] - chol[1]).abs().max() > 1e-3
    torch.testing.assert_close(policy.cholesky(context[3]), chol[3])  # one context alone


def test_golden_contextual_cholesky_and_its_gradient() -> None:
    # A network with weights 0 and bias b adds b for every context: here −log-diagonals, so softplus(0) = log 2, and 1, 2, 3.
    policy = GaussianPolicy(1, 3, (2,), min_std=0.1, contextual_covariance=True).double()
    with torch.no_grad():
        policy.covariance[-1].bias.copy_(torch.cat([-policy.log_diagonal, torch.tensor([1.0, 2.0, 3.0])]))
    d = torch.log(torch.tensor(2.0, dtype=torch.float64)).item() + 0.1
    expected = torch.tensor([[d, 0, 0], [1, d, 0], [2, 3, d]], dtype=torch.float64)
    torch.testing.assert_close(policy.cholesky(torch.randn(2, 1).double()), expected.expand(2, 3, 3))
    with torch.no_grad():
        policy.covariance[-1].weight.normal_()
    assert torch.autograd.gradcheck(policy.cholesky, torch.randn(2, 1).double().requires_grad_())


def test_a_contextual_covariance_is_asked_with_a_context_and_not_set() -> None:
    policy = GaussianPolicy(2, 3, contextual_covariance=True)
    with pytest.raises(ValueError, match="depends on the context; cholesky\\(\\) needs one"):
        policy.cholesky()
    with pytest.raises(ValueError, match="cannot be set to one matrix"):
        policy.set_cholesky(torch.eye(3))


def test_golden_normalised_contexts() -> None:
    # Mean (2, 5); standard deviations 1 and, of what never changes, none to divide by.
    torch.manual_seed(0)
    plain = GaussianPolicy(2, 3, (4,), contextual_covariance=True).double()
    policy = GaussianPolicy(2, 3, (4,), contextual_covariance=True, normalised=True).double()
    policy.load_state_dict(plain.state_dict(), strict=False)
    policy.set_contexts(torch.tensor([[1.0, 5.0], [3.0, 5.0]]).double())
    seen, expected = torch.tensor([[3.0, 5.0], [2.0, 7.0]]).double(), torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
    for found, wanted in zip(policy(seen), plain(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@given(shift=st.floats(-100, 100), scale=st.floats(1e-3, 1e3))
def test_normalised_contexts_have_no_unit(shift: float, scale: float) -> None:
    torch.manual_seed(1)
    policy = GaussianPolicy(3, 2, (8,), normalised=True).double()
    contexts, found = torch.randn(20, 3).double(), []
    for seen in (contexts, shift + scale * contexts):
        policy.set_contexts(seen)
        found.append(policy(seen)[0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-8)
