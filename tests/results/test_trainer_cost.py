"""The cost of a trust region in the trainer: what did not finish is not told."""

import json
from pathlib import Path
from typing import Any

import pytest
import trainer_cost

from corral.lab.jobs.llm.settings import read_recipe
from corral.lab.run.life import Outcome


def test_a_run_that_was_cut_off_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: Any, out: Path, **__: Any) -> Outcome:
        return Outcome(out, {"stopped": "interrupted"})

    monkeypatch.setattr(trainer_cost, "train", cut_off)
    with pytest.raises(SystemExit, match="troll was interrupted before its 4 steps"):
        trainer_cost.measure("troll", 3, "cpu", [read_recipe("demo")])


def test_success_is_measured_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    before = trainer_cost.RunTrainer.measure
    seen = []
    monkeypatch.setattr(trainer_cost, "train", lambda *_, **__: seen.append(trainer_cost.RunTrainer.measure) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer_cost.measure("troll", 3, "cpu", [read_recipe("demo")])
    assert seen != [before]
    assert trainer_cost.RunTrainer.measure is before


@pytest.mark.parametrize(("device", "measured"), [("cpu", 4), ("cuda", 6)])
def test_on_a_gpu_a_round_that_compiles_kernels_is_measured_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, measured: int
) -> None:
    seen: list[str] = []
    found = {"step": 1.0, "rollouts": 0.5, "updates": 0.5, "certificate": 0.0, "mib": 0.0}
    monkeypatch.setattr(trainer_cost, "measure", lambda name, *_: seen.append(name) or found)
    monkeypatch.setattr(trainer_cost.torch, "set_num_threads", lambda _: None)
    out = tmp_path / "cost.jsonl"
    arguments = ["troll", "ppo_clip", "--rounds", "2", "--device", device, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["trainer_cost.py", *arguments])
    trainer_cost.main()
    assert seen == ["troll", "ppo_clip"] * (measured // 2)
    assert [json.loads(line)["round"] for line in out.read_text().splitlines()] == [0, 0, 1, 1]
