"""Runs in an environment of one's own: trained, resumed, evaluated, filmed, exported and reported as in corral's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from corral.lab.cli import main
from corral.lab.jobs.robot.exported import load
from corral.lab.jobs.robot.prepare import restored
from lab.environments.test_own import REACH

EXAMPLE = Path(__file__).parents[3] / "examples" / "point_masses.py"
TABLE = """
[tracking]
joints = [0, 2]
velocities = [2, 4]
command = "position"
steps = 12
dt = 0.05

[learner]
episodes = 8

[tce]
points = 4
policy_epochs = 2
critic_epochs = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file of settings beside the module that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reach_of_mine.py").write_text(REACH)
    (tmp_path / "mine.toml").write_text('environment = "reach_of_mine:Reach"\niterations = 3\neval_size = 4\n' + TABLE)
    yield "mine.toml"
    sys.modules.pop("reach_of_mine", None)


def lines(run: str) -> list[dict[str, object]]:
    """Metrics, but for what a clock says."""
    read = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "steps_per_second")} for line in read]


@pytest.mark.supports("run: your own environment, module:Class or a Gymnasium id", door="robots")
def test_a_class_of_one_s_own_from_training_to_the_robot(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", config, "--quiet", "--out", "whole"]) == 0
    assert (
        main(["train", "--config", config, "--iterations", "2", "--learner.decay-over", "3", "--quiet", "--out", "part"]) == 0
    )
    assert main(["train", "--resume", "part", "--iterations", "3", "--quiet"]) == 0
    assert main(["train", "--config", config, "--learner.decay-over", "3", "--quiet", "--out", "again"]) == 0
    # The last step is always measured: here the second too, since the run was to end there.
    assert [line["reward"] for line in lines("part")] == [line["reward"] for line in lines("again")]
    assert lines("part")[-1] == lines("again")[-1]
    assert lines("whole")[-1]["success"] is not None
    assert json.loads(Path("whole/config.json").read_text())["task"]["tracking"]["joints"] == [0, 2]

    assert main(["eval", "whole", "--episodes", "4", "--video", "film.gif", "--quiet"]) == 0
    assert Path("film.gif").read_bytes().startswith(b"GIF")
    assert main(["report", "whole", "--out", "page.html"]) == 0
    assert "reach_of_mine:Reach" in Path("page.html").read_text()

    assert main(["export", "whole", "--out", "plan.npz"]) == 0
    assert main(["export", "whole", "--out", "plan.pt2"]) == 0
    assert "plan.pt2 has the policy after step 3; torch.export.load loads it." in capsys.readouterr().out
    observation = np.random.default_rng(0).normal(size=(5, 6))  # as the class returns them: without the elapsed share
    y, v, a = load("plan.npz")(observation)
    with restored(Path("whole"), "latest") as (_, learner, *_):
        np.testing.assert_allclose(np.stack(learner.predict(observation)), [y, v], rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(learner.predict(observation[3])), [y[3], v[3]], rtol=0, atol=1e-12)
        played = learner.evaluate([3])
        np.testing.assert_allclose(
            played.actions[0], learner.predict(played.observations[0, 0, :-1].numpy())[0], rtol=0, atol=1e-6
        )
    program = torch.export.load("plan.pt2").module()
    np.testing.assert_allclose(program(torch.from_numpy(observation)), [y, v, a], rtol=0, atol=1e-12)
    np.testing.assert_allclose(program(torch.from_numpy(observation[:1])), [y[:1], v[:1], a[:1]], rtol=0, atol=1e-12)


def test_step_based_baselines_and_comparisons(config: str) -> None:
    ppo = ["--learner.minibatches", "4", "--learner.epochs", "1"]
    Path("plain.toml").write_text(Path(config).read_text().split("[learner]")[0])
    assert (
        main(
            [
                "train",
                "--config",
                "plain.toml",
                "--algorithm",
                "sb3-ppo",
                "--learner.episodes",
                "8",
                *ppo,
                "--quiet",
                "--out",
                "ppo",
            ]
        )
        == 0
    )
    assert lines("ppo")[-1]["success"] is not None
    given = ["--iterations", "1", "--out", "compared", "--jobs", "1", "--quiet"]
    assert main(["compare", "--config", config, "--algorithms", "tce,bbrl", "--seeds", "1", *given]) == 0
    assert len([*Path("compared").glob("**/metrics.jsonl")]) == 2


def test_an_id_of_gymnasium_s_by_flags_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = ["--tracking.joints", "[0, 7]", "--tracking.velocities", "[7, 14]", "--tracking.p", "1", "--tracking.steps", "30"]
    out = tmp_path / "run"
    assert main(["train", "--environment", "Pusher-v5", *table, "--smoke", "--quiet", "--out", str(out)]) == 0
    assert lines(str(out))[-1]["env_steps"] == 2 * 4 * 30
    assert lines(str(out))[-1]["success"] is None, "Pusher-v5 says nothing of success"
    assert main(["train", "--environment", "Pusher-v5", *table, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "[tracking]" in printed
    assert "joints = [0, 7]" in printed
    assert main(["train", "--recipe", "demo", "--environment", "Pusher-v5"]) == 1
    assert "environment" in capsys.readouterr().err


@pytest.mark.supports("run: an environment of torch tensors", door="robots")
def test_a_batch_of_torch_tensors_is_learned_in(tmp_path: Path) -> None:
    table = ["--tracking.joints", "[0, 2]", "--tracking.velocities", "[2, 4]", "--tracking.p", "4", "--tracking.d", "2"]
    table += ["--tracking.steps", "50", "--tracking.dt", "0.04", "--set", "learner.std=0.3", "--set", "learner.episodes=32"]
    table += ["--set", "learner.mean_bound=0.3", "--set", "learner.policy_rate=2e-3", "--eval-size", "32"]
    out = tmp_path / "run"
    assert (
        main(["train", "--environment", f"{EXAMPLE}:PointMasses", *table, "--iterations", "12", "--quiet", "--out", str(out)])
        == 0
    )
    first, last = lines(str(out))[0], lines(str(out))[-1]
    assert last["return"] > first["return"] + 10  # type: ignore[operator]  # 23 with this seed
    assert main(["eval", str(out), "--episodes", "2", "--video", str(tmp_path / "film.gif"), "--quiet"]) == 0
    assert (tmp_path / "film.gif").read_bytes().startswith(b"GIF")
