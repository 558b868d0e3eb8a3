"""Content of a report on runs, computed once for the HTML page and the exported files."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from corral.lab.report import figures, outcomes
from corral.lab.report.html import Row, shorten
from corral.lab.report.looks import Look, assign_looks
from corral.lab.report.outcomes import Group, group_runs, split_runs
from corral.lab.report.read import Run, SavedComparison, flatten, setting_text, table_in
from corral.lab.report.sweep import Sweep, find_sweeps, sweep_table
from corral.lab.run.settings import SECRET
from corral.validate import RunError


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Content of a report: groups of runs, the main metric, and all tables."""

    title: str
    groups: Sequence[Group]
    """Groups of runs on the report's page. Runs of one group differ in their seeds only."""
    sweep_groups: Sequence[Group]
    """Groups of runs of a comparison's sweep, on which it chose the settings of the reported runs.

    They appear in the sweep and in lists of runs, and count in no other statistic."""
    sweeps: Sequence[Sweep]
    comparisons: Sequence[SavedComparison]
    measure: outcomes.Measure
    threshold: float | None
    """Threshold of the main metric for the column "steps to reach it"; None if every problem has its own threshold."""
    metrics: Sequence[figures.Metric]
    every: int
    """Number of training steps that each point of a figure summarises."""
    scores: pd.DataFrame
    """Table of scores, with a row per run, as `score_runs` computes it."""
    tables: Mapping[str, list[Row]]

    @property
    def runs(self) -> list[Run]:
        """List the runs of all groups in the report."""
        return [run for group in self.groups for run in group.runs]

    @property
    def problems(self) -> list[str]:
        """List the problems (task and model) of the report's groups, each once."""
        return list(dict.fromkeys(group.problem for group in self.groups))

    @property
    def seeds(self) -> list[str]:
        """List the random seeds of the report's runs, each once."""
        return list(dict.fromkeys(run.seed for run in self.runs))

    @cached_property
    def final_pairs(self) -> list[Row]:
        """Pairwise comparisons of final values, leader first in each pair. Significant differences come before others."""
        return outcomes.sort_pairs([row for row in self.tables["comparisons"] if row["measure"] == "final"])

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Colour and marker of every compared method, by the method's name in groups and sweeps."""
        swept = [row.contestant for sweep in self.sweeps for row in sweep.rows]
        return assign_looks([*(group.objective for group in self.groups), *swept])

    @cached_property
    def styles(self) -> dict[int, tuple[int, int, int]]:
        """Colour, marker and dash of each group's curve, by the group's key. Dashes distinguish up to four settings.

        Markers distinguish any more settings.
        """
        settings, found = list(dict.fromkeys(group.setting for group in self.groups)), {}
        for group in self.groups:
            (colour, marker), place = self.looks[group.objective], 0 if group.chosen else settings.index(group.setting)
            found[group.key] = colour, marker + place // 4, place % 4
        return found

    @property
    def is_single(self) -> bool:
        """True if the report is about a single run."""
        return len(self.runs) == 1 and not self.sweep_groups


