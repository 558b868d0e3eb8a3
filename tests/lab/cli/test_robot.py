"""Robots on the command line: one rule tells them from language models, and one set of flags serves both."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.lab.cli import main
from corral.lab.jobs.robot.settings import Settings, resolve
from corral.lab.run.settings import read_recipe, recipes


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """The settings that a command line would train with."""
    seen: list[Any] = []

    def remember(settings: Settings, **how: Any) -> Any:
        seen.append(settings)
        return type("Outcome", (), {"summary": {"stopped": "finished"}})

    monkeypatch.setattr("corral.lab.jobs.robot.train.train", remember)

    def run(*argv: str) -> Settings:
        assert main(["train", *argv]) == 0
        return seen[-1]

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("robot") / "run"
    assert main(["train", "--recipe", "via_point", "--smoke", "--quiet", "--out", str(out)]) == 0
    return out


def test_no_recipe_has_two_kinds() -> None:
    assert not recipes("robot").keys() & recipes("llm").keys()
    assert recipes() == recipes("robot") | recipes("llm")


@pytest.mark.supports("run: recipe, file and flags in layers", door="robots")
def test_recipe_file_and_flags(settings_of: Callable[..., Settings], tmp_path: Path) -> None:
    assert settings_of("--recipe", "via_point") == resolve([read_recipe("via_point")])
    argv = ["--recipe", "via_point", "--algorithm", "bbrl", "--iterations", "7", "--set", "learner.episodes=8", "--seed", "3"]
    settings = settings_of(*argv, "--prodmp.basis", "4", "--eval-size", "5")
    assert (settings.algorithm, settings.iterations, settings.seed, settings.eval_size) == ("bbrl", 7, 3, 5)
    assert settings.learner == {**read_recipe("via_point")["bbrl"], "episodes": 8}
    assert settings.prodmp["basis"] == 4
    path = tmp_path / "mine.toml"
    path.write_text('environment = "corral/HopperJump-v0"\n[learner]\nepisodes = 2\n')
    alone = settings_of("--config", str(path), "--set", "learner.points=13")
    assert alone == resolve([{"environment": "corral/HopperJump-v0", "learner": {"episodes": 2, "points": 13}}])
    (tmp_path / "mine.yaml").write_text("environment: corral/BoxPushing-v0\nlearner:\n  policy_rate: 1e-4\n")
    assert settings_of("--config", str(tmp_path / "mine.yaml")).learner == {"policy_rate": 1e-4}
    smoke = settings_of("--recipe", "via_point", "--smoke", "--iterations", "3")
    assert (smoke.iterations, smoke.learner["episodes"], smoke.learner["points"]) == (3, 4, 25)


@pytest.mark.supports("run: plain lines in a pipe", door="robots")
def test_a_run_in_a_pipe_prints_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "--recipe", "via_point", "--algorithm", "sb3-ppo", "--smoke", "--out", str(out)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[:6]] == ["corral", "algorithm", "policy", "step", "device", "run"]
    assert [row.split("  ")[0] for row in rows[6:9]] == ["step 0/2", "step 1/2", "step 2/2"]
    assert all(word in rows[8] for word in ("success", "return", "reward"))
    assert rows[-3].endswith(f"The run is in {out}")
    assert rows[-2:] == [f"Next: corral report {out} --open", f"      corral eval {out}"]


def test_resume_goes_by_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(run), "--guard", "stop", "--quiet"]) == 0
    assert "finished after 2 steps" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--seed", "1", "--report-to", "tensorboard"]) == 1
    told = capsys.readouterr().err
    allowed = "only --guard, --iterations, --report-to, --simulator, --quiet and --verbose can."
    assert f"so seed cannot be given with it; {allowed}" in told


def test_eval_prints_a_table_and_keeps_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film = tmp_path / "film.gif"
    assert main(["eval", str(run), "--episodes", "2", "--video", str(film)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("return", "success", "jerk (LDJ)", "SPARC", "torque rate", "95% interval"))
    assert film.read_bytes().startswith(b"GIF")
    written = json.loads((run / "evals" / "step-2-episodes-2" / "eval.json").read_text())
    assert (written["step"], written["episodes"], written["algorithm"]) == (2, 2, "tce")


def test_a_film_without_its_encoder_is_refused_before_anything_is_played(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setattr("corral.lab.jobs.robot.evaluate.restored", pytest.fail)
    assert main(["eval", str(run), "--video", str(tmp_path / "film.mp4")]) == 1
    assert "pip install imageio-ffmpeg. A .gif does not." in capsys.readouterr().err


def test_one_episode_has_an_interval_of_success_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    printed = capsys.readouterr().out
    rows = {row.split("  ")[0].strip(): row.split() for row in printed.splitlines() if row.strip()}
    assert rows["return"][2::2] == rows["torque rate"][3::2] == ["–", "–"]
    assert "…" in rows["success"], "Wilson's says something of one trial"
    assert "over 1 held-out context. In" in printed
    written = json.loads((run / "evals" / "step-2-episodes-1" / "eval.json").read_text(), parse_constant=pytest.fail)
    for found in written["estimates"].values():
        assert [name for name, one in found.items() if one["low"] is not None] == ["success"]
        assert all(one["high"] is None for name, one in found.items() if name != "success")
