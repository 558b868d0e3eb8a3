"""docs/performance.md, docs/design/head.md and docs/warp.md: what the rows of benchmarks/results say."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

from results.pages import DOCS, ROOT, Texts, fill, spaced_table

sys.path.append(str(ROOT / "benchmarks"))  # whose files run as programs, and find each other there

from head_contenders import CLIP, GEMM, HEADS, OLD, TROLL
from head_union import UNIONS
from robot_rate import FILE as ROBOT_RATE
from robot_rate import WAYS
from rows import FOLDER, Row, read_rows
from update_phase import CONTENDERS

HEAD_PAGES = (DOCS / "performance.md", DOCS / "design/head.md", DOCS / "results/index.md")
WIDTHS = (4096, 896)
USUAL = {"N": 8192, "V": 151936, "K": 64}
Rows = list[Row]


def find(rows: Rows, **wanted: object) -> Row:
    """The row with these values; empty where there is none, or where it was not timed."""
    return next((row for row in rows if wanted.items() <= row.items() and "ms" in row), {})


def ours(rows: Rows, width: int, policy: str, task: str, name: str) -> Row:
    """A row of the usual shape, from our own section or from that of the others' heads."""
    listed = [row for section in ("usual", "heads") for row in rows if row["section"] == section]
    return find(listed, **USUAL, H=width, policy=policy, task=task, name=name)


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 1000 else f"{value:.0f} MiB"


def beyond_gradients(row: Row) -> float | None:
    """MiB at the worst moment without dH and dW, both in bfloat16."""
    return row["mib"] - 2 * row["H"] * (row["N"] + row["V"]) / 2**20 if row else None


def source(rows: Rows, *sections: str) -> str:
    """Machine, date and command of a block's measurements."""
    some = [row for row in rows if row["section"] in sections]
    if not some:
        return "Not measured yet.\n"
    cards = dict.fromkeys(f"{row['gpu'] or 'x86 CPU'}, torch {row['torch']}" for row in some)
    dates = dict.fromkeys(f"{row['date']} (code {row['code']})" for row in some)
    return f"{'; '.join(cards)}; {', '.join(dates)}: `python benchmarks/head.py --section {' '.join(sections)}`.\n"


GAINS = [
    ("old pass: log-probs and the 64 most likely tokens", "peaked", OLD, "corral"),
    ("TROLL update, peaked policy", "peaked", TROLL, "corral"),
    ("PPO clip update, peaked policy", "peaked", CLIP, "corral"),
    ("TROLL update, flat policy", "flat", TROLL, "corral"),
    ("TROLL update, flat policy, `exact=True`", "flat", TROLL, "corral, exact"),
]


def gains(rows: Rows) -> str:
    """Time and memory against full logits."""
    head = [f"N = {USUAL['N']}, V = {USUAL['V']}", *(x for h in WIDTHS for x in (f"H = {h}: full logits", "corral", ""))]
    lines = []
    for what, policy, task, name in GAINS:
        cells = [what]
        for width in WIDTHS:
            full, mine = ours(rows, width, policy, task, "full logits"), ours(rows, width, policy, task, name)
            pair = [f"{figure(row['ms'])} ms, {mebibytes(row['mib'])}" for row in (full, mine) if row]
            cells += [*pair, f"{full['ms'] / mine['ms']:.1f} ×"] if len(pair) == 2 else [""] * 3
        lines.append(cells)
    return f"{spaced_table(head, lines)}\n{source(rows, 'usual')}"


