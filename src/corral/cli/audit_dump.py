"""`corral audit DUMP`: what any trainer logged of its tokens, with a progress bar."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.cli.audit_result import Audited
from corral.cli.eval import eval_settings
from corral.cli.kind import check_kind
from corral.cli.train import quiet_libraries
from corral.validate import RunError

if TYPE_CHECKING:
    from corral.audit.dump.find import Dump
    from corral.audit.rules import Rules
    from corral.audit.stream import Columns
    from corral.audit.tally import StreamSummary

TEXT_FLAGS = ("temperature", "device", "problems")
"""Flags of models that matter where logged texts are rescored."""


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
    from corral.llm.eval_settings import EvalSettings

    settings = EvalSettings(model=names[0], **eval_settings(arguments, TEXT_FLAGS))
    out = arguments.out or Path("audits") / _label(dump.path)
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        return audit_texts(dump, (names[0], names[1]), settings, rules, out, progress)


def audit_logged(dump: "Dump", rules: "Rules", arguments: argparse.Namespace) -> Audited:
    """One pass over a dump."""
    from corral.audit.stream import audit_dump

    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        summary, sample = audit_dump(dump, rules, progress)
    return describe_dump(dump, rules, summary, sample, arguments)


def describe_dump(
    dump: "Dump", rules: "Rules", summary: "StreamSummary", sample: "Columns", arguments: argparse.Namespace
) -> Audited:
    """The numbers of a dump, and what shows them."""
    from corral.audit.sample import with_texts
    from corral.audit.threshold import AUDITED
    from corral.cli.audit_view import show_stream
    from corral.report.audit.stream_page import write_stream_page

    texts = None if arguments.tokenizer is None else _token_texts(sample["token"].tolist(), arguments.tokenizer)
    shown = with_texts(sample, texts)
    info = {
        "name": dump.path.resolve().name or "dump",
        "what": dump.compared,
        "remarks": dump.remarks,
        "rules": {key: rules.as_dict()[key] for key in ("clip", "own", "kl_bound", "tv_bound")},
        "settings": {"format": dump.format, "files": len(dump.files), "bytes": dump.bytes},
    }
    return Audited(
        page=_default_page(dump.path),
        write_page=lambda page, live: write_stream_page(summary, shown, info, page, live),
        numbers=lambda: {**summary.as_dict(), **info},
        show=lambda last: show_stream(summary, info, last, quiet=arguments.quiet),
        clipping=next(row for row in summary.thresholds if row.family == AUDITED).kl,
        newest=f"step {summary.by_step[-1]['step']:,}",
    )


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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from corral.run.view import PatientConsole

    console = PatientConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("reading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)
