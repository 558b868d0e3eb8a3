"""README's figure, docs/headline.svg, and the sentence below it: what a batch of rollouts is good for. Trains nothing.

    python benchmarks/deployed/headline.py

From benchmarks/deployed/results: the demo as it ships, ten steps at its own rate, nothing held, one to eight passes a batch.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from spec import START
from study_table import Row, certificate, final, finished, steps_of

from corral.report.looks import DARK, LIGHT, SHAPES, assign_looks
from corral.run.files import write_whole

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
NAMES = {"troll": "TROLL", "dppo": "DPPO", "ppo_clip": "PPO clip"}
PASSES = (1, 2, 4, 8)
BLOCK = re.compile(r"<!-- headline -->\n.*?<!-- /headline -->", re.DOTALL)
Points = dict[tuple[str, int], list[float]]
"""A value per seed, by objective and passes."""


def chosen(runs: Sequence[Row]) -> list[Row]:
    """Ten steps of the demo at its own rate, with nothing held."""
    wanted = {"rate": 2e-4, "arm": "off", "steps": 10, "recipe": "demo"}
    found = [run for run in runs if wanted.items() <= run.items() and run.get("start", START) == START]
    return [run for run in found if not run.get("reuse") and run.get("passes") in PASSES]


def points(runs: Sequence[Row], value: Callable[[Row], float]) -> Points:
    """Values by objective and passes, each over its seeds."""
    found: Points = {}
    for run in runs:
        if run["objective"] in NAMES:
            found.setdefault((run["objective"], run["passes"]), []).append(value(run))
    return found


def moved(run: Row) -> float:
    """Nats that the network moves in a step, mean over tokens and steps."""
    return fmean(certificate(line, "mean") for line in steps_of(run))


class Panel:
    """Lines over passes inside a box, a dot per seed; `scale` maps a value to 0 (bottom) … 1 (top)."""

    left, width, top, height = 50.0, 330.0, 44.0, 160.0

    def __init__(self, title: str, found: Points, scale: Callable[[float], float], ticks: dict[str, float]) -> None:
        self.title, self.found, self.scale, self.ticks = title, found, scale, ticks

    def place(self, passes: int, value: float) -> tuple[float, float]:
        x = self.left + 16 + (self.width - 112) * math.log2(passes) / math.log2(PASSES[-1])
        return x, self.top + self.height * (1 - min(max(self.scale(value), 0.0), 1.0))

    def svg(self, shift: float) -> str:
        out = [f'<g transform="translate({shift:g} 0)"><text class="title" x="{self.left:g}" y="22">{self.title}</text>']
        for text, value in self.ticks.items():
            y = self.place(1, value)[1]
            out.append(f'<path class="grid" d="M{self.left:g} {y:.1f}h{self.width - 80:g}"/>')
            out.append(f'<text class="tick" x="{self.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for passes in PASSES:
            x = self.place(passes, 0)[0]
            out.append(
                f'<text class="tick" x="{x:.1f}" y="{self.top + self.height + 20:g}" text-anchor="middle">{passes}</text>'
            )
        middle = (self.place(PASSES[0], 0)[0] + self.place(PASSES[-1], 0)[0]) / 2
        out.append(f'<text class="tick" x="{middle:.1f}" y="{self.top + self.height + 40:g}" text-anchor="middle">')
        out.append("passes over each batch of rollouts</text>")
        ends = {name: fmean(self.found[name, PASSES[-1]]) for name in NAMES if (name, PASSES[-1]) in self.found}
        labels = _apart({name: self.place(PASSES[-1], value)[1] for name, value in ends.items()})
        for name, (_, marker) in assign_looks(NAMES).items():
            here = [(passes, self.found[name, passes]) for passes in PASSES if (name, passes) in self.found]
            line = " ".join("{:.1f} {:.1f}".format(*self.place(passes, fmean(values))) for passes, values in here)
            out.append(f'<path class="line {name}" d="M{line}"/>')
            for passes, values in here:
                dots = [self.place(passes, value) for value in values]
                out += [f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in dots]
                x, y = self.place(passes, fmean(values))
                out.append(f'<path class="mark {name}" transform="translate({x:.1f} {y:.1f})" d="{SHAPES[marker]}"/>')
            if name in labels:
                x = self.place(PASSES[-1], 0)[0] + 12
                out.append(f'<text class="label {name}" x="{x:.1f}" y="{labels[name] + 4:.1f}">{NAMES[name]}</text>')
        return "".join([*out, "</g>"])


def _apart(heights: dict[str, float], least: float = 16.0) -> dict[str, float]:
    """Heights of labels, pushed down where two would overlap."""
    placed: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max([y, *(other + least for other in placed.values())])
    return placed


def _decades(value: float) -> float:
    """Two decades from 0.003 on."""
    return math.log10(max(value, 1e-9) / 3e-3) / 2


def style() -> str:
    """Colours of the objectives and of the paper, light and dark."""

    def theme(colours: Sequence[str], ink: str, faint: str, grid: str) -> str:
        of = "".join(f".{name}{{--c:{colours[place]}}}" for name, (place, _) in assign_looks(NAMES).items())
        return f"{of}.title{{fill:{ink}}}.tick{{fill:{faint}}}.grid{{stroke:{grid}}}"

    plain = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px}.title{font-size:13px;font-weight:600}"
        ".label{font-weight:600;fill:var(--c)}.line{fill:none;stroke:var(--c);stroke-width:2.2}.mark{fill:var(--c)}"
        ".dot{fill:var(--c);opacity:.45}.grid{fill:none}"
    )
    light, dark = theme(LIGHT, "#1f2328", "#59636e", "#d1d9e0"), theme(DARK, "#f0f6fc", "#9198a1", "#3d444d")
    return f"<style>{plain}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def draw(runs: Sequence[Row]) -> str:
    """Two panels: what is learned, and how far the network moves for it."""
    percents = {f"{tick} %": tick / 100 for tick in (40, 50, 60, 70)}
    learned = Panel(
        "held-out success after ten batches of rollouts", points(runs, final), lambda v: (v - 0.35) / 0.35, percents
    )
    nats = {str(tick): tick for tick in (0.01, 0.03, 0.1, 0.3)}
    far = Panel("how far a step moves the network, in nats", points(runs, moved), _decades, nats)
    said = "Held-out success and mean KL per step over one, two, four and eight passes, for TROLL, DPPO and PPO's clip"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 250" role="img" aria-label="{said}">'
        f"{style()}{learned.svg(0)}{far.svg(396)}</svg>\n"
    )


def sentence(runs: Sequence[Row]) -> str:
    """What the figure says, in numbers, with how many runs each rests on."""
    learned, far = points(runs, final), points(runs, moved)
    first, last = PASSES[0], PASSES[-1]
    seeds = sorted({len(values) for values in learned.values()})
    few = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds"

    def percent(name: str, passes: int) -> str:
        return f"{100 * fmean(learned[name, passes]):.0f} %"

    def nats(name: str) -> str:
        return f"{fmean(far[name, last]):.2g}"

    return (
        f"With one pass over each batch TROLL and clipping tie ({percent('troll', first)}, {percent('ppo_clip', first)}). "
        f"With {last}, TROLL has {percent('troll', last)} and moves {nats('troll')} nats a step,\n"
        f"clipping {percent('ppo_clip', last)} and {nats('ppo_clip')}. (A small model, {few} a point, signs rather than proof: "
        "[the study](docs/deployed.md#the-study); `make results`.)"
    )


def main() -> None:
    """Write the figure and README's sentence."""
    runs = chosen(list(finished([RESULTS]).values()))
    write_whole(ROOT / "docs" / "headline.svg", lambda beside: beside.write_text(draw(runs)))
    readme = ROOT / "README.md"
    text = BLOCK.sub(lambda _: f"<!-- headline -->\n{sentence(runs)}\n<!-- /headline -->", readme.read_text())
    write_whole(readme, lambda beside: beside.write_text(text))


if __name__ == "__main__":
    main()