def on_cpu(rows: Rows) -> str:
    """A line per dtype and number of threads, relative to full logits."""
    tasks, lines = {OLD: "corral", TROLL: "corral, exact", CLIP: "corral, exact"}, []
    measured = [row for row in rows if row["section"] == "cpu"]
    for threads, dtype in dict.fromkeys((row["threads"], row["dtype"]) for row in measured):
        where, cells = {"threads": threads, "dtype": dtype}, []
        for task, name in tasks.items():
            x, y = (find(measured, **where, task=task, name=who) for who in (name, "full logits"))
            cells.append(f"{x['ms'] / y['ms']:.2f} × the time, {x['mib'] / y['mib']:.2f} × the memory" if x and y else "")
        lines.append([f"{threads} thread{'s' if threads > 1 else ''}, {dtype}", *cells])
    shape = ", ".join(f"{name} = {measured[0][name]}" for name in "NVH") if measured else ""
    return f"{spaced_table([f'CPU, {shape}, against full logits', *tasks], lines)}\n{source(rows, 'cpu')}"


Find = Callable[[Rows, int, str], float | None]
"""Rows, a width, and "x" or "x_sustained" → a figure."""
Spot = tuple[str, str, str]  # policy, task and name


def over(one: Spot, other: Spot) -> Find:
    """A time over another's."""
    return lambda rows, width, x: _ratio(ours(rows, width, *one), ours(rows, width, *other), x)


def over_fastest(policy: str) -> Find:
    """Our clip update over that of the fastest other fused head; chunks of research code are none."""
    names = [name for _, name in HEADS if not name.startswith("checkpointed")]

    def found(rows: Rows, width: int, x: str) -> float | None:
        others = [row for name in names if x in (row := ours(rows, width, policy, CLIP, name))]
        return _ratio(ours(rows, width, policy, CLIP, "corral"), min(others, key=lambda row: row[x], default={}), x)

    return found


def _ratio(one: Row, other: Row, x: str) -> float | None:
    return one[x] / other[x] if x in one and x in other else None


def memory(*spot: str) -> Find:
    return lambda rows, width, x: beyond_gradients(ours(rows, width, *spot)) if x == "x" else None


def worst(key: str) -> Find:
    """The largest of corral's errors at a width, whatever the policy and the task."""

    def found(rows: Rows, width: int, x: str) -> float | None:
        listed = [row for row in rows if row["section"] == "usual" and row["H"] == width and row["name"].startswith("corral")]
        return max((row[key] for row in listed if key in row), default=None) if x == "x" else None

    return found


PEAKED, FLAT = ("peaked", TROLL, "corral"), ("flat", TROLL, "corral, exact")
ONE, THREE = ("peaked", GEMM, "one GEMM"), ("flat", GEMM, "three GEMMs")
GOALS: list[tuple[str, str, float, float, Find]] = [
    ("TROLL update, peaked, × one GEMM", ".2f", 1.08, 1.12, over(PEAKED, ONE)),
    ("TROLL update, peaked, × clip update on full logits", ".2f", 0.26, 0.15, over(PEAKED, ("peaked", CLIP, "full logits"))),
    ("old pass with the exact top 64, × one GEMM", ".2f", 1.06, 1.15, over(("peaked", OLD, "corral"), ONE)),
    ("exact TROLL update, flat, × three GEMMs", ".2f", 1.05, 1.15, over(FLAT, THREE)),
    ("TROLL update, peaked, × our own clip update", ".3f", 1.02, 1.02, over(PEAKED, ("peaked", CLIP, "corral"))),
    ("clip update, peaked, × the fastest other fused head", ".2f", 0.45, 0.45, over_fastest("peaked")),
    ("clip update, flat, × the fastest other fused head", ".2f", 1.05, 1.05, over_fastest("flat")),
    ("sparse update: MiB beyond dH and dW", ".0f", 128, 128, memory(*PEAKED)),
    ("exact update: MiB beyond dH and dW", ".0f", 2048, 2048, memory(*FLAT)),
    ("largest error of a log-prob", ".1e", 2e-4, 2e-4, worst("logp_error")),
    ("largest relative error of dH", ".1e", 3e-3, 3e-3, worst("gradient_error")),
    ("a projected token's KL, farthest from its bound", ".1e", 1e-6, 1e-6, worst("kl_error")),
]  # fmt: skip
"""What is to stay below which figure at each width, its form, and how it is found."""


