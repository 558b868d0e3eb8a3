"""An objective is added in a copy of the tree: its function, its settings with a line of the registry, a test, a page,
and nothing else by hand."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "scripts", "README.md")
GENERATED = {"docs/objectives/index.md"}
"""Written by scripts/objective_tables.py."""

FUNCTIONS = "src/corral/objective/penalties.py"
"""Functions of spo's family."""

SETTINGS = "src/corral/objective/config.py"
"""Settings of every objective, and the registry."""


def renamed(text: str) -> str:
    """What spo's files would say of an objective called toy."""
    return re.sub(r"\bSPO(?=\b|Config)", "Toy", re.sub(r"\bspo\b", "toy", text))


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def files(tree: Path) -> dict[str, bytes]:
    everything = (path for name in COPIED for path in [tree / name, *(tree / name).rglob("*")])
    paths = (path for path in everything if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(tree)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The repository: a copy of what is changed, links to the rest."""
    copy = tmp_path_factory.mktemp("tree")
    for source in ROOT.iterdir():
        if source.name not in COPIED:
            (copy / source.name).symlink_to(source)
        elif source.is_dir():
            shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / source.name)
    yield copy
    shutil.rmtree(copy)


def test_four_files_add_an_objective_and_every_check_of_objectives_passes(tree: Path) -> None:
    before = files(tree)
    for folder, page in (("tests/objective", "test_{}.py"), ("docs/objectives", "{}.md")):
        source = tree / folder / page.format("spo")
        (tree / folder / page.format("toy")).write_text(renamed(source.read_text()))
    settings = r"^@dataclass[^\n]*\nclass SPOConfig.*?(?=^[@#])|^    \"spo\": [^\n]*\n"
    function = r"^def spo\(.*?(?=^def )|, SPOConfig$"
    for file, pattern in ((SETTINGS, settings), (FUNCTIONS, function)):
        text = (tree / file).read_text()
        parts = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
        assert len(parts) == 2, "the class and the line of the registry; the import of the class and the function"
        for part in parts:
            text = text.replace(part, part + renamed(part), 1)
        (tree / file).write_text(text)

    written = run(tree, "scripts/objective_tables.py")
    assert written.returncode == 0, written.stderr
    assert (tree / "docs/objectives/index.md").read_text().count("\n| `toy` | ") == 3

    changed = {name for name, content in files(tree).items() if before.get(name) != content}
    assert changed >= GENERATED
    assert len(changed - GENERATED) <= 5, sorted(changed)

    every = ["tests/test_surface.py", "tests/docs/test_objective_docs.py"]
    every += [f"tests/objective/test_{name}.py" for name in ("toy", "registry", "every_objective", "bad_input")]
    named = ("-k", "toy or registry or readme_lists or links")
    checks = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named, *every)
    assert checks.returncode == 0, checks.stdout[-3000:]


def test_an_objective_without_words_for_the_index_is_refused(tree: Path) -> None:
    page = tree / "docs" / "objectives" / "gmpo.md"
    whole = page.read_text()
    page.write_text(whole.replace("| mechanism |", "| mechanics |"))
    try:
        done = run(tree, "scripts/objective_tables.py", "--check")
    finally:
        page.write_text(whole)
    assert done.returncode
    assert "docs/objectives/gmpo.md: the section `## In the index` has the rows formula, region" in done.stderr
