"""README's figure, docs/headline.svg, and the sentence below it: what a batch of rollouts is good for. Trains nothing.

    python benchmarks/deployed/headline.py

From benchmarks/deployed/results. Left: success over batches of rollouts, on seeds on which nothing was chosen. Right: the demo
as it ships, ten batches at its own rate, nothing held, one to eight passes over each.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from plans import CHOSEN
from spec import START
from study_confirm import LEVEL, places_above, runs_of, steps_to
from study_table import Row, certificate, finished, held_out, steps_of

from corral.report.looks import DARK, LIGHT, SHAPES, assign_looks
from corral.run.files import write_whole

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
NAMES = {"troll": "TROLL", "dppo": "DPPO", "ppo_clip": "PPO clip"}
PASSES = (1, 2, 4, 8)
ARMS = (("troll", "TROLL, 4 passes", CHOSEN[0]), ("ppo_clip", "clip, 4 passes", CHOSEN[1]), ("once", "clip, 1 pass", CHOSEN[2]))
"""Curves on the left: colour, label, setting; of clipping, the best of those that were tried, and the best with one pass."""
BLOCK = re.compile(r"<!-- headline -->\n.*?<!-- /headline -->", re.DOTALL)
Values = Mapping[float, Sequence[float]]
"""A value per seed, by place on the axis."""


@dataclass(frozen=True)
class Line:
    """One curve: the mean over seeds of every place, and a dot per seed."""

    look: str
    """Its class in the style sheet."""
    label: str
    values: Values
    marker: str


def curves(runs: Sequence[Row]) -> list[Line]:
    """Held-out success over batches of rollouts, on fresh seeds."""
    markers, lines = assign_looks(NAMES), []
    for look, label, how in ARMS:
        found: dict[float, list[float]] = {}
        for run in runs_of(runs, how):
            for step, success in held_out(run):
                found.setdefault(step, []).append(success)
        lines.append(Line(look, label, found, markers["ppo_clip" if look == "once" else look][1]))
    return lines


def distances(runs: Sequence[Row]) -> list[Line]:
    """Nats that the network moves in a step, mean over tokens and steps, over passes."""
    wanted = {"rate": 2e-4, "arm": "off", "steps": 10, "recipe": "demo"}
    of_demo = [run for run in runs if wanted.items() <= run.items() and run.get("start", START) == START]
    found: dict[str, dict[float, list[float]]] = {name: {} for name in NAMES}
    for run in of_demo:
        if run["objective"] in NAMES and not run.get("reuse") and run.get("passes") in PASSES:
            moved = fmean(certificate(line, "mean") for line in steps_of(run))
            found[run["objective"]].setdefault(run["passes"], []).append(moved)
    looks = assign_looks(NAMES)
    return [Line(name, label, found[name], looks[name][1]) for name, label in NAMES.items()]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines inside a box; `across` and `up` map a value to 0 … 1."""

    title: str
    axis: str
    lines: Sequence[Line]
    across: Callable[[float], float]
    up: Callable[[float], float]
    ticks: Mapping[str, float]
    places: Sequence[int]
    key: tuple[float, float] | None = None
    """Where a key to the lines begins; without one, labels stand at their ends."""
    left: float = 50.0
    width: float = 330.0
    top: float = 44.0
    height: float = 160.0

    def place(self, x: float, value: float) -> tuple[float, float]:
        inside = self.top + self.height * (1 - min(max(self.up(value), 0.0), 1.0))
        return self.left + 10 + (self.width - 118) * self.across(x), inside

    def ends(self) -> dict[str, tuple[float, float]]:
        """Where labels stand."""
        if self.key is not None:
            x, y = self.place(*self.key)
            return {line.look: (x, y + 20 * row) for row, line in enumerate(self.lines)}
        found = {line.look: self.place(*_last(line)) for line in self.lines}
        heights = _apart({look: y for look, (_, y) in found.items()})
        return {look: (x + 10, heights[look]) for look, (x, _) in found.items()}

    def svg(self, shift: float) -> str:
        out = [f'<g transform="translate({shift:g} 0)"><text class="title" x="{self.left:g}" y="22">{self.title}</text>']
        for text, value in self.ticks.items():
            y = self.place(0, value)[1]
            out.append(f'<path class="grid" d="M{self.left:g} {y:.1f}h{self.width - 94:g}"/>')
            out.append(f'<text class="tick" x="{self.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        under = self.top + self.height + 20
        for x in self.places:
            out.append(f'<text class="tick" x="{self.place(x, 0)[0]:.1f}" y="{under:g}" text-anchor="middle">{x}</text>')
        middle = (self.place(self.places[0], 0)[0] + self.place(self.places[-1], 0)[0]) / 2
        out.append(f'<text class="tick" x="{middle:.1f}" y="{under + 20:g}" text-anchor="middle">{self.axis}</text>')
        ends = self.ends()
        for line in self.lines:
            means = [(x, fmean(values)) for x, values in sorted(line.values.items())]
            path = " ".join("{:.1f} {:.1f}".format(*self.place(*point)) for point in means)
            out.append(f'<path class="line {line.look}" d="M{path}"/>')
            for x, values in line.values.items():
                dots = [self.place(x, value) for value in values]
                out += [f'<circle class="dot {line.look}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in dots]
            for point in means:
                x, y = self.place(*point)
                out.append(f'<path class="mark {line.look}" transform="translate({x:.1f} {y:.1f})" d="{SHAPES[line.marker]}"/>')
            x, y = ends[line.look]
            if self.key is not None:  # beside a piece of its line
                out.append(f'<path class="line {line.look}" d="M{x - 28:.1f} {y:.1f}h22"/>')
            out.append(f'<text class="label {line.look}" x="{x:.1f}" y="{y + 4:.1f}">{line.label}</text>')
        return "".join([*out, "</g>"])


def _last(line: Line) -> tuple[float, float]:
    """Where a curve ends."""
    x = max(line.values)
    return x, fmean(line.values[x])


def _apart(heights: dict[str, float], least: float = 16.0) -> dict[str, float]:
    """Heights of labels, pushed down where two would overlap."""
    placed: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max([y, *(other + least for other in placed.values())])
    return placed


def style() -> str:
    """Colours of the objectives and of the paper, light and dark; clipping with one pass is clipping, dashed."""

    def theme(colours: Sequence[str], ink: str, faint: str, grid: str) -> str:
        of = {name: colours[place] for name, (place, _) in assign_looks(NAMES).items()}
        of["once"] = of["ppo_clip"]
        rules = "".join(f".{name}{{--c:{colour}}}" for name, colour in of.items())
        return f"{rules}.title{{fill:{ink}}}.tick{{fill:{faint}}}.grid{{stroke:{grid}}}"

    plain = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px}.title{font-size:13px;font-weight:600}"
        ".label{font-weight:600;fill:var(--c)}.line{fill:none;stroke:var(--c);stroke-width:2.2}.mark{fill:var(--c)}"
        ".dot{fill:var(--c);opacity:.35}.grid{fill:none}.line.once{stroke-dasharray:5 4}.mark.once{display:none}"
    )
    light, dark = theme(LIGHT, "#1f2328", "#59636e", "#d1d9e0"), theme(DARK, "#f0f6fc", "#9198a1", "#3d444d")
    return f"<style>{plain}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def draw(runs: Sequence[Row]) -> str:
    """Two panels: what rollouts buy, and how far the network moves for it."""
    learned = Panel(
        title="held-out success", axis="batches of rollouts", lines=curves(runs), across=lambda x: x / 20,
        up=lambda value: (value - 0.15) / 0.6, ticks={f"{tick} %": tick / 100 for tick in (20, 40, 60)},
        places=(0, 5, 10, 15, 20), key=(12, 0.365),
    )  # fmt: skip
    far = Panel(
        title="how far a batch moves the network, in nats", axis="passes over each batch", lines=distances(runs),
        across=lambda x: math.log2(max(x, 1)) / 3, up=lambda value: math.log10(max(value, 1e-9) / 3e-3) / 2,
        ticks={str(tick): tick for tick in (0.01, 0.03, 0.1, 0.3)}, places=PASSES,
    )  # fmt: skip
    said = "Held-out success over batches of rollouts for TROLL and PPO's clip; mean KL per step over passes, for DPPO too"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 250" role="img" aria-label="{said}">'
        f"{style()}{learned.svg(0)}{far.svg(410)}</svg>\n"
    )


