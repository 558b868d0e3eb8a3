"""The head's benchmark as a picture: time and memory of the usual shapes, full logits beside others' heads and ours."""

import math
from pathlib import Path
from typing import Any

from head_goals import COOL, EXACT, NAIVE, SHAPE, TROLL, WIDTHS, Measured
from head_tables import Row, figure

from corral.run.files import write_whole

COLORS = {"full logits": "#9a9a9a", "fastest other fused head": "#d9a441", "corral": "#2f7d4f", "corral, exact": "#8cc7a1"}
GROUPS = ["old pass", "TROLL,\npeaked", "TROLL,\nflat", "clip,\npeaked", "clip,\nflat"]
MODELS = {4096: "H = 4096, as in an 8B model", 896: "H = 896, as in a 0.5B model"}


def bars(measured: Measured, width: int) -> list[dict[str, Row]]:
    """Who stands in each group; a head that was not measured leaves a gap."""
    old = {"full logits": ("old pass", "full logits"), "corral": ("old pass", TROLL[1])}
    groups = [{who: measured.get(width, "peaked", *key) for who, key in old.items()}]
    for task in (TROLL[0], NAIVE[0]):
        for policy in ("peaked", "flat"):
            found = {
                "full logits": measured.get(width, policy, task, "full logits"),
                "corral": measured.get(width, policy, task, TROLL[1]),
            }
            if task == NAIVE[0]:
                found["fastest other fused head"] = measured.fastest(width, policy, COOL)
            if policy == "flat":
                found["corral, exact"] = measured.get(width, policy, task, EXACT[1])
            groups.append(found)
    return groups


def plot(results: dict[str, Any], path: Path) -> None:
    """Two rows, time and memory, and a column per width."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "corral", "font.size": 9}  # the same file from the same numbers
    from matplotlib import pyplot

    measured = Measured(results["head on cuda"]["rows"])
    drawn, axes = pyplot.subplots(2, len(WIDTHS), figsize=(9, 6), sharex=True)
    for (above, below), width in zip(axes.T, WIDTHS, strict=True):
        one = measured.get(width, "peaked", "products", "one product").get(COOL, math.nan)
        groups = bars(measured, width)
        _draw(above, groups, lambda row, one=one: row[COOL] / one, "{:.1f}".format)
        _draw(below, groups, lambda row: row["mib"] / 1024, "{:.2g}".format)
        above.set_title(f"{MODELS[width]}\n(one product: {figure(one)} ms)", fontsize=10)
        for least in (1, 3):
            above.axhline(least, color="black", linewidth=0.8, linestyle=":")
        above.margins(y=0.1)
        below.set(yscale="log", ylim=(0.06, 30), xticks=range(len(GROUPS)), xticklabels=GROUPS)
        below.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="x", length=0)
    axes[0, 0].set_ylabel("time, × one product")
    axes[1, 0].set_ylabel("memory with gradients, GiB")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    drawn.legend(handles, list(COLORS), loc="lower center", ncols=len(COLORS), frameon=False)
    gpu = results["head on cuda"]["machine"]["gpu"]
    shape = f"N = {SHAPE[0]}, V = {SHAPE[1]}, K = {SHAPE[2]}, {gpu}"
    drawn.suptitle(f"{shape}; dotted: one product, and three, the least for a dense gradient", fontsize=9)
    drawn.tight_layout(rect=(0, 0.05, 1, 1))
    write_whole(path, lambda beside: drawn.savefig(beside, format="svg", metadata={"Date": None}))
    pyplot.close(drawn)


def _draw(axis: Any, groups: list[dict[str, Row]], value: Any, form: Any) -> None:
    """Bars side by side, each with its figure above."""
    for place, group in enumerate(groups):
        present = [(who, row) for who in COLORS if (row := group.get(who))]
        thickness = 0.9 / max(len(present), 3)
        for index, (who, row) in enumerate(present):
            x, height = place + (index - (len(present) - 1) / 2) * thickness, value(row)
            axis.bar(x, height, 0.92 * thickness, color=COLORS[who])
            axis.annotate(form(height), (x, height), (0, 1), textcoords="offset points", ha="center", va="bottom", fontsize=7)
