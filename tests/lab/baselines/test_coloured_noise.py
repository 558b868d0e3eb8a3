"""Coloured noise: its spectrum, its variance, and that policies act with it and learn without it."""

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.lab.baselines.noise import ColouredGaussian, ColouredSquashedGaussian, EpisodeNoise, _colour, coloured_noise
from corral.lab.baselines.stable import Baseline, BaselineConfig
from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.evaluate import measure
from corral.robot.episode import Plant, held_out_seeds
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"


def covariance(steps: int, beta: float) -> torch.Tensor:
    """Of a sequence [T T], exactly: the noise is linear in standard normal draws."""
    entries = 2 * (steps // 2 + 1)
    rows = _colour(torch.eye(entries, dtype=torch.float64).view(entries, 2, -1), steps, beta)
    return rows.T @ rows


def test_golden_covariance_of_red_noise() -> None:
    # T = 4, β = 2: f = ¼, ¼, ½, so powers 16, 16, 4. One entry: 2 · 16 + 4 · 16 + 2 · 4 = 104; at a distance of one step the
    # middle term's cosine is 0 and the last one's −1: (32 − 8)/104 = 3/13; of two: (32 − 64 + 8)/104 = −3/13.
    expected = [1, 3 / 13, -3 / 13, 3 / 13]
    assert_close(covariance(4, 2.0)[0], torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=20)
@given(steps=st.integers(1, 60), beta=st.floats(-1.0, 3.0))
def test_every_entry_is_standard_normal_whatever_the_colour(steps: int, beta: float) -> None:
    found = covariance(steps, beta)
    assert_close(found.diagonal(), torch.ones(steps, dtype=torch.float64), rtol=1e-9)
    white = covariance(steps, 0.0)
    assert_close(white, torch.eye(steps, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("steps", [100, 251])
def test_the_spectrum_falls_as_it_should(steps: int, beta: float) -> None:
    power = np.fft.fft(np.fft.fft(covariance(steps, beta).numpy()).conj().T).diagonal().real  # E |x̂_k|², by NumPy
    index = np.arange(1, steps // 2)
    slope, _ = np.polyfit(np.log(index), np.log(power[index]), 1)
    assert slope == pytest.approx(-beta, abs=1e-9)
    torch.manual_seed(0)  # and of what is drawn
    drawn = (torch.fft.rfft(coloured_noise(400, steps, 2, beta), dim=1).abs() ** 2).mean((0, 2)).numpy()
    slope, _ = np.polyfit(np.log(index), np.log(drawn[index]), 1)
    assert slope == pytest.approx(-beta, abs=0.05)


def test_episodes_have_sequences_of_their_own_from_first_step_to_last() -> None:
    torch.manual_seed(0)
    noise = EpisodeNoise(1.0, 6, 2)
    noise.begin(3)
    whole, seen = noise._sequences.clone(), []
    for step in range(4):
        seen.append(noise.now())
        noise.advance(np.array([False, step == 1, False]))
    assert torch.equal(torch.stack(seen, 1)[[0, 2]], whole[[0, 2], :4])
    assert torch.equal(torch.stack(seen, 1)[1, :2], whole[1, :2])
    assert torch.equal(torch.stack(seen, 1)[1, 2:], noise._sequences[1, :2])  # a new one, from its beginning
    assert not torch.equal(noise._sequences[1], whole[1])


def test_policies_act_with_it_and_sac_learns_from_white_noise() -> None:
    noise = EpisodeNoise(1.0, 6, 2)
    noise.begin(3)
    mean, log_std = torch.tensor([[0.1, -0.2]] * 3), torch.tensor([-1.0, 0.5])
    drawn = mean + log_std.exp() * noise.now()
    assert_close(ColouredGaussian(noise).actions_from_params(mean, log_std), drawn)
    squashed = ColouredSquashedGaussian(noise)
    assert_close(squashed.actions_from_params(mean, log_std), drawn.tanh())
    many = torch.zeros(50, 2, requires_grad=True)  # a minibatch of other states
    actions, _ = squashed.log_prob_from_params(many, log_std)
    assert len(actions.detach().unique(dim=0)) == 50
    actions.sum().backward()
    assert (many.grad != 0).all()
    assert_close(squashed.actions_from_params(mean, log_std), drawn.tanh())  # and acts with the same again


@pytest.mark.parametrize("kind", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])
def test_exploration_remembers(kind: str) -> None:
    found = {}
    for colour in (0.0, 1.0):
        envs = gymnasium.make_vec(NAME, num_envs=8, vectorization_mode="vector_entry_point")
        config = BaselineConfig(iterations=2, episodes=8, hidden=(8,), epochs=1, minibatches=4, noise_colour=colour)
        agent = Baseline(Plant(envs, ENVIRONMENTS[NAME].tracking, 100), f"sb3-{kind}-pink", config)
        found[colour] = measure(agent, ENVIRONMENTS[NAME], 16)["explore/autocorrelation"]
        few = agent.explore(held_out_seeds(3))  # fewer than environments
        assert torch.equal(few.actions, agent.explore(held_out_seeds(3)).actions)
    assert found[1.0] > found[0.0] + 0.15  # actions answer the state too, which remembers


def test_what_is_no_colour_is_refused() -> None:
    with pytest.raises(ValueError, match="`beta` is a finite number"):
        coloured_noise(1, 4, 1, float("nan"))
    with pytest.raises(ValueError, match="`noise_colour` is a finite number"):
        BaselineConfig(noise_colour=float("inf"))
