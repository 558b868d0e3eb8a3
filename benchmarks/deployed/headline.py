"""README's figure, docs/headline.svg, and the sentences below it: what a batch of rollouts is good for, and which learning
rates are. Trains nothing.

    python benchmarks/deployed/headline.py

From benchmarks/deployed/results. Left: success over batches of rollouts, on seeds on which nothing was chosen. Right: success
after ten batches, used once each, over constant learning rates, with the network held and not.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from plans import CHOSEN
from study_confirm import LEVEL, places_above, runs_of, steps_to
from study_rates import HELD, TUNED, UNHELD, fresh_rates, over_rates
from study_table import Row, final, finished, held_out

from corral.lab.report.looks import DARK, LIGHT, SHAPES, assign_looks
from corral.lab.run.files import write_whole

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
NAMES = {"troll": "TROLL", "ppo_clip": "clip"}
DASHED = "dashed"
ARMS = (
    ("troll", "TROLL, 4 passes", CHOSEN[0]),
    ("ppo_clip", "clip, 4 passes", CHOSEN[1]),
    (f"ppo_clip {DASHED}", "clip, 1 pass", CHOSEN[2]),
)
"""Curves on the left: look, label, setting; of clipping, the best of those that were tried, and the best with one pass."""
BLOCK = re.compile(r"<!-- headline -->\n.*?<!-- /headline -->", re.DOTALL)
Values = Mapping[float, Sequence[float]]
"""A value per seed, by place on the axis."""


@dataclass(frozen=True)
class Line:
    """One curve: the mean over seeds of every place, and a dot per seed."""

    look: str
    """Its classes in the style sheet."""
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
        lines.append(Line(look, label, found, markers[look.split()[0]][1]))
    return lines


def over_constant_rates(runs: Sequence[Row]) -> list[Line]:
    """Success after ten batches, used once each, by constant learning rate: held, then unheld."""
    lines = []
    for arm, end, dashed in ((HELD, ", held", ""), (UNHELD, "", f" {DASHED}")):
        for name, label in NAMES.items():
            found: dict[float, list[float]] = {}
            for run in over_rates(runs, "constant"):
                if (run["objective"], run["arm"]) == (name, arm):
                    found.setdefault(run["rate"], []).append(final(run))
            lines.append(Line(name + dashed, label + end, found, assign_looks(NAMES)[name][1]))
    return lines


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines inside a box; `across` and `up` map a value to 0 … 1."""

    title: str
    axis: str
    lines: Sequence[Line]
    across: Callable[[float], float]
    up: Callable[[float], float]
    ticks: Mapping[str, float]
    places: Mapping[str, float]
    key: tuple[float, float]
    """Where the key to the lines begins."""
    left: float = 50.0
    width: float = 330.0
    top: float = 44.0
    height: float = 160.0

    def place(self, x: float, value: float) -> tuple[float, float]:
        inside = self.top + self.height * (1 - min(max(self.up(value), 0.0), 1.0))
        return self.left + 10 + (self.width - 20) * self.across(x), inside

    def svg(self, shift: float) -> str:
        out = [f'<g transform="translate({shift:g} 0)"><text class="title" x="{self.left:g}" y="22">{self.title}</text>']
        for text, value in self.ticks.items():
            y = self.place(0, value)[1]
            out.append(f'<path class="grid" d="M{self.left:g} {y:.1f}h{self.width:g}"/>')
            out.append(f'<text class="tick" x="{self.left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        under = self.top + self.height + 20
        for text, x in self.places.items():
            out.append(f'<text class="tick" x="{self.place(x, 0)[0]:.1f}" y="{under:g}" text-anchor="middle">{text}</text>')
        middle = fmean(self.place(x, 0)[0] for x in (min(self.places.values()), max(self.places.values())))
        out.append(f'<text class="tick" x="{middle:.1f}" y="{under + 20:g}" text-anchor="middle">{self.axis}</text>')
        key_x, key_y = self.place(*self.key)
        for row, line in enumerate(self.lines):
            means = [(x, fmean(values)) for x, values in sorted(line.values.items())]
            path = " ".join("{:.1f} {:.1f}".format(*self.place(*point)) for point in means)
            out.append(f'<path class="line {line.look}" d="M{path}"/>')
            for x, values in line.values.items():
                dots = [self.place(x, value) for value in values]
                out += [f'<circle class="dot {line.look}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in dots]
            for point in means:
                x, y = self.place(*point)
                out.append(f'<path class="mark {line.look}" transform="translate({x:.1f} {y:.1f})" d="{SHAPES[line.marker]}"/>')
            y = key_y + 20 * row
            out.append(f'<path class="line {line.look}" d="M{key_x - 28:.1f} {y:.1f}h22"/>')
            out.append(f'<text class="label {line.look}" x="{key_x:.1f}" y="{y + 4:.1f}">{line.label}</text>')
        return "".join([*out, "</g>"])


def style() -> str:
    """Colours of the objectives and of the paper, light and dark."""

    def theme(colours: Sequence[str], ink: str, faint: str, grid: str) -> str:
        of = {name: colours[place] for name, (place, _) in assign_looks(NAMES).items()}
        rules = "".join(f".{name}{{--c:{colour}}}" for name, colour in of.items())
        return f"{rules}.title{{fill:{ink}}}.tick{{fill:{faint}}}.grid{{stroke:{grid}}}"

    plain = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12px}.title{font-size:13px;font-weight:600}"
        ".label{font-weight:600;fill:var(--c)}.line{fill:none;stroke:var(--c);stroke-width:2.2}.mark{fill:var(--c)}"
        ".dot{fill:var(--c);opacity:.35}.grid{fill:none}.line.dashed{stroke-dasharray:5 4}.mark.dashed{display:none}"
    )
    light, dark = theme(LIGHT, "#1f2328", "#59636e", "#d1d9e0"), theme(DARK, "#f0f6fc", "#9198a1", "#3d444d")
    return f"<style>{plain}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def draw(runs: Sequence[Row]) -> str:
    """Two panels: what rollouts buy, and what a learning rate costs."""
    learned = Panel(
        title="held-out success", axis="batches of rollouts", lines=curves(runs), across=lambda x: x / 20,
        up=lambda value: (value - 0.15) / 0.6, ticks={f"{tick} %": tick / 100 for tick in (20, 40, 60)},
        places={str(x): x for x in (0, 5, 10, 15, 20)}, key=(12, 0.365),
    )  # fmt: skip
    rates = Panel(
        title="after ten batches, by learning rate", axis="constant learning rate, one pass", lines=over_constant_rates(runs),
        across=lambda x: math.log10(max(x, 3e-5) / 3e-5) / 3, up=lambda value: value / 0.65,
        ticks={f"{tick} %": tick / 100 for tick in (0, 20, 40, 60)},
        places={text: float(text) for text in ("1e-4", "1e-3", "1e-2")}, key=(6e-3, 0.35),
    )  # fmt: skip
    said = "Held-out success of TROLL and PPO's clip: over batches of rollouts; over learning rates, held and not"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 250" role="img" aria-label="{said}">'
        f"{style()}{learned.svg(0)}{rates.svg(410)}</svg>\n"
    )


