"""docs/performance.md says what benchmarks/results/head.json holds, and a table says what a row does."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def head_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("head_page", ROOT / "benchmarks" / "head_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_the_latest_numbers(head_page: ModuleType) -> None:
    text = head_page.PAGE.read_text()
    assert head_page.page(json.loads(head_page.FILE.read_text()), text) == text, "run `python benchmarks/head_page.py`"
    assert head_page.FIGURE.exists()


def test_a_table_of_three_rows(head_page: ModuleType) -> None:
    shape = {"N": 8, "V": 9, "H": 2, "K": 1, "policy": "flat", "dtype": "float32"}
    rows = [
        {**shape, "task": "products", "name": "one product", "ms": 2.0, "mib": 1.0},
        {**shape, "task": "old pass", "name": "ours", "ms": 3.0, "mib": 250.4, "logp_error": 1.21e-6},
        {**shape, "task": "clip update", "name": "theirs", "status": "not installed"},
    ]
    assert head_page.table(rows).splitlines() == [
        "| task |  | ms | × one product | MiB | error |",
        "| --- | --- | --- | --- | --- | --- |",
        "| products | one product | 2 | 1.00 | 1 |  |",
        "| old pass | ours | 3 | 1.50 | 250 | 1.2e-06 |",
        "| clip update | theirs | not installed |  |  |  |",
    ]
