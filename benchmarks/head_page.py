"""Write what benchmarks/results/head.json holds into docs/performance.md, as tables and a figure.

python benchmarks/head_page.py
"""

import json
import os
from collections.abc import Iterable
from itertools import groupby, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE, PAGE, FIGURE = ROOT / "benchmarks/results/head.json", ROOT / "docs/performance.md", ROOT / "docs/performance.svg"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
OTHERS = ", other shapes"
MARKERS = {"products": "x", "old pass": "o", "troll update": "^", "clip update": "s"}
Row = dict[str, Any]


def shape_of(row: Row) -> tuple[Any, ...]:
    """What rows of one table have in common."""
    return tuple(row[key] for key in ("N", "V", "H", "K", "policy", "dtype"))


def table(rows: Iterable[Row]) -> str:
    """One shape: a line per contender, times relative to one matrix product beside them."""
    rows = list(rows)
    product = next((row["ms"] for row in rows if row["name"] == "one product" and "ms" in row), None)
    sustained = any("ms_sustained" in row for row in rows)
    head = ["task", "", "ms", *(["sustained"] if sustained else []), "× one product", "MiB", "error"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        if "ms" not in row:
            lines.append([row["task"], row["name"], row["status"], *[""] * (len(head) - 3)])
            continue
        times = [figure(row["ms"]), *([figure(row["ms_sustained"])] if sustained else [])]
        ratio = "" if product is None else f"{row['ms'] / product:.2f}"
        lines.append([row["task"], row["name"], *times, ratio, figure(row["mib"]), error(row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def error(row: Row) -> str:
    """The error that counts for the task."""
    return next((f"{row[key]:.1e}" for key in ("logp_error", "gradient_error") if key in row), "")


def title(row: Row) -> str:
    """Heading of a table."""
    return f"N = {row['N']}, V = {row['V']}, H = {row['H']}, K = {row['K']}, {row['policy']} policy, {row['dtype']}"


def overview(rows: Iterable[Row]) -> str:
    """Many shapes: a line per shape, corral's times relative to those products that nobody can do without."""
    head = [
        "N",
        "V",
        "H",
        "K",
        "policy",
        "one product, ms",
        "old pass",
        "troll",
        "clip",
        "exact troll ÷ 3",
        "full logits: old",
        "troll",
        "clip",
    ]
    lines = [head, ["---"] * len(head)]
    for _, group in groupby(rows, shape_of):
        listed = list(group)
        ms = {(row["task"], row["name"]): row["ms"] for row in listed if "ms" in row}
        one, three = ms["products", "one product"], ms["products", "three products"]
        sparse = [ms[task, "corral, triton"] / one for task in ("old pass", "troll update", "clip update")]
        naive = [ms[task, "full logits"] / one for task in ("old pass", "troll update", "clip update")]
        ratios = [*sparse, ms["troll update", "corral, triton, exact"] / three, *naive]
        shape = [str(listed[0][key]) for key in ("N", "V", "H", "K", "policy")]
        lines.append([*shape, figure(one), *(f"{ratio:.2f}" for ratio in ratios)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(name: str, result: dict[str, Any]) -> str:
    """Everything measured on one device."""
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['threads']} threads of a {machine['cpu']} CPU"
    text = f"## {name[0].upper()}{name[1:]}\n\n{where}, torch {machine['torch']}.\n\n"
    if name.endswith(OTHERS):
        text += "Times as multiples of one product; the exact update as one of three. Few runs each.\n\n"
        return text + overview(result["rows"])
    for _, rows in groupby(result["rows"], shape_of):
        listed = list(rows)
        text += f"### {title(listed[0])}\n\n{table(listed)}\n"
    return text


def page(results: dict[str, Any], old: str) -> str:
    """The page with its measured part replaced."""
    before, rest = old.split(BEGIN)
    after = rest.split(END)[1]
    measured = "".join(section(name, result) for name, result in sorted(results.items()))
    return f"{before}{BEGIN}\n\n{measured.rstrip()}\n\n{END}{after}"


def plot(results: dict[str, Any], path: Path) -> None:
    """Time against memory of every contender at the first shape measured on each device."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "corral"  # the same file from the same numbers
    from matplotlib import pyplot

    figure_, axes = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4.5), squeeze=False)
    for axis, (name, result) in zip(axes[0], sorted(results.items()), strict=True):
        _, group = next(groupby(result["rows"], shape_of))
        rows = [row for row in group if "ms" in row]
        for (task, marker), ours in product(MARKERS.items(), (False, True)):
            chosen = [row for row in rows if row["task"] == task and ("corral" in row["name"]) == ours]
            if chosen:
                times, sizes = [row["ms"] for row in chosen], [row["mib"] for row in chosen]
                who, color = ("corral", "tab:green") if ours else ("others", "tab:gray")
                axis.scatter(times, sizes, marker=marker, color=color, label=f"{task}, {who}")
        axis.set(xscale="log", yscale="log", xlabel="ms", ylabel="MiB at the worst moment", title=f"{name}\n{title(rows[0])}")
        axis.title.set_fontsize(9)
        axis.legend(fontsize=7)
    figure_.tight_layout()
    figure_.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    results = json.loads(FILE.read_text())
    text = page(results, PAGE.read_text())
    partial = PAGE.with_name(f"{PAGE.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, PAGE)
    plot({name: result for name, result in results.items() if not name.endswith(OTHERS)}, FIGURE)


if __name__ == "__main__":
    main()
