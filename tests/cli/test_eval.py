"""`corral eval` from the command line: what is printed where, and sentences for mistakes."""

import json
from pathlib import Path

import pytest

from corral.cli import main
from corral.cli.eval import FLAGS
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
    assert [row.split()[0] for row in rows if "completions  " in row] == ["4/12", "8/12", "12/12"]
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
    monkeypatch.setattr("corral.llm.evaluate.evaluate", lambda *args, **kwargs: pytest.fail("it has begun"))
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "eval takes a run's folder or a model"),
        (["tiny"], "tiny is a model, and has no task of its own: say which with --task"),
        (["nowhere"], "nowhere is no folder here, and a model of the hub has no task of its own: say which with --task"),
        (["tiny", "--task", "count-down"], "there is no task 'count-down'. Did you mean 'countdown'?"),
        (["tiny", "--task", "countdown", "--samples", "0"], "`samples` is a whole number ≥ 1; got 0"),
        (["tiny", "--task", "countdown", "--samples", "many"], "`samples` is int; got 'many'"),
        (["tiny", "--task", "countdown", "--backend", "gpu"], "`backend` is one of auto, transformers, vllm; got 'gpu'"),
        (["tiny", "--task", "countdown", "--backend", "vllm", "--device", "cpu"], "--backend vllm: vLLM "),
        (["tiny", "--task", "countdown", "--set", "n=4"], "--set takes task_config.key=value; got 'n=4'"),
        (["tiny", "--task", "countdown", "--set", "task_config.m=4"], "countdown: "),
        (["tiny", "--task", "countdown", "--checkpoint", "best"], "chooses among those of a run, and tiny is no run"),
        (["tiny", "--task", "countdown", "--instruction", "x" * 600 + "{problem}"], "more than the 512 positions of the model"),
        (["tiny", "--smoke"], "--smoke evaluates a random model, so tiny cannot be given with it"),
        (["runs/no-such-run"], "there is no run or model folder runs/no-such-run"),
    ],
)
def test_mistakes_get_a_sentence(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *argv]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("corral: ")
    assert message in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir()), "nothing is written before everything is checked"


def test_what_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny", "--sampels", "3"]) == 2
    assert "eval has no '--sampels'" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("corral.llm.evaluate.answer_batch", interrupt)
    assert main(["eval", model, *SMALL.split(), "--out", str(tmp_path / "e")]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in (*FLAGS, "out", "against", "smoke", "quiet"))
