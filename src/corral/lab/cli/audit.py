"""Command `corral audit`: audit the clipping in a dump, a run or the folder of an audit."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from corral.lab.cli import INTERRUPTED, check_installed, given_flags, refuse
from corral.lab.cli.eval import FLAGS, eval_settings
from corral.lab.cli.kind import check_kind, kind_of_run
from corral.lab.cli.train import TOOLS, UNSAFE, quiet_libraries
from corral.lab.run.files import write_json
from corral.lab.run.text import count
from corral.provenance import plain
from corral.validate import RunError

if TYPE_CHECKING:
    from corral.lab.audit.dump import Dump
    from corral.lab.audit.rules import Rules
    from corral.lab.audit.tally import Audit, DumpAudit

_ABOVE = 3
"""Exit status if more tokens would be wrongly blocked than --fail-above allows."""

_NEEDED = ("numpy", "pandas", "pyarrow", "rich", "jinja2")
"""Packages that showing an audit needs; comparing models needs more."""

_INTERVAL = 10.0
"""Seconds between two polls of the files."""

wait: Callable[[float], object] = time.sleep
"""Function that waits between polls; tests replace it."""

_TEXT_FLAGS = ("temperature", "device", "problems")
"""Model flags that apply when logged texts are rescored."""

_MODEL_FLAGS = {
    "task": "what to ask; by default a run's own task",
    "problems": "held-out problems (16)",
    "samples": "completions of each (8)",
    "temperature": "of the policy (1)",
    "batch-size": "prompts at a time (256)",
    **{name: FLAGS[name] for name in ("instruction", "max-tokens", "seed", "device", "tool", "environment-factory")},
}

_EPILOG = """
Five things can be audited:
  corral audit audit/                     what corral.llm.audit(trainer, out="audit/") wrote during training
  corral audit DUMP                       what any trainer logged of its tokens: JSON lines as in docs/audit.md, prime-rl's
                                          token_exports, slime's debug train data, open-instruct's trainer_logprobs
  corral audit TEXTS --model A --model B  texts that verl or TRL logged, rescored by the old and the new model
  corral audit RUN                        a run of `corral train`: each checkpoint against the one before
  corral audit --old A --new B --task T   two models: A writes completions, B is measured on their tokens
