"""README's figure: its script's settings with TROLL and with PPO's clip, planned before a run that counts, and what was found.

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

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from results.packed import FOLDER, Row
from results.pages import INK, draw_line, interval_text, markdown, new_figure, p_text, rate_text, save_figure
from results.runs import area, by_seed, final, finished, greedy, held_out, kl, mean, with_interval
from results.spec import Run
from results.table import CLIP, TROLL, Arm, Cell

ROWS = FOLDER / "front.parquet"

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


Arms = dict[str, list[Row]]
"""Name → runs on the fresh seeds."""
SCRIPT, BOUNDED, BEST_CLIP, BEST_TROLL = 'TROLL, `"auto"` (the script)', 'clip, `"auto"`', "clip, tuned", "TROLL, tuned"
LABELS = {"troll": "TROLL", "ppo_clip": "clip"}
COMPARED = ((SCRIPT, BEST_CLIP), (SCRIPT, BOUNDED), (BEST_TROLL, BEST_CLIP))
LINES = ((SCRIPT, "TROLL, as in the script", "-"), (BOUNDED, "clip, as in the script", "-"), (BEST_CLIP, "clip, tuned", "--"))
"""Arms of the figure: name, label and line."""


def arms(rows: Sequence[Row]) -> Arms:
    """Arms on the fresh seeds that the first three of them have; tuned TROLL if it has these too."""
    known = {row["key"]: row for row in rows}
    planned = {SCRIPT: automatic(TROLL), BOUNDED: automatic(CLIP), BEST_CLIP: tuned(CLIP, rows), BEST_TROLL: tuned(TROLL, rows)}
    have = {name: {run.seed: known[run.key] for run in runs if run.key in known} for name, runs in planned.items()}
    seeds = sorted(have[SCRIPT].keys() & have[BOUNDED].keys() & have[BEST_CLIP].keys())
    return {name: [runs[seed] for seed in seeds] for name, runs in have.items() if runs.keys() >= set(seeds)}


def differences(rows: Sequence[Row]) -> list[tuple[str, str, Any, float]]:
    """The named comparisons of arms with all seeds: both names, the difference in points, and its p after Holm's correction."""
    from corral.lab.report.statistics import difference, holm  # it needs corral[report], which a study does without

    known = arms(rows)
    sides = [(a, b) for a, b in COMPARED if a in known and b in known]
    found = [difference(*(by_seed(known[name], lambda run: 100 * final(run)) for name in pair)) for pair in sides]
    adjusted = holm([one.p for one in found])
    return [(*pair, one, p) for pair, one, p in zip(sides, found, adjusted, strict=True)]


def compared(rows: Sequence[Row]) -> str:
    """The named comparisons as a table."""
    lines = [[f"{a} − {b}", interval_text(one), str(one.seeds), p_text(p)] for a, b, one, p in differences(rows)]
    return markdown(("difference at the end", "points (95 %)", "seeds", "p (Holm)"), lines)


def reported(rows: Sequence[Row]) -> str:
    """Every arm on the fresh seeds."""
    lines = []
    for name, runs in arms(rows).items():
        about = [str(runs[0]["passes"]), rate_text(runs[0]["rate"]), "no" if runs[0]["arm"] == "off" else ".02"]
        ends = [with_interval(list(map(read, runs))) for read in (final, greedy)]
        lines.append([name, *about, *ends, mean(runs, area), kl(runs, "mean")])
    head = ("arm", "passes", "rate", "bound", "success at the end", "greedy", "mean success", "KL")
    return markdown(head, lines)


def trials(rows: Sequence[Row]) -> str:
    """Success at the end of every trial, seed by seed."""
    lines = []
    for arm in (CLIP, TROLL):
        for cell in cells(arm, rows):
            for rate in cell.grid(bounded=False):
                keys = [arm.run(rate, seed, **cell.settings).key for seed in TUNING]
                ends = [final(cell.rows[key]) for key in keys if key in cell.rows]
                if len(ends) == len(keys):
                    lines.append(
                        [arm.objective, str(cell.settings["passes"]), rate_text(rate), *(f"{end:.3f}"[1:] for end in ends)]
                    )
    return markdown(("objective", "passes", "rate", *(f"seed {seed}" for seed in TUNING)), lines)


