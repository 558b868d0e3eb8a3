"""Trackers of a robot's run: what arrives in TensorBoard, wandb and trackio, and what is refused."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import resume, train
from corral.lab.run.trackers import tracking
from corral.validate import RunError

LINES = [{"step": 0, "success": 0.25, "return": None, "warnings": ["w"]}, {"step": 1, "success": None, "tr/kl_before": 0.5}]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.supports("run: `--report-to tensorboard`", door="robots")
def test_tensorboard_has_the_metrics_of_a_robots_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    settings = resolve([TRAINING, {"report_to": "tensorboard", "iterations": 2, "checkpoint_every": 1}])
    run = train(settings, out=tmp_path / "run", quiet=True).path
    found = scalars(run / "tensorboard")
    assert [step for step, _ in found["train/reward"]] == [1, 2]
    assert found["train/success"][0][0] == 0, "before the first update"
    resume(run, iterations=3, quiet=True)
    assert [step for step, _ in scalars(run / "tensorboard")["train/reward"]] == [1, 2, 3]


def test_lines_reach_several_trackers_and_runs_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Opened:
        def __init__(self, **given: Any) -> None:
            calls.append(given)

        def log(self, numbers: dict[str, float], step: int) -> None:
            calls.append((step, numbers))

        def finish(self) -> None:
            calls.append("finished")

        def __enter__(self) -> "Opened":
            return self

        def __exit__(self, *error: object) -> None:
            self.finish()

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=Opened))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with tracking("wandb,trackio", tmp_path / "arm", {"seed": 3}, 0) as track:
        for line in LINES:
            track(line)
    wandb, trackio = calls[:2]
    assert (wandb["project"], wandb["name"], wandb["config"]) == ("mine", "arm", {"seed": 3})
    assert (trackio["project"], trackio["name"], trackio["config"]) == ("corral", "arm", {"seed": 3})
    first, second = (0, {"train/step": 0.0, "train/success": 0.25}), (1, {"train/step": 1.0, "train/tr/kl_before": 0.5})
    assert calls[2:] == [first, first, second, second, "finished", "finished"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_libraries_themselves_take_the_lines(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install {name}")
    script = "from pathlib import Path; from corral.lab.run.trackers import tracking\n"
    script += f"with tracking({name!r}, Path('arm'), {{'seed': 3}}, 0) as track:\n    for line in {LINES!r}: track(line)"
    offline = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".wandb", ".db", ".parquet")]


def test_an_unknown_tracker_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"'tensorbord'.*Did you mean 'tensorboard'"):
        resolve([TRAINING, {"report_to": "tensorbord"}])
    monkeypatch.setattr("corral.lab.run.trackers.find_spec", lambda name: None)
    settings = resolve([TRAINING, {"report_to": "wandb"}])  # a run may be read where its tracker is not installed
    with pytest.raises(RunError, match="`report_to=wandb` needs the package wandb, which is not installed: pip install wandb"):
        train(settings, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
