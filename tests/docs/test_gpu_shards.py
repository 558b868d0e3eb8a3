"""`make test-gpu`: all tests of kernels, the TRL door and robots' learners are in one shard; none that fails is called good."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_gpu.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_shards", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(arguments: list[str]) -> set[Path]:
    """What pytest collects of such a line."""
    given = [ROOT / argument for argument in arguments if argument.startswith("tests/")]
    ignored = {ROOT / argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")}
    return {file for path in given for file in ([path] if path.is_file() else path.glob("test_*.py"))} - ignored


def test_every_file_is_in_one_shard(script: ModuleType, tmp_path: Path) -> None:
    found = Counter(file for shard in script.SHARDS for file in files_of(script.command(shard, 1, tmp_path)))
    wanted = {file for folder in ("head", "corral_trl", "deployed") for file in (ROOT / "tests" / folder).glob("test_*.py")}
    assert len(wanted) > 40
    robots = {
        file
        for folder in ("robot", "lab/baselines", "lab/environments", "lab/jobs")
        for file in (ROOT / "tests" / folder).glob("test_*.py")
        if re.search(r"mark\.gpu|import DEVICE", file.read_text())
    }
    assert len(robots) > 3
    assert found == dict.fromkeys(wanted | robots | {ROOT / "tests" / "test_cuda.py"}, 1)


def test_paths_are_whole_and_the_interpreter_sees_no_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "packages:/elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    given, cpu_only = script.environment("head"), script.environment("interpreter")
    assert given["PYTHONPATH"] == f"{ROOT}/src:{Path.cwd()}/packages:/elsewhere"
    assert given["CUDA_VISIBLE_DEVICES"] == "0"
    assert (cpu_only["CUDA_VISIBLE_DEVICES"], cpu_only["TRITON_INTERPRET"]) == ("", "1")


def test_golden_report(script: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/></testsuites>')
    result = script.read(report, 61.4)
    assert str(result) == "4 passed, 3 failed, 3 skipped in 61 s"
    assert not result.good
    assert result._replace(failed=0).good
    assert not result._replace(failed=0, passed=0).good, "nothing was tested"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import time; time.sleep(60)", "interpreter  not at an end after 0.2 s"),
        ("import sys; sys.exit(4)", "interpreter  pytest ended with status 4 and wrote no report"),
    ],
)
def test_a_shard_without_a_report_has_failed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, says: str
) -> None:
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", program])
    if "sleep" in program:
        monkeypatch.setattr(script, "SECONDS", 0.2)
    assert script.main(["interpreter"]) == 1
    assert capsys.readouterr().out == f"FAIL {says}\n"


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        ("heads", "there is no shard 'heads'; there are kernels, head, trainer, deployed, door, robot, interpreter"),
        pytest.param(
            "head",
            "torch finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU"),
        ),
    ],
)
def test_what_cannot_run_is_said(script: ModuleType, capsys: pytest.CaptureFixture[str], shard: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main([shard])
    assert says in capsys.readouterr().err


def test_another_python_is_taken_as_it_is() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "test-gpu", "RUN=python3", "SHARD=head"]
    free = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # of `make test`
    done = subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, timeout=60)
    assert done.stdout == "python3 scripts/test_gpu.py head\n"
