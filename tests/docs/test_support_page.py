"""docs/support.md is what the markers of the tests say, and the script that writes it notices what cannot be right."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "support_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tests_say(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr()


def test_ci_runs_what_the_page_says_it_runs(script: ModuleType) -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-browser"} <= set(commands)
    makefile = (ROOT / "Makefile").read_text()
    command = makefile.split("\ntest: setup\n\t")[1].splitlines()[0]
    # Playwright leaves an event loop in its process, which tests of asynchronous rewards cannot share: a target of its own.
    assert command == "$(PYTEST) -m 'not slow and not browser and not results'", "nothing else is left out but the studies"
    for place in script.TARGETS.values():
        if place.startswith("`make"):
            assert f"\n{place.strip('`').removeprefix('make ')}:" in makefile


def test_golden_page(script: ModuleType) -> None:
    table = {
        "objective: troll": {"import corral": {"GPU", "CI"}, "TRL": {"`make test-vllm`"}},
        "other: Unsloth": {"TRL": {"refused"}},
    }
    text = script.page(table)
    assert "## Objectives\n\n| | import corral | TRL |\n|---|---|---|\n| troll | CI, GPU | `make test-vllm` |\n" in text
    assert "## Other software\n\n| | TRL |\n|---|---|\n| Unsloth | refused |\n" in text
    assert "## Models" not in text


def test_golden_notes(script: ModuleType, request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.supports("scale: FSDP2", door="TRL"))
    request.node.add_marker(pytest.mark.refuses("scale: rings", door="TRL", why="there are none"))
    request.node.add_marker(pytest.mark.supports("objective: troll", door="TRL"))
    notes = script.explain(script.read_items([request.node]))
    assert notes["scale: FSDP2"] == "[test_support_page.py](../tests/docs/test_support_page.py)"
    assert notes["scale: rings"] == "there are none"
    assert "objective: troll" not in notes
    text = script.page({"scale: rings": {"TRL": {"refused"}}, "objective: troll": {"TRL": {"CI"}}}, notes)
    assert "## Several processes\n\n| | TRL | how it is known |\n|---|---|---|\n| rings | refused | there are none |\n" in text
    assert "| troll | CI |\n" in text


def test_what_ci_shows_is_not_sent_to_make_test_all(script: ModuleType) -> None:
    for order in (("CI", "`make test-all`"), ("`make test-all`", "CI")):
        table: dict[str, dict[str, set[str]]] = {}
        for place in order:
            script.add(table, "objective: troll", "TRL", place)
        assert table == {"objective: troll": {"TRL": {"CI"}}}


@pytest.mark.parametrize(
    ("feature", "door", "why"),
    [("troll", "TRL", "should begin with a group"), ("objective: troll", "trl", "names the door 'trl'")],
)
def test_markers_that_cannot_be_right(script: ModuleType, feature: str, door: str, why: str) -> None:
    with pytest.raises(script.SupportError, match=why):
        script.add({}, feature, door, "CI")


def test_what_is_tested_is_not_untested(script: ModuleType, request: pytest.FixtureRequest) -> None:
    feature, door, _ = script.UNTESTED[0]
    request.node.add_marker(pytest.mark.supports(feature, door=door))
    with pytest.raises(script.SupportError, match="take it from UNTESTED"):
        script.tabulate(script.read_items([request.node]))


def test_a_file_that_is_skipped_whole_is_read(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    path = tmp_path / "test_other.py"
    text = """
pytestmark = pytest.mark.verl

@pytest.mark.{0}("scale: rays", door="verl")
def test_x(): ...
"""
    path.write_text(text.format("supports"))
    claim = ("scale: rays", "verl", "`make test-verl`", "[test_other.py](../test_other.py)")
    assert list(script.read_markers(path)) == [claim]
    path.write_text(text.format("refuses"))
    assert script.tabulate(script.read_markers(path))["scale: rays"] == {"verl": {"refused"}}
    path.write_text(text.format("supports").replace("rays", "{what}"))
    with pytest.raises(script.SupportError, match="write them out"):
        script.tabulate(script.read_markers(path))
    path.write_text(text.format("supports").replace("pytestmark = pytest.mark.verl", ""))
    with pytest.raises(script.SupportError, match="its pytestmark names no target"):
        script.tabulate(script.read_markers(path))
