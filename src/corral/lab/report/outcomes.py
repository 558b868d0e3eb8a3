"""Groups of runs that differ in their seeds only, their scores, and comparisons of groups with confidence intervals."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.report import statistics
from corral.lab.report.html import Row, shorten
from corral.lab.report.read import Run, SavedComparison, flatten, setting_text, table_in, value_text
from corral.lab.run.interval import Estimate
from corral.lab.run.settings import SECRET, guess
from corral.lab.run.text import visible

Chosen = Mapping[Path, tuple[str, str]]
"""Mapping for runs whose setting a comparison chose: path of the run → (compared method, setting as text)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of runs that differ in their seeds only."""

    key: int
    """Position of the group in the report, which determines its colour."""
    objective: str
    """Name of the group's objective, with settings of this objective that were varied: `troll bound=0.1`."""
    setting: str
    """Varied settings of the group that are not the objective's own, often none: `learning_rate=0.001`."""
    problem: str
    """Problem of the group: task and model. Only groups with the same problem are compared."""
    runs: Sequence[Run]
    chosen: bool = False
    """True if a comparison chose the setting: groups with chosen settings are compared although their settings differ."""

    @property
    def label(self) -> str:
        """Name of the group: its objective, followed by its setting unless a comparison chose the setting."""
        return shorten(self.objective if self.chosen else f"{self.objective} {self.setting}".strip(), 300)


def group_runs(runs: Sequence[Run], chosen: Chosen | None = None) -> list[Group]:
    """Group runs that differ in their seeds only, and sort the groups by problem, setting and objective.

    Runs of a comparison are grouped by compared method.
    """
    chosen = {} if chosen is None else chosen
    found: dict[tuple[str, str, str], list[Run]] = {}
    problems = problems_of(runs)
    for run in runs:
        peers = [peer for peer in runs if problems[id(peer)] == problems[id(run)]]
        objective, varied = name_contestant(run, peers)
        objective, setting = chosen.get(run.path) or (objective, setting_text(varied))
        found.setdefault((problems[id(run)], setting, objective), []).append(run)

    def order(item: tuple[tuple[str, str, str], list[Run]]) -> tuple[Any, ...]:
        (where, setting, objective), members = item
        # A page opens on its first problem, which is no smoke test.
        smoke = all(run.is_smoke for run in runs if problems[id(run)] == where)
        return smoke, where, () if members[0].path in chosen else _natural(setting), _natural(objective)

    ordered = sorted(found.items(), key=order)
    names = Counter((where, objective) for where, _, objective in found)
    return [
        Group(
            key=index,
            # A contestant says it all only where it has one chosen setting: two comparisons may choose otherwise.
            objective=f"{objective} {setting}" if members[0].path in chosen and names[where, objective] > 1 else objective,
            setting=setting,
            problem=where,
            runs=sorted(members, key=lambda run: _natural(run.seed)),
            chosen=members[0].path in chosen,
        )
        for index, ((where, setting, objective), members) in enumerate(ordered)
    ]


def split_runs(runs: Sequence[Run], comparisons: Sequence[SavedComparison]) -> tuple[list[Run], list[Run], Chosen]:
    """Separate the reported runs from the runs of finished sweeps, and find the setting that a sweep chose for each.

    As long as a comparison has no reported run, the runs of its sweep stay among the reported runs.
    """
    places = {run.path.resolve(): run for run in runs}
    swept: set[int] = set()
    chosen: dict[Path, tuple[str, str]] = {}
    for comparison in comparisons:
        reported = {path: run for path, run in comparison.places("report") if path in places}
        if comparison.sweep and reported:
            chosen |= {places[path].path: (run.contestant, setting_text(run.setting)) for path, run in reported.items()}
            swept |= {id(places[path]) for path, _ in comparison.places("sweep") if path in places and path not in reported}
    return [run for run in runs if id(run) not in swept], [run for run in runs if id(run) in swept], chosen


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """List the pairs of groups to compare: objectives with equal or chosen settings, or settings of a single objective."""
    found = []
    for index, ours in enumerate(groups):
        for theirs in groups[:index]:
            if ours.problem != theirs.problem:
                continue
            alone = len({group.objective for group in groups if group.problem == ours.problem}) == 1
            if ours.setting == theirs.setting or alone or (ours.chosen and theirs.chosen):
                found.append((ours, theirs))
    return found


