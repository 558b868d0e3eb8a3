"""A finished audit, whatever was audited: its page, its numbers as JSON, its sentences, and an exit status for CI."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.provenance import plain
from corral.run.files import write_json
from corral.validate import RunError

if TYPE_CHECKING:
    from corral.audit.summary import Ball

_ABOVE = 3
"""Exit status: more tokens would be wrongly blocked than --fail-above allows."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The numbers of one audit, and what shows them."""

    page: Path
    """Where its page belongs, unless --page says otherwise."""
    write_page: Callable[[Path, float | None], int]
    """Writes it there; of a live audit, with the seconds after which it is written again. Returns the size in bytes."""
    numbers: Callable[[], Mapping[str, Any]]
    """Everything, for --json."""
    show: Callable[[str], None]
    """Prints sentences and tables, and this last line."""
    clipping: "Ball"
    """The audited rule against the KL ball."""
    newest: str
    """Where training is: `step 12`."""


def publish(audited: Audited, arguments: argparse.Namespace, live: float | None = None) -> str:
    """Write the page, and the file of --json; a sentence about where the page is."""
    page = arguments.page or audited.page
    size = audited.write_page(page, live)
    if arguments.json not in (None, "-"):
        write_json(Path(arguments.json), dict(audited.numbers()))
    return f"The page is in {page} ({size / 1e6:.1f} MB)."


def finish(audited: Audited, arguments: argparse.Namespace) -> int:
    """Page, JSON and terminal; the exit status."""
    last = publish(audited, arguments)
    if arguments.json == "-":
        sys.stdout.write(json.dumps(plain(audited.numbers()), indent=2, allow_nan=False) + "\n")
    else:
        audited.show(last)
    return _judge_errors(audited.clipping, arguments.fail_above)


def check_files(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be read or written, or cannot be meant, before anything is computed."""
    if arguments.path is not None:
        try:
            arguments.path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"{str(arguments.path)[:200]} cannot be read: {reason}.") from error
    limit = arguments.fail_above
    if limit is not None and not (math.isfinite(limit) and 0 <= limit <= 100):
        raise RunError(f"--fail-above is a percentage from 0 to 100; got {limit:g}.")
    if arguments.json not in (None, "-") and not Path(arguments.json).parent.is_dir():
        raise RunError(f"there is no folder {Path(arguments.json).parent} to write {Path(arguments.json).name} into.")


def _judge_errors(ball: "Ball", limit: float | None) -> int:
    """0, or 3 and a sentence if a larger share of all tokens would be blocked inside the KL ball than `limit` per cent."""
    share = 100 * ball.blocked_inside / ball.tokens
    if limit is None or share <= limit:
        return 0
    sys.stderr.write(
        f"corral: clipping would block {share:.3g} % of all tokens though inside the KL ball, more than the {limit:g} % of "
        f"--fail-above.\n"
    )
    return _ABOVE
