"""`corral report` on the output folder of a CorralTrainer: one run, by its newest checkpoint."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_models import make_trainer

from corral.lab.cli import main
from corral.lab.report.read import find_runs, read_run
from corral.validate import RunError


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a script of six updates leaves: checkpoints after every second one, and the model beside them."""
    out = tmp_path_factory.mktemp("trainer") / "mine"
    trainer = make_trainer(out, "dppo", max_steps=6, save_strategy="steps", save_steps=2, objective_config={"bound": 0.3})
    trainer.train()
    trainer.save_model(str(out))
    assert {"config.json", "checkpoint-2", "checkpoint-4", "checkpoint-6"} <= {path.name for path in out.iterdir()}
    return out


@pytest.mark.supports("run: a report of a script's own trainer", door="TRL")
def test_a_report_of_one_run(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(output), "--out", str(page)]) == 0
    assert f"The report of 1 run is in {page}" in capsys.readouterr().out
    text = page.read_text()
    assert re.search(r"<h1[^>]*>even_words with .*dppo</h1>", text)
    assert "1 run: 1 finished." in text
    assert "unknown" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_every_logged_update_is_a_line(output: Path) -> None:
    run = read_run(output)
    assert (run.objective, run.task, run.seed, run.stopped) == ("dppo", "even_words", "3", "finished")
    assert (run.steps, run.planned_steps, run.config["reduction"]["own"]) == (6, 6, True)
    assert run.settings["objective_config"]["bound"] == 0.3
    logged = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert [step for step, _ in run.values("tr/active_frac")] == [1, 2, 3, 4, 5, 6]
    assert run.values("reward") == [(line["step"], line["reward"]) for line in logged if "reward" in line]
    assert run.notes == []


def test_a_run_that_goes_on_is_read_from_the_newest_checkpoint_by_number(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "run" / "checkpoint-10")
    run = read_run(tmp_path / "run")
    assert (run.steps, run.planned_steps, run.stopped) == (4, 6, "not ended")
    assert find_runs([tmp_path]) == [tmp_path / "run"]


def test_a_model_is_no_run(output: Path, tmp_path: Path) -> None:
    shutil.copy(output / "config.json", tmp_path)
    with pytest.raises(RunError, match="no runs in"):
        find_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}')
    assert find_runs([tmp_path]) == [tmp_path]


def test_a_rate_of_auto_is_reported_as_such(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate="auto", loss_type="auto", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    assert read_run(tmp_path).settings["learning_rate"] == "auto"


@pytest.mark.parametrize(
    "state",
    [
        "{",
        "[]",
        "{}",
        '{"log_history": [1, {"step": "x"}, {"step": 1, "reward": "nan"}], "stateful_callbacks": {"RunRecord": 3}}',
    ],
)
def test_a_state_that_is_torn_or_another_trainers_is_a_note(state: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(state)
    run = read_run(tmp_path)
    assert (run.objective, run.stopped) == ("unknown", "not ended")
    assert "trainer_state.json names no objective: it was not written by a CorralTrainer." in run.notes
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html"), "--quiet"]) == 0
