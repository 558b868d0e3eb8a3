"""Names that keep the source readable, counted: a rule that nobody counts is broken by the tenth change."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from long import LONG

SOURCE = Path(__file__).parents[1] / "src" / "corral"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
LINES = {path: len(path.read_text().splitlines()) for path in TREES}

TWICE = {
    "Settings": "of a run: language models and robots have their own, each in its package's settings.py",
}
"""Classes of one name in two files, and why that helps a reader."""


def nodes(kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of this kind in the source, with its file."""
    return ((path, node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kind))


def test_contracts_are_typed_so_attributes_are_rarely_asked_for_by_name() -> None:
    names = [node.func.id for _, node in nodes(ast.Call) if isinstance(node.func, ast.Name)]
    share = sum(name in ("getattr", "hasattr") for name in names) / sum(LINES.values()) * 1000
    assert share <= 1.5, "per 1000 lines; give the thing a type, or a default"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in nodes(ast.ClassDef):
        places[node.name].append(str(path.relative_to(SOURCE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not {name: twice[name] for name in twice.keys() - TWICE}, (
        "name each after what it is, or list it in TWICE with a reason"
    )
    assert not TWICE.keys() - twice, "once alone by now: strike it from TWICE"


def test_what_make_check_leaves_out_is_there() -> None:
    assert [path for path in LONG if not path.exists()] == [], "tests/long.py names what was moved or renamed"


def test_no_two_files_of_tests_have_one_name() -> None:
    # Tests are in no package: pytest imports each by its file's name, and refuses the second of a name.
    counts = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