def goals(rows: Rows) -> str:
    """Every goal with what is reached, cool and sustained; bold where it is met."""
    head = ["", *(cell for width in WIDTHS for cell in (f"H = {width}: goal", "cool", "sustained"))]
    lines = []
    for what, form, *most, found in GOALS:
        cells = [what]
        for width, goal in zip(WIDTHS, most, strict=True):
            values = [found(rows, width, x) for x in ("x", "x_sustained")]
            said = ("" if v is None else f"**{v:{form}}**" if v <= goal else f"{v:{form}}" for v in values)
            cells += [f"≤ {goal:{form}}", *said]
        lines.append(cells)
    return f"{spaced_table(head, lines)}\n{source(rows, 'usual', 'heads')}"


def heads(rows: Rows) -> str:
    """The fused heads of others, and ours: a clip update at the usual shapes."""
    cases = [(width, policy) for width in WIDTHS for policy in ("peaked", "flat")]
    lines = []
    for name in ("full logits", "corral", "corral, exact", *(name for _, name in HEADS)):
        found = [ours(rows, *case, CLIP, name) for case in cases]
        if any(found):
            lines.append([name, *(f"{row['x']:.2f}, {mebibytes(row['mib'])}" if row else "" for row in found)])
    head = ["clip update, × one GEMM and memory", *(f"H = {width}, {policy}" for width, policy in cases)]
    return f"{spaced_table(head, lines)}\n{source(rows, 'usual', 'heads')}"


def updates(rows: Rows) -> str:
    """A line for every model and policy whose contenders were all timed."""
    head = ["model, policy", "sequences × tokens", *CONTENDERS, "tokens/s: troll × TRL", "MiB: TRL, ppo_clip, troll"]
    timed, lines = [row for row in rows if row["section"] == "update"], []
    for model, policy in dict.fromkeys((row["model"], row["policy"]) for row in timed):
        three = [find(timed, model=model, policy=policy, name=name) for name in CONTENDERS]
        if all(three):
            size, last = f"{three[0]['sequences']} × {three[0]['tokens']}", f"{three[0]['ms'] / three[-1]['ms']:.2f}"
            times, mib = [f"{figure(row['ms'])} ms" for row in three], ", ".join(f"{row['mib']:.0f}" for row in three)
            lines.append([f"{model}, {policy}", size, *times, last, mib])
    return f"{spaced_table(head, lines)}\n{source(rows, 'update')}"


def shapes(rows: Rows) -> str:
    """A line per shape: multiples of one GEMM, and the exact update's of three."""
    brief = [row for section in ("usual", "shapes") for row in rows if row["section"] == section]
    head = ["N", "V", "H", "K", "policy", "one GEMM, ms", "old pass", "TROLL", "clip", "exact TROLL ÷ 3"]
    lines = []
    for shape, group in groupby(brief, lambda row: tuple(row[key] for key in ("N", "V", "H", "K", "policy"))):
        x = {(row["task"], row["name"]): row for row in group if "ms" in row}
        if {(TROLL, "corral, exact"), (GEMM, "three GEMMs")} <= x.keys():
            multiples = [x[task, "corral"]["x"] for task in (OLD, TROLL, CLIP)]
            multiples.append(x[TROLL, "corral, exact"]["x"] / x[GEMM, "three GEMMs"]["x"])
            one, cells = figure(x[GEMM, "one GEMM"]["ms"]), [f"{multiple:.2f}" for multiple in multiples]
            lines.append([*map(str, shape), one, *cells, *(f"{x[t, 'full logits']['x']:.2f}" for t in (OLD, TROLL, CLIP))])
    return f"{spaced_table([*head, 'full logits: old pass', 'TROLL', 'clip'], lines)}\n{source(rows, 'usual', 'shapes')}"


