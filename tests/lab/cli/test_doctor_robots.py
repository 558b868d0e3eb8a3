"""`corral doctor` where robots alone, language models alone, or neither can be trained."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from corral.lab.cli import doctor, main
from corral.validate import pip_install

LANGUAGE = {name: None for name in doctor.TRAINING if name not in doctor.ROBOTS}
ROBOTS = {name: None for name in doctor.ROBOTS if name not in doctor.TRAINING}


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], versions: dict[str, str | None]
) -> tuple[int, str]:
    """Status and text, if these packages had these versions (None: are not there)."""
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: versions[name] if name in versions else version(name.replace("_", "-"))
    )
    monkeypatch.setattr(doctor, "_OPTIONAL", {})
    return main(["doctor"]), capsys.readouterr().out


def test_robots_alone_are_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, LANGUAGE)
    assert status == 0, text
    assert f"`corral train` can run.\nlanguage models: {pip_install('llm')}\n" in text
    assert "gymnasium" in text
    assert "embedded" not in text
    assert "trl " not in text


def test_language_models_alone_are_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, ROBOTS)
    assert status == 0, text
    assert f"`corral train` can run.\nrobots: {pip_install('robot')}\n" in text
    assert "mujoco" not in text


def test_a_half_installed_kind_is_trouble(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, LANGUAGE | {"mujoco": "2.3.3"})
    assert status == 1
    assert f"missing: mujoco>=3.3, found 2.3.3: {pip_install('robot')}" in text


def test_neither_is_trouble_and_both_are_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, LANGUAGE | ROBOTS)
    assert status == 1
    assert f"missing: gymnasium>=1.1: {pip_install('robot')}" in text
    assert f"missing: trl{doctor.TRAINING['trl']}: {pip_install('llm')}" in text


def test_without_packaging_releases_are_shown_and_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    status, text = said(monkeypatch, capsys, LANGUAGE | ROBOTS)
    assert status == 1
    assert f"not compared with {doctor.NEEDED['torch']}: pip install packaging" in text


def test_doctor_and_the_project_want_the_same_for_robots() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    asked = dict(re.fullmatch(r"([\w-]+)(.*)", one).groups() for one in project["optional-dependencies"]["robot"])
    assert asked == doctor.ROBOTS