def sentence(runs: Sequence[Row]) -> str:
    """What the figure's left says, in numbers, with how many runs each rests on."""
    found = [runs_of(runs, how) for *_, how in ARMS]
    ours, tuned, once = (median(map(steps_to, some)) for some in found)
    seeds = sorted({len(some) for some in found})
    assert len(seeds) == 1
    above, places = places_above(runs)
    others = f"; it is above clip in {above} of {places} [other tasks and starts](docs/deployed.md#elsewhere)" if places else ""
    return (
        f"TROLL, with four passes over each batch, has {100 * LEVEL:.0f} % success after {ours:.1f} batches of rollouts; "
        f"PPO's clip, tuned over rate and passes,\nafter {tuned:.1f}, with one pass after {once:.0f}. (Medians of {seeds[0]} "
        f"fresh seeds of [the study](docs/deployed.md#fresh-seeds), a small model; TROLL held at .03, "
        f"linear{others};\n`make results`.)"
    )


def sentence_of_rates(runs: Sequence[Row]) -> str:
    """What `learning_rate="auto"` buys on fresh seeds, against the best rate that was tried, and one 2.5 times as large."""
    found = fresh_rates(runs)

    def ends(rate: float | str, arm: str, schedule: str) -> list[float]:
        return [100 * fmean(map(final, found[name, rate, arm, schedule])) for name in NAMES]

    (auto, clip_auto), (lost, clip_lost) = ends("auto", HELD, "constant"), ends(1e-3, UNHELD, "linear")
    tuned, clip_tuned = (max(ends(rate, UNHELD, "linear")[place] for rate in TUNED) for place in range(len(NAMES)))
    seeds = min(len(found[name, "auto", HELD, "constant"]) for name in NAMES)
    return (
        f'`learning_rate="auto"` holds the network that samples next, in place of a rate to tune: with one pass TROLL ends at '
        f"{auto:.0f} % ({seeds} fresh seeds), at\nthe better of two tuned rates at {tuned:.0f}, at 2.5 times that rate at "
        f"{lost:.0f}; clip at {clip_auto:.0f}, {clip_tuned:.0f} and {clip_lost:.0f} "
        f"([rates](docs/deployed.md#rates-how-far-off-one-may-be))."
    )


def main() -> None:
    """Write the figure and README's sentences."""
    runs = list(finished([RESULTS]).values())
    write_whole(ROOT / "docs" / "headline.svg", lambda beside: beside.write_text(draw(runs)))
    readme = ROOT / "README.md"
    said = f"{sentence(runs)}\n\n{sentence_of_rates(runs)}"
    text = BLOCK.sub(lambda _: f"<!-- headline -->\n{said}\n<!-- /headline -->", readme.read_text())
    write_whole(readme, lambda beside: beside.write_text(text))


if __name__ == "__main__":
    main()