def make_report(
    runs: Sequence[Run],
    comparisons: Sequence[SavedComparison] = (),
    *,
    title: str | None = None,
    threshold: float | None = None,
    notes: Sequence[str] = (),
) -> RunReport:
    """Build the content of a report: group the runs by setting, and compute every table.

    Args:
        comparisons: what `corral compare` wrote beside the runs, from `read_comparisons`.
        notes: what was wrong with files that belong to no run.
        threshold: of the metric, for the steps to it; None takes nine tenths of the best objective's end, problem by problem.
    """
    if not runs:
        raise RunError("a report needs at least one run.")
    shown, aside, chosen = split_runs(runs, comparisons)
    groups, swept = group_runs(shown, chosen), group_runs(aside)
    measure = outcomes.main_metric(runs)
    if threshold is not None and not math.isfinite(threshold):
        raise RunError(f"a threshold is a number; got {threshold}.")
    if threshold is not None and measure.key == "success" and not 0 <= threshold <= 1:
        raise RunError(f"a threshold of success lies between 0 and 1; got {threshold:g}. For 60 %, give 0.6.")
    scores = outcomes.score_runs([*groups, *swept], measure)
    counted = scores[scores["group"] < len(groups)]
    thresholds, results = [], []
    for name in dict.fromkeys(group.problem for group in groups):
        here = counted[counted["problem"] == name]
        thresholds.append(outcomes.default_threshold(here, measure) if threshold is None else threshold)
        results += outcomes.results([group for group in groups if group.problem == name], here, thresholds[-1])
    metrics = figures.select_metrics(shown)
    found = find_sweeps(runs, comparisons, measure)
    differ, same = configuration(groups)
    return RunReport(
        title=title or _headline(groups),
        groups=groups,
        sweep_groups=swept,
        sweeps=found,
        comparisons=comparisons,
        measure=measure,
        threshold=thresholds[0] if len(set(thresholds)) == 1 else None,
        metrics=metrics,
        every=figures.stride(shown, metrics),
        scores=counted,
        tables={
            "results": results,
            "comparisons": outcomes.comparisons(groups, counted, measure),
            "overall": outcomes.overall(counted, measure),
            "sweep": sweep_table(found),
            "runs": scores[[*outcomes.RUN_COLUMNS]].to_dict("records"),
            "events": [
                *events([*groups, *swept]),
                *plan_events(comparisons, runs),
                *(_event("", "", "file", note) for note in notes),
            ],
            "differences": differ,
            "settings": same,
            "versions": versions([*groups, *swept]),
            "commands": commands(groups),
        },
    )


def _headline(groups: Sequence[Group]) -> str:
    """Write the default title of a report's page: `countdown with tiny: dppo, troll`."""
    problems = list(dict.fromkeys(group.problem for group in groups))
    names = list(dict.fromkeys(group.objective for group in groups))
    what = problems[0] if len(problems) == 1 else f"{len(problems)} problems"
    return shorten(f"{what}: {', '.join(names) if len(names) <= 6 else f'{len(names)} objectives'}", 120)


def name_seeds(seeds: Sequence[object]) -> str:
    """Write a list of seeds as text: `seed 0`, or `seeds 0, 1, 2`."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


# --------------------------------------------------------------------------------------------- events, settings, commands


def events(groups: Sequence[Group]) -> list[Row]:
    """Build the table of failures and warnings: warnings of the guard, incomplete runs, and missing or damaged files."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for group in groups:
        for run in group.runs:
            again = sum(other.seed == run.seed for other in group.runs)
            for step, kind, what in _events(run, again):
                # What is wrong with the files of several seeds is said once.
                key = (group.label, step, kind, what, "" if kind == "file" else id(run))
                found.setdefault(key, []).append(run.seed)
    return [_event(label, ", ".join(seeds), kind, what, step) for (label, step, kind, what, _), seeds in found.items()]


def _event(objective: str, seed: str, kind: str, what: str, step: int | None = None) -> Row:
    return {"objective": objective, "seed": seed, "step": step, "kind": kind, "what": what}


def _events(run: Run, again: int) -> Iterator[tuple[int | None, str, str]]:
    """Yield (step, kind, sentence) of each failure or warning of a run. `again` counts runs with equal settings and seed."""
    for line in run.lines:
        warnings = line.get("warnings")
        for text in warnings if isinstance(warnings, list) else ():
            yield int(line["step"]), "guard", str(text)
    if run.stopped not in ("finished", "not ended"):
        yield run.steps, run.stopped, str(run.summary.get("why") or f"the run was {run.stopped}.")
    if run.stopped not in outcomes.COUNTED:
        yield run.steps, "left out", f"{run.stopped} after {run.steps} of {run.planned_steps} steps: not in the statistics."
    elif again > 1:
        yield None, "twice", f"{again} runs have the same settings and seed; the last of them that finished counts."
    for note in run.notes:
        yield None, "file", note


def plan_events(comparisons: Sequence[SavedComparison], runs: Sequence[Run]) -> list[Row]:
    """List planned runs that the report lacks: not started, failed at once, or not among the report's folders."""
    there, rows = {run.path.resolve() for run in runs}, []
    for entry in (entry for comparison in comparisons for path, entry in comparison.places() if path not in there):
        kind, what = {
            "failed": ("failed", entry.error or "it failed before it began."),
            "finished": ("elsewhere", "finished, and not among the folders of this report."),
        }.get(entry.state, ("left out", f"planned, and {entry.state}: not in the statistics."))
        rows.append(_event(f"{entry.contestant} {setting_text(entry.setting)}".strip(), str(entry.seed), kind, what))
    return rows


