"""Model cards of trained models, with the objective, its settings and the paper to cite."""

import json
from collections.abc import Mapping
from typing import Any

from corral.objective.config import OBJECTIVES


def settings_section(objective: str, settings: Mapping[str, Any]) -> str:
    """Return a Markdown section with the objective and a table of settings. A nested dictionary becomes one row per key."""
    rows = []
    for key, value in settings.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        rows += [f"| {_cell(f'{key}.{name}' if name else key)} | {_cell(entry)} |" for name, entry in inner]
    about = f"## Objective and settings\n\nThe policy loss is corral's objective {_cell(objective)}."
    return "\n".join([about, "", "| setting | value |", "|---|---|", *rows, ""])


def model_card(
    name: str,
    objective: str,
    settings: Mapping[str, Any],
    about: str,
    *,
    base: str | None = None,
    library: str = "transformers",
) -> str:
    """Return the Markdown of a whole model card: metadata, a sentence about the run, the settings and the citation.

    Args:
        about: sentence on the run and what was measured.
        base: id on the hub of the model that training began with.
        library: library that loads the model.
    """
    paper = OBJECTIVES[objective][1].paper if objective in OBJECTIVES else None
    head = ["---", f"library_name: {library}", *([f"base_model: {json.dumps(base)}"] if base else []), "tags:"]
    head += ["- corral", "- reinforcement-learning", "---", "", f"# {_line(name)}", "", _line(about), ""]
    cited = ["## Citation", "", "```bibtex", paper.bibtex, "```", ""] if paper else []
    return "\n".join([*head, settings_section(objective, settings), *cited])


def _line(text: object) -> str:
    """Return a user's text as one line of Markdown, with markup characters escaped."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>|#" else letter for letter in " ".join(str(text).split()))


def _cell(value: object) -> str:
    """Format a setting's value as code for a cell of a Markdown table."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, default=str)).split())
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if text else "—"
