"""`corral audit … --live`: a dump or an audit that grows, with its page written again whenever there is more."""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from corral.cli import INTERRUPTED, refuse
from corral.cli.audit_dump import describe_dump
from corral.cli.audit_measured import measured_audit
from corral.cli.audit_result import Audited, finish, publish
from corral.run.text import count
from corral.validate import RunError

if TYPE_CHECKING:
    from corral.audit.rules import Rules

_INTERVAL = 10.0
"""Seconds between two looks at the files."""

wait: Callable[[float], object] = time.sleep
"""What passes the time; tests have their own."""


def check_live(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be followed."""
    interval, path = arguments.interval, arguments.path
    if interval is not None and not arguments.live:
        raise RunError("--interval is the time between two looks of --live, which is not given.")
    if not arguments.live:
        return
    if interval is not None and not (math.isfinite(interval) and interval >= 0.1):
        raise RunError(f"--interval is a number of seconds, 0.1 or more; got {interval:g}.")
    if arguments.json == "-":
        raise RunError("--live writes its numbers again and again: name a file for --json, not the standard output.")
    if path is None or (path / "config.json").is_file():
        raise RunError(
            "--live follows a dump of logged tokens, or the folder of corral.llm.audit(trainer, out=…); the checkpoints of a "
            "run, and two models, are compared without it."
        )


def follow(arguments: argparse.Namespace, rules: "Rules", check_audit: Callable[[], Path]) -> int:
    """Look again and again until Ctrl-C, then show what was found; the exit status.

    Args:
        check_audit: refuses flags that say nothing to an audit that was measured.
    """
    from corral.audit.errors import NothingYet

    interval: float = arguments.interval or _INTERVAL
    newest = None
    try:
        with _status_line(quiet=arguments.quiet) as say:
            followed = _Followed(arguments, rules, check_audit, lambda text: say(text, brief=True))
            while True:
                try:
                    found = followed.look()
                    if found is not None:
                        newest = found
                        publish(newest, arguments, live=interval)
                        say(_status(newest))
                except NothingYet as error:
                    say(f"Waiting: {error}")
                wait(interval)
    except KeyboardInterrupt:
        if newest is None:
            return refuse("interrupted before there was anything to audit.", INTERRUPTED)
        return finish(newest, arguments)
    except RunError:
        if newest is not None:
            publish(newest, arguments)  # no page goes on calling itself live
        raise


class _Followed:
    """A dump, or an audit's folder: which of them is decided at every look, as either may still have to appear."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        rules: "Rules",
        check_audit: Callable[[], Path],
        tell: Callable[[str], object],
    ) -> None:
        from corral.audit.stream import DumpAudit

        self.arguments, self.rules, self.check_audit, self.tell = arguments, rules, check_audit, tell
        self.stream = DumpAudit(rules)
        self.parts: frozenset[Path] = frozenset()

    def look(self) -> Audited | None:
        """The audit of what is there now; None if that is no more than last time."""
        from corral.audit.dump.find import find_dump

        path: Path = self.arguments.path
        if (path / "audit.json").is_file():
            parts = frozenset((self.check_audit() / "audit.parquet").glob("update-*.parquet"))
            if parts and parts == self.parts:
                return None
            found = measured_audit(path, self.arguments)
            self.parts = parts
            return found
        dump = find_dump(path)
        if dump.texts:
            raise RunError(
                f"{path} holds logged texts ({dump.format}), which two models have to rescore: audit it without --live."
            )
        if not self.stream.read(dump, self._count_bytes(), growing=True):
            return None
        return describe_dump(dump, self.rules, *self.stream.result(), self.arguments)

    def _count_bytes(self) -> Callable[[int], None]:
        """Tells how much was read, of a dump that takes a while."""
        done = 0

        def add_bytes(size: int) -> None:
            nonlocal done
            before, done = done >> 24, done + size
            if done >> 24 > before:
                self.tell(f"Reading, {done / 1e9:.2f} GB so far.")

        return add_bytes


def _status(audited: Audited) -> str:
    """Where training is, and what the audit says so far; in 80 columns, for a terminal."""
    from corral.audit.words import percent

    ball = audited.clipping
    inside = f", {percent(ball.blocked_inside / ball.blocked)} of these inside the KL ball" if ball.blocked else ""
    clipped = percent(ball.blocked / ball.tokens)
    return f"{time.strftime('%H:%M:%S')}  {audited.newest}, {count(ball.tokens, 'token')}: would clip {clipped}{inside}"


class _Say(Protocol):
    def __call__(self, text: str, *, brief: bool = False) -> None: ...


@contextmanager
def _status_line(*, quiet: bool) -> Iterator[_Say]:
    """One line that changes, in a terminal; elsewhere a line whenever it does, unless it is brief."""
    from rich.live import Live
    from rich.text import Text

    from corral.run.view import PatientConsole

    console = PatientConsole(quiet=quiet)
    if not console.is_terminal or quiet:
        last = ""

        def print_line(text: str, *, brief: bool = False) -> None:
            nonlocal last
            if not brief and text != last:
                last = text
                console.print(Text(text), soft_wrap=True)

        yield print_line
        return
    with Live(Text("Reading …"), console=console, transient=True, refresh_per_second=4) as live:

        def update_line(text: str, *, brief: bool = False) -> None:
            live.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)

        yield update_line
