"""The last sections of a page: failures and warnings, runs, configuration, how to reproduce them."""

from typing import Any

from corral.report.content import RunReport
from corral.report.html import Safe, join, note, shorten, table, tag
from corral.report.page.findings import spread
from corral.report.tables import compare_command
from corral.run.text import count

_EVENTS = {"objective": "Objective", "seed": "Seed", "step": "Step", "kind": "Kind", "what": "What happened"}

_LONGEST = 20_000
"""Characters of a command, or of a file of settings."""

_RUNS = {
    "objective": "Objective", "seed": "Seed", "stopped": "Ended", "steps": "Steps", "start": "Start", "best": "Best",
    "final": "Final", "greedy": "Greedy", "return": "Return",
    "seconds": "Seconds", "tokens": "Tokens", "env_steps": "Environment steps", "skipped": "Skipped updates", "run": "Folder",
}  # fmt: skip


def event_table(report: RunReport) -> Safe:
    """Warnings of the guard, incomplete runs, files that could not be read."""
    rows = report.tables["events"]
    if not rows:
        return note("None: every run finished, the guard had nothing to say, and every file could be read.", good=True)
    return table(
        rows,
        _EVENTS,
        lambda key, row: "—" if row[key] is None else str(row[key]),
        aria_label="Failures and warnings",
        data_table="events",
    )


def run_table(report: RunReport) -> Safe:
    """One row per run."""

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "steps":
            return f"{row['steps']} of {row['planned']}"
        if row[key] is None:
            return "—"
        if key in ("start", "best", "final", "greedy"):
            return report.measure.text(row[key])
        if key == "return":
            return spread(row[key], None, None)
        return f"{row[key]:,.0f}" if isinstance(row[key], float) else str(row[key])

    rows = report.tables["runs"]
    optional = ("greedy", "return", "tokens", "env_steps")
    columns = {key: text for key, text in _RUNS.items() if key not in optional or any(row[key] is not None for row in rows)}
    return table(rows, columns, show, aria_label="Runs", data_table="runs")


def configuration(report: RunReport) -> Safe:
    """What differs between groups, and what they share."""
    differ, same = report.tables["differences"], report.tables["settings"]
    first = note("The groups differ in no setting.", good=True)
    if differ:
        columns = {key: key for key in differ[0]} | {"setting": "Setting"}
        first = table(differ, columns, lambda key, row: row[key], aria_label="Settings that differ")
    shared = table(
        same, {"setting": "Setting", "value": "Value"}, lambda key, row: row[key], aria_label="Settings that all share"
    )
    return join(
        first, tag("details", tag("summary", f"{count(len(same), 'setting')} that all share"), shared) if same else None
    )


def reproduce(report: RunReport) -> Safe:
    """Versions, and a command or a file of settings per run."""
    rows = report.tables["versions"]
    differ = [row["package"] for row in rows if row["differ"]]
    how = "The same from a file: save this as settings.json, then run corral train --config settings.json."
    items = [tag("pre", text, tabindex="0") for plan in report.comparisons if (text := compare_command(plan.command))]
    for row in report.tables["commands"]:
        command = tag("p", "It was started from Python, or its command is unknown.")
        if row["command"]:
            command = tag("pre", shorten(row["command"], _LONGEST), tabindex="0")
        settings = tag("pre", shorten(row["settings"], _LONGEST), tabindex="0")
        words: tuple[object, ...] = (command, tag("p", how))
        if row["script"] is not None:  # its task and rewards are no names that `corral train` knows
            script = f"A script made the trainer: {shorten(str(row['script']), _LONGEST)}. It had these settings, among others."
            words = (tag("p", script),)
        items.append(tag("details", tag("summary", f"{row['objective']}, seed {row['seed']}"), *words, settings))
    return join(
        note(f"The runs were made with different versions of {', '.join(differ)}.") if differ else None,
        *items,
        tag("h3", "Versions"),
        table(rows, {"package": "Package", "versions": "Version"}, lambda key, row: row[key], aria_label="Versions"),
    )