def problems_of(runs: Sequence[Run]) -> dict[int, str]:
    """Map each run's `id` to its problem: the task with its varied settings, and the language model if there is one."""
    found = {}
    for run in runs:
        same = [peer for peer in runs if peer.task == run.task]
        task = f"{run.task} {setting_text(varying_settings(run, same, 'task_settings'))}".strip()
        found[id(run)] = task if run.is_robot else " with ".join(filter(None, (task, run.model)))
    return found


def name_contestant(run: Run, peers: Iterable[Run]) -> tuple[str, dict[str, str]]:
    """Return the name of a run's objective with its varied settings, as `troll bound=0.1`, and its other varied settings.

    Args:
        peers: runs on the same problem.
    """
    same = [peer for peer in peers if peer.objective == run.objective]
    name = f"{run.objective} {setting_text(varying_settings(run, same, 'own_settings'))}".strip()
    return name, varying_settings(run, same, "shared_settings")


def varying_settings(run: Run, peers: Iterable[Run], which: str) -> dict[str, str]:
    """Return the settings of a run that vary among comparable runs (`peers`), without secrets.

    Args:
        which: "own_settings", "shared_settings" or "task_settings" of a run.
    """
    read: Callable[[Run], dict[str, str]] = attrgetter(which)
    mine, others = read(run), [read(peer) for peer in peers]
    keys = sorted({key for other in [mine, *others] for key in other if not SECRET.search(key)})
    varied = {key: mine.get(key, "default") for key in keys if len({other.get(key) for other in others}) > 1}
    return {key: value_text(guess(text)) if text.startswith("[") else text for key, text in varied.items()}


def _natural(text: str) -> tuple[Any, ...]:
    """Sort key for texts with numbers that puts 2 before 10, and 1e-4 before 0.001."""
    words = []
    for word in text.replace("=", " ").split():
        try:
            words.append((0, float(word), ""))
        except ValueError:
            words.append((1, 0.0, word))
    return tuple(words)


# ---------------------------------------------------------------------------------------------------------------- scores

BESIDE = ("greedy", "return")
"""Metrics reported beside the main metric: greedy success, and the return of robots."""

COUNTED = ("finished", "collapsed")
"""Outcomes of runs that count in the statistics: the budget was used up, or the guard stopped a collapsed run."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Metric by which a report compares runs, such as held-out success, with its name and unit."""

    key: str
    name: str
    unit: str
    factor: float
    """Factor that converts a logged value of the metric to `unit`, such as 100 from a share to points."""

    def text(self, value: float) -> str:
        """Format a value of the metric: `67.6 %`, or a plain number."""
        return f"{100 * value:.1f} %" if self.factor == 100 else statistics.plain(value)

    def estimate(self, value: float | None, low: float | None, high: float | None) -> str:
        """Format an estimate of the metric with its interval, if there is one: `67.6 % [65.0…70.1]`."""
        if value is None or not math.isfinite(value):
            return "—"
        if low is None or high is None:
            return self.text(value)
        percent = self.text(value), f"{100 * low:.1f}", f"{100 * high:.1f}"
        return statistics.bracketed(*(percent if self.factor == 100 else statistics.plains(value, low, high)))


RETURN = Measure(key="return", name="return", unit="", factor=1.0)

_MEASURES = (
    Measure(key="success", name="success", unit="points", factor=100.0),
    RETURN,
    Measure(key="reward", name="reward", unit="", factor=1.0),
)
"""Candidates for a report's main metric, best first: held-out success, return on held-out contexts, training reward."""


