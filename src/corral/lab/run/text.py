"""Formatting of numbers and names in sentences, and escaping of untrusted text."""

import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Pattern of characters that disguise a text or control a terminal, such as control characters and invisible marks.
Bidirectional marks and lone surrogates are matched too. Zero-width joiners are not among them."""


_CURSOR = re.compile(r"\r(?!\n)|\n*(\x1b\[A)+\Z")
"""Pattern of control sequences with which a progress bar returns to the start of its line or to another line."""


def count(number: int, thing: str) -> str:
    """Format a number with its noun, such as 1 step or 2 steps."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a duration in seconds, such as `45 s`, `13 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def visible(text: str) -> str:
    """Replace every hidden character of a text by its code, such as ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", text.replace("\r\n", "\n"))


class VisibleStream:
    """Output stream that replaces hidden characters by their codes before they reach the wrapped stream.
    Other methods are the wrapped stream's.

    Progress bars keep the two things that they draw with: a carriage return before a line, and cursor moves by themselves.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text to the stream, with hidden characters replaced by their codes."""
        bar = _CURSOR.match(text)
        start = bar.end() if bar is not None else 0
        self.stream.write(text[:start] + visible(text[start:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line, with hidden characters replaced by their codes."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # isatty, fileno, encoding, …: whatever this stream has


@contextmanager
def visible_output() -> Iterator[None]:
    """Context in which hidden characters are replaced by their codes in everything that this process prints.
    This includes logs, warnings, and tracebacks of any library."""
    sys.excepthook = _print_exception
    streams = sys.stdout, sys.stderr
    mine: Any = [one if isinstance(one, VisibleStream) else VisibleStream(one) for one in streams]
    sys.stdout, sys.stderr = mine
    try:
        yield
    finally:
        for name, stream, own in zip(("stdout", "stderr"), streams, mine, strict=True):
            if vars(sys)[name] is own:  # else somebody has put another one there since
                setattr(sys, name, stream)


def _print_exception(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print the traceback of an uncaught exception, with hidden characters replaced by their codes."""
    VisibleStream(sys.stderr).write("".join(traceback.format_exception(kind, error, where)))


def columns(words: Iterable[str], width: int = 100) -> str:
    """Join words with commas into indented lines of at most `width` characters."""
    return textwrap.fill(", ".join(words), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
