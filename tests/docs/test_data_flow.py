"""The walks through the files in docs/data-flow.md: every file exists, is entered once, and has what it is entered at."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (`[^|]+`) \|", re.MULTILINE)


def walks() -> dict[str, list[tuple[str, list[str]]]]:
    """Of every section with a table of files: the files in order, and the names at which each is entered."""
    sections = re.split(r"^## ", (ROOT / "docs" / "data-flow.md").read_text(), flags=re.MULTILINE)
    found = {text.splitlines()[0]: ROW.findall(text) for text in sections}
    return {title: [(file, re.findall(r"`([\w.]+)`", names)) for file, names in rows] for title, rows in found.items() if rows}


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a file, methods with their class."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_there_is_one_for_a_prompt_of_corral_train() -> None:
    (rows,) = (rows for title, rows in walks().items() if "corral train" in title)
    assert [rows[0][0], rows[-1][0]] == ["lab/cli/train.py", "lab/run/files.py"]


def test_there_is_one_for_the_fused_loss_and_one_for_tce() -> None:
    starts = {title.split("`")[1] if "`" in title else title.split(",")[0]: rows[0][0] for title, rows in walks().items()}
    assert starts["policy_loss_from_hidden"] == "head/policy_loss.py"
    assert starts["A batch of TCE"] == "lab/cli/train.py"


@pytest.mark.parametrize(("title", "rows"), walks().items(), ids=list(walks()))
def test_every_file_is_entered_once_at_something_that_it_has(title: str, rows: list[tuple[str, list[str]]]) -> None:
    files = [file for file, _ in rows]
    assert len(files) == len(set(files)) > 3, title
    for file, names in rows:
        path = ROOT / "src" / "corral" / file
        assert path.is_file(), f"{title}: there is no src/corral/{file}"
        assert names, f"{title}: {file} is entered nowhere"
        assert set(names) <= defined(path), f"{title}: {file} has no {set(names) - defined(path)}"
