"""Terminal output of a comparison: a live table, plain lines, or only failures and the end with `--quiet`."""

import time
from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from corral.lab.compare.record import Comparison, Progress
from corral.lab.report.read import PlannedRun, setting_text
from corral.lab.run.text import duration
from corral.lab.run.view import RunView, choose_view, number

_COLOURS = {
    "running": "cyan", "failed": "red", "interrupted": "yellow", "collapsed": "yellow", "finished": "green", "waiting": "dim",
}  # fmt: skip
"""Colours of run states in the live table. If not all runs fit on the screen, earlier states are shown first."""

_EVERY = 60.0
"""Smallest number of seconds between two progress lines."""


class CompareView(RunView):
    """View of a comparison for `--quiet`, which prints failures and the end. Other views extend this class."""

    def __init__(self, console: Console, problems: Console) -> None:
        super().__init__(console, problems)
        self.progress: dict[str, Progress] = {}
        self.left: float | None = None

    def banner(self, lines: Sequence[tuple[str, str]]) -> None:
        """Called before the first run with the description of the comparison, as lines of a name and a sentence."""

    def open(self, comparison: Comparison) -> None:
        """Called when the comparison starts or is resumed."""
        self.comparison = comparison

    def update_run(self, record: PlannedRun, progress: Progress) -> None:
        """Called when a run has a new state."""
        self.progress[record.folder] = progress
        if record.state == "failed":
            self.warn(f"{record.label} failed: {record.error}")

    def update_time(self, left: float | None) -> None:
        """Called at every poll of the jobs with the estimated seconds until the comparison ends."""
        self.left = left

    def progress_line(self) -> str:
        """Write a line on the comparison's progress: `3 of 12 runs done, 2 running, about 12 min left`."""
        records = self.comparison.records
        states = [record.state for record in records]
        done = sum(states.count(state) for state in ("finished", "collapsed"))
        parts = [f"{done} of {self.comparison.plan.count} runs done"]
        parts += [f"{states.count(state)} {state}" for state in ("running", "interrupted", "failed") if state in states]
        return ", ".join([*parts, *([f"about {duration(self.left)} left"] if self.left is not None else [])])


class PlainCompareView(CompareView):
    """View of a comparison without a terminal, which prints a line when a run starts or ends, and once a minute."""

    quiet = False

    def banner(self, lines: Sequence[tuple[str, str]]) -> None:
        for name, text in lines:
            self.say(f"{name:<10} {text}")

    def open(self, comparison: Comparison) -> None:
        super().open(comparison)
        self.spoke = time.monotonic()

    def update_run(self, record: PlannedRun, progress: Progress) -> None:
        super().update_run(record, progress)
        if record.state != "failed":
            success = "" if progress.success is None else f", success {number(progress.success)}"
            at = f" at step {progress.step} of {progress.steps}{success}" if progress.step or progress.success else ""
            self.say(f"{record.label}: {record.state}{at}")

    def update_time(self, left: float | None) -> None:
        super().update_time(left)
        if time.monotonic() - self.spoke > _EVERY:
            self.spoke = time.monotonic()
            self.say(self.progress_line())


class LiveCompareView(PlainCompareView):
    """View of a comparison as a live table: compared method, setting, seed, state, step, success, time left."""

    live: Live | None = None

    def open(self, comparison: Comparison) -> None:
        super().open(comparison)
        self.last = ""
        self.live = Live(self.table(), console=self.console, refresh_per_second=2, get_renderable=self.table, transient=True)
        self.live.start()

    def stopping(self, sentence: str) -> None:
        self.last = sentence  # what is written past the table, the table paints over

    update_run, update_time = CompareView.update_run, CompareView.update_time

    def close(self) -> None:
        if self.live is not None:  # a comparison may fail before it begins
            self.live.stop()

    def table(self) -> Group:
        """Build the live table of the runs that fit on the screen, and a line of totals."""
        shown = visible_records(self.comparison.records, max(3, self.console.height - 6))
        names, *rows = run_cells(shown, self.progress)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in names:
            table.add_column(name, justify="right" if name in ("seed", "step", "success", "left") else "left", no_wrap=True)
        for record, row in zip(shown, rows, strict=True):
            table.add_row(*(Text(cell, style=_COLOURS[record.state] if cell == record.state else "") for cell in row))
        caption = self.progress_line()
        if len(shown) < len(self.comparison.records):
            caption += f"; {len(self.comparison.records) - len(shown)} not shown"
        last = [Text(self.last, style="yellow")] if self.last else []
        return Group(table, Text(caption, style="bold"), *last)


def make_compare_view(*, quiet: bool) -> CompareView:
    """Choose the view of a comparison: quiet, a live table on a terminal, or plain lines."""
    return choose_view(CompareView, PlainCompareView, LiveCompareView, quiet=quiet)


def run_cells(records: Sequence[PlannedRun], progress: dict[str, Progress]) -> list[list[str]]:
    """Build the cells of a comparison's table of runs, headings first. Columns that are empty for all runs are omitted."""
    swept, failed = any(record.setting for record in records), any(record.error for record in records)
    names = ["contestant", *(["setting"] if swept else []), "seed", "state", "step", "success", "left"]
    rows = [names + (["what went wrong"] if failed else [])]
    for record in records:
        seen = progress.get(record.folder)
        row = [record.contestant, *([setting_text(record.setting)] if swept else []), str(record.seed)]
        row += [record.state, f"{seen.step}/{seen.steps}" if seen and seen.inode is not None else ""]
        row += ["" if seen is None or seen.success is None else number(seen.success)]
        row += [seen.left if seen and record.state == "running" else "", *([record.error or ""] if failed else [])]
        rows.append(row)
    return rows


def visible_records(records: Sequence[PlannedRun], most: int) -> list[PlannedRun]:
    """Select at most `most` runs to show: active runs first, then the latest finished runs. The plan's order is kept."""
    by_state = {state: [record for record in records if record.state == state] for state in _COLOURS}
    by_state["finished"].reverse()
    chosen = [record for state in _COLOURS for record in by_state[state]][:most]
    return [record for record in records if any(record is other for other in chosen)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of text as lines, each column as wide as its widest entry."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