def sentence(rows: Sequence[Row], above: int, places: int) -> str:
    """Sentences below README's figure.

    Args:
        above, places: on how many of how many other tasks and starting models TROLL ended above clip, with larger batches.
    """
    known, study = arms(rows), "docs/results/deployed.md"
    found = [(one.mean.value, p) for a, _, one, p in differences(rows) if a == SCRIPT]
    verdict = "No difference between TROLL and PPO's clip is significant in this script"
    if all(p < 0.05 and gap > 0 for gap, p in found):
        verdict = "TROLL solves more held-out problems in this script than PPO's clip does"
    elif any(p < 0.05 and gap < 0 for gap, p in found):
        verdict = "PPO's clip solves more held-out problems in this script than TROLL does"
    elif any(p < 0.05 for _, p in found):
        verdict = "PPO's clip solves as many held-out problems in this script as TROLL, once it is bounded or tuned"
    shares = {name: [f"{100 * fmean(map(read, runs)):.0f} %" for read in (final, greedy)] for name, runs in known.items()}
    start = [f"{100 * fmean(run['lines'][0][key] for run in known[SCRIPT]):.0f} %" for key in ("success", "greedy")]
    how = known[BEST_CLIP][0]
    at = f"{rate_text(how['rate'])}, {how['passes']} {'pass' if how['passes'] == 1 else 'passes'}"
    least = fmean(run["lines"][0]["greedy"] for run in known[SCRIPT])
    falls = all(fmean(map(greedy, runs)) < least for runs in known.values())
    greedily = "Every arm loses greedy success" if falls else "Beside it is greedy success"
    names = {SCRIPT: "TROLL, the script", BOUNDED: "PPO's clip, same settings", BEST_CLIP: f"PPO's clip, tuned ({at})"}
    table = [["before training", *start], *([label, *shares[name]] for name, label in names.items())]
    return (
        f"{verdict}, if completions are sampled at temperature 1. {greedily} (of the likeliest "
        f"completion):\n\n"
        f"{markdown(('held-out success', 'sampled', 'greedy'), table)}\n"
        f"Means of [{len(known[SCRIPT])} fresh seeds]({study}#the-script) after ten batches. With batches of 512, "
        f"TROLL ends above tuned clip on {above} of {places} [other tasks and starting models]({study}#elsewhere).\n"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Held-out success over batches of rollouts, for README: readable at the width of a phone."""
    from corral.lab.report.looks import LIGHT, MARKERS, assign_looks

    figure, (axes,) = new_figure(figsize=(5.4, 3.2))
    looks = {name: {"color": LIGHT[colour], "marker": MARKERS[place]} for name, (colour, place) in assign_looks(LABELS).items()}
    known = arms(rows)
    for name, label, line in LINES:
        values: Mapping[float, list[float]] = defaultdict(list)
        for step, value in (point for run in known[name] for point in held_out(run)):
            values[step].append(value)
        draw_line(axes, values, label=label, linestyle=line, **looks[known[name][0]["objective"]])
    axes.set(ylabel="held-out success", xlabel="batches of 128 completions", ylim=(0.1, 0.8), xticks=range(0, 11, 2))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK[0])
    save_figure(figure, path, dark=True)


def blocks(above: int, places: int) -> dict[str, Callable[[], str]]:
    """Name → text of every block that the rows of the plan fill."""
    rows = finished(ROWS)
    return {
        "script": partial(sentence, rows, above, places),
        "scriptcompared": partial(compared, rows),
        "scriptarms": partial(reported, rows),
        "scripttrials": partial(trials, rows),
    }
