"""`corral audit DUMP`: what any trainer logged of its tokens, with a progress bar; JSON and an exit status for CI."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.cli.eval import eval_settings
from corral.cli.kind import check_kind
from corral.cli.train import quiet_libraries
from corral.run.files import RunError, plain, write_json

if TYPE_CHECKING:
    from corral.audit.dump.find import Dump
    from corral.audit.rules import Rules
    from corral.audit.summary import Ball

TEXT_FLAGS = ("temperature", "device", "problems")
"""Flags of models that matter where logged texts are rescored."""

_ABOVE = 3
"""Exit status: more tokens are wrongly blocked than --fail-above allows."""


def rescore(dump: "Dump", rules: "Rules", arguments: argparse.Namespace) -> Path:
    """Texts of a dump under the two models of --model; the folder of the audit."""
    names = arguments.model
    if len(names) != 2:
        raise RunError(
            f"{dump.path} holds texts and scores without log-probs ({dump.format}): name the model that sampled and the one "
            f"that came out of training, --model OLD --model NEW, to have them rescored."
        )
    check_kind("llm", "rescoring texts")
    quiet_libraries()
    from corral.llm.audit_texts import audit_texts
    from corral.llm.evaluate import EvalSettings

    settings = EvalSettings(model=names[0], **eval_settings(arguments, TEXT_FLAGS))
    out = arguments.out or Path("audits") / _label(dump.path)
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        return audit_texts(dump, (names[0], names[1]), settings, rules, out, progress)


def audit_logged(dump: "Dump", rules: "Rules", arguments: argparse.Namespace) -> int:
    """One pass over a dump; sentences and a table in the terminal, everything on a page and as JSON. The exit status."""
    from corral.audit.sample import with_texts
    from corral.audit.stream import audit_dump
    from corral.audit.threshold import AUDITED
    from corral.cli.audit_view import show_stream
    from corral.report.audit.stream_page import write_stream_page

    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        summary, sample = audit_dump(dump, rules, progress)
    texts = None if arguments.tokenizer is None else _token_texts(sample["token"].tolist(), arguments.tokenizer)
    name = dump.path.resolve().name or "dump"
    info = {
        "name": name,
        "what": dump.compared,
        "remarks": dump.remarks,
        "rules": {key: rules.as_dict()[key] for key in ("clip", "own", "kl_bound", "tv_bound")},
        "settings": {"format": dump.format, "files": len(dump.files), "bytes": dump.bytes},
    }
    page = arguments.page or _default_page(dump.path)
    size = write_stream_page(summary, with_texts(sample, texts), info, page)
    if arguments.json is not None:
        write_numbers(arguments.json, {**summary.as_dict(), **info})
    if arguments.json != "-":
        show_stream(summary, info, f"The page is in {page} ({size / 1e6:.1f} MB).", quiet=arguments.quiet)
    audited = next(row for row in summary.thresholds if row.family == AUDITED)
    return judge_errors(audited.kl, arguments.fail_above)


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


def judge_errors(ball: "Ball", limit: float | None) -> int:
    """0, or 3 and a sentence if a larger share of all tokens is blocked inside the KL ball than `limit` per cent."""
    share = 100 * ball.blocked_inside / ball.tokens
    if limit is None or share <= limit:
        return 0
    sys.stderr.write(
        f"corral: {share:.3g} % of all tokens are blocked by clipping though inside the KL ball, more than the {limit:g} % of "
        f"--fail-above.\n"
    )
    return _ABOVE


def write_numbers(target: str, content: Mapping[str, Any]) -> None:
    """JSON into a file, whole or not at all, or to the standard output."""
    if target == "-":
        sys.stdout.write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")
    else:
        write_json(Path(target), dict(content))


def asdict_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose values may be dataclasses, for JSON."""
    return {key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value for key, value in row.items()}


def _token_texts(ids: Iterable[int], name: str) -> dict[int, str]:
    """What tokens say, by the tokenizer of a model."""
    check_kind("llm", "a tokenizer")
    quiet_libraries()
    from corral.llm.audit_texts import load_tokenizer

    tokenizer: Any = load_tokenizer(name)
    known = len(tokenizer)
    return {token: tokenizer.decode([token]) if 0 <= token < known else f"⟨{token}⟩" for token in set(ids)}


def _default_page(path: Path) -> Path:
    """audits/NAME.html, below where the command is called: a dump's own folder is not written to."""
    folder = Path("audits")
    folder.mkdir(exist_ok=True)
    return folder / f"{_label(path)}.html"


def _label(path: Path) -> str:
    """A dump's name as a file may have it."""
    return "".join(x if x.isalnum() or x in "._-" else "-" for x in path.resolve().name).strip("-.")[-80:] or "dump"


@contextmanager
def _progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A bar on the error stream if that is a terminal; what it gives is told how many bytes were read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("reading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)
