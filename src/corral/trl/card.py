"""Model cards of trained models, with the objective, its settings and the paper to cite."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

PAPERS = {
    "troll": {
        "name": "TROLL",
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
        "citation": textwrap.dedent("""\
            @misc{becker2025troll,
              title         = {{TROLL}: Trust Regions improve Reinforcement Learning for Large Language Models},
              author        = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and Neumann, Gerhard},
              year          = {2025},
              eprint        = {2510.03817},
              archivePrefix = {arXiv}
            }"""),
    },
    "dppo": {
        "name": "DPPO",
        "title": "Rethinking the Trust Region in LLM Reinforcement Learning",
        "id": "2602.04879",
        "citation": textwrap.dedent("""\
            @misc{qi2026dppo,
              title         = {Rethinking the Trust Region in {LLM} Reinforcement Learning},
              author        = {Qi, Penghui and Zhou, Xiangxin and Liu, Zichen and Pang, Tianyu and Du, Chao and Lin, Min and Lee, Wee Sun},
              year          = {2026},
              eprint        = {2602.04879},
              archivePrefix = {arXiv}
            }"""),  # noqa: E501 - a citation as docs/cite.md has it
    },
}
"""Papers that a card cites, by objective: the method's name, the paper's title, its arXiv number and its BibTeX entry."""


def settings_section(objective: str, settings: Mapping[str, Any]) -> str:
    """Markdown section with the objective and a table of settings. A nested dictionary becomes one table row per key."""
    rows = []
    for key, value in settings.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        rows += [f"| {_cell(f'{key}.{name}' if name else key)} | {_cell(entry)} |" for name, entry in inner]
    return "\n".join(
        [
            "## Objective and settings",
            "",
            f"The policy loss is corral's objective {_cell(objective)}.",
            "",
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def model_card(
    name: str,
    objective: str,
    settings: Mapping[str, Any],
    about: str,
    *,
    base: str | None = None,
    library: str = "transformers",
) -> str:
    """Markdown of a whole model card: metadata, a sentence on the run, the settings and the citation.

    Args:
        about: sentence on the run and what was measured.
        base: id on the hub of the model that training began with.
        library: library that loads the model.
    """
    paper = PAPERS.get(objective)
    head = ["---", f"library_name: {library}", *([f"base_model: {json.dumps(base)}"] if base else []), "tags:"]
    head += ["- corral", "- reinforcement-learning", "---", "", f"# {_line(name)}", "", _line(about), ""]
    cited = ["## Citation", "", "```bibtex", paper["citation"], "```", ""] if paper else []
    return "\n".join([*head, settings_section(objective, settings), *cited])


def _line(text: object) -> str:
    """Text from a user as one line of Markdown, with markup characters escaped."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>|#" else letter for letter in " ".join(str(text).split()))


def _cell(value: object) -> str:
    """Value formatted as code for a table cell."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value, default=str)).split())
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if text else "—"
