"""No text of a model, a file or a user reaches a terminal as a control sequence: every command, hostile text in every field."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.lab.cli import main
from corral.lab.run.text import VisibleStream, visible
from small_runs import save_model, small

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202edlrow\x08\r"
"""Sets a terminal's title, clears its screen, colours it by a C1 control, turns text around and overwrites it."""

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

NAME = EVIL.replace("/", "")
"""The same as the name of a file."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from corral.lab.jobs.llm.train import train

    folder = tmp_path_factory.mktemp("honest")
    train(small(save_model(folder / "model"), steps=2), out=folder / "run", quiet=True)
    return folder


@pytest.fixture
def hostile(honest: Path, tmp_path: Path) -> Path:
    """A folder of runs whose every field is hostile."""
    run = tmp_path / f"runs{NAME}" / f"run{NAME}"
    shutil.copytree(honest / "run", run)
    content = json.loads((run / "config.json").read_text())
    content |= {EVIL: EVIL, "command": [EVIL], "versions": {EVIL: EVIL}, "commit": EVIL}
    content["settings"] |= {"objective": EVIL, "model": EVIL, EVIL: EVIL}
    content["objective"] |= {EVIL: EVIL}
    (run / "config.json").write_text(json.dumps(content))
    lines = [json.loads(line) | {EVIL: 1.0, f"tr/{EVIL}": EVIL, "warnings": [EVIL]} for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + EVIL)
    summary = json.loads((run / "summary.json").read_text()) | {"stopped": EVIL, "why": EVIL, EVIL: EVIL}
    (run / "summary.json").write_text(json.dumps(summary))
    table = pq.read_table(run / "completions.parquet")
    for name in ("prompt", "completion"):
        table = table.set_column(table.column_names.index(name), name, pa.array([EVIL] * len(table)))
    pq.write_table(table.append_column(EVIL, pa.array([EVIL] * len(table))), run / "completions.parquet")
    return run


@pytest.fixture
def written(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What has been written to both streams, which must be something and nothing hidden."""

    def read() -> str:
        out = "".join(capfd.readouterr())
        assert out
        assert not HIDDEN.search(re.sub(r"(?m)^\r", "", out)), ascii(out)
        return out

    return read


EVAL = ("--problems", "2", "--samples", "1", "--device", "cpu")

