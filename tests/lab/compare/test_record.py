"""compare.json: what is written is what is read, and what it promises to others is there."""

import json
import math
from pathlib import Path

import pytest

from corral.lab.compare.plan import Training, make_plan
from corral.lab.compare.record import Comparison, list_differences, read, render_value
from corral.lab.report.read import FILE, read_comparison
from corral.validate import RunError


def comparison(path: Path, **settings: str) -> Comparison:
    sweep = {"objective_config.bound": [0.05, math.inf], "loss_type": ["grpo", "dr_grpo"], "mask": [True, None]}
    plan = make_plan("llm", ["dppo", "troll"], sweep, seeds=1, choosing=1)
    return Comparison(path=path, plan=plan, training=Training(recipe="demo", settings=settings), command="corral compare …")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first = comparison(tmp_path, steps="3")
    first.chosen = {"dppo": {"objective_config.bound": math.inf, "loss_type": "grpo", "mask": True}}
    first.add_runs()
    first.records[0].state, first.records[1].error = "finished", "out of luck"
    first.save()
    again = read(tmp_path)
    assert again.plan == first.plan  # JSON has no infinity, and no tuples
    assert again.chosen == first.chosen
    assert again.records == first.records
    assert (again.training, again.command) == (first.training, first.command)
    assert list_differences(first.flags, again.flags) == []
    again.save()
    assert again.content() == first.content()


def test_reports_read_it(tmp_path: Path) -> None:
    ours = comparison(tmp_path)
    ours.records[0].state, ours.records[0].error = "failed", "out of luck"
    ours.save()
    theirs = read_comparison(tmp_path)
    assert theirs.command == ours.command
    assert (theirs.choose_seeds, theirs.report_seeds) == ((0,), (1,))
    assert [tmp_path / run.folder for run in theirs.runs] == [ours.path / record.folder for record in ours.records]
    assert (theirs.runs[0].state, theirs.runs[0].error, theirs.runs[0].stage) == ("failed", "out of luck", "sweep")


def test_the_file_has_what_was_promised(tmp_path: Path) -> None:
    comparison(tmp_path).save()
    content = json.loads((tmp_path / FILE).read_text())
    promised = "version kind recipe command contestants sweep choose_seeds report_seeds chosen runs"
    assert set(promised.split()) <= content.keys()
    assert content["runs"][0].keys() == {"folder", "contestant", "setting", "seed", "stage", "state", "error"}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("key", ["kind", "train"])
def test_a_file_that_lacks_what_all_runs_share_is_not_resumed(tmp_path: Path, key: str) -> None:
    comparison(tmp_path).save()
    content = json.loads((tmp_path / FILE).read_text())
    del content[key]
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(RunError, match="does not say what all runs share"):
        read(tmp_path)
    assert len(read_comparison(tmp_path).runs) == len(content["runs"])  # a report needs neither


def test_differences_are_named(tmp_path: Path) -> None:
    said = list_differences(comparison(tmp_path, steps="3").flags, comparison(tmp_path, steps="4", beta="0.1").flags)
    assert said == ["beta is not given there and 0.1 here", "steps is 3 there and 4 here"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not given"), ((), "nothing"), ({}, "nothing"), ({"a": (1, 2)}, "a=1,2"), ("x", "x")],
)
def test_values_in_sentences(value: object, text: str) -> None:
    assert render_value(value) == text
