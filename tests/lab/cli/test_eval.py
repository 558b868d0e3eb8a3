"""`corral eval` from the command line: what is printed where, and sentences for mistakes."""

import json
from pathlib import Path

import pytest

from corral.lab.cli import main
from corral.lab.cli.eval import FLAGS
from small_runs import save_model

SMALL = "--task digits --problems 4 --samples 2 --device cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_in_a_pipe_it_prints_plain_lines_and_a_table(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "e"
    assert main(["eval", model, *SMALL.split(), "--batch-size", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed, "no colours, no cursor moves"
    rows = printed.splitlines()
    assert [row.split()[0] for row in rows[:5]] == ["model", "task", "answers", "device", "results"]
    assert [row.split()[1] for row in rows if row.startswith("completions ")] == ["4/12", "8/12", "12/12"]
    assert "95% interval" in printed
    for name in ("greedy", "pass@1", "avg@2", "pass@2"):
        assert any(row.split()[:1] == [name] for row in rows)
    assert rows[-1].endswith(f"Results and completions are in {out}")
    saved = json.loads((out / "eval.json").read_text())
    assert saved["settings"]["samples"] == 2
    assert saved["settings"]["batch_size"] == 4


def test_quiet_is_one_line_and_done_is_done(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", model, *SMALL.split(), "--out", str(tmp_path / "e"), "--quiet"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("greedy 0.")
    assert printed.out.count("\n") == 1
    assert main(argv) == 0
    assert capsys.readouterr().out == printed.out
    assert main(argv[:-1]) == 0
    assert "has this evaluation already" in capsys.readouterr().out


def test_two_models_are_compared(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", model, *SMALL.split(), "--out", str(tmp_path / "a"), "--quiet"]) == 0
    argv = ["eval", model, *SMALL.split(), "--temperature", "0.5", "--out", str(tmp_path / "b"), "--quiet"]
    assert main([*argv, "--against", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert "+0.000" in printed, "greedy answers do not depend on the temperature"


def test_what_cannot_be_compared_with_is_said_first(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.lab.jobs.llm.evaluate.evaluate", lambda *args, **kwargs: pytest.fail("it has begun"))
    argv = ["eval", model, *SMALL.split(), "--out", str(tmp_path / "b"), "--quiet"]
    assert main([*argv, "--against", str(tmp_path / "none")]) == 1
    assert "eval.json" in capsys.readouterr().err


def test_settings_of_the_task_reach_it(model: str, tmp_path: Path) -> None:
    argv = ["eval", model, *SMALL.split(), "--set", "task_config.prompt_length=5", "--out", str(tmp_path / "e"), "--quiet"]
    assert main(argv) == 0
    assert json.loads((tmp_path / "e" / "eval.json").read_text())["settings"]["task"] == {"name": "digits", "prompt_length": 5}


def test_smoke_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--smoke", "--out", str(tmp_path / "e"), "--quiet"]) == 0
    assert "2 problems of countdown" in capsys.readouterr().out


def test_an_interruption_says_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("corral.lab.jobs.llm.evaluate.answer_batch", interrupt)
    assert main(["eval", model, *SMALL.split(), "--out", str(tmp_path / "e")]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in (*FLAGS, "out", "against", "smoke", "quiet"))
