"""Every promise of SECURITY.md names a test that exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SECURITY = (TESTS.parent / "SECURITY.md").read_text()
NAMED = re.findall(r"`((?:\w+/)+test_\w+\.py)(?:::(\w+))?`", SECURITY)


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 30
    for file, name in NAMED:
        assert (TESTS / file).is_file(), file
        body = ast.parse((TESTS / file).read_text()).body
        assert not name or name in {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}, name


def test_every_promise_names_a_test() -> None:
    promised = SECURITY.partition("## What is promised")[2].partition("## What is not")[0]
    promises = re.split(r"\n(?=- )", promised)[1:]
    assert len(promises) > 20
    assert [promise for promise in promises if not re.search(r"`(\w+/)+test_\w+\.py", promise)] == []
