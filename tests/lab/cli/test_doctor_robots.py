"""`corral doctor` where robots alone, language models alone, or neither can be trained."""

from importlib.metadata import version

import pytest

from corral.lab.cli import doctor, main
from corral.validate import pip_install

OF_LANGUAGE, OF_ROBOTS = doctor.requirements("llm"), doctor.requirements("robot")
LANGUAGE = {name: None for name in OF_LANGUAGE if name not in OF_ROBOTS}
ROBOTS = {name: None for name in OF_ROBOTS if name not in OF_LANGUAGE}


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
    assert f"missing: mujoco{OF_ROBOTS['mujoco']}, found 2.3.3: {pip_install('robot')}" in text


def test_neither_is_trouble_and_both_are_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, LANGUAGE | ROBOTS)
    assert status == 1
    assert f"missing: gymnasium>=1.1: {pip_install('robot')}" in text
    assert f"missing: trl{OF_LANGUAGE['trl']}: {pip_install('llm')}" in text


def test_without_packaging_releases_are_shown_and_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    status, text = said(monkeypatch, capsys, LANGUAGE | ROBOTS)
    assert status == 1
    assert f"not compared with {doctor.requirements(None)['torch']}: pip install packaging" in text
