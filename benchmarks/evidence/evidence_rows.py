"""Runs of both studies as the page judges them: cells of equal settings, paired differences, collapses with their bound."""

import json
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "deployed"))

from evidence_plans import SEEDS  # noqa: E402
from scipy import stats  # noqa: E402
from spec import START  # noqa: E402
from study_table import Row, area, certificate, final, held_out, steps_of  # noqa: E402

from corral.lab.report.statistics import Difference, difference, has_collapsed  # noqa: E402

PRETRAINED, CODED = "evidence-b", "evidence-e"
"""The recipes of pretrained models and of programs, each seed of which has a start of its own."""
DEVICES = ("cuda", "cpu")
PLACES = [HERE / "results", HERE.parent / "deployed/results"]
DEFAULTS = {
    "variant": "", "model": "tiny", "updates": 8, "sampler": "", "anchor": "auto", "reuse": None, "passes": 1, "start": START,
    "recipe": "demo", "device": "cpu", "end_size": 0, "base": "",
}  # fmt: skip
"""Fields that runs of the other study do not have."""


def read_runs() -> list[Row]:
    """Finished runs of the demo, of pretrained models and of programs, nothing held."""
    recipes = ("demo", PRETRAINED, CODED)
    return [run for run in _finished() if run["arm"] == "off" and run["start"] == START and run["recipe"] in recipes]


def read_automatic() -> list[Row]:
    """Finished runs of pretrained models at a rate that nobody tuned, which are held."""
    return [run for run in _finished() if run["rate"] == "auto" and run["recipe"] == PRETRAINED]


def _finished() -> Iterable[Row]:
    """One of each key and device, with the trainer as it ships."""
    files = [file for place in PLACES for file in sorted(place.glob("*.jsonl"))]
    lines = [{**DEFAULTS, **json.loads(line)} for file in files for line in file.read_text().splitlines()]
    ours = [run for run in lines if run.get("finished") and "held" not in run]
    return {(run["key"], run["device"]): run for run in ours}.values()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Settings that runs of one cell share; seeds differ."""

    arm: tuple[str, str]
    """Objective and variant."""
    rate: float | str | tuple[float, ...] = (2e-4, 3e-4)
    """Of several, runs are paired within each, and a seed counts once, with the mean over rates."""
    best: bool = False
    """Of several rates, count each seed at the one that is best in the mean over the other seeds, which it had no part in."""
    recipe: str = "demo"
    passes: int = 1
    steps: int = 15
    every: int = 5
    """Batches between measurements: areas of other grids are others."""
    seeds: Container[int] | None = None
    """Those that count; all by default."""
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> tuple[float | str, ...]:
        """All of them."""
        return self.rate if isinstance(self.rate, tuple) else (self.rate,)

    def runs(self, runs: Iterable[Row]) -> dict[tuple[int, float | str, str], Row]:
        """By seed, rate and device."""
        wanted = {**DEFAULTS, "schedule": "linear", "passes": self.passes, "steps": self.steps, "eval_every": self.every}
        wanted |= {"objective": self.arm[0], "variant": self.arm[1], "recipe": self.recipe, **self.others}
        for key in ("device", "end_size", *([] if self.recipe == "demo" else ["model"])):
            wanted.pop(key)
        same = (run for run in runs if run["rate"] in self.rates and all(run[key] == value for key, value in wanted.items()))
        same = (run for run in same if self.seeds is None or run["seed"] in self.seeds)
        return {(run["seed"], run["rate"], run["device"]): run for run in same}


def word_cell(base: str, arm: str, passes: int, rate: float | str | tuple[float, ...], **others: Any) -> Cell:
    """Runs of a pretrained model on the seeds of the grid of rates, unless others are named; `base` is a name of BASES."""
    same: dict[str, Any] = {"recipe": PRETRAINED, "steps": 12, "every": 4, "others": {"base": base}}
    return Cell(**{"arm": (arm, ""), "passes": passes, "rate": rate, "seeds": SEEDS, **same, **others})


def arm_name(arm: tuple[str, str]) -> str:
    """`troll`, or `troll, unprojected`."""
    return ", ".join(filter(None, arm))


def collapsed(run: Row) -> bool:
    """Whether a run lost what it had, or never earned anything again."""
    return bool(run["dead"]) or has_collapsed(held_out(run), "finished")


def most_collapses(count: int, runs: int) -> float:
    """The largest probability of a collapse that this count does not exclude: 95 %, one-sided (Clopper and Pearson).

    0 of 10 is at most 26 %.
    """
    return 1.0 if count == runs else float(stats.beta.ppf(0.95, count + 1, runs - count))


def measures(runs: Sequence[Row]) -> dict[str, float]:
    """Means over seeds: area under the held-out curve, final, greedy, KL of the deployed network, share of tokens acted on."""
    lines = [line for run in runs for line in steps_of(run)]
    found = {"area": fmean(map(area, runs)), "final": fmean(map(final, runs))}
    found |= {"greedy": fmean(final(run, "greedy") for run in runs), "start": fmean(held_out(run)[0][1] for run in runs)}
    found |= {name: fmean(certificate(line, name) for line in lines) for name in ("mean", "p999", "max")}
    return found | {"acted": fmean(line.get("tr/active_frac", 0.0) for line in lines)}


def compare(ours: Cell, theirs: Cell, runs: Sequence[Row], read: Callable[[Row], float] = area) -> Difference | None:
    """The paired difference in points of success, a number per seed; None where no seed is shared.

    Cells of the same rates are paired within each of them, others by seed alone. One seed draws other numbers on a GPU than
    on a CPU, so pairs are of one device: of the one that has more of them.
    """
    found: list[Difference] = []
    for device in DEVICES:
        a, b = (
            {(seed, rate): 100 * read(run) for (seed, rate, where), run in cell.runs(runs).items() if where == device}
            for cell in (ours, theirs)
        )
        if ours.best:
            sides = [at_best(a, ours.rates), at_best(b, theirs.rates)]
        elif ours.rates == theirs.rates:
            shared = a.keys() & b.keys()
            sides = [_mean_by_seed({place: side[place] for place in shared}) for side in (a, b)]
        else:
            sides = [_mean_by_seed(a), _mean_by_seed(b)]
        found += [difference(*sides)] if sides[0].keys() & sides[1].keys() else []
    return max(found, key=lambda one: one.seeds, default=None)


def at_best(values: Mapping[tuple[int, float | str], float], rates: Sequence[float | str]) -> dict[str, float]:
    """Each seed's number at the rate that is best over the other seeds; seeds that lack a rate are left out."""
    seeds = sorted({seed for seed, _ in values if all((seed, rate) in values for rate in rates)})
    found = {}
    for seed in seeds if len(seeds) > 1 else ():
        others = [other for other in seeds if other != seed]
        best = max(rates, key=lambda rate, others=others: fmean(values[other, rate] for other in others))
        found[str(seed)] = values[seed, best]
    return found


def _mean_by_seed(values: Mapping[tuple[int, float | str], float]) -> dict[str, float]:
    """Over rates: runs of one seed share their problems, and are no independent evidence."""
    seeds = sorted({seed for seed, _ in values})
    return {str(seed): fmean(value for (one, _), value in values.items() if one == seed) for seed in seeds}