RUN_COMMANDS: dict[str, Callable[[str, str], list[str]]] = {
    "report": lambda run, out: ["report", run, "--out", f"{out}/page.html"],
    "report of its parent": lambda run, out: ["report", str(Path(run).parent), "--out", f"{out}/page{NAME}.html"],
    "eval": lambda run, out: ["eval", run, *EVAL, "--out", f"{out}/eval{NAME}"],
    "eval of a hostile task": lambda run, out: ["eval", run, *EVAL, "--task", EVIL],
    "eval of a hostile module": lambda run, out: ["eval", run, *EVAL, "--task", f"{EVIL}:{EVIL}"],
    "eval of a hostile checkpoint": lambda run, out: ["eval", run, *EVAL, "--checkpoint", EVIL],
    "eval against": lambda run, out: ["eval", run, *EVAL, "--against", run],
    "audit": lambda run, out: ["audit", run, *EVAL, "--out", f"{out}/audit{NAME}"],
    "audit as texts": lambda run, out: ["audit", f"{run}/completions.parquet", "--model", EVIL, "--model", EVIL],
    "export": lambda run, out: ["export", run, "--out", f"{out}/model{NAME}"],
    "resume": lambda run, out: ["train", "--resume", run, "--steps", "3"],
    "compare": lambda run, out: ["compare", "--resume", run],
    "train from it": lambda run, out: ["train", "--model", run, "--smoke", "--out", f"{out}/new{NAME}", "--device", "cpu"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_hostile_run(command: str, hostile: Path, tmp_path: Path, written: Callable[[], str]) -> None:
    with contextlib.suppress(SystemExit):
        main(RUN_COMMANDS[command](str(hostile), str(tmp_path)))
    written()


COMMANDS: dict[str, list[str]] = {
    "no command": [EVIL],
    "explain": ["explain", EVIL],
    "doctor": ["doctor", "--model", f"./{EVIL}"],
    "doctor of an engine": ["doctor", "--engine", EVIL],
    "an unknown flag": ["report", ".", f"--{EVIL}"],
    "a model": ["train", "--model", f"./{EVIL}", "--dry-run"],
    "an objective": ["train", "--objective", EVIL],
    "a recipe": ["train", "--recipe", EVIL],
    "a file of settings": ["train", "--config", EVIL],
    "a setting": ["train", "--set", f"{EVIL}={EVIL}"],
    "a dump": ["audit", EVIL],
    "a contestant": ["compare", "--objectives", EVIL],
    "a sweep": ["compare", "--objectives", "troll,dppo", "--sweep", f"{EVIL}={EVIL}"],
    "bench": ["bench", EVIL],
    "explore": ["explore", "--out", f"/nowhere/{EVIL}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_arguments(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Callable[[], str]) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        main(COMMANDS[command])
    written()


FILES: dict[str, tuple[str, str, list[str]]] = {
    "settings": ("a.yaml", f"{json.dumps(EVIL)}: 1\n", ["train", "--config", "FILE"]),
    "broken settings": ("a.toml", f"a = '{EVIL.replace(chr(13), '')}", ["train", "--config", "FILE"]),
    "a dump": ("a.jsonl", json.dumps({EVIL: EVIL}), ["audit", "FILE"]),
    "a dump's field": (
        "b.jsonl",
        json.dumps({"tokens": [EVIL], "logp_old": EVIL, "logp_new": [0.1], "advantages": EVIL}),
        ["audit", "FILE"],
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_hostile_file(what: str, tmp_path: Path, written: Callable[[], str]) -> None:
    name, text, command = FILES[what]
    path = tmp_path / f"{NAME}{name}"
    path.write_text(text)
    with contextlib.suppress(SystemExit):
        assert main([str(path) if word == "FILE" else word for word in command]) != 0
    written()


def rows_with_hostile_keys(folder: Path) -> str:
    """Problems, one of which has no answer and a hostile key instead."""
    rows = [{"prompt": f"{number}+1=", "answer": "1"} for number in range(40)]
    rows += [{"prompt": "9", EVIL: EVIL}, {"prompt": "0+1=", "answer": "1"}]
    path = folder / f"rows{NAME}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_keys_of_malformed_rows(tmp_path: Path, honest: Path) -> None:
    """Warnings are shown by Python itself, in a process that filters no stream: their text is visible already."""
    code = f"""
from corral.task import make_task
make_task("jsonl", path={rows_with_hostile_keys(tmp_path)!r}, skip_malformed=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "malformed and skipped" in done.stderr
    assert "⟨U+001B⟩" in done.stderr
    assert not HIDDEN.search(done.stderr.split("warnings.warn(")[0].replace(NAME, "")), ascii(done.stderr)


@pytest.mark.filterwarnings("ignore")
def test_a_reward_that_raises_with_a_completion(tmp_path: Path, honest: Path, written: Callable[[], str]) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(f"def pay(completions, **columns):\n    raise ValueError({EVIL!r} + completions[0])\n")
    model = str(honest / "model")
    argv = ["train", "--model", model, "--task", "digits", "--smoke", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*argv, "--reward", f"{reward}:pay"]) == 1
    said = written()
    assert "Traceback" in said
    assert "⟨U+001B⟩]0;owned" in said


CRASH = f"""
import sys, threading, warnings, logging
import corral.lab.cli.explain
import corral.lab.cli as cli

def run(arguments):
    warnings.warn({EVIL!r})
    logging.getLogger("somebody").warning({EVIL!r})
    thread = threading.Thread(target=lambda: 1 / [0][len({EVIL!r}) * 0])
    thread.start(), thread.join()
    print({EVIL!r})
    raise LookupError({EVIL!r})

corral.lab.cli.explain.run = run
sys.exit(cli.main(["explain", "x"]))
"""


def test_crashes_warnings_and_logs_of_anybody() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("⟨U+001B⟩]0;owned") == 3
    assert "LookupError" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.stdout.count("⟨U+001B⟩") == 2
    assert not HIDDEN.search(done.stderr + done.stdout)


def test_a_live_panel_in_a_terminal(honest: Path, tmp_path: Path) -> None:
    """There the panel's own sequences must pass, and nobody else's."""
    task = tmp_path / "hostile.py"
    task.write_text(TASK)
    argv = ["train", "--model", str(honest / "model"), "--task", f"{task}:Hostile", "--steps", "2", "--eval-size", "2"]
    argv += ["--device", "cpu", "--out", str(tmp_path / "run"), "--num-generations", "4", "--per-device-train-batch-size", "4"]
    code = f"import sys; from corral.lab.cli import main; sys.exit(main({argv!r}))"
    read, write = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=write, env=environment) as process:
        os.close(write)
        said = b""
        with contextlib.suppress(OSError):
            while data := os.read(read, 65536):
                said += data
    os.close(read)
    text = said.decode()
    assert process.returncode == 0, text
    assert "\x1b[" in text
    assert "⟨U+001B⟩]0;" in text
    assert not re.search("\x1b\\]|\x07|[\x80-\x9f\u202a-\u202e]", text)


TASK = f"""
from dataclasses import dataclass
from typing import ClassVar
import warnings

@dataclass(frozen=True)
class Hostile:
    name: ClassVar[str] = "hostile" + {EVIL!r}
    max_completion_length: ClassVar[int] = 3
    def train_prompts(self, count, seed): return ["a\\x1b]0;"] * count
    def held_out_prompts(self, count, seed): return ["b\\x1b]0;"] * count
    def verify(self, prompt, completion):
        warnings.warn({EVIL!r})
        print({EVIL!r})
        return float(len(completion) > 1)
"""


def test_a_stream_writes_out_what_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    stream = VisibleStream(sys.stdout)
    stream.write(f"a\n{EVIL}\tb\r\n")
    assert capsys.readouterr().out == f"a\n{visible(EVIL)}\tb\n"
    for bar in ("\r 10%", "\n\n\x1b[A\x1b[A", "\x1b[A"):  # what tqdm draws with
        stream.write(bar)
        assert capsys.readouterr().out == bar
    stream.write("\r 10%\x1b[A\rx")
    assert capsys.readouterr().out == "\r 10%⟨U+001B⟩[A⟨U+000D⟩x"
    stream.write("\x1b[Aover the line before")
    assert capsys.readouterr().out == "⟨U+001B⟩[Aover the line before"
    assert stream.isatty() is sys.stdout.isatty()