def configuration(groups: Sequence[Group]) -> tuple[list[Row], list[Row]]:
    """Build two tables of settings: those in which groups of runs differ, with a column per group, and those that all share."""
    several = len({group.problem for group in groups}) > 1
    columns: dict[str, dict[str, str]] = {}
    for group in groups:
        name = f"{group.label} ({group.problem})" if several else group.label
        columns[name if name not in columns else f"{name} {group.setting}"] = _settings(group)
    frame = pd.DataFrame(columns, dtype=object).fillna("—").sort_index().rename_axis("setting")
    differ = frame.nunique(axis=1) > 1
    same = frame[~differ].iloc[:, 0].rename("value")
    return frame[differ].reset_index().to_dict("records"), same.reset_index().to_dict("records")


def _settings(group: Group) -> dict[str, str]:
    """Return the resolved settings of a group of runs, without secrets. A setting that varies over seeds is shown as `…`."""
    parts = ("objective", "task", "model", "settings", "trainer")
    columns = [flatten({part: run.config[part] for part in parts if part in run.config}) for run in group.runs]
    found = {}
    for key in {key for column in columns for key in column}:
        part, _, name = key.partition(".")
        told = (part == "settings" and name in group.runs[0].config) or (part == "trainer" and f"settings.{name}" in columns[0])
        if told or name == "seed" or SECRET.search(key):
            continue
        values = sorted({column.get(key, "—") for column in columns})
        found[key] = values[0] if len(values) == 1 else "… (differs between seeds)"
    return found


def versions(groups: Sequence[Group]) -> list[Row]:
    """List the versions of Python packages that the runs used, several for a package if runs differ."""
    runs = [run.config for group in groups for run in group.runs]
    frame = pd.DataFrame([{**table_in(config, "versions"), "commit": config.get("commit")} for config in runs])
    found = {key: sorted(column.dropna().map(str).unique()) for key, column in frame.items()}
    return [{"package": key, "versions": ", ".join(each), "differ": len(each) > 1} for key, each in found.items() if each]


def commands(groups: Sequence[Group]) -> list[Row]:
    """List the command, script and settings of each run, from which the run can be repeated."""
    return [
        {
            "objective": group.label, "seed": run.seed, "command": command(run), "script": run.config.get("script"),
            "settings": json.dumps(_drop_secrets(run.settings), indent=2, default=str),
        }
        for group in groups
        for run in group.runs
    ]  # fmt: skip


def _drop_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Remove secrets, such as API keys, from nested settings."""
    kept = {key: value for key, value in tree.items() if not SECRET.search(key)}
    return {key: _drop_secrets(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def command(run: Run) -> str | None:
    """Return the `corral train …` command of a run, without output folder and secrets. None for a run started from Python."""
    said = run.config.get("command")
    return _render_command([str(word) for word in said], "train") if isinstance(said, list) else None


def compare_command(text: str) -> str | None:
    """Return the `corral compare …` command that started a comparison, without folder and secrets. None if Python code did."""
    try:
        return _render_command(shlex.split(text), "compare")
    except ValueError:  # a quote that is not closed
        return None


def _render_command(words: Sequence[str], name: str) -> str | None:
    """Format a `corral` command from the word `name` on, without output folder and secrets. None if `name` is missing."""
    if name not in words[1:]:
        return None
    kept, words = [], words[words.index(name, 1) :]
    for before, word in zip(["", *words[:-1]], words, strict=True):
        if word in ("--out", "--resume") or before in ("--out", "--resume") or word.startswith(("--out=", "--resume=")):
            continue
        flag, equals, value = word.rpartition("=") if word.startswith("--set=") else word.partition("=")
        if before.startswith("--") and "=" not in before and SECRET.search(before):
            word = "…"
        elif equals and value and SECRET.search(flag):
            word = f"{flag}=…"
        kept.append(word)
    return "corral " + shlex.join(kept)
