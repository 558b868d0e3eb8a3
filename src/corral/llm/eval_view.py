"""What a person sees of an evaluation: progress with the time left, then a table of estimates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from corral.run.interval import Estimate
from corral.run.view import Clock, PatientConsole, TimeLeft

_LINES = 20
"""About so many lines of progress where there is no terminal."""


class EvalView:
    """Quiet: warnings, and one sentence at the end. The base of the others."""

    def __init__(self, console: Console, problems: Console) -> None:
        self.console, self.problems = console, problems

    def begin(self, heading: Sequence[tuple[str, str]], total: int, done: int) -> None:
        """It starts, or goes on with `done` completions of `total`."""

    def advance(self, done: int, name: str, right: float) -> None:
        """So many completions are there; of the greedy or the sampled ones, this share is right so far."""

    def say(self, sentence: str) -> None:
        """Something good to know."""

    def warn(self, sentence: str) -> None:
        """Something a person should know."""
        self.problems.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True, highlight=False)

    def end(self, result: Mapping[str, Any], where: Path) -> None:
        """What came out, and where it is."""
        self._print(_last_words(result, where))

    def close(self) -> None:
        """Give the terminal back."""

    def _print(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True, highlight=False)


class PlainEvalView(EvalView):
    """A line now and then: for pipes, files and batch systems."""

    def begin(self, heading: Sequence[tuple[str, str]], total: int, done: int) -> None:
        self.total, self.clock, self.shown = total, Clock(total, done), done
        for name, text in heading:
            self._print(f"{name:<10} {text}")

    def advance(self, done: int, name: str, right: float) -> None:
        left = self.clock.left(done)
        if done < self.total and done - self.shown < self.total / _LINES:
            return
        self.shown = done
        self._print(f"{done:,}/{self.total:,} completions  {name} {right:.3f}" + (f"  {left} left" if left else ""))

    def say(self, sentence: str) -> None:
        self._print(sentence)

    def end(self, result: Mapping[str, Any], where: Path) -> None:
        self.console.print(_table(result))
        self._print(_remarks(result, where))


class LiveEvalView(PlainEvalView):
    """A bar that stays in place."""

    progress: Progress | None = None

    def begin(self, heading: Sequence[tuple[str, str]], total: int, done: int) -> None:
        super().begin(heading, total, done)
        columns = (TextColumn("completions"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.description}"))
        self.progress = Progress(*columns, TimeLeft(self.clock), console=self.console, expand=True)
        self.task = self.progress.add_task("", total=total, completed=done)
        self.progress.start()

    def advance(self, done: int, name: str, right: float) -> None:
        self.clock.left(done)
        assert self.progress is not None  # `begin` comes first
        self.progress.update(self.task, completed=done, description=f"{name} {right:.3f}")

    def close(self) -> None:
        if self.progress is not None:  # it may fail before it begins
            self.progress.stop()


def make_eval_view(*, quiet: bool) -> EvalView:
    """The view for where the output goes."""
    console, problems = PatientConsole(), PatientConsole(stderr=True)
    if quiet:
        return EvalView(console, problems)
    in_terminal = console.is_terminal and not console.is_dumb_terminal
    return LiveEvalView(console, console) if in_terminal else PlainEvalView(console, problems)


def _table(result: Mapping[str, Any]) -> Table:
    """Every estimate with its interval."""
    columns = "", Column("value", justify="right"), f"{result['level']:.0%} interval"
    rows = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, found in result["estimates"].items():
        rows.add_row(name, f"{found['value']:.3f}", f"{found['low']:.3f} – {found['high']:.3f}")
    return rows


def _remarks(result: Mapping[str, Any], where: Path) -> str:
    """What the table leaves out."""
    tokens, plan = result["tokens"], result["settings"]
    text = f"{result['problems']:,} problems of {plan['task']['name']}; {tokens['mean']:.0f} tokens a completion"
    if tokens["cut"]:
        text += f", {tokens['cut']:.1%} cut off at {plan['max_tokens']}"
    return f"{text}. Results and completions are in {where}"


def _last_words(result: Mapping[str, Any], where: Path) -> str:
    """The two numbers that matter most, in a sentence."""
    parts = []
    for name in ("greedy", "pass@1"):
        found = result["estimates"][name]
        parts.append(f"{name} {found['value']:.3f} ({found['low']:.3f}–{found['high']:.3f})")
    return f"{', '.join(parts)}; {_remarks(result, where)}"


def comparison(found: Mapping[str, Estimate], level: float) -> Table:
    """Differences with their intervals; those that leave 0 out are marked."""
    columns = "", Column("difference", justify="right"), f"{level:.0%} interval", ""
    rows = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, one in found.items():
        assert one.low is not None  # differences have both
        assert one.high is not None
        clear = "" if one.low <= 0 <= one.high else "leaves 0 out"
        rows.add_row(name, f"{one.value:+.3f}", f"{one.low:+.3f} … {one.high:+.3f}", clear)
    return rows
