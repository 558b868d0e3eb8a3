"""Terminal output of a run: a live panel, plain lines outside a terminal, or with --quiet only warnings and the result."""

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from corral.lab.run.text import VisibleStream, visible

_FIVE = (
    ("success",),
    ("greedy", "return"),
    ("reward",),
    ("entropy",),
    ("tr/deployed_kl_mean", "tr/kl_after", "tr/kl_before"),
)
"""Five metrics shown per step: from each tuple, the first metric that the run has. With --verbose all metrics follow."""

_RATES = ("learning_rate", "tokens_per_second", "steps_per_second")
"""Metrics that --verbose shows before the metrics whose names begin with tr/."""

_Line = Mapping[str, Any]
_Row = Mapping[str, Any]


class RunView:
    """Terminal output with --quiet: only warnings and the result. Also the base class of the other views."""

    quiet = True
    verbose = False
    """True if all metrics and all lines of the heading are shown."""

    def __init__(self, console: Console, problems: Console) -> None:
        self.console, self.problems = console, problems

    def warn(self, sentence: str) -> None:
        """Show a warning in the terminal."""
        self.problems.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True, highlight=False)

    def say(self, sentence: str) -> None:
        """Print a sentence, unless the command was given --quiet."""
        if not self.quiet:
            self.print(sentence)

    def print(self, text: str) -> None:
        """Print text unchanged, without markup."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Give the terminal back at the end of a run."""

    def begin(self, banner: Sequence[tuple[str, str]], steps: int, done: int, what: str = "step") -> None:
        """Announce that a job starts, or resumes after `done` steps. `what` is the noun for a step."""

    def line(self, line: _Line) -> None:
        """Show the metrics of a training step."""

    def completions(self, rows: Sequence[_Row], *, verified: bool = True) -> None:
        """Show a few completions of the run. Only a verifier's rewards, from 0 to 1, are marked as right or wrong."""

    def stopping(self, sentence: str) -> None:
        """Announce that a signal will stop the run soon.
        The console is bypassed because it may be in the middle of a write."""
        if not self.problems.quiet:
            os.write(2, f"\n{sentence}\n".encode())

    def end(self, sentence: str) -> None:
        """Show the outcome and the folder of a run that ended."""
        self.close()
        self.print(sentence)


class PlainView(RunView):
    """Terminal output with one line per step, without colours or cursor moves, for pipes, files and batch systems."""

    quiet = False

    def begin(self, banner: Sequence[tuple[str, str]], steps: int, done: int, what: str = "step") -> None:
        self.steps, self.clock, self.what = steps, Clock(steps, done), what
        for name, text in banner:
            self.print(f"{name:<10} {text}")

    def line(self, line: _Line) -> None:
        left = self.clock.left(line["step"])
        values = [f"{name} {text}" for name, text in readable(line, verbose=self.verbose)]
        self.print("  ".join([f"{self.what} {line['step']}/{self.steps}", *values, *([f"{left} left"] if left else [])]))

    def completions(self, rows: Sequence[_Row], *, verified: bool = True) -> None:
        if rows:
            self.print(_SAMPLES)
        for row in rows:
            self.print(f"  {_mark(row['reward'], verified)[0]} {shorten(row['prompt'])}{shorten(row['completion'])}")


