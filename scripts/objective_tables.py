"""Tables of objectives in docs/objectives/index.md, written from the registry and the objectives' pages.

    python scripts/objective_tables.py            writes them
    python scripts/objective_tables.py --check    only says whether they are up to date

Names, needs, anchors and reductions come from the registry; words from the section "In the index" of docs/objectives/<name>.md.
What stands between `<!-- objectives: TABLE -->` and `<!-- /objectives -->` is written anew, the rest of a file stays.
"""

import argparse
import re
import sys
from pathlib import Path

import corral

ROOT = Path(__file__).parents[1]

WRITTEN = ("docs/objectives/index.md",)
"""Files with such tables."""

WORDS = (
    "formula", "region", "divergence", "estimator", "mechanism", "ratio level", "reference", "also in",
    "formula checked against", "default checked against", "could not be verified",
)  # fmt: skip
"""Rows of a page's section "In the index"."""

TABLES = {
    "index": ("name", "formula", "region", "needs", "also in", "reference", "page"),
    "axes": ("name", "divergence", "estimator", "mechanism", "anchor", "ratio level", "reduction"),
    "verified": ("name", "formula checked against", "default checked against", "could not be verified"),
}
"""Columns of each table."""

BLOCK = re.compile(r"<!-- objectives: (\w+) -->\n.*?<!-- /objectives -->", re.DOTALL)
SECTION = re.compile(r"^## In the index\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ([a-z ]+) \| (.+) \|$", re.MULTILINE)


class PageError(Exception):
    """A page lacks what a table needs."""


def cells(name: str, root: Path = ROOT) -> dict[str, str]:
    """Cells of an objective's rows in all tables, by column."""
    path = root / "docs" / "objectives" / f"{name}.md"
    if not path.exists():
        raise PageError(f"docs/objectives/{name}.md is not there: every objective has a page.")
    section = SECTION.search(path.read_text())
    words = dict(ROW.findall(section[1])) if section else {}
    if tuple(words) != WORDS:
        raise PageError(
            f"docs/objectives/{name}.md: the section `## In the index` has the rows {', '.join(WORDS)}, in this order; got "
            f"{', '.join(words) or 'none'}."
        )
    config = corral.make_objective(name).config
    links = {"name": f"`{name}`", "page": f"[{name}]({name}.md)"}
    registered = {"anchor": config.anchor, "reduction": config.reductions[0], "needs": needs(config, words["estimator"])}
    return words | links | registered


def needs(config: corral.ObjectiveConfig, estimator: str) -> str:
    """Name the parts of a batch that an objective with its defaults reads."""
    read = "both policies on a support" if "dist_old" in config.needs else "sampled tokens"
    if "logp_rollout" in config.needs:
        read += ", the sampler's log-probs"
    if not config.tokenwise:
        read += ", whole micro-batches" if "micro-batch" in estimator else ", whole sequences"
    return read


def table(columns: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    """Markdown, a row per objective."""
    lines = [" | ".join(column for column in columns), "|".join("---" for _ in columns)]
    lines[0], lines[1] = f"| {lines[0]} |", f"|{lines[1]}|"
    return "\n".join([*lines, *(f"| {' | '.join(row[column] for column in columns)} |" for row in rows)])


def rewrite(text: str, root: Path = ROOT) -> str:
    """A file's text with every table as it should be."""
    rows = [cells(name, root) for name in corral.objective_names()]
    return BLOCK.sub(
        lambda found: f"<!-- objectives: {found[1]} -->\n\n{table(TABLES[found[1]], rows)}\n\n<!-- /objectives -->", text
    )


def main() -> None:
    """Write the tables, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    check = parser.parse_args().check
    try:
        new = {path: rewrite(path.read_text()) for path in (ROOT / name for name in WRITTEN)}
    except PageError as error:
        sys.exit(str(error))
    stale = [path for path, text in new.items() if path.read_text() != text]
    if check and stale:
        sys.exit(
            f"{', '.join(path.name for path in stale)}: not what the objectives say. Run python scripts/objective_tables.py."
        )
    for path in stale:
        path.write_text(new[path])


if __name__ == "__main__":
    main()
