"""README's figure: its script's settings with TROLL and with PPO's clip, planned before a run that counts.

    OMP_NUM_THREADS=1 python -m results.study --plan front --workers 1 --minutes 70 --out runs/front
    python -m results.packed results/front.parquet runs/front        then `make results`

**Setting.** The embedded model and countdown as in README's script: ten batches of 128 completions (16 prompts × 8), four
updates of 32 completions in a pass, the objective's own reduction, defaults for everything else. A number as learning rate
falls linearly to 0, which is CorralConfig's default. At "auto" the rate is constant and `deployed_bound` .02, the defaults too.

**Arms.** TROLL with four passes at "auto" is the script. PPO's clip with four passes at "auto" is equally bounded. PPO's clip
is then tuned over one and four passes and learning rates, without a bound, and so is TROLL.

**Tuning.** On seeds 701 and 702: 1e-4, 2e-4, 4e-4 and 8e-4 with four passes; 2e-4, 4e-4, 8e-4 and 1.6e-3 with one. If the best
is at an end, the grid grows there by a factor of two, at most three times. The best passes and rate of an objective have the
largest mean held-out success (1,024 problems, temperature 1) over the two seeds after ten batches.

**Report.** Seeds 703 to 712, used by no other study. Primary endpoint: held-out success at temperature 1 on 2,048 problems
after ten batches. Secondary, without claims: greedy success on 1,024 problems, and the mean held-out success over the run.

**Comparisons.** The script − tuned clip, the script − clip at "auto", tuned TROLL − tuned clip: paired by seed, Student's 95 %
interval, Holm's correction over the three. Clip is tuned first and the fresh seeds of the first three arms come next, so tuned
TROLL is left out of the report and of the correction if time ends before it has all ten seeds. The page shows all arms,
whichever is ahead, and README names the best clip.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from results.packed import Row
from results.runs import final
from results.spec import Run
from results.table import CLIP, TROLL, Arm, Cell

TUNING, FRESH = (701, 702), tuple(range(703, 713))
RATES = {4: (1e-4, 2e-4, 4e-4, 8e-4), 1: (2e-4, 4e-4, 8e-4, 1.6e-3)}
BOUND = 0.02
"""`deployed_bound` of the arms at "auto": the default with several passes."""
SETTING: dict[str, Any] = {"start": "script", "updates": 4, "steps": 10}
TUNED: dict[str, Any] = {**SETTING, "eval_every": 10, "eval_size": 1024}
REPORTED: dict[str, Any] = {**SETTING, "eval_every": 2, "eval_size": 256, "end_size": 2048}


def cells(arm: Arm, rows: Sequence[Row]) -> list[Cell]:
    """Trials of an arm with four passes and with one."""
    known = {row["key"]: row for row in rows}
    return [Cell((arm,), TUNED | {"passes": passes}, known, tuning=TUNING, rates=RATES) for passes in RATES]


def automatic(arm: Arm) -> list[Run]:
    """The script with this arm's objective, on the fresh seeds."""
    return [replace(arm, bounded=True).run(BOUND, seed, passes=4, **REPORTED) for seed in FRESH]


def tuned(arm: Arm, rows: Sequence[Row]) -> list[Run]:
    """The arm at its best passes and learning rate on the fresh seeds; none until it is tuned."""
    found: dict[tuple[int, float], float] = {}
    for cell in cells(arm, rows):
        if (rate := cell.best(arm)) is None:
            return []
        passes = cell.settings["passes"]
        ends = [final(cell.rows[arm.run(rate, seed, **cell.settings).key]) for seed in TUNING]
        found[passes, rate] = fmean(ends)
    passes, rate = max(found, key=lambda how: found[how])
    return [arm.run(rate, seed, passes=passes, **REPORTED) for seed in FRESH]


def front(rows: Sequence[Row]) -> list[Run]:
    """Runs of the plan as far as the rows say what they are; fresh seeds outermost."""
    trials = [run for cell in cells(CLIP, rows) for run in cell.tune()]
    if clip := tuned(CLIP, rows):
        known = {row["key"] for row in rows}
        trials += [run for seed in zip(automatic(TROLL), automatic(CLIP), clip, strict=True) for run in seed]
        if known.issuperset(run.key for run in trials):
            trials += [run for cell in cells(TROLL, rows) for run in cell.tune()] + tuned(TROLL, rows)
    return trials
