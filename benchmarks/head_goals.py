"""What the head is meant to reach on a GPU, and what it reaches: two tables, computed from benchmarks/results/head.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from head_tables import Row, figure, markdown, mebibytes, shape_of

WIDTHS = (4096, 896)
SHAPE = (8192, 151936, 64)
"""N, V and K of the usual comparison."""
FUSED = ("TRL", "verl", "Liger", "CCE", "Quack", "torch F.")
"""How the names of other people's fused heads begin."""
COOL, SUSTAINED = "ms", "ms_sustained"


class Measured:
    """Rows of the usual shape, by width, policy, task and name."""

    def __init__(self, rows: list[Row]) -> None:
        usual = [row for row in rows if (row["N"], row["V"], row["K"]) == SHAPE and "ms" in row]
        self.rows = {(row["H"], row["policy"], row["task"], row["name"]): row for row in usual}

    def get(self, width: int, policy: str, task: str, name: str) -> Row:
        return self.rows.get((width, policy, task, name), {})

    def ratio(self, when: str, one: Row, other: Row) -> float | None:
        return one[when] / other[when] if when in one and when in other else None

    def fastest(self, width: int, policy: str, when: str) -> Row:
        """The other fused head with the least time."""
        heads = [
            row for (h, p, task, name), row in self.rows.items()
            if (h, p, task) == (width, policy, "clip update") and name.startswith(FUSED) and when in row
        ]  # fmt: skip
        return min(heads, key=lambda row: row[when], default={})


Find = Callable[[Measured, int, str], float | None]
"""Measurements, a width, and cool or sustained → the figure."""


@dataclass(frozen=True)
class Goal:
    """One line: what is meant to stay below which figure at each width, and how it is found."""

    what: str
    most: tuple[float, float]
    found: Find
    form: Callable[[float], str] = "{:.2f}".format
    timed: bool = True

    def line(self, measured: Measured) -> list[str]:
        cells = [self.what]
        for width, most in zip(WIDTHS, self.most, strict=True):
            values = [self.found(measured, width, when) for when in (COOL, SUSTAINED)[: 1 + self.timed]]
            cells += [f"≤ {self.form(most)}", *(self._reached(value, most) for value in values)]
            cells += [] if self.timed else [""]
        return cells

    def _reached(self, value: float | None, most: float) -> str:
        if value is None:
            return ""
        return f"**{self.form(value)}**" if value <= most else self.form(value)


def _against(policy: str, one: tuple[str, str], other: tuple[str, str]) -> Find:
    return lambda m, width, when: m.ratio(when, m.get(width, policy, *one), m.get(width, policy, *other))


def _over_fastest(policy: str) -> Find:
    def found(m: Measured, width: int, when: str) -> float | None:
        return m.ratio(when, m.get(width, policy, *CLIP), m.fastest(width, policy, when))

    return found


def _beyond_gradients(policy: str, update: tuple[str, str]) -> Find:
    """MiB at the worst moment without dH and dW, both in bfloat16."""

    def found(m: Measured, width: int, _: str) -> float | None:
        row = m.get(width, policy, *update)
        return row["mib"] - 2 * width * (SHAPE[0] + SHAPE[1]) / 2**20 if row else None

    return found


def _worst(key: str) -> Find:
    """The largest of corral's errors, whatever the policy and the task."""

    def found(m: Measured, width: int, _: str) -> float | None:
        errors = [row[key] for (h, *_, name), row in m.rows.items() if h == width and name.startswith("corral") and key in row]
        return max(errors, default=None)

    return found


ONE, THREE = ("products", "one product"), ("products", "three products")
TROLL, CLIP = ("troll update", "corral, triton"), ("clip update", "corral, triton")
EXACT = ("troll update", "corral, triton, exact")
NAIVE = ("clip update", "full logits")
TINY = "{:.1e}".format
GOALS = [
    Goal("TROLL update, peaked, × one product", (1.08, 1.12), _against("peaked", TROLL, ONE)),
    Goal("TROLL update, peaked, × clip update on full logits", (0.26, 0.15), _against("peaked", TROLL, NAIVE)),
    Goal(
        "old pass with the exact top 64, × one product", (1.06, 1.15), _against("peaked", ("old pass", "corral, triton"), ONE)
    ),
    Goal("exact TROLL update, flat, × three products", (1.05, 1.15), _against("flat", EXACT, THREE)),
    Goal("TROLL update, peaked, × our own clip update", (1.02, 1.02), _against("peaked", TROLL, CLIP), "{:.3f}".format),
    Goal("clip update, peaked, × the fastest other fused head", (0.45, 0.45), _over_fastest("peaked")),
    Goal("clip update, flat, × the fastest other fused head", (1.05, 1.05), _over_fastest("flat")),
    Goal("sparse update: MiB beyond dH and dW", (128, 128), _beyond_gradients("peaked", TROLL), figure, timed=False),
    Goal("exact update: MiB beyond dH and dW", (2048, 2048), _beyond_gradients("flat", EXACT), "{:.0f}".format, timed=False),
    Goal("largest error of a log-prob", (2e-4, 2e-4), _worst("logp_error"), TINY, timed=False),
    Goal("largest relative error of dH", (3e-3, 3e-3), _worst("gradient_error"), TINY, timed=False),
    Goal("a projected token's KL, farthest from its bound", (1e-6, 1e-6), _worst("kl_error"), TINY, timed=False),
]


