"""README's figure, docs/headline.svg, and the sentence below it: rollouts that a given success takes. Trains nothing.

    python benchmarks/deployed/headline.py

From benchmarks/deployed/results: TROLL and clipping as they were tuned, on the fresh seeds of the study.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from plans import CHOSEN
from study_confirm import LEVEL, runs_of, steps_to
from study_table import Row, certificate, final, finished, held_out, steps_of

from corral.report.looks import DARK, LIGHT, assign_looks
from corral.run.files import write_whole

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
BLOCK = re.compile(r"<!-- headline -->\n.*?<!-- /headline -->", re.DOTALL)
LABELS = ("TROLL, 4 passes", "clip, 4 passes", "clip, 1 pass")
"""The first three of `CHOSEN`."""
BATCHES = 20
"""Where the axis ends."""
Curve = list[tuple[float, float]]


class Line(NamedTuple):
    """A setting's runs, as curves over batches of rollouts."""

    label: str
    objective: str
    dashed: bool
    curves: list[Curve]

    @property
    def mean(self) -> Curve:
        """Over the runs, where all of them have a point."""
        return [(group[0][0], fmean(y for _, y in group)) for group in zip(*self.curves, strict=False)]


def tuned(runs: Sequence[Row]) -> list[list[Row]]:
    """Runs of each setting on fresh seeds."""
    return [runs_of(runs, how) for how in CHOSEN[: len(LABELS)]]


def moved(run: Row) -> Curve:
    """Nats that the network moves in each step."""
    return [(float(line["step"]), certificate(line, "mean")) for line in steps_of(run)]


def lines(groups: Sequence[Sequence[Row]], read: Callable[[Row], Curve]) -> list[Line]:
    """A line per setting that has runs; one pass is dashed."""
    return [
        Line(label, group[0]["objective"], group[0]["passes"] == 1, [read(run) for run in group])
        for label, group in zip(LABELS, groups, strict=True)
        if group
    ]


class Panel:
    """Lines over batches inside a box, each run faint behind its mean; `scale` maps a value to 0 (bottom) … 1 (top)."""

    left, width, top, height = 50.0, 235.0, 44.0, 160.0

    def __init__(self, title: str, drawn: list[Line], scale: Callable[[float], float], ticks: dict[str, float]) -> None:
        self.title, self.drawn, self.scale, self.ticks = title, drawn, scale, ticks

    def place(self, batch: float, value: float) -> tuple[float, float]:
        """Where a point is."""
        up = min(max(self.scale(value), 0.0), 1.0)
        return self.left + self.width * batch / BATCHES, self.top + self.height * (1 - up)

    def _path(self, curve: Curve) -> str:
        return "M" + " ".join("{:.1f} {:.1f}".format(*self.place(*point)) for point in curve)

    def svg(self, shift: float) -> str:
        """The panel, moved to the right by `shift`."""
        bottom = self.top + self.height
        out = [f'<g transform="translate({shift:g} 0)"><text class="title" x="{self.left:g}" y="22">{self.title}</text>']
        for text, value in self.ticks.items():
            y = self.place(0, value)[1]
            out.append(f'<path class="grid" d="M{self.left:g} {y:.1f}h{self.width:g}"/>')
            out.append(f'<text class="tick" x="{self.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for batch in range(0, BATCHES + 1, 5):
            x = self.place(batch, 0)[0]
            out.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 20:g}" text-anchor="middle">{batch}</text>')
        middle = self.left + self.width / 2
        out.append(f'<text class="tick" x="{middle:g}" y="{bottom + 40:g}" text-anchor="middle">batches of rollouts</text>')
        ends = {line.label: line.mean[-1] for line in self.drawn}
        heights: dict[str, float] = {}
        for last in {batch for batch, _ in ends.values()}:
            heights |= _apart({label: self.place(*end)[1] for label, end in ends.items() if end[0] == last})
        for line in self.drawn:
            dashed = " dashed" if line.dashed else ""
            out += [f'<path class="run {line.objective}" d="{self._path(curve)}"/>' for curve in line.curves]
            out.append(f'<path class="line {line.objective}{dashed}" d="{self._path(line.mean)}"/>')
            x, y = self.place(line.mean[-1][0], 0)[0] + 7, heights[line.label]
            out.append(f'<text class="label {line.objective}" x="{x:.1f}" y="{y:.1f}">{line.label}</text>')
        return "".join([*out, "</g>"])


