"""docs/tasks.md lists every task, docs/tasks-details.md every setting with its default."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from corral.lab.tasks import TASKS
from corral.lab.tasks.dataset import FiniteTask
from corral.lab.tasks.jsonl import Jsonl
from corral.lab.tasks.math import MathTask
from corral.lab.tasks.math_problems import DAPOMath
from corral.lab.tasks.reasoning_gym import ReasoningGym

PAGE = "".join((Path(__file__).parents[3] / "docs" / name).read_text() for name in ("tasks.md", "tasks-details.md"))
OURS = [name for name, cls in TASKS.items() if cls.__module__.startswith("corral.")]


def section(title: str) -> str:
    found = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return str(found[-1])  # the guide may have a heading of the same name


def defaults(cls: Any) -> dict[str, str]:
    return {
        item.name: "{}" if item.default_factory is dict else repr(item.default).replace("'", '"')
        for item in dataclasses.fields(cls)
    }


def rows(title: str) -> dict[str, str]:
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(title), re.MULTILINE))


def test_every_task_has_a_row_and_names_where_its_data_come_from() -> None:
    table = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|(.*)\|$", section("What there is"), re.MULTILINE)}
    assert set(table) == set(OURS)
    for name in OURS:
        hub = getattr(TASKS[name], "HUB", None)
        assert hub is None or f"`{hub.name}`" in table[name]


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "expression", "two_numbers"])
def test_settings_of_procedural_tasks(name: str) -> None:
    found = re.findall(rf"^\| `{name}` \| `(\w+)` \| `([^`]+)` \|", section("Procedural settings"), re.MULTILINE)
    assert dict(found) == defaults(TASKS[name])


def test_settings_of_the_others() -> None:
    shared = set(defaults(FiniteTask))
    assert set(re.findall(r"^\| `(\w+)` \|", section("Data sets"), re.MULTILINE)) == shared
    mathematics = {key: value for key, value in defaults(MathTask).items() if key not in shared}
    assert rows("Which answer counts") == mathematics
    assert rows("reasoning-gym") == defaults(ReasoningGym)
    own = {key: value for key, value in defaults(Jsonl).items() if key not in shared - {"held_out"} and key not in mathematics}
    assert rows("Settings of your own file") == own
    assert set(defaults(DAPOMath)) == shared | set(mathematics)
