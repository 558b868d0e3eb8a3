"""Tables of runs, events, settings, versions and commands. Rows of plain values, ready for CSV."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corral.lab.report.groups import SECRET, Group
from corral.lab.report.outcomes import COUNTED
from corral.lab.report.read import Run, SavedComparison, flatten, setting_text, table_in

_Row = dict[str, Any]


def run_table(groups: Sequence[Group], metric: str) -> list[_Row]:
    """One row per run."""
    rows = []
    for group in groups:
        for run in group.runs:
            values = [value for _, value in run.values(metric)]
            rows.append(
                {
                    "run": str(run.path), "objective": group.label, "problem": group.problem, "seed": run.seed,
                    "stopped": run.stopped, "steps": run.steps, "planned": run.planned_steps,
                    "start": values[0] if values else None, "best": max(values, default=None), "final": run.final(metric),
                    "greedy": run.final("greedy"), "return": run.final("return"),
                    "seconds": run.last("seconds"), "tokens": run.last("num_tokens"),
                    "env_steps": run.last("env_steps"), "skipped": run.last("skipped"),
                }
            )  # fmt: skip
    return rows


def events(groups: Sequence[Group]) -> list[_Row]:
    """A table of problems: warnings of the guard, runs that did not finish, and files that are missing or damaged."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for group in groups:
        for run in group.runs:
            again = sum(other.seed == run.seed for other in group.runs)
            for step, kind, what in _events(run, again):
                # What is wrong with the files of several seeds is said once.
                key = (group.label, step, kind, what, "" if kind == "file" else id(run))
                found.setdefault(key, []).append(run.seed)
    return [_event(label, ", ".join(seeds), kind, what, step) for (label, step, kind, what, _), seeds in found.items()]


def _event(objective: str, seed: str, kind: str, what: str, step: int | None = None) -> _Row:
    return {"objective": objective, "seed": seed, "step": step, "kind": kind, "what": what}


def _events(run: Run, again: int) -> Iterator[tuple[int | None, str, str]]:
    """Step, kind and sentence of everything about one run; `again` runs have its settings and its seed."""
    for line in run.lines:
        warnings = line.get("warnings")
        for text in warnings if isinstance(warnings, list) else ():
            yield int(line["step"]), "guard", str(text)
    if run.stopped not in ("finished", "not ended"):
        yield run.steps, run.stopped, str(run.summary.get("why") or f"the run was {run.stopped}.")
    if run.stopped not in COUNTED:
        yield run.steps, "left out", f"{run.stopped} after {run.steps} of {run.planned_steps} steps: not in the statistics."
    elif again > 1:
        yield None, "twice", f"{again} runs have the same settings and seed; the last of them that finished counts."
    for note in run.notes:
        yield None, "file", note


def plan_events(comparisons: Sequence[SavedComparison], runs: Sequence[Run]) -> list[_Row]:
    """Planned runs without a folder here: not started, failed at once, or not given to the report."""
    there = {run.path.resolve() for run in runs}
    rows = []
    for entry in (entry for comparison in comparisons for path, entry in comparison.places() if path not in there):
        kind, what = "left out", f"planned, and {entry.state}: not in the statistics."
        if entry.state == "failed":
            kind, what = "failed", entry.error or "it failed before it began."
        elif entry.state == "finished":
            kind, what = "elsewhere", "finished, and not among the folders of this report."
        rows.append(_event(f"{entry.contestant} {setting_text(entry.setting)}".strip(), str(entry.seed), kind, what))
    return rows


def file_events(notes: Sequence[str]) -> list[_Row]:
    """Files of no run that could not be read."""
    return [_event("", "", "file", note) for note in notes]


def configuration(groups: Sequence[Group]) -> tuple[list[_Row], list[_Row]]:
    """Settings in which groups differ, one column per group; and those that all share."""
    several = len({group.problem for group in groups}) > 1
    columns: dict[str, dict[str, str]] = {}
    for group in groups:
        name = f"{group.label} ({group.problem})" if several else group.label
        columns[name if name not in columns else f"{name} {group.setting}"] = _settings(group)
    differ, same = [], []
    for key in sorted({key for column in columns.values() for key in column}):
        values = {name: column.get(key, "—") for name, column in columns.items()}
        if len(set(values.values())) > 1:
            differ.append({"setting": key, **values})
        else:
            same.append({"setting": key, "value": next(iter(values.values()))})
    return differ, same


def _settings(group: Group) -> dict[str, str]:
    """Resolved settings of a group, without secrets; a setting that differs between seeds is shown as `…`."""
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


def versions(groups: Sequence[Group]) -> list[_Row]:
    """Packages, and which versions the runs had; more than one where they differ."""
    found: dict[str, set[str]] = {}
    for group in groups:
        for run in group.runs:
            for key, value in {**table_in(run.config, "versions"), "commit": run.config.get("commit")}.items():
                if value is not None:
                    found.setdefault(key, set()).add(str(value))
    return [{"package": key, "versions": ", ".join(sorted(values)), "differ": len(values) > 1} for key, values in found.items()]


def commands(groups: Sequence[Group]) -> list[_Row]:
    """Commands and files of settings that repeat each run."""
    return [
        {
            "objective": group.label, "seed": run.seed, "command": command(run), "script": run.config.get("script"),
            "settings": json.dumps(_drop_secrets(run.settings), indent=2, default=str),
        }
        for group in groups
        for run in group.runs
    ]  # fmt: skip


def _drop_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, and settings within settings, but for secrets."""
    kept = {key: value for key, value in tree.items() if not SECRET.search(key)}
    return {key: _drop_secrets(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def command(run: Run) -> str | None:
    """`corral train …` as it was given, without where it wrote; None if it was started from Python."""
    said = run.config.get("command")
    return _render_command([str(word) for word in said], "train") if isinstance(said, list) else None


def compare_command(text: str) -> str | None:
    """`corral compare …` as it was given, without where it wrote; None if it was started from Python."""
    try:
        return _render_command(shlex.split(text), "compare")
    except ValueError:  # a quote that is not closed
        return None


def _render_command(words: Sequence[str], name: str) -> str | None:
    """`corral` and the words from `name` on, without where it wrote, and without secrets; None if `name` is not there."""
    if name not in words[1:]:
        return None
    kept, words = [], words[words.index(name, 1) :]
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word in ("--out", "--resume") or before in ("--out", "--resume") or word.startswith(("--out=", "--resume=")):
            continue
        flag, equals, value = word.rpartition("=") if word.startswith("--set=") else word.partition("=")
        if before.startswith("--") and "=" not in before and SECRET.search(before):
            word = "…"
        elif equals and value and SECRET.search(flag):
            word = f"{flag}=…"
        kept.append(word)
    return "corral " + shlex.join(kept)