def main_metric(runs: Sequence[Run]) -> Measure:
    """Choose a report's main metric: held-out success if all tasks have it, else held-out return, else training reward."""
    tasks = {run.task: [peer for peer in runs if peer.task == run.task] for run in runs}
    for everywhere in (all, any):
        for measure in _MEASURES:
            if everywhere(any(run.values(measure.key) for run in peers) for peers in tasks.values()):
                return measure
    return _MEASURES[-1]


RUN_COLUMNS = (
    "run", "objective", "problem", "seed", "stopped", "steps", "planned", "start", "best", "final", "greedy", "return",
    "seconds", "tokens", "env_steps", "skipped",
)  # fmt: skip
"""Columns of the table of scores (`score_runs`) that the report's table of runs shows."""


def score_runs(groups: Sequence[Group], measure: Measure) -> pd.DataFrame:
    """Compute the scores of every run, as a table with a row per run. Values that were not measured are None.

    Beside RUN_COLUMNS: `group`, the place of its group; `counts`, whether it is in the statistics; `points`, its measurements;
    `area`, their mean over the run; `collapsed`.
    """
    rows = []
    for place, group in enumerate(groups):
        for run in group.runs:
            points = run.values(measure.key)
            values = [value for _, value in points]
            rows.append(
                {
                    "group": place, "counts": run.stopped in COUNTED, "points": points,
                    "area": statistics.area_under_curve(points, run.planned_steps),
                    "collapsed": statistics.has_collapsed(points, run.stopped),
                    "run": str(run.path), "objective": group.label, "problem": group.problem, "seed": run.seed,
                    "stopped": run.stopped, "steps": run.steps, "planned": run.planned_steps,
                    "start": values[0] if values else None, "best": max(values, default=None), "final": run.final(measure.key),
                    **{name: run.final(name) for name in BESIDE}, "seconds": run.last("seconds"),
                    "tokens": run.last("num_tokens"), "env_steps": run.last("env_steps"), "skipped": run.last("skipped"),
                }
            )  # fmt: skip
    return pd.DataFrame(rows, dtype=object)  # or None would become NaN, and steps beside it 8.0


def _counted(scores: pd.DataFrame, column: str = "final") -> pd.DataFrame:
    """Select the runs that count in statistics and have a number in `column`: the latest run of each group and seed."""
    known = scores[scores["counts"].astype(bool)].dropna(subset=[column])
    return known.drop_duplicates(["group", "seed"], keep="last")


def by_seed(scores: pd.DataFrame, group: Group, column: str = "final") -> dict[str, float]:
    """Map each seed of a group to its score in `column`, for runs that count in statistics."""
    return _counted(scores[scores["group"] == group.key], column).set_index("seed")[column].to_dict()


def _mean(values: pd.Series) -> float | None:
    """Compute the mean of the numbers in a column. Returns None if there are none."""
    known = values.dropna().to_numpy(float)
    return float(np.mean(known)) if len(known) else None


def default_threshold(scores: pd.DataFrame, measure: Measure) -> float | None:
    """Compute the default threshold of one problem: nine tenths of the best group's final value. None if no run has one.

    For returns, nine tenths of the way from the mean start to the best final value.
    """
    ends = _counted(scores).groupby("group")["final"]
    best = max((float(statistics.middle_mean(found.to_numpy(float)[:, None])[0]) for _, found in ends), default=0.0)
    start = 0.0 if measure.key == "success" else _mean(scores["start"]) or 0.0
    return start + 0.9 * (best - start) if len(ends) and best > start else None


