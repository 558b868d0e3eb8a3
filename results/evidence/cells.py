"""Runs of both studies as docs/results/llm.md judges them: cells of equal settings, paired differences, collapses."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from corral.lab.report.statistics import Difference, difference, has_collapsed
from results.packed import Row
from results.plans import SEEDS
from results.runs import DEFAULTS, DEPLOYED, EVIDENCE, area, finished, held_out, mean, where
from results.spec import CODED, PRETRAINED, START

DEVICES = ("cuda", "cpu")


def read_runs() -> list[Row]:
    """Finished runs of the demo, of pretrained models and of programs, nothing held."""
    return where(_shipped(), arm="off", start=START, recipe=("demo", PRETRAINED, CODED))


def read_automatic() -> list[Row]:
    """Finished runs of pretrained models at a rate that nobody tuned, which are held."""
    return where(_shipped(), rate="auto", recipe=PRETRAINED)


def _shipped() -> list[Row]:
    """Finished runs with the trainer as it ships, one of each key and device."""
    return [run for run in finished(EVIDENCE, DEPLOYED, by=("key", "device")) if "held" not in run]


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
    seeds: Collection[int] | None = None
    """Those that count; all by default."""
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def rates(self) -> tuple[float | str, ...]:
        """Learning rates of the cell."""
        return self.rate if isinstance(self.rate, tuple) else (self.rate,)

    def runs(self, runs: Iterable[Row]) -> dict[tuple[int, float | str, str], Row]:
        """Runs of the cell by seed, learning rate and device."""
        wanted = {**DEFAULTS, "reuse": None, "schedule": "linear", "passes": self.passes, "steps": self.steps}
        wanted |= {"objective": self.arm[0], "variant": self.arm[1], "recipe": self.recipe, "eval_every": self.every}
        wanted |= self.others | ({} if self.seeds is None else {"seed": self.seeds})
        for key in ("device", "end_size", *([] if self.recipe == "demo" else ["model"])):
            wanted.pop(key)
        return {(run["seed"], run["rate"], run["device"]): run for run in where(runs, **wanted, rate=self.rates)}

    def area(self, runs: Iterable[Row]) -> str:
        """The mean area of its runs."""
        return mean(self.runs(runs).values(), area)


def word_cell(base: str, arm: str, passes: int, rate: float | str | tuple[float, ...], **others: Any) -> Cell:
    """Runs of a pretrained model on the seeds of the grid of rates, unless others are named; `base` is a name of BASES."""
    same: dict[str, Any] = {"recipe": PRETRAINED, "steps": 12, "every": 4, "others": {"base": base}}
    return Cell(**{"arm": (arm, ""), "passes": passes, "rate": rate, "seeds": SEEDS, **same, **others})


def arm_name(arm: tuple[str, str]) -> str:
    """`troll`, or `troll, unprojected`."""
    return ", ".join(filter(None, arm))


def collapsed(run: Row) -> bool:
    """True if a run lost its success, or never earned a reward again."""
    return bool(run["dead"]) or has_collapsed(held_out(run), "finished")


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
        shared = a.keys() & b.keys() if ours.rates == theirs.rates else a.keys() | b.keys()
        sides = (
            [at_best(a, ours.rates), at_best(b, theirs.rates)]
            if ours.best
            else [_mean_by_seed({place: value for place, value in side.items() if place in shared}) for side in (a, b)]
        )
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
