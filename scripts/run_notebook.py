"""Run a notebook's code cells in order, and write what they print and draw into it: no Jupyter needed.

python scripts/run_notebook.py examples/grpo_to_trust_region.ipynb
"""

import ast
import base64
import io
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any], settings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a notebook, and return its names after the last cell. Texts and figures become the outputs of the cells.

    Args:
        notebook: as JSON; its outputs are written anew.
        settings: source text → what takes its place, such as fewer batches.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    changed = dict(settings or {})
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        for text in [text for text in changed if text in source]:
            source = source.replace(text, changed.pop(text))
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(ast.parse(source), f"cell {number + 1}", "exec"), names)
        cell["execution_count"] = number + 1
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}]
        cell["outputs"] = [output for output in cell["outputs"] if output["text"]]
        for figure in map(plt.figure, plt.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, dpi=80, metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "<Figure>"}
            cell["outputs"].append({"output_type": "display_data", "data": data, "metadata": {}})
        plt.close("all")
    if changed:
        raise ValueError(f"run_notebook: no cell has {', '.join(changed)}, which was to be replaced.")
    return names


def main() -> None:
    """Command line."""
    from corral.lab.run.files import write_whole

    for path in map(Path, sys.argv[1:]):
        notebook = json.loads(path.read_text())
        run(notebook)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        write_whole(path, lambda beside, text=text: beside.write_text(text))


if __name__ == "__main__":
    main()
