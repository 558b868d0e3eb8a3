"""`corral bench`: a name, a script of the source checkout, and sentences where there is none."""

import runpy
from pathlib import Path

import pytest

from corral.lab.cli import bench, main


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.BENCHMARKS)


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_script_is_there_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = bench._FOLDER / bench.BENCHMARKS[name][0]
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert "usage: " + script.name in capsys.readouterr().out


def test_a_script_s_own_complaint_is_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "head", "--rows"]) == 2  # it wants a number
    assert "usage: " + bench.BENCHMARKS["head"][0] in capfd.readouterr().err


def test_an_unknown_name_answers_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "heat"]) == 2
    assert "there is no benchmark 'heat'" in (said := capsys.readouterr().err)
    assert "head" in said


def test_outside_a_source_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    assert main(["bench", "head"]) == 1
    assert "runs from a source checkout" in capsys.readouterr().err
