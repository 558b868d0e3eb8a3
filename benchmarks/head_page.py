"""Write what benchmarks/results holds of the head and the trainer into docs/performance.md, and a few lines into README.md.

A block between `<!-- measured: NAME -->` and `<!-- /measured -->` is written anew; whatever else a page says stays.

python benchmarks/head_page.py
"""

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from head_figure import plot
from head_goals import gains, goals, in_short
from head_kernels import kernels
from head_tables import Row, figure, markdown, tables
from results import HEAD, ROLLOUTS, UPDATES, read_results
from update_tables import updates

from corral.run.files import write_whole

ROOT = Path(__file__).parents[1]
PAGES, FIGURE = (ROOT / "docs/performance.md", ROOT / "README.md"), ROOT / "docs/performance.svg"
BLOCK = re.compile(r"<!-- measured: (\w+) -->\n.*?<!-- /measured -->", re.DOTALL)


def rollouts(results: dict[str, Any]) -> str:
    """How flat real policies are, and what the head takes on them where it was timed."""
    result = results.get("rollouts on cuda") or results["rollouts on cpu"]
    rewards, *rows = result["rows"]
    sets = {name: list(group) for name, group in groupby(rows, lambda row: row["set"])}
    first, last = (sum(part) / len(part) for part in (rewards["rewards"][:5], rewards["rewards"][-5:]))
    text = f"Mean reward of the first five steps {first:.2f}, of the last five {last:.2f}.\n\n"
    head = [
        "set",
        "tokens",
        "entropy, nats",
        "tokens for 1 − 10⁻⁵, median",
        "rows whose 64 hold that",
        "mass outside the 64: mean, 90 %",
    ]
    text += markdown([*head, "dense rows by the bound"], (_about(name, group[0]) for name, group in sets.items()))
    timed = {name: {(row["task"], row["name"]): row for row in group[1:]} for name, group in sets.items() if "ms" in group[1]}
    if timed:
        some = next(iter(timed.values()))["products", "one product"]
        head = [
            "ms",
            "one, three products",
            "old pass: full logits, corral",
            "TROLL: full logits",
            "routed",
            "exact",
            "clip: full logits",
        ]
        text += f"\n{result['machine']['gpu']}, N = {some['N']} (a set's rows, repeated), cool:\n\n"
        text += markdown([*head, "routed", "exact"], (_times(name, group) for name, group in timed.items()))
    return f"{text}\n{_errors(rows)}\n"


def _about(name: str, row: Row) -> list[str]:
    outside = f"{_percent(row['outside_mean'])}, {_percent(row['outside_90'])}"
    needed, fits, dense = f"{row['support_median']:,.0f}", _percent(row["support_fits"]), _percent(row["dense_share"])
    return [name, str(row["rows"]), f"{row['entropy']:.2f}", needed, fits, outside, dense]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def _times(name: str, rows: dict[tuple[str, str], Row]) -> list[str]:
    def ms(task: str, *names: str) -> str:
        return ", ".join(figure(rows[task, name]["ms"]) for name in names)

    updates = [ms(f"{task} update", who) for task in ("troll", "clip") for who in ("full logits", *OURS)]
    return [name, ms("products", "one product", "three products"), ms("old pass", "full logits", OURS[0]), *updates]


OURS = ("corral, triton", "corral, triton, exact")


def _errors(rows: list[Row]) -> str:
    """The worst of all sets, ours and those of full logits."""

    def worst(key: str, who: str) -> str:
        found = [
            row[key] for row in rows if row.get("name", "").startswith(who) and "float32" not in row["name"] and key in row
        ]
        return f"{max(found):.1e}" if max(found) else "0"

    said = [
        ("of a log-prob", "logp_error"),
        ("of a member of the support", "support_error"),
        ("of dH, relative", "gradient_error"),
    ]
    said.append(("nats by which a token left out was likelier than one kept", "missed_by"))
    parts = [f"{what} {worst(key, 'corral')} (full logits in bfloat16: {worst(key, 'full logits')})" for what, key in said]
    return f"Largest errors of all sets against float64: {'; '.join(parts)}."


BLOCKS: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "gains": (HEAD, gains),
    "goals": (HEAD, goals),
    "head": (HEAD, in_short),
    "kernels": (HEAD, kernels),
    "rollouts": (ROLLOUTS, rollouts),
    "tables": (HEAD, tables),
    "updates": (UPDATES, updates),
}
"""What stands in a block: a file of results, and how they are written down."""


def page(old: str) -> str:
    """A page with its measured blocks written anew."""

    def written(match: re.Match[str]) -> str:
        path, text_of = BLOCKS[match[1]]
        return f"<!-- measured: {match[1]} -->\n\n{text_of(read_results(path)).rstrip()}\n\n<!-- /measured -->"

    return BLOCK.sub(written, old)


def main() -> None:
    for path in PAGES:
        text = page(path.read_text())
        write_whole(path, lambda beside, text=text: beside.write_text(text))
    plot(read_results(HEAD), FIGURE)


if __name__ == "__main__":
    main()
