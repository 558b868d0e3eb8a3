"""The tutorial on one's own robot, followed literally but for its size."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from corral.lab.cli import main
from corral.lab.jobs.robot.exported import load

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "own-environment.md").read_text()
SMALL = ["--iterations", "2", "--learner.episodes", "8", "--eval-size", "2", "--quiet"]


@pytest.mark.long
def test_the_tutorial_works_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(text)
    assert {path.name for path in tmp_path.iterdir()} == {"pusher.toml", "touch.py"}
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    ran = [shlex.split(line)[1:] for line in commands if line.startswith("corral ")]
    assert [words[0] for words in ran] == ["train", "eval", "report", "train", "export"]
    for words in ran:
        given = words if words[0] != "eval" else [*words[:2], "--episodes", "2", *words[4:]]
        assert main([*given, *(SMALL if words[0] == "train" else [])]) == 0
    assert Path("pusher.gif").read_bytes().startswith(b"GIF")
    plan = load("pusher_plan.npz")
    assert np.stack(plan(np.zeros(23))).shape == (3, 100, 7)
    assert '"success": 0.0' in Path("runs/touch/metrics.jsonl").read_text(), "the class tells of success"
    assert '"success": null' in Path("runs/pusher/metrics.jsonl").read_text()
