"""Rows of benchmarks/results/head.json as Markdown: one table per shape, and one line per shape for many of them."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

TASKS = ["products", "old pass", "troll update", "clip update"]
OTHERS = ", other shapes"
Row = dict[str, Any]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 1000 else f"{value:.0f} MiB"


def shape_of(row: Row) -> tuple[Any, ...]:
    """What rows of one table have in common."""
    return tuple(row[key] for key in ("N", "V", "H", "K", "policy", "dtype"))


def title(row: Row) -> str:
    """Heading of a table."""
    return f"N = {row['N']}, V = {row['V']}, H = {row['H']}, K = {row['K']}, {row['policy']} policy, {row['dtype']}"


def table(rows: Iterable[Row]) -> str:
    """One shape: a line per contender, times relative to one matrix product beside them."""
    rows = sorted(rows, key=lambda row: TASKS.index(row["task"]))
    one = next((row for row in rows if row["name"] == "one product" and "ms" in row), {})
    columns = {"ms": "ms", "ms_sustained": "ms, sustained"} if any("ms_sustained" in row for row in rows) else {"ms": "ms"}
    ratios = ["× one product", "sustained"][: len(columns)]
    head = ["task", "", *columns.values(), *ratios, "MiB", "error"]
    lines = []
    for row in rows:
        if "ms" not in row:
            lines.append([row["task"], row["name"], row["status"], *[""] * (len(head) - 3)])
            continue
        times = [figure(row[key]) if key in row else "" for key in columns]
        relative = [f"{row[key] / one[key]:.2f}" if key in row and key in one else "" for key in columns]
        lines.append([row["task"], row["name"], *times, *relative, figure(row["mib"]), error(row)])
    return markdown(head, lines)


def error(row: Row) -> str:
    """The error that counts for the task."""
    return next((f"{row[key]:.1e}" for key in ("logp_error", "gradient_error") if key in row), "")


def overview(rows: Iterable[Row]) -> str:
    """A line per shape: corral's times relative to the products that nobody can do without, cool / sustained."""
    head = ["N", "V", "H", "K", "policy", "one product, ms", "old pass", "TROLL", "clip", "exact TROLL ÷ 3"]
    head += ["full logits: old pass", "TROLL", "clip"]
    lines, seen = [], set()
    for shape, group in groupby(rows, shape_of):
        listed = {(row["task"], row["name"]): row for row in group}
        if shape in seen or ("troll update", "corral, triton, exact") not in listed:
            continue
        seen.add(shape)
        one, three = (listed["products", f"{number} product{s}"] for number, s in (("one", ""), ("three", "s")))
        ours = [ratio(listed[task, "corral, triton"], one) for task in TASKS[1:]]
        exact = ratio(listed["troll update", "corral, triton, exact"], three)
        naive = [ratio(listed[task, "full logits"], one, cool_only=True) for task in TASKS[1:]]
        lines.append([*(str(value) for value in shape[:5]), figure(one["ms"]), *ours, exact, *naive])
    return markdown(head, lines)


def ratio(row: Row, to: Row, cool_only: bool = False) -> str:
    """Cool, and sustained where both were taken so."""
    if "ms" not in row:
        return row["status"]
    keys = ["ms"] if cool_only or not all("ms_sustained" in x for x in (row, to)) else ["ms", "ms_sustained"]
    return " / ".join(f"{row[key] / to[key]:.2f}" for key in keys)


def where(machine: Row) -> str:
    threads = machine["threads"]
    name = machine["gpu"] or f"{threads} thread{'s' if threads > 1 else ''} of an {machine['cpu']} CPU"
    return f"{name}, torch {machine['torch']}"


def tables(results: dict[str, Any]) -> str:
    """Everything measured: a table per shape, but one line each for the many that were measured briefly."""
    text, brief = "", []
    for name, result in sorted(results.items()):
        if name.endswith(OTHERS) or not name.startswith("head on"):
            continue
        text += f"### {name[0].upper()}{name[1:]}\n\n{where(result['machine'])}.\n\n"
        for _, rows in groupby(result["rows"], shape_of):
            listed = list(rows)
            text += f"**{title(listed[0])}**\n\n{table(listed)}\n"
        if name + OTHERS in results:
            brief = [*result["rows"], *results[name + OTHERS]["rows"]]
    if brief:
        text += (
            "### Other shapes\n\nMultiples of one product (the exact update: of three), cool / sustained. Few runs each.\n\n"
        )
        text += overview(brief)
    return text
