"""Layers of settings: files, recipes, flags, and values of the right type."""

from pathlib import Path
from typing import Any

import pytest

from corral.lab.run.settings import add_layer, coerce, guess, nested, read_file, read_recipe, recipes
from corral.validate import RunError


@pytest.mark.parametrize(("name", "text"), [("a.toml", "steps = = 3"), ("a.yaml", "steps: [3"), ("b.yaml", "- 3")])
def test_a_file_that_is_none_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=r"TOML|YAML"):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("1e-4", float, 1e-4), (1, float, 1.0), ("none", float | None, None), (None, int | None, None), ("3", int | None, 3),
        ("true", bool, True), ("{a = 1}", dict | str | None, {"a": 1}), ("[1, 2]", list[float] | None, [1, 2]), ("8", str, "8"),
        (".05", float, 0.05), (".05", str, ".05"),
    ],
)  # fmt: skip
def test_values_become_the_type_of_their_setting(value: Any, hint: Any, expected: Any) -> None:
    assert coerce("key", value, hint) == expected


@pytest.mark.parametrize(("value", "hint"), [("yes", bool), (1.5, int), (True, int), (None, float), ("[1]", dict)])
def test_values_of_another_type_are_refused(value: Any, hint: Any) -> None:
    with pytest.raises(RunError, match="`key` is"):
        coerce("key", value, hint)


def test_texts_stand_for_what_they_look_like() -> None:
    # TOML has no .5, but people do; all else is as TOML has it, or a text.
    given = [".5", "-.5e-3", "1e-4", "none", "inf", "true", "[1]", ".5.5", ".env", "v1.5", "'a .5'"]
    assert [guess(text) for text in given] == [
        *(0.5, -0.5e-3, 1e-4, None, float("inf"), True, [1]),
        *(".5.5", ".env", "v1.5", "a .5"),
    ]


def test_a_layer_wins_key_by_key_and_adds_to_tables() -> None:
    merged: dict[str, Any] = {}
    add_layer(merged, {"seed": 1, "table": {"a": "inf", "b": "x"}, "other": {"a": 1}}, ["table"])
    add_layer(merged, {"table": {"b": 2}, "other": {"b": 1}}, ["table"])
    assert merged == {"seed": 1, "table": {"a": float("inf"), "b": 2}, "other": {"b": 1}}


def test_flags_of_a_table_and_of_none() -> None:
    assert nested([("table.a-b", "1"), ("eval-size", "2")], ["table", "other"]) == {"table": {"a_b": "1"}, "eval_size": "2"}
    with pytest.raises(RunError, match=r"no setting `seed\.a`: only table and other have settings of their own"):
        nested([("seed.a", "1")], ["table", "other"])


def test_recipes_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lab.run.settings.RECIPES", tmp_path)
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "one.toml").write_text("seed = 1\n[compare]\nseeds = 3\n")
    (tmp_path / "llm" / "note.md").write_text("no recipe\n")
    assert recipes().keys() == recipes("llm").keys() == {"one"}
    assert recipes("robot") == {}
    assert read_recipe("one") == {"seed": 1}
    with pytest.raises(RunError, match=r"no recipe 'onne'\. Did you mean 'one'\?"):
        read_recipe("onne")