def unions(rows: Rows) -> str:
    """A line per policy: TROLL on the old support and on the union, × one GEMM and memory, errors, and what is seen."""
    measured, lines = [row for row in rows if row["section"] == "union"], []
    names = [name for task, name in UNIONS if task != GEMM]
    for width, policy in dict.fromkeys((row["H"], row["policy"]) for row in measured):
        found = [find(measured, H=width, policy=policy, task=TROLL, name=name) for name in names]
        if all(found):
            old, union, *_, on_torch = found
            errors = ", ".join(f"{100 * row['gradient_error']:.2g} %" for row in (old, union, on_torch))
            seen = ", ".join(f"{100 * row['seen']:.3g} %" for row in (old, union))
            missed = f"{old['missed']}, {union['missed']} of {old['beyond']}"
            times = [f"{row['x']:.2f}, {mebibytes(row['mib'])}" for row in found]
            lines.append([f"H = {width}, {policy}", *times, errors, seen, missed])
    called = [name.removeprefix("corral, ") for name in names]
    said = ["dH off by: old, union, torch", "KL seen: old, union", "missed: old, union"]
    head = ["TROLL, × one GEMM and memory", *called, *said]
    return f"{spaced_table(head, lines)}\n{source(rows, 'union')}"


IN_SHORT = [
    ("one GEMM, a lower bound", *ONE),
    ("TROLL update, peaked policy", *PEAKED),
    ("TROLL update, any policy, exact gradient", *FLAT),
    ("TROLL update on full logits", "peaked", TROLL, "full logits"),
    ("PPO clip update on full logits", "peaked", CLIP, "full logits"),
]


def in_short(rows: Rows, width: int = 4096) -> str:
    """A few lines for a front page: time, memory beyond dH and dW, and how far dH is off."""
    lines = []
    for what, *spot in IN_SHORT:
        if row := ours(rows, width, *spot):
            beyond = None if spot[1] == GEMM else beyond_gradients(row)
            # Of a clipped loss, rows whose ratio is rounded across the threshold would be most of the error.
            error = f"{100 * row['gradient_error']:.2g} %" if spot[1] == TROLL else ""
            lines.append([what, f"{figure(row['ms'])} ms", "" if beyond is None else mebibytes(beyond), error])
    return spaced_table(["", "time", "peak memory beyond dH and dW", "dH off by"], lines)


BLOCKS: dict[str, Callable[[Rows], str]] = {
    "gains": gains, "cpu": on_cpu, "goals": goals, "heads": heads, "updates": updates, "shapes": shapes, "head": in_short,
    "unions": unions,
}  # fmt: skip


def robot_rates(rows: Rows) -> str:
    """Control steps a second of the simulated tasks, by cores, copies, threads and way of playing."""
    head = ["task", "cores", "copies", "threads", "", "steps/s", "× one thread's batch", "× one thread, step by step"]
    lines = []
    for row in rows:
        if "task" in row:
            times = [f"{row[key]:.2f}" if (key := f"times_one_{way}") in row else "–" for way in ("batch", "steps")]
            rate = f"{row['steps_per_second']:,.0f}".replace(",", " ")
            sizes = [str(row[key]) for key in ("cores", "episodes", "workers")]
            lines.append([row["task"], *sizes, WAYS[row["way"]], rate, *times])
    return spaced_table(head, lines) if lines else "Not measured yet."


def of_one_gpu(rows: Rows) -> Rows:
    """Rows of a CPU, and of the GPU that was measured last."""
    gpu = [None, *(row["gpu"] for row in rows if row["gpu"])][-1]
    return [row for row in rows if row["gpu"] in (None, gpu)]


def pages(read: Callable[[Path], str]) -> Texts:
    """The pages as the raw rows have them."""
    rows = of_one_gpu(read_rows(FOLDER / "head.jsonl"))
    rates = {"rate": lambda: robot_rates(read_rows(ROBOT_RATE))}
    return {
        **fill(read, HEAD_PAGES, "measured", {name: partial(block, rows) for name, block in BLOCKS.items()}),
        **fill(read, (DOCS / "warp.md",), "measured", rates),
    }
