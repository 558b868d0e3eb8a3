"""The notebook runs from top to bottom, at a reduced size, and its stored outputs are whole."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN = runpy.run_path(str(ROOT / "scripts" / "run_notebook.py"))["run"]
NOTEBOOK = ROOT / "examples" / "grpo_to_trust_region.ipynb"


def read() -> dict[str, Any]:
    return dict(json.loads(NOTEBOOK.read_text()))


def test_every_cell_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = read()
    names = RUN(notebook, {"BATCHES, COMPLETIONS = 10, 128": "BATCHES, COMPLETIONS = 1, 16"})
    assert [len(found.get("rewards", [])) for found in names["results"].values()] == [0, 1, 1, 1, 1]
    assert len(names["tokens"]) > 0
    drawn = [output for cell in notebook["cells"] for output in cell.get("outputs", []) if "data" in output]
    assert len(drawn) == 2


def test_stored_outputs_are_of_its_own_cells() -> None:
    cells = [cell for cell in read()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    texts = "".join("".join(output.get("text", [])) for cell in cells for output in cell["outputs"])
    assert all(text in texts for text in ("clipping, 1e-3: reward", "TROLL, auto: reward", "start"))


def test_a_setting_that_no_cell_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no cell has nothing like it"):
        RUN({"cells": [{"cell_type": "code", "source": ["x = 1"]}]}, {"nothing like it": ""})
