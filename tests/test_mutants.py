"""The list of mutants fits the code: every defect can be put in, and the tests that should notice it are there."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = runpy.run_path(str(ROOT / "scripts/mutants.py"))["read_mutants"]()


def test_there_are_at_least_forty():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_can_be_applied(mutant):
    assert "\n" not in mutant.old + mutant.new
    assert mutant.old != mutant.new
    whole = (ROOT / "src/corral" / mutant.file).read_text()
    assert whole.count(mutant.old) == 1
    ast.parse(whole.replace(mutant.old, mutant.new))


@pytest.mark.parametrize("test", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_its_tests_are_there(test):
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