With --live the first two are followed while they grow, until Ctrl-C: the page is written again whenever there is more.
A task's own settings: --set task_config.path=problems.jsonl.
Exit status: 0 fine, 1 failed, 2 not understood, 3 more than --fail-above, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "path", metavar="AUDIT|DUMP|RUN", nargs="?", type=Path, help="an audit's folder, a dump, or a run's folder"
    )
    parser.add_argument("--old", metavar="MODEL", help="tiny, smollm2, a folder, a run, a hub id")
    parser.add_argument("--new", metavar="MODEL", help="the same after training")
    parser.add_argument(
        "--model", metavar="MODEL", action="append", default=[], help="of logged texts: old, then new; given twice"
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="of dumps: whose tokenizer tells the text of tokens (else ids)")
    for name, what in _MODEL_FLAGS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=what)
    parser.add_argument("--tools", metavar="FUNCTION", action="append", help=TOOLS)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="task_config.…; repeatable")
    parser.add_argument("--clip", metavar="LOW,HIGH", help="of models and dumps: how far a ratio may be from 1 (0.2,0.2)")
    parser.add_argument(
        "--kl-bound", metavar="X", type=float, help="of models and dumps: radius of the KL ball, in nats (0.05)"
    )
    parser.add_argument("--tv-bound", metavar="X", type=float, help="of models and dumps: radius of the TV ball (0.2)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="of models: the audit's folder (RUN/audit, or audits/OLD-NEW)")
    parser.add_argument("--page", metavar="FILE", type=Path, help="the page (audit.html in the audit's folder)")
    parser.add_argument("--json", metavar="FILE", help="every number as JSON; - is the standard output")
    parser.add_argument(
        "--fail-above",
        metavar="PERCENT",
        type=float,
        help="exit with 3 if more of all tokens would be blocked inside the KL ball",
    )
    parser.add_argument("--live", action="store_true", help="of dumps and audits that grow: write the page again and again")
    parser.add_argument("--interval", metavar="SECONDS", type=float, help="of --live: between two looks at the files (10)")
    parser.add_argument("--unsafe-code-execution", action="store_true", help=UNSAFE)
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong, and the sentences")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Measure models, unless there is an audit already, and show the result."""
    if rest:
        return refuse(f"audit has no {rest[0]!r}. `corral audit --help` lists what it has.")
    check_installed("audits need", _NEEDED, "report")
    _check_files(arguments)
    _check_live(arguments)
    if arguments.live:
        return _follow(arguments)
    try:
        return _finish(*_measure(arguments), arguments)
    except KeyboardInterrupt:
        return refuse("interrupted.", INTERRUPTED)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse unreadable input, unwritable output and meaningless combinations before any computation."""
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


def _check_live(arguments: argparse.Namespace) -> None:
    """Refuse `--live` for input that cannot be followed."""
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
    _refuse_flags(arguments, ("old", "new", "model", *_MODEL_FLAGS, "out"), "--live loads no model")


def _refuse_flags(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    given = [name for name, value in given_flags(arguments, names).items() if value != []]
    given += [name for name in ("set", "tools", "unsafe_code_execution") if vars(arguments)[name]]
    if given:
        raise RunError(f"{why}, so --{given[0].replace('_', '-')} cannot be given with it.")


def _measure(arguments: argparse.Namespace) -> "tuple[Audit, Path]":
    """Compute the audit for the arguments, and the path of its page."""
    from corral.lab.audit.dump import find_dump
    from corral.lab.audit.tally import DumpAudit

    path: Path | None = arguments.path
    if path is not None and (path / "audit.json").is_file():
        return _read_folder(_existing_audit(arguments))
    if path is None or (path / "config.json").is_file():
        return _read_folder(_audit_models(arguments))
    dump = find_dump(path)
    if dump.texts:
        names = [name for name in _MODEL_FLAGS if name not in _TEXT_FLAGS]
        _refuse_flags(arguments, ("old", "new", "tokenizer", *names), f"{path} holds logged texts")
        return _read_folder(_rescore(dump, _rules(arguments), arguments))
    _refuse_flags(arguments, ("old", "new", "model", *_MODEL_FLAGS, "out"), f"{path} is a dump of logged tokens")
    stream = DumpAudit(_rules(arguments))
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        stream.read(dump, progress)
    return _describe_dump(dump, stream, arguments)


def _existing_audit(arguments: argparse.Namespace) -> Path:
    """Folder of a finished audit; a RunError for flags that could not change it."""
    _refuse_flags(
        arguments,
        ("old", "new", "model", "tokenizer", *_MODEL_FLAGS, "clip", "kl-bound", "tv-bound", "out"),
        f"{arguments.path} is an audit that was measured already",
    )
    return arguments.path


def _read_folder(folder: Path) -> "tuple[Audit, Path]":
    """Read the audit in a folder, and the path of its page."""
    from corral.lab.audit.folder import read_audit
    from corral.lab.audit.tally import audit_table

    return audit_table(*read_audit(folder)), folder / "audit.html"


def _describe_dump(dump: "Dump", stream: "DumpAudit", arguments: argparse.Namespace) -> "tuple[Audit, Path]":
    """Audit a dump, with a page below the current folder: nothing is written to a dump."""
    name = arguments.tokenizer
    audit = stream.result(dump) if name is None else stream.result(dump, lambda ids: _token_texts(ids, name))
    folder = Path("audits")
    folder.mkdir(exist_ok=True)
    return audit, folder / f"{_label(dump.path)}.html"


def _token_texts(ids: Sequence[int], name: str) -> dict[int, str]:
    """Decode tokens with a model's tokenizer."""
    check_kind("llm", "a tokenizer")
    quiet_libraries()
    from corral.lab.audit.models import load_tokenizer

    tokenizer: Any = load_tokenizer(name)
    known = len(tokenizer)
    return {token: tokenizer.decode([token]) if 0 <= token < known else f"⟨{token}⟩" for token in ids}


def _label(path: Path) -> str:
    """Turn a dump's name into a file name."""
    return "".join(x if x.isalnum() or x in "._-" else "-" for x in path.resolve().name).strip("-.")[-80:] or "dump"


def _rescore(dump: "Dump", rules: "Rules", arguments: argparse.Namespace) -> Path:
    """Rescore the texts of a dump under the two models of --model, and return the folder of the audit."""
    names = arguments.model
    if len(names) != 2:
        raise RunError(
            f"{dump.path} holds texts and scores without log-probs ({dump.format}): name the model that sampled and the one "
            f"that came out of training, --model OLD --model NEW, to have them rescored."
        )
    check_kind("llm", "rescoring texts")
    quiet_libraries()
    from corral.lab.audit.models import audit_texts
    from corral.lab.jobs.llm.eval_settings import EvalSettings

    settings = EvalSettings(model=names[0], **eval_settings(arguments, _TEXT_FLAGS))
    out = arguments.out or Path("audits") / _label(dump.path)
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        return audit_texts(dump, (names[0], names[1]), settings, rules, out, progress)


def _audit_models(arguments: argparse.Namespace) -> Path:
    """Compare saved weights, and return the folder of the result."""
    path, old, new = arguments.path, arguments.old, arguments.new
    if path is None and (old is None or new is None):
        raise RunError("audit takes an audit's folder, a dump, a run's folder, or --old MODEL --new MODEL --task TASK.")
    if path is not None and (old is not None or new is not None):
        raise RunError("audit takes a folder, or --old and --new; not both.")
    if arguments.model or arguments.tokenizer:
        raise RunError("--model and --tokenizer are for what other engines logged; models are compared by --old and --new.")
    if path is not None and kind_of_run(path) == "robot":
        raise RunError(f"{path} is a robot's run; audits are about the tokens of language models.")
    check_kind("llm", "auditing models")
    quiet_libraries()
    from corral.lab.audit.models import audit_pair, audit_run
    from corral.lab.jobs.llm.eval_settings import EvalSettings
    from corral.lab.run.view import make_view

    given = {"problems": 16, "samples": 8, "backend": "transformers", **eval_settings(arguments, ("tools", *_MODEL_FLAGS))}
    settings, rules, say = EvalSettings(**{"model": "", **given}), _rules(arguments), make_view(quiet=arguments.quiet).say
    if path is not None:
        return audit_run(path, settings, rules, arguments.out or path / "audit", say)
    label = "-".join("".join(x if x.isalnum() or x in "._" else "-" for x in name).strip("-.")[-40:] for name in (old, new))
    return audit_pair(old, new, settings, rules, arguments.out or Path("audits") / label, say)


def _rules(arguments: argparse.Namespace) -> "Rules":
    """Rules to audit."""
    from corral.lab.audit.rules import Rules
    from corral.objective import make_objective

    given = given_flags(arguments, ("kl_bound", "tv_bound"))
    try:
        if arguments.clip is not None:
            low, _, high = arguments.clip.partition(",")
            given |= {"clip": make_objective("ppo_clip", clip_low=float(low), clip_high=float(high or low))}
    except ValueError as error:
        raise RunError(f"--clip takes LOW,HIGH such as 0.2,0.28; got {arguments.clip!r}: {error}") from error
    try:
        return Rules(**given)
    except ValueError as error:
        raise RunError(str(error)) from error


@contextmanager
def _progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Context with a progress bar on stderr, if that is a terminal; gives a function for the number of bytes read."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from corral.lab.run.view import PatientConsole

    console = PatientConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("reading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)


def _publish(audit: "Audit", page: Path, arguments: argparse.Namespace, live: float | None = None) -> str:
    """Write the page and the file of --json; returns a sentence about the page's path."""
    from corral.lab.audit.page import write_page

    page = arguments.page or page
    size = write_page(audit, page, live)
    if arguments.json not in (None, "-"):
        write_json(Path(arguments.json), audit.as_dict())
    return f"The page is in {page} ({size / 1e6:.1f} MB)."


def _finish(audit: "Audit", page: Path, arguments: argparse.Namespace) -> int:
    """Write page, JSON and terminal output; returns 0, or 3 with a message if --fail-above is exceeded.

    The limit is on tokens that are blocked inside the KL ball.
    """
    from corral.lab.cli.audit_view import show

    last = _publish(audit, page, arguments)
    if arguments.json == "-":
        sys.stdout.write(json.dumps(plain(audit.as_dict()), indent=2, allow_nan=False) + "\n")
    else:
        show(audit, last, quiet=arguments.quiet)
    ball, limit = audit.verdicts["clipped"]["kl"], arguments.fail_above
    share = 100 * ball.wrong
    if limit is None or share <= limit:
        return 0
    sys.stderr.write(
        f"corral: clipping would block {share:.3g} % of all tokens though inside the KL ball, more than the {limit:g} % of "
        f"--fail-above.\n"
    )
    return _ABOVE


def _follow(arguments: argparse.Namespace) -> int:
    """Poll until Ctrl-C, then show the audit; returns the exit status."""
    from corral.lab.audit.folder import NothingYet

    interval: float = arguments.interval or _INTERVAL
    newest: tuple[Audit, Path] | None = None
    try:
        with _status_line(quiet=arguments.quiet) as say:
            look = _look_again(arguments, lambda text: say(text, brief=True))
            while True:
                try:
                    if (found := look()) is not None:
                        newest = found
                        _publish(*newest, arguments, live=interval)
                        say(_status(newest[0]))
                except NothingYet as error:
                    say(f"Waiting: {error}")
                wait(interval)
    except KeyboardInterrupt:
        if newest is None:
            return refuse("interrupted before there was anything to audit.", INTERRUPTED)
        return _finish(*newest, arguments)
    except RunError:
        if newest is not None:
            _publish(*newest, arguments)  # no page goes on calling itself live
        raise


def _look_again(arguments: argparse.Namespace, tell: Callable[[str], object]) -> "Callable[[], tuple[Audit, Path] | None]":
    """Build a function that returns the current audit and its page, or None if it has no new data.

    A dump, or an audit's folder: which of them is decided at every look, as either may still have to appear.
    """
    from corral.lab.audit.dump import find_dump
    from corral.lab.audit.tally import DumpAudit

    path: Path = arguments.path
    stream, parts = DumpAudit(_rules(arguments)), frozenset[Path]()

    def look() -> "tuple[Audit, Path] | None":
        nonlocal parts
        if (path / "audit.json").is_file():
            there = frozenset((_existing_audit(arguments) / "audit.parquet").glob("update-*.parquet"))
            if there and there == parts:
                return None
            found = _read_folder(path)
            parts = there
            return found
        dump = find_dump(path)
        if dump.texts:
            raise RunError(
                f"{path} holds logged texts ({dump.format}), which two models have to rescore: audit it without --live."
            )
        done = 0

        def add_bytes(size: int) -> None:
            nonlocal done
            before, done = done >> 24, done + size
            if done >> 24 > before:  # of a dump that takes a while
                tell(f"Reading, {done / 1e9:.2f} GB so far.")

        return _describe_dump(dump, stream, arguments) if stream.read(dump, add_bytes, growing=True) else None

    return look


def _status(audit: "Audit") -> str:
    """Training progress and the audit's findings so far, in 80 columns for a terminal."""
    from corral.lab.audit.words import percent

    ball = audit.verdicts["clipped"]["kl"]
    newest = f"{'update' if audit.whole else 'step'} {audit.by_step[-1]['step']:,}"
    inside = f", {percent(ball.inside)} of these inside the KL ball" if ball.blocked else ""
    clipped = percent(ball.share)
    return f"{time.strftime('%H:%M:%S')}  {newest}, {count(ball.tokens, 'token')}: would clip {clipped}{inside}"


class _Say(Protocol):
    def __call__(self, text: str, *, brief: bool = False) -> None: ...


@contextmanager
def _status_line(*, quiet: bool) -> Iterator[_Say]:
    """Status line that is overwritten in a terminal; elsewhere a new line after each change, unless it is brief."""
    from rich.live import Live
    from rich.text import Text

    from corral.lab.run.view import PatientConsole

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