def sentence(runs: Sequence[Row]) -> str:
    """What the figure says, in numbers, with how many runs each rests on."""
    found = [runs_of(runs, how) for *_, how in ARMS]
    ours, tuned, once = (median(map(steps_to, some)) for some in found)
    seeds = sorted({len(some) for some in found})
    assert len(seeds) == 1
    above, places = places_above(runs)
    others = f"; it is above clip in {above} of {places} [other tasks and starts](docs/deployed.md#elsewhere)" if places else ""
    return (
        f"TROLL, with four passes over each batch, has {100 * LEVEL:.0f} % success after {ours:.1f} batches of rollouts; "
        f"PPO's clip, tuned over rate and passes,\nafter {tuned:.1f}, with one pass after {once:.0f}. (Medians of {seeds[0]} "
        f"fresh seeds of [the study](docs/deployed.md#fresh-seeds), a small model{others};\n`make results`.)"
    )


def main() -> None:
    """Write the figure and README's sentence."""
    runs = list(finished([RESULTS]).values())
    write_whole(ROOT / "docs" / "headline.svg", lambda beside: beside.write_text(draw(runs)))
    readme = ROOT / "README.md"
    text = BLOCK.sub(lambda _: f"<!-- headline -->\n{sentence(runs)}\n<!-- /headline -->", readme.read_text())
    write_whole(readme, lambda beside: beside.write_text(text))


if __name__ == "__main__":
    main()
