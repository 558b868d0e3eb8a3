"""The cost of a trust region in the trainer: what did not finish is not told."""

from pathlib import Path
from typing import Any

import pytest
import trainer_cost

from corral.llm.settings import read_recipe
from corral.run.ending import Outcome


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