def goals(results: dict[str, Any]) -> str:
    """Every goal with what is reached; bold where it is met."""
    measured = Measured(results["head on cuda"]["rows"])
    head = ["", "H = 4096: goal", "cool", "sustained", "H = 896: goal", "cool", "sustained"]
    rivals = [measured.fastest(width, policy, COOL).get("name") for policy in ("peaked", "flat") for width in WIDTHS]
    named = "; ".join(dict.fromkeys(name for name in rivals if name))
    text = markdown(head, (goal.line(measured) for goal in GOALS))
    return f"{text}\nThe fastest other fused head: {named}.\n" if named else text


GAINS = [
    ("old pass: log-probs and the 64 most likely tokens", "peaked", "old pass", "corral, triton"),
    ("TROLL update, peaked policy", "peaked", *TROLL),
    ("PPO clip update, peaked policy", "peaked", *CLIP),
    ("TROLL update, flat policy", "flat", *TROLL),
    ("TROLL update, flat policy, `exact=True`", "flat", *EXACT),
]


def gains(results: dict[str, Any]) -> str:
    """Time and memory against full logits, for a reader with a minute."""
    measured = Measured(results["head on cuda"]["rows"])
    head = [f"N = {SHAPE[0]}, V = {SHAPE[1]}, {results['head on cuda']['machine']['gpu']}"]
    for width in WIDTHS:
        head += [f"H = {width}: full logits", "corral", ""]
    lines = []
    for what, policy, task, name in GAINS:
        cells = [what]
        for width in WIDTHS:
            full, ours = measured.get(width, policy, task, "full logits"), measured.get(width, policy, task, name)
            if not full or not ours:
                cells += [""] * 3
                continue
            cells += [f"{figure(row[COOL])} ms, {mebibytes(row['mib'])}" for row in (full, ours)]
            cells.append(f"{full[COOL] / ours[COOL]:.1f} ×")
        lines.append(cells)
    return f"{markdown(head, lines)}\n{on_cpu(results)}"


IN_SHORT = [
    ("one matrix product, the least there is", "peaked", *ONE),
    ("TROLL update, peaked policy", "peaked", *TROLL),
    ("TROLL update, any policy, exact gradient", "flat", *EXACT),
    ("TROLL update on full logits", "peaked", "troll update", "full logits"),
    ("PPO clip update on full logits", "peaked", *NAIVE),
]


def in_short(results: dict[str, Any], width: int = 4096) -> str:
    """A few lines for a front page: time, memory beyond dH and dW, and how far dH is off."""
    measured, lines = Measured(results["head on cuda"]["rows"]), []
    for what, policy, task, name in IN_SHORT:
        row, size = measured.get(width, policy, task, name), _beyond_gradients(policy, (task, name))
        if not row:
            continue
        beyond = None if task == ONE[0] else size(measured, width, COOL)
        # Of a clipped loss, rows whose ratio is rounded across the threshold would be most of the error.
        error = f"{100 * row['gradient_error']:.2g} %" if task == TROLL[0] else ""
        lines.append([what, f"{figure(row[COOL])} ms", "" if beyond is None else mebibytes(beyond), error])
    return markdown(["", "time", "peak memory beyond dH and dW", "dH off by"], lines)


def on_cpu(results: dict[str, Any]) -> str:
    """A line per dtype and number of threads: the first shape, relative to full logits."""
    tasks, lines, shape = ("old pass", "troll update", "clip update"), [], ""
    for name in sorted(name for name in results if name.startswith("head on cpu")):
        first = results[name]["rows"][0]
        shape = f"N = {first['N']}, V = {first['V']}, H = {first['H']}"
        for dtype in ("float32", "bfloat16"):
            alike = [row for row in results[name]["rows"] if shape_of(row) == shape_of({**first, "dtype": dtype})]
            rows = {(row["task"], row["name"]): row for row in alike}
            pairs = [(rows[task, "corral, torch"], rows[task, "full logits"]) for task in tasks if rows]
            cells = [f"{x[COOL] / y[COOL]:.2f} × the time, {x['mib'] / y['mib']:.2f} × the memory" for x, y in pairs]
            if cells:
                lines.append([f"{name.removeprefix('head on cpu, ')}, {dtype}", *cells])
    return markdown([f"CPU, {shape}, against full logits", *tasks], lines)
