"""No objective is named outside `objective/`: what is special about one is declared in its settings."""

import ast
from pathlib import Path

import pytest

from corral.objective import OBJECTIVES

SOURCE = Path(__file__).parents[2] / "src" / "corral"
NAMES = frozenset(OBJECTIVES)
CLASSES = {config_cls.__name__ for _, config_cls in OBJECTIVES.values()}
MODULES = {f"corral.objective.{name}" for name in ("weights", "clips", "penalties", "masks", "projections")}

DEFAULT = "the default of a setting"
AUDIT = "the rules that an audit applies to any run"
MAY: dict[str, tuple[frozenset[str], str]] = {
    "trl/config.py": (frozenset({"troll"}), DEFAULT),
    "lab/jobs/llm/settings.py": (frozenset({"troll"}), DEFAULT),
    "engines/async_grpo.py": (frozenset({"dppo"}), DEFAULT),
    "engines/prime_rl.py": (frozenset({"dppo"}), DEFAULT),
    "validate.py": (NAMES, "what papers and other libraries call an objective"),
    "lab/audit": (NAMES, AUDIT),
    "lab/cli/audit.py": (NAMES, AUDIT),
    "lab/report/explore": (NAMES, "the three methods that its page draws"),
}
"""Names that may stand as a value in a file or folder, and why."""


def docstrings(tree: ast.AST) -> set[ast.AST]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def named(text: str) -> set[str]:
    """Names of objectives that stand alone as a value, their settings' classes, and imports of their modules."""
    tree = ast.parse(text)
    words, found = docstrings(tree), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(word)) if word in NAMES and node not in words:
                found.add(word)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CLASSES or name in MODULES:
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                found.add(module)
    return found


OUTSIDE = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "objective"]


def exemption(path: Path) -> str | None:
    where = path.relative_to(SOURCE)
    return next((place for place in MAY if where.is_relative_to(place)), None)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_objective_is_named(path: Path) -> None:
    place = exemption(path)
    found = named(path.read_text()) - (MAY[place][0] if place else frozenset())
    assert not found, "declare it in objective/config.py, and read the declaration here"


def test_every_exemption_is_used() -> None:
    assert {exemption(path) for path in OUTSIDE if named(path.read_text())} == set(MAY)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('if config.name == "troll": pass', {"troll"}),
        ("from corral.objective.masks import divergence", {"corral.objective.masks"}),
        ("import corral.objective.masks", {"corral.objective.masks"}),
        ("isinstance(config, DPPOConfig)", {"DPPOConfig"}),
        ("isinstance(config, config_module.DPPOConfig)", {"DPPOConfig"}),
        ('def f():\n    """troll"""\n    return "use troll"', set()),
    ],
)
def test_every_way_of_naming_one_is_found(text: str, names: set[str]) -> None:
    assert named(text) == names
