"""The plan of the table: every objective by passes and lag, tuned alike, then on fresh seeds. TABLE.md has it in words.

    OMP_NUM_THREADS=1 python -m results.study --plan table --device cuda --workers 15 --minutes 28 --out runs/table

Later runs depend on earlier ones, so a plan here is a function of the rows that there are. The study calls it again whenever it
has nothing left to do, and one command goes on from wherever the study stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from corral.objective import OBJECTIVES
from results.packed import Row
from results.runs import area
from results.spec import Run

TABLE_START = "sums"
"""The start of every run, a name of STARTS. Changing it here changes the study."""
TUNING = (601, 602)
"""Seeds that rates are chosen on."""
FRESH = tuple(range(603, 611))
"""Seeds of the reported runs; no study has used them."""
CELLS = ((4, 0), (4, 4), (1, 0), (1, 4))
"""Passes and lag of each column, the most telling first."""
FAR_CELL = (1, 16)
"""Passes and lag of the column for the best arms of (1, 4)."""
BEST = 8
"""Number of arms in FAR_CELL, beside clipping."""
RATES = {4: (1e-4, 2e-4, 4e-4), 1: (2e-4, 4e-4, 8e-4)}
BOUNDS = {4: (0.01, 0.02, 0.04), 1: (0.015, 0.03, 0.06)}
"""First trials by passes. A grid is extended by factors of two."""
EXTENSIONS = 3
"""Largest number of trials that are added at either end."""
LONG = 1000
"""Batches of a long run."""


@dataclass(frozen=True)
class Arm:
    """A contestant: an objective with a variant, at learning rates that are tuned, or bounded at bounds that are."""

    objective: str
    variant: str = ""
    bounded: bool = False
    """True if the deployed network is bounded and the learning rate automatic, with a constant schedule."""

    def run(self, trial: float, seed: int, **settings: Any) -> Run:
        """One run of the arm with a rate, or a bound, on a seed."""
        how: dict[str, Any] = {"rate": trial}
        if self.bounded:
            how = {"rate": "auto", "bound": trial, "schedule": "constant"}
        return Run(objective=self.objective, variant=self.variant, seed=seed, **{"start": TABLE_START, **how, **settings})


CLIP, TROLL = Arm("ppo_clip"), Arm("troll")
ARMS = tuple(Arm(name) for name in sorted(OBJECTIVES) if ":" not in name and name != "distill")
"""Every objective that learns from rewards alone, at its own defaults."""
RIVALS = (
    *(Arm("ppo_clip", variant) for variant in ("ε=.05", "ε=.1", "ε=.3", "ε=.4")),
    Arm("troll", "unprojected"),
    Arm("dppo", "top-K"),
    Arm("reinforce", "KL to the start"),
    Arm("ppo_clip", bounded=True),
    Arm("troll", bounded=True),
)
"""Further arms of the cell of four passes without a lag. Bounded arms are compared with one another."""


def arms_of(passes: int, lag: int) -> tuple[Arm, ...]:
    """Arms of a cell."""
    return (*ARMS, *RIVALS) if (passes, lag) == CELLS[0] else ARMS


def settings_of(passes: int, lag: int) -> dict[str, Any]:
    """Settings that the runs of a cell share: ten batches, with a lag of 16 sixty-four, measured on 1,024 problems."""
    steps = 64 if lag >= 16 else 10
    every = 8 if lag >= 16 else 2
    return {
        "passes": passes,
        "lag": lag,
        "steps": steps,
        "eval_every": every,
        "eval_size": 1024,
        "end_size": 4096,
        "pass_at": 8,
    }


@dataclass(frozen=True)
class Cell:
    """A cell of the table in the light of the rows that there are."""

    arms: Sequence[Arm]
    settings: dict[str, Any]
    rows: dict[str, Row]
    """Rows by key: finished runs and failed ones."""
    tuning: Sequence[int] = TUNING
    fresh: Sequence[int] = FRESH
    extensions: int = EXTENSIONS
    rates: Mapping[int, Sequence[float]] = field(default_factory=lambda: RATES)
    """First trials of the learning rate, by passes."""

    def grid(self, bounded: bool) -> list[float]:
        """Trials of the rate, or of the bound, that all arms have; grown where the best trial of an arm lies at an end."""
        trials = list((BOUNDS if bounded else self.rates)[self.settings["passes"]])
        first, last = trials[0], trials[-1]
        arms = [arm for arm in self.arms if arm.bounded == bounded]
        while (best := [self._best_of(arm, trials) for arm in arms]) and any(one is not None for one in best):
            if trials[0] in best and trials[0] > first / 2**self.extensions:
                trials.insert(0, trials[0] / 2)
            elif trials[-1] in best and trials[-1] < last * 2**self.extensions:
                trials.append(trials[-1] * 2)
            else:
                break
        return trials

    def _runs(self, arm: Arm, trial: float, seeds: Sequence[int]) -> list[Run]:
        return [arm.run(trial, seed, **self.settings) for seed in seeds]

    def _best_of(self, arm: Arm, trials: Sequence[float]) -> float | None:
        """Trial with the largest mean area on the tuning seeds, of equals the smallest; None if a run is missing or failed."""
        areas = {}
        for trial in trials:
            found = [self.rows.get(run.key, {}) for run in self._runs(arm, trial, self.tuning)]
            if not all(row.get("finished") for row in found):
                return None
            areas[trial] = fmean(map(area, found))
        return max(areas, key=lambda trial: areas[trial])

    def best(self, arm: Arm) -> float | None:
        """Trial that the arm is reported at; None as long as any arm has trials to run."""
        if any(run.key not in self.rows for run in self.tune()):
            return None
        return self._best_of(arm, self.grid(arm.bounded))

    def tune(self) -> list[Run]:
        """Runs on which trials are chosen: as many for every arm, seeds outermost."""
        grids = {bounded: self.grid(bounded) for bounded in (False, True)}
        each = [(arm, trial) for arm in self.arms for trial in grids[arm.bounded]]
        return [arm.run(trial, seed, **self.settings) for seed in self.tuning for arm, trial in each]

    def report(self) -> list[Run]:
        """Runs on fresh seeds, of every arm at its best trial; none until all arms are tuned. Seeds are outermost."""
        best = {arm: self.best(arm) for arm in self.arms}
        return [
            arm.run(trial, seed, **self.settings) for seed in self.fresh for arm, trial in best.items() if trial is not None
        ]

    def ranking(self) -> list[Arm]:
        """Arms with every fresh run, the largest mean area first."""
        areas = {}
        for arm in self.arms:
            trial = self.best(arm)
            found = [] if trial is None else [self.rows.get(run.key, {}) for run in self._runs(arm, trial, self.fresh)]
            if found and all(row.get("finished") for row in found):
                areas[arm] = fmean(map(area, found))
        return sorted(areas, key=lambda arm: -areas[arm])

    @property
    def is_over(self) -> bool:
        """True if every run of the cell has a row."""
        runs = [*self.tune(), *self.report()]
        return all(run.key in self.rows for run in runs)


def cell(passes: int, lag: int, rows: Sequence[Row], arms: Sequence[Arm] | None = None) -> Cell:
    """A cell of the table with the rows that there are; of a key the last finished row, else a failed one."""
    known: dict[str, Row] = {}
    for row in rows:
        if row.get("finished") or not known.get(row["key"], {}).get("finished"):
            known[row["key"]] = row
    return Cell(arms_of(passes, lag) if arms is None else arms, settings_of(passes, lag), known)


def far(rows: Sequence[Row]) -> Cell | None:
    """The cell with the largest lag, for clipping and the best arms of a lag of four; None until these are known."""
    near = cell(*CELLS[3], rows)
    if not near.is_over:
        return None
    arms = [CLIP, *(arm for arm in near.ranking() if arm != CLIP)][: BEST + 1]
    return cell(*FAR_CELL, rows, arms)


def table(rows: Sequence[Row]) -> list[Run]:
    """Runs of all cells, one cell after another, as far as the rows say what they are; then the cell with the largest lag."""
    cells = [cell(*each, rows) for each in CELLS]
    last = far(rows)
    return [run for each in [*cells, *([] if last is None else [last])] for run in (*each.tune(), *each.report())]


def long(rows: Sequence[Row]) -> list[Run]:
    """A thousand batches of clipping, TROLL and the best other arm at their rates for one pass; the first two at "auto" too."""
    tuned = cell(*CELLS[2], rows)
    if not tuned.is_over:
        return []
    other = next((arm for arm in tuned.ranking() if arm not in (CLIP, TROLL)), None)
    same = settings_of(*CELLS[2]) | {"steps": LONG, "eval_every": 50}
    arms = [(arm, tuned.best(arm)) for arm in (CLIP, TROLL, *([] if other is None else [other]))]
    arms += [(replace(arm, bounded=True), 0.03) for arm in (CLIP, TROLL)]
    return [arm.run(trial, seed, **same) for seed in FRESH[:3] for arm, trial in arms if trial is not None]


def every_arm() -> list[Run]:
    """Two steps of every arm, with and without a lag: does it run at all?"""
    small: dict[str, Any] = {"steps": 2, "eval_size": 16, "eval_every": 2}
    runs = [arm.run(0.02 if arm.bounded else 2e-4, 1, passes=1, lag=lag, **small) for arm in (*ARMS, *RIVALS) for lag in (0, 1)]
    return list(dict.fromkeys(runs))