def _apart(heights: dict[str, float], least: float = 16.0) -> dict[str, float]:
    """Heights of labels, pushed down where two would overlap."""
    placed: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max([y, *(other + least for other in placed.values())])
    return placed


def _decades(value: float) -> float:
    """Two decades and a half from 0.0003 on."""
    return math.log10(max(value, 1e-9) / 3e-4) / 2.5


def style() -> str:
    """Colours of the objectives and of the paper, light and dark."""
    looks = assign_looks(["troll", "ppo_clip"])

    def theme(colours: Sequence[str], ink: str, faint: str, grid: str) -> str:
        of = "".join(f".{name}{{--c:{colours[place]}}}" for name, (place, _) in looks.items())
        return f"{of}.title{{fill:{ink}}}.tick{{fill:{faint}}}.grid{{stroke:{grid}}}"

    plain = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px}.title{font-size:13px;font-weight:600}"
        ".label{font-weight:600;fill:var(--c)}.line,.run,.grid{fill:none}.line{stroke:var(--c);stroke-width:2.4}"
        ".run{stroke:var(--c);opacity:.22}.dashed{stroke-dasharray:6 4}"
    )
    light, dark = theme(LIGHT, "#1f2328", "#59636e", "#d1d9e0"), theme(DARK, "#f0f6fc", "#9198a1", "#3d444d")
    return f"<style>{plain}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def draw(groups: Sequence[Sequence[Row]]) -> str:
    """Two panels: what is learned, and how far the network moves for it."""
    percents = {f"{tick} %": tick / 100 for tick in (20, 40, 60, 80)}
    learned = Panel("held-out success", lines(groups, held_out), lambda value: (value - 0.15) / 0.65, percents)
    nats = {text: float(text) for text in ("0.001", "0.01", "0.1")}
    far = Panel("how far a step moves the network, in nats", lines(groups, moved), _decades, nats)
    said = "Held-out success and KL of each step over batches of rollouts, for TROLL and PPO's clip"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 250" role="img" aria-label="{said}">'
        f"{style()}{learned.svg(0)}{far.svg(402)}</svg>\n"
    )


def sentence(groups: Sequence[Sequence[Row]]) -> str:
    """What the figure says, in numbers, and on how many seeds."""
    troll, clip, _ = groups
    needed = [f"{median(map(steps_to, group)):.2g}" for group in groups]
    ends = [f"{100 * fmean(map(final, group)):.0f} %" for group in (troll, clip)]
    far = [fmean(value for run in group for _, value in moved(run)) for group in (troll, clip)]
    seeds = min(map(len, groups))
    return (
        f"TROLL solves {100 * LEVEL:.0f} % of held-out problems after {needed[0]} batches of rollouts, clipping with its best "
        f"rate and passes after {needed[1]},\n"
        f"with one pass after {needed[2]}. After ten it has {ends[0]}, clipping {ends[1]}, and a step moves the network "
        f"{far[0]:.1g} nats instead of {far[1]:.1g}.\n"
        f"(Medians and means of {seeds} fresh seeds; a model of a million parameters: "
        "[the study](docs/deployed.md#fresh-seeds), `make results`.)"
    )


def main() -> None:
    """Write the figure and README's sentence."""
    groups = tuned(list(finished([RESULTS]).values()))
    write_whole(ROOT / "docs" / "headline.svg", lambda beside: beside.write_text(draw(groups)))
    readme = ROOT / "README.md"
    text = BLOCK.sub(lambda _: f"<!-- headline -->\n{sentence(groups)}\n<!-- /headline -->", readme.read_text())
    write_whole(readme, lambda beside: beside.write_text(text))


if __name__ == "__main__":
    main()
