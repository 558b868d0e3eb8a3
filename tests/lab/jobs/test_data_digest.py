"""A resumed run notices data that are not those it began with."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.lab.cli import main
from corral.lab.jobs.llm.prepare import describe_data, digest
from corral.lab.jobs.llm.train import resume, train
from corral.lab.tasks import make_task
from corral.validate import RunError
from small_runs import Digits, save_model, small

Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def some_rows(count: int, start: int = 0) -> Rows:
    return [{"prompt": f"{number}+1", "answer": str(number + 1), "source": "a"} for number in range(start, start + count)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps over problems from two files beside it."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", some_rows(200))
    write(folder / "test.jsonl", some_rows(20, 500))
    model = save_model(folder / "model")
    config = {"path": str(folder / "train.jsonl"), "held_out": str(folder / "test.jsonl"), "verifier": "exact"}
    train(small(model, task="jsonl", task_config=config, max_completion_length=4, steps=2), out=folder / "run", quiet=True)
    return folder


@pytest.fixture
def data(begun: Path, tmp_path: Path) -> Path:
    """A copy of that run, over a copy of its data."""
    folder = tmp_path / "copy"
    shutil.copytree(begun, folder)
    config = folder / "run" / "config.json"
    config.write_text(config.read_text().replace(str(begun), str(folder)))
    return folder


def change(path: Path, how: Callable[[Rows], Rows]) -> None:
    write(path, how([json.loads(line) for line in path.read_text().splitlines()]))


CHANGES: dict[str, tuple[str, Callable[[Rows], Rows]]] = {
    "reordered": ("train", lambda rows: rows[::-1]),
    "cut": ("train", lambda rows: rows[:100]),
    "answers of 0": ("train", lambda rows: [{**row, "answer": "0"} for row in rows]),
    "another column": ("train", lambda rows: [{**row, "source": "b"} for row in rows]),
    "other prompts": ("train", lambda rows: [{**row, "prompt": row["prompt"] + " "} for row in rows]),
    "held out answers": ("test", lambda rows: [{**row, "answer": "0"} for row in rows]),
    "fewer held out": ("test", lambda rows: rows[:5]),
    "held out reordered": ("test", lambda rows: rows[::-1]),
}


@pytest.mark.refuses("run: other data than it began with", door="command line")
@pytest.mark.parametrize("what", CHANGES)
def test_changed_data_are_refused(what: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split, how = CHANGES[what]
    change(data / f"{split}.jsonl", how)
    before = (data / "run" / "metrics.jsonl").read_text()
    assert main(["train", "--resume", str(data / "run"), "--steps", "3", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert ("to train on" in said, "held out" in said) == (split == "train", split == "test")
    assert "--changed-data" in said
    assert (data / "run" / "metrics.jsonl").read_text() == before


def test_the_same_data_go_on_and_are_remembered_as_far_as_they_are_used(data: Path) -> None:
    before = json.loads((data / "run" / "config.json").read_text())["data"]
    resume(data / "run", steps=3, quiet=True)
    after = json.loads((data / "run" / "config.json").read_text())
    assert after["data"]["train"]["rows"] == before["train"]["rows"] // 2 * 3
    assert after["data"]["held_out"] == before["held_out"]
    assert "earlier_data" not in after
    change(data / "train.jsonl", CHANGES["answers of 0"][1])
    with pytest.raises(RunError, match=f"the {after['data']['train']['rows']} rows to train on"):
        resume(data / "run", steps=4, quiet=True)


def test_the_flag_goes_on_and_writes_down_what_was_before(data: Path) -> None:
    before = json.loads((data / "run" / "config.json").read_text())["data"]
    change(data / "train.jsonl", CHANGES["answers of 0"][1])
    assert main(["train", "--resume", str(data / "run"), "--steps", "3", "--quiet", "--changed-data"]) == 0
    after = json.loads((data / "run" / "config.json").read_text())
    assert after["earlier_data"] == [{**before, "until": 2}]
    assert after["data"]["train"]["sha256"] != before["train"]["sha256"]
    resume(data / "run", steps=4, quiet=True)


def test_a_shorter_run_is_checked_by_all_rows_that_it_began_with(data: Path) -> None:
    resume(data / "run", steps=4, quiet=True)
    shutil.rmtree(data / "run" / "checkpoints")
    resume(data / "run", steps=2, quiet=True)


def test_a_run_of_an_earlier_release_says_that_nothing_is_known(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = data / "run" / "config.json"
    content = json.loads(config.read_text())
    del content["data"]
    config.write_text(json.dumps(content))
    resume(data / "run", steps=3, quiet=True)
    assert "no digest of the run's data" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("odd", [None, [], {"train": {}}, {"train": {"rows": "3"}}, {"train": {"rows": -1}}], ids=str)
def test_a_digest_that_cannot_be_read_is_no_promise(odd: Any, data: Path) -> None:
    config = data / "run" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"data": odd}))
    with pytest.raises(RunError, match="is not what a run writes"):
        resume(data / "run", steps=3, quiet=True)


def test_the_flag_is_for_resuming(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--changed-data"]) == 1
    assert "goes with --resume" in capsys.readouterr().err


CODE = """
from corral.lab.jobs.llm.prepare import describe_data
from corral.task import make_task
task = make_task("jsonl", path={path!r}, held_out=0.5, verifier="code")
print(describe_data(task, task.train_prompts(9, 0), task.held_out_prompts(9, 0)))
"""


def test_another_process_finds_the_same_digest(tmp_path: Path) -> None:
    tests = [{"args": [[1, 2], {"a": [1]}], "result": {"b": 2}}, {"args": [[], {}], "result": None}]
    write(tmp_path / "a.jsonl", [{"prompt": f"write {n}", "answer": {"tests": tests, "entry": "f"}} for n in range(20)])
    code = CODE.format(path=str(tmp_path / "a.jsonl"))
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1
    assert "sha256" in found.pop()


class Columned(Digits):
    """A task of a user's own, whose columns hold what JSON does not have."""

    def columns(self, prompt: str) -> dict[str, Any]:
        return {"set": {prompt, "b", "c"}, "object": object(), "path": Path(prompt)}


def test_a_task_without_data_has_its_prompts_and_columns() -> None:
    first, second = (describe_data(Columned(), ["a", "b"], ["c"]) for _ in range(2))
    assert first == second
    assert first["train"]["sha256"] != describe_data(Digits(), ["a", "b"], ["c"])["train"]["sha256"]
    assert digest(Digits(), ["a", "b"]) != digest(Digits(), ["b", "a"])


def test_an_answer_counts_where_rows_are_trimmed(tmp_path: Path) -> None:
    """Code tasks keep no column of their rows, whose tests can be millions of characters."""
    rows = [{"prompt": f"write {n}", "tests": [{"stdin": "1", "stdout": "1"}]} for n in range(10)]
    found = []
    for output in "12":
        rows[0]["tests"] = [{"stdin": "1", "stdout": output}]
        write(tmp_path / "a.jsonl", rows)
        task = make_task("code", path=str(tmp_path / "a.jsonl"), held_out=0.5)
        found.append(describe_data(task, task.train_prompts(5, 0), task.held_out_prompts(5, 0)))
    assert found[0] != found[1]
