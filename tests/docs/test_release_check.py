"""`make release-check` tries every interpreter that there is, without running any of its checks."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "release_check.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_interpreter(path: Path, status: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_golden_interpreters(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 3.11 answers on PATH; 3.12 has a name there that is not selected, and is in the folder; 3.13 is broken, 3.14 not there.
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    first = write_interpreter(tmp_path / "bin" / "python3.11", 0)
    write_interpreter(tmp_path / "pyenv/versions/3.11.7/bin/python3.11", 0)
    write_interpreter(tmp_path / "bin" / "python3.12", 127)
    second = write_interpreter(tmp_path / "pyenv/versions/3.12.1/bin/python3.12", 0)
    write_interpreter(tmp_path / "bin" / "python3.13", 1)
    assert script.interpreters() == [first, second]
    monkeypatch.setattr(script, "INTERPRETERS", ("3.13", "3.14"))
    with pytest.raises(SystemExit, match=r"None of python3\.13, python3\.14 is on PATH and runs"):
        script.interpreters()
