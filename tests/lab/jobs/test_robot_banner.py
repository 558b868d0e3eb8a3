"""What is said before a run: what follows a batch, and that a trust region cannot act where nothing has moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.lab.jobs.robot.prepare import prepare
from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import banner


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "4 episodes of 100 steps of 0.02 s, then 2 updates of the critic and 2 of the policy"),
        (
            {"learner": {"policy_epochs": 1}},
            "1 of the policy; at its only one the policy is still the old one, and no trust region",
        ),
        ({"learner": {"plans_per_context": 4}}, "then 2 updates of the policy, 4 plans a context"),
        ({"algorithm": "sb3-ppo"}, "then 1 pass of 4 updates"),
        ({"algorithm": "sb3-ppo", "learner": {"epochs": 3}}, "then 3 passes of 4 updates"),
        ({"algorithm": "sb3-sac"}, "then updates as it goes, 8 for every 64 steps"),
    ],
)
def test_a_step_is_told_in_words(changes: dict[str, Any], words: str) -> None:
    settings = resolve([TRAINING, changes])
    assert words in dict(banner(settings, prepare(settings), Path("run")))["step"]


def test_where_plans_are_simulated_is_told() -> None:
    settings = resolve([TRAINING])
    agent = prepare(settings)
    assert dict(banner(settings, agent, Path("run")))["device"] == "cpu (1 thread); float64"
    told = dict(banner(replace(settings, simulator="warp"), agent, Path("run")))["device"]
    assert told == "cpu (1 thread), plans simulated by MuJoCo Warp on a GPU; float64"
    agent.config = replace(agent.config, device="cuda")
    told = dict(banner(replace(settings, simulator="warp"), agent, Path("run")))["device"]
    assert told.endswith("on a GPU, updates on cuda; float64")