def _columns(name: str, estimate: Estimate | None) -> Row:
    """Split an estimate into three columns of a table row: value, lower and upper end of the interval."""
    value, low, high = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def results(groups: Sequence[Group], scores: pd.DataFrame, threshold: float | None) -> list[Row]:
    """Compute the table of results, a row per group: final value, mean over the run, steps to threshold, collapses, time."""
    rows = []
    for group in groups:
        runs = _counted(scores[scores["group"] == group.key])
        row: Row = {"objective": group.objective, "setting": group.setting, "problem": group.problem}
        row |= {"runs": len(group.runs), "counted": len(runs)}
        for name in ("final", "area", *BESIDE):
            known = runs[name].dropna().to_numpy(float)
            row |= _columns(name, statistics.interquartile_mean(known) if len(known) else None)
        reached = [] if threshold is None else [statistics.steps_to(points, threshold) for points in runs["points"]]
        median = float(np.median(reached)) if reached else math.inf
        row |= {
            "steps_to_threshold": median if math.isfinite(median) else None,
            "reached": sum(map(math.isfinite, reached)),
            "collapsed": int(runs["collapsed"].sum()),
            "seconds": _mean(runs["seconds"]),
        }
        rows.append(row)
    return rows


def comparisons(groups: Sequence[Group], scores: pd.DataFrame, measure: Measure) -> list[Row]:
    """Compare groups of runs in pairs. Returns a table with a row and a sentence per pair and score.

    p-values have Holm's correction over all pairs of a measure.
    """
    rows = []
    judged = {"final": measure, "area": measure}
    if measure.key == "success":
        judged["return"] = RETURN  # what robots have besides
    several = len({group.problem for group in groups}) > 1
    for name, by in judged.items():
        found = []
        for ours, theirs in pairs(groups):
            sides = [
                {seed: value * by.factor for seed, value in by_seed(scores, side, name).items()} for side in (ours, theirs)
            ]
            if all(sides):
                found.append((ours, theirs, statistics.difference(*sides), [np.array([*side.values()]) for side in sides]))
        adjusted = statistics.holm([difference.p for _, _, difference, _ in found])
        what = f"mean {by.name} over the run" if name == "area" else f"final {by.name}"
        for (ours, theirs, difference, ends), p in zip(found, adjusted, strict=True):
            names = shorten(visible(ours.label), 80), shorten(visible(theirs.label), 80)
            of = f"{what} in {shorten(visible(ours.problem), 80)}" if several else what
            uneven = _uneven_weights(ours, theirs)
            held = statistics.is_significant(p) and not uneven
            words = statistics.sentence(*names, of, difference, holds=held, among=len(found), unit=by.unit, uneven=uneven)
            other = _other_differences(ours, theirs)
            rows.append(
                {
                    "measure": name, "problem": ours.problem, "ours": ours.label, "theirs": theirs.label,
                    "our_objective": ours.objective, "their_objective": theirs.objective,
                    "difference": difference.mean.value, "low": difference.mean.low, "high": difference.mean.high,
                    "unit": by.unit, "p": difference.p, "seeds": difference.seeds, "paired": difference.paired,
                    "claimed": held,
                    **_columns("probability", statistics.probability_of_improvement(*ends)),
                    "sentence": words + (f" They also differ in {other}." if other else ""),
                }
            )  # fmt: skip
    return rows


_WEIGHTS = {
    "loss_type": "reductions", "advantage": "advantages", "scale_rewards": "scales of rewards",
    "multi_objective_aggregation": "sums of rewards",
}  # fmt: skip
"""Settings of any objective that weigh tokens and rewards, with the names of what they set."""

_OWN = {
    "seed", "objective", "report_to", "guard", "keep_completions", "keep_checkpoints", "checkpoint_every", "workers",
    "objective_config", "algorithm", "learner", "prodmp",
}  # fmt: skip
"""Settings that may differ in a fair comparison, because they belong to an objective or to the way a run is repeated."""


