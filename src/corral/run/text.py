"""Numbers and things in sentences, and texts of others made safe to show."""

import re
import textwrap
from collections.abc import Iterable

_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Controls, invisible and bidirectional marks, lone surrogates: what makes a text look like another one, or steers a terminal.
Joiners stay."""


def count(number: int, thing: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def visible(text: str) -> str:
    """The text with everything hidden in it written out, as ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", text.replace("\r\n", "\n"))


def columns(words: Iterable[str], width: int = 100) -> str:
    """Words in indented lines."""
    return textwrap.fill(", ".join(words), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