class LiveView(RunView):
    """Terminal output as a panel that stays in place, with progress, time left, newest metrics, and a few completions."""

    quiet = False
    live: Live | None = None

    def begin(self, banner: Sequence[tuple[str, str]], steps: int, done: int, what: str = "step") -> None:
        for name, text in banner:
            self.console.print(f"[bold]{name:<10}[/] {escape(text)}", highlight=False)
        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(bar_width=None), TimeRemainingColumn(), TextColumn("left"))
        self.progress = Progress(*columns, expand=True, speed_estimate_period=math.inf)  # a step may take minutes
        self.task = self.progress.add_task(what, total=steps, completed=done)
        self.newest: dict[str, Any] = {}
        self.rows: Sequence[_Row] = ()
        self.last = Text(style="yellow")
        self.live = Live(self._panel(), console=self.console, refresh_per_second=4, get_renderable=self._panel)
        self.live.start()

    def line(self, line: _Line) -> None:
        self.newest |= {key: value for key, value in line.items() if value is not None}
        self.progress.update(self.task, completed=line["step"])

    def completions(self, rows: Sequence[_Row], *, verified: bool = True) -> None:
        self.rows = [{**row, "mark": _mark(row["reward"], verified)} for row in rows]

    def stopping(self, sentence: str) -> None:
        self.last = Text(sentence, style="yellow")  # what is written past the panel, the panel paints over

    def close(self) -> None:
        if self.live is not None:  # a run may fail before it begins
            self.live.stop()

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 3))
        pairs = readable(self.newest, verbose=self.verbose)
        across = max(1, (self.console.width - 10) // (26 if self.verbose else 20))
        for start in range(0, len(pairs), across):
            table.add_row(*(Text.assemble((name, "dim"), " ", (text, "bold")) for name, text in pairs[start : start + across]))
        shown = [Text(_SAMPLES, style="dim")] if self.rows else []
        shown += [
            Text.assemble(row["mark"], " ", (shorten(row["prompt"]), "dim"), shorten(row["completion"])) for row in self.rows
        ]
        content = Group(self.progress, table, *shown, *([self.last] if self.last else []))
        # A terminal echoes Ctrl-C as ^C after the panel. In a line that is full it would move the cursor to the next line, and
        # a frame of the panel would stay.
        return Panel(content, title="corral", title_align="left", width=max(20, self.console.width - 6))


class Clock:
    """Estimate of the time left in a run, from the steps done since this process began."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.first, self.start = steps, done, time.monotonic()
        self.at = done
        self.rate: float | None = None

    def left(self, step: int) -> str | None:
        """Return the time left after `step`, as h:mm:ss. Returns None before the first step."""
        now = time.monotonic()
        if step > self.at:
            self.at, self.rate = step, (now - self.start) / (step - self.first)
            self.seen = now
        if self.rate is None:
            return None
        seconds = max(0, round((self.steps - self.at) * self.rate - (now - self.seen)))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


class PatientConsole(Console):
    """Rich console that continues silently after a broken pipe, as in `corral train | head`, and removes escape sequences.

    What models, users and files say reaches the terminal as text alone: no cursor move, no title, no clipboard of theirs.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    @property
    def file(self) -> Any:
        """Output stream of the console without escaping.
        Texts are escaped already, and the console's own escape sequences must pass."""
        file = super().file
        return file.stream if isinstance(file, VisibleStream) else file

    @file.setter
    def file(self, file: Any) -> None:
        self._file = file

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno() if self.stderr else sys.stdout.fileno())
        os.close(null)


_View = TypeVar("_View", bound=RunView)


def make_view(*, quiet: bool, silent: bool = False, verbose: bool = False) -> RunView:
    """Create the terminal view of a run for the current output. Processes other than the main process print nothing."""
    view = choose_view(RunView, PlainView, LiveView, quiet=quiet, silent=silent)
    view.verbose = verbose
    return view


def choose_view(still: type[_View], plain: type[_View], live: type[_View], *, quiet: bool, silent: bool = False) -> _View:
    """Choose a view class and create it: `still` if quiet, `live` for a terminal, `plain` for a file or pipe."""
    console, problems = PatientConsole(quiet=silent), PatientConsole(quiet=silent, stderr=True)
    if quiet or silent:
        return still(console, problems)
    # In a terminal, warnings must pass through the live panel's own console.
    return live(console, console) if console.is_terminal and not console.is_dumb_terminal else plain(console, problems)


def readable(line: _Line, *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return names and values of a step's metrics as texts to show: five, or all with `verbose`."""
    keys = [next((key for key in group if line.get(key) is not None), "") for group in _FIVE]
    if verbose:
        keys += [*_RATES, *sorted(key for key in line if key.startswith("tr/") and key not in keys)]
    pairs = [(key, line[key]) for key in keys if line.get(key) is not None]
    if line.get("skipped"):
        pairs.append(("skipped", line["skipped"]))
    return [(key.replace("_per_second", "/s"), number(value)) for key, value in pairs]


def number(value: float) -> str:
    """Format a number with three digits, thousands with commas, and no rounding errors."""
    if abs(value) < 1e-9:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_SAMPLES = "Sampled in this step, as reward, prompt and completion:"
"""Heading of the completions that a run shows."""


def _mark(reward: float, verified: bool) -> tuple[str, str]:
    """Return a coloured mark for a right or wrong completion, or a number for any other reward."""
    if verified and reward >= 1:
        return "✓", "green"
    return ("✗", "red") if verified and reward <= 0 else (number(reward), "")


def shorten(text: str, limit: int = 120) -> str:
    """Shorten a text to a single line of at most `limit` characters."""
    text = visible(text).replace("\n", "⏎").replace("\t", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"