def _uneven_weights(ours: Group, theirs: Group) -> str:
    """Write a note if two groups of runs weight tokens or rewards differently, which may cause their difference. Else empty."""
    first, second = ours.runs[0], theirs.runs[0]
    if first.objective == second.objective:
        return ""
    for key, name in _WEIGHTS.items():
        a, b = (run.trainer.get(key) for run in (first, second))
        if a != b:
            each = f"{first.objective} {a or 'default'}, {second.objective} {b or 'default'}"
            return f"their {name} differ ({each}), and corral compare --common makes them the same"
    for run in (first, second):
        if table_in(run.config, "reduction").get("own") is False:  # None where nothing says so
            return f"{run.objective} was averaged by {run.trainer.get('loss_type')}, which is not its own reduction"
    return ""


def _other_differences(ours: Group, theirs: Group) -> str:
    """List settings that were not varied but differ between two groups, so that a comparison may be unfair."""
    aside = _OWN | ({"loss_type", "advantage", "scale_rewards"} if _uneven_weights(ours, theirs) else set())  # said already
    a, b = (
        {key: value for key, value in flatten(side.runs[0].settings).items() if key.split(".")[0] not in aside}
        for side in (ours, theirs)
    )
    said = f" {ours.setting} {theirs.setting}"
    names = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and f" {key}=" not in said)
    return ", ".join(names)


def overall(scores: pd.DataFrame, measure: Measure) -> list[Row]:
    """Compute the table over all tasks, a row per method with runs on every problem: interquartile mean, and mean.

    Runs are resampled within each task (rliable's stratified bootstrap). Nothing if there are fewer than two problems, or
    fewer than two contestants with runs on all of them.
    """
    problems = scores["problem"].nunique()
    found = normalise_scores(scores, measure)
    matrices = {}
    for name, own in found.groupby("objective", sort=False):
        # [R T] of the seeds that every problem has.
        latest = own.drop_duplicates(["problem", "seed"], keep="last")
        table = latest.pivot(index="seed", columns="problem", values="score").reindex(latest["seed"].unique()).dropna()
        if table.shape[1] == problems and len(table):
            matrices[name] = table.to_numpy(float)
    if problems < 2 or len(matrices) < 2:
        return []
    rows = []
    for name, values in matrices.items():
        beaten = [statistics.chance_over_tasks(values, other) for rival, other in matrices.items() if rival != name]
        rows.append(
            {
                "objective": name, "tasks": values.shape[1], "seeds": values.shape[0],
                **_columns("middle", statistics.interquartile_mean(values)),
                **_columns("mean", statistics.mean_over_tasks(values)),
                "chance": float(np.mean(beaten)),
            }
        )  # fmt: skip
    return rows


def normalise_scores(scores: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """Normalise the runs' final values of all problems to one scale, in a column `score`. Runs that do not count are left out.

        success as it is; of returns: score = (final − start) / (best − start)

    start is the mean over the task's runs, best the highest group mean: 0 is where runs of the task began.
    """
    found = _counted(scores).assign(score=lambda frame: frame["final"])
    if measure.key == "success":
        return found
    start = found["problem"].map(scores.groupby("problem")["start"].apply(_mean))
    means = found.groupby(["problem", "group"])["final"].apply(_mean)
    room = found["problem"].map(means.groupby("problem").max()) - start
    return found.assign(score=(found["final"] - start) / room)[room > 0]


def sort_pairs(rows: Sequence[Row]) -> list[Row]:
    """Sort pairwise comparisons, leader first in each pair. Significant differences come first, then larger differences."""
    turned = []
    for row in rows:
        if row["difference"] < 0:
            low, high = (None if end is None else -end for end in (row["high"], row["low"]))
            sides = {"ours": row["theirs"], "theirs": row["ours"]}
            sides |= {"our_objective": row["their_objective"], "their_objective": row["our_objective"]}
            row = {**row, **sides, "difference": -row["difference"], "low": low, "high": high}
        turned.append(row)
    return sorted(turned, key=lambda row: (not row["claimed"], -row["difference"]))
