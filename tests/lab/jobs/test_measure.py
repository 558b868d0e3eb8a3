"""What is measured of a policy while it learns: by hand, and what cannot be measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.evaluate import LAG, MOVED, autocorrelation, evaluate, measure, smoothness
from corral.lab.jobs.robot.prepare import prepare
from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from corral.robot.episode import Episodes, held_out_seeds

ENVIRONMENT = ENVIRONMENTS["corral/ViaPointReacher-v0"]


def episodes(actions: np.ndarray, velocities: np.ndarray | None = None) -> Episodes:
    """Arms with these actions [E T 5] and, if given, velocities."""
    count, steps = actions.shape[:2]
    observations = np.zeros((count, steps + 1, 15))
    if velocities is not None:
        observations[:, 1:, 5:10] = velocities
    whole = np.ones((count, steps), bool)
    return Episodes(*map(torch.from_numpy, (observations, actions[..., 0] * 0, whole, actions, *np.ones((3, count)))))


def test_white_exploration_forgets_and_slow_exploration_does_not() -> None:
    generator = np.random.default_rng(0)
    mean = episodes(np.broadcast_to(np.sin(np.linspace(0, 6, 100))[:, None], (40, 100, 5)).copy())
    white = episodes(mean.actions.numpy()[:MOVED] + 0.1 * generator.standard_normal((MOVED, 100, 5)))
    slow = episodes(mean.actions.numpy()[:MOVED] + 0.1 * generator.standard_normal((MOVED, 1, 5)))
    assert autocorrelation(white, mean, ENVIRONMENT) == pytest.approx(0.0, abs=0.03)
    assert autocorrelation(slow, mean, ENVIRONMENT) == pytest.approx(1.0)
    # A sine of period 4 lags is a cosine one lag later: 0, but for the ends.
    lag = round(LAG / ENVIRONMENT.dt)
    wave = episodes(mean.actions.numpy()[:1] + np.sin(np.pi / 2 * np.arange(100) / lag)[None, :, None])
    assert autocorrelation(wave, mean, ENVIRONMENT) == pytest.approx(0.0, abs=0.05)


def test_without_exploration_or_time_there_is_nothing_to_compare() -> None:
    still = episodes(np.zeros((4, 100, 5)))
    assert autocorrelation(still, still, ENVIRONMENT) is None
    short = episodes(np.ones((4, 3, 5)))
    assert autocorrelation(short, episodes(np.zeros((4, 3, 5))), ENVIRONMENT) is None
    ended = replace(still, mask=torch.zeros_like(still.mask))
    assert autocorrelation(ended, still, ENVIRONMENT) is None


def test_smoothness_passes_over_robots_at_rest_and_ends_with_the_episode() -> None:
    time = np.linspace(0, 1, 100)
    speed = 30 * time**2 - 60 * time**3 + 30 * time**4  # minimum jerk: −log 204.8
    velocities = np.zeros((3, 100, 5))
    velocities[:2, :, 0] = speed
    velocities[1, 50:, 1] = np.random.default_rng(0).standard_normal(50)  # after the second episode's end
    some = episodes(np.zeros((3, 100, 5)), velocities)
    mask = some.mask.clone()
    mask[1, 50:] = False
    found = smoothness(replace(some, mask=mask), ENVIRONMENT)
    assert len(found["jerk"]) == len(found["spectrum"]) == 2, "the third stood still"
    assert found["jerk"][0] == pytest.approx(-np.log(204.8), abs=0.1)
    assert found["jerk"][1] > -7, "half of a smooth motion is smooth"
    assert found["torque_rate"].tolist() == [0, 0, 0]
    assert len(smoothness(some, ENVIRONMENT, 1)["jerk"]) == 1


@pytest.mark.parametrize("algorithm", ["tce", "sb3-ppo", "sb3-ppo-gsde"])
def test_measuring_changes_nothing(algorithm: str) -> None:
    asked = resolve([TRAINING, {"algorithm": algorithm, "prodmp": {"basis": 3, "alpha": 10.0, "auto_scale": True}}])
    looked, blind = prepare(asked), prepare(asked)
    for agent in (looked, blind):
        agent.step()
    found = measure(looked, ENVIRONMENT, 4)
    assert measure(looked, ENVIRONMENT, 4) == found
    assert found["explore/torque_rate"] > found["motion/torque_rate"]
    assert (found["explore/autocorrelation"] > 0.5) == (algorithm != "sb3-ppo"), "plans and gSDE remember"
    one, other = looked.step(), blind.step()
    assert one["return"] == other["return"]
    assert looked.evaluate([1, 2]).returns.tolist() == blind.evaluate([1, 2]).returns.tolist()


def test_the_hopper_s_height_is_measured_and_other_tasks_have_none(tmp_path: Path) -> None:
    asked = resolve([TRAINING, {"environment": "corral/HopperJump-v0", "iterations": 1, "learner": {"episodes": 2}}])
    outcome = train(asked, out=tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    agent = prepare(asked)
    heights = agent.evaluate(held_out_seeds(4)).max_height
    assert lines[0]["max_height"] == float(heights.mean())
    assert 1.499 <= float(heights.min()) < 2.5, "it begins at 1.5 m, less the first step of its fall"
    estimates = evaluate(outcome.path, episodes=4).result["estimates"]
    assert 1.499 <= estimates["mean"]["max height (m)"]["low"] <= estimates["mean"]["max height (m)"]["high"] < 2.5
    assert "max_height" not in measure(prepare(resolve([TRAINING])), ENVIRONMENT, 4)
