"""Command `corral audit`: measure which tokens are blocked by clipping, in logged data, in a run or between two models."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.lab.cli import INTERRUPTED, check_installed, check_kind, given_flags, kind_of_run, refuse
from corral.lab.cli.eval import FLAGS, eval_settings
from corral.lab.cli.train import TOOLS, UNSAFE, quiet_libraries
from corral.lab.run.files import write_json
from corral.lab.run.text import visible
from corral.provenance import plain
from corral.validate import RunError, run_errors

if TYPE_CHECKING:
    from corral.lab.audit.dump import Dump
    from corral.lab.audit.limits import Limit
    from corral.lab.audit.rules import Rules
    from corral.lab.audit.tally import Audit

_BEYOND = 3
"""Exit status of `corral audit` if a number exceeds its limit in --fail-above or --fail-if."""

_NEEDED = ("numpy", "pandas", "pyarrow", "rich", "jinja2")
"""Python packages needed to show an audit. Comparing models needs more packages."""

_INTERVAL = 10.0
"""Seconds between two polls of the audited files with --live."""

_LISTED = 8
"""Largest number of blocked tokens listed in a terminal. The audit's page lists more."""

wait: Callable[[float], object] = time.sleep
"""Function that waits between two polls of the audited files. Tests replace it."""

_MODEL_FLAGS = {
    "task": "what to ask; by default a run's own task",
    "problems": "held-out problems (16)",
    "samples": "completions of each (8)",
    "temperature": "of the policy (1)",
    "batch-size": "prompts at a time (256)",
    **{name: FLAGS[name] for name in ("instruction", "max-tokens", "seed", "device", "tool", "environment-factory")},
}

_RULES = ("clip", "kl_bound", "tv_bound")
_TEXT_FLAGS = ("temperature", "device", "problems")
_SETTINGS = ("set", "tools", "unsafe_code_execution", *_MODEL_FLAGS)

_TAKEN: dict[str, Sequence[str]] = {
    "{path} is an audit that was measured already": (),
    "{path} is a dump of logged tokens": (*_RULES, "tokenizer"),
    "{path} holds logged texts": (*_RULES, *_TEXT_FLAGS, "model", "out"),
    "{path} is a run": (*_RULES, *_SETTINGS, "out"),
    "two models are compared": (*_RULES, *_SETTINGS, "old", "new", "out"),
    "--live loads no model": (*_RULES, "tokenizer"),
}
"""Flags that each kind of audit input accepts, besides the output flags. The keys are parts of error sentences."""

_OUTPUT = ("path", "page", "json", "fail_above", "fail_if", "live", "interval", "quiet")

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
Exit status: 0 fine, 1 failed, 2 not understood, 3 beyond --fail-above or --fail-if, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral audit` to the parser."""
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
    wrong = "exit with 3 if more of all tokens would be blocked inside the KL ball"
    beyond = "exit with 3 if a number is beyond a limit: 'ess<0.7', 'wrong>2%%'; repeatable, docs/audit.md lists the numbers"
    parser.add_argument("--fail-above", metavar="PERCENT", type=float, help=wrong)
    parser.add_argument("--fail-if", metavar="EXPRESSION", action="append", default=[], help=beyond)
    parser.add_argument("--live", action="store_true", help="of dumps and audits that grow: write the page again and again")
    parser.add_argument("--interval", metavar="SECONDS", type=float, help="of --live: between two looks at the files (10)")
    parser.add_argument("--unsafe-code-execution", action="store_true", help=UNSAFE)
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong, and the sentences")


def run(arguments: argparse.Namespace) -> int:
    """Run the audit, or read a stored audit, and show the result."""
    check_installed("audits need", _NEEDED, "report")
    _check(arguments)
    look = _reader(arguments)
    if arguments.live:
        return _follow(look, arguments)
    try:
        found = look()
        assert found is not None, "only --live looks again"
        return _finish(*found, arguments)
    except KeyboardInterrupt:
        return refuse("interrupted.", INTERRUPTED)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse unreadable input, unwritable output, impossible limits, and `--live` without growing files, before computing."""
    path, interval, limit = arguments.path, arguments.interval, arguments.fail_above
    if path is not None:
        try:
            path.stat()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"{str(path)[:200]} cannot be read: {reason}.") from error
    if limit is not None and not 0 <= limit <= 100:
        raise RunError(f"--fail-above is a percentage from 0 to 100; got {limit:g}.")
    if arguments.fail_if:
        _limits(arguments)
    if arguments.json not in (None, "-") and not Path(arguments.json).parent.is_dir():
        raise RunError(f"there is no folder {Path(arguments.json).parent} to write {Path(arguments.json).name} into.")
    if interval is not None and not arguments.live:
        raise RunError("--interval is the time between two looks of --live, which is not given.")
    if not arguments.live:
        return
    if interval is not None and not 0.1 <= interval < math.inf:
        raise RunError(f"--interval is a number of seconds, 0.1 or more; got {interval:g}.")
    if arguments.json == "-":
        raise RunError("--live writes its numbers again and again: name a file for --json, not the standard output.")
    if path is None or (path / "config.json").is_file():
        raise RunError(
            "--live follows a dump of logged tokens, or the folder of corral.llm.audit(trainer, out=…); the checkpoints of a "
            "run, and two models, are compared without it."
        )
    _refuse_others(arguments, "--live loads no model")


def _refuse_others(arguments: argparse.Namespace, kind: str) -> None:
    """Refuse flags that the kind of audit input does not accept. `kind` is a key of `_TAKEN`."""
    taken = {name.replace("-", "_") for name in (*_OUTPUT, *_TAKEN[kind])}
    for name, value in vars(arguments).items():
        if name not in taken and value not in (None, [], False):
            why = kind.format(path=arguments.path)
            raise RunError(f"{why}, so --{name.replace('_', '-')} cannot be given with it.")


def _reader(arguments: argparse.Namespace) -> "Callable[[], tuple[Audit, Path] | None]":
    """Build a function that returns the current audit and its page's path, or with --live None if no new data came.

    With --live, a dump and an audit's folder are told apart at every look, as either may still have to appear.
    """
    from corral.lab.audit.dump import find_dump
    from corral.lab.audit.folder import read_audit
    from corral.lab.audit.tally import DumpAudit, audit_table
    from corral.lab.report.read import is_run

    path, live, rules = arguments.path, arguments.live, _rules(arguments)
    stream, seen = DumpAudit(rules), frozenset[Path]()

    def look() -> "tuple[Audit, Path] | None":
        nonlocal seen
        folder, parts = path, frozenset[Path]()
        if path is not None and (path / "audit.json").is_file():
            _refuse_others(arguments, "{path} is an audit that was measured already")
            parts = frozenset((path / "audit.parquet").glob("update-*.parquet"))
            if live and parts and parts == seen:
                return None
        elif path is None or (not live and (path / "config.json").is_file() and is_run(path)):
            folder = _audit_models(arguments, rules)
        else:
            dump = find_dump(path)
            if not dump.form.texts:
                return read_dump(dump)
            if live:
                raise RunError(
                    f"{path} holds logged texts ({dump.format}), which two models have to rescore: audit it without --live."
                )
            folder = _rescore(dump, arguments, rules)
        found = audit_table(*read_audit(folder)), folder / "audit.html"
        seen = parts
        return found

    def read_dump(dump: "Dump") -> "tuple[Audit, Path] | None":
        _refuse_others(arguments, "{path} is a dump of logged tokens")
        with _progress_bar(dump.bytes, quiet=live or arguments.quiet) as progress:
            if not stream.read(dump, progress, growing=live) and live:
                return None
        decode = {} if arguments.tokenizer is None else {"texts": partial(_token_texts, arguments.tokenizer)}
        audit, folder = stream.result(dump, **decode), Path("audits")
        folder.mkdir(exist_ok=True)  # below the current folder, since nothing is written to a dump
        return audit, folder / f"{_label(dump.path, 80)}.html"

    return look


def _token_texts(name: str, ids: Sequence[int]) -> dict[int, str]:
    """Decode token ids to texts with a model's tokenizer."""
    check_kind("llm", "a tokenizer")
    quiet_libraries()
    from corral.lab.models.load import load_skeleton

    tokenizer: Any = load_skeleton(name)[1]
    known = len(tokenizer)
    return {token: tokenizer.decode([token]) if 0 <= token < known else f"⟨{token}⟩" for token in ids}


def _label(name: Path | str, most: int) -> str:
    """Turn a model's or a dump's name into a file name of at most `most` characters."""
    text = name.resolve().name if isinstance(name, Path) else name
    return "".join(x if x.isalnum() or x in "._-" else "-" for x in text).strip("-.")[-most:] or "dump"


def _rescore(dump: "Dump", arguments: argparse.Namespace, rules: "Rules") -> Path:
    """Rescore the texts of a dump under the two models given by --model, and return the audit's folder."""
    _refuse_others(arguments, "{path} holds logged texts")
    if len(arguments.model) != 2:
        raise RunError(
            f"{dump.path} holds texts and scores without log-probs ({dump.format}): name the model that sampled and the one "
            f"that came out of training, --model OLD --model NEW, to have them rescored."
        )
    check_kind("llm", "rescoring texts")
    quiet_libraries()
    from corral.lab.audit.models import audit_texts
    from corral.lab.jobs.llm.eval_settings import EvalSettings

    settings = EvalSettings(model=arguments.model[0], **eval_settings(arguments, _TEXT_FLAGS))
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        out = arguments.out or Path("audits") / _label(dump.path, 80)
        return audit_texts(dump, arguments.model, settings, rules, out, progress)


def _audit_models(arguments: argparse.Namespace, rules: "Rules") -> Path:
    """Audit two models, or the checkpoints of a run, and return the audit's folder."""
    path, old, new = arguments.path, arguments.old, arguments.new
    if path is None and (old is None or new is None):
        raise RunError("audit takes an audit's folder, a dump, a run's folder, or --old MODEL --new MODEL --task TASK.")
    _refuse_others(arguments, "two models are compared" if path is None else "{path} is a run")
    if path is not None and kind_of_run(path) == "robot":
        raise RunError(f"{path} is a robot's run; audits are about the tokens of language models.")
    check_kind("llm", "auditing models")
    quiet_libraries()
    from corral.lab.audit.models import audit_pair, audit_run
    from corral.lab.jobs.llm.eval_settings import EvalSettings
    from corral.lab.run.view import make_view

    given = {"problems": 16, "samples": 8, "backend": "transformers", **eval_settings(arguments, ("tools", *_MODEL_FLAGS))}
    settings, say = EvalSettings(**{"model": "", **given}), make_view(quiet=arguments.quiet).say
    if path is not None:
        return audit_run(path, settings, rules, arguments.out or path / "audit", say)
    out = arguments.out or Path("audits") / f"{_label(old, 40)}-{_label(new, 40)}"
    return audit_pair(old, new, settings, rules, out, say)


def _rules(arguments: argparse.Namespace) -> "Rules":
    """Create the clipping rules to audit from the command-line flags."""
    from corral.lab.audit.rules import Rules
    from corral.objective import make_objective

    given = given_flags(arguments, ("kl_bound", "tv_bound"))
    if arguments.clip is not None:
        low, _, high = arguments.clip.partition(",")
        try:
            given |= {"clip": make_objective("ppo_clip", clip_low=float(low), clip_high=float(high or low))}
        except ValueError as error:
            raise RunError(f"--clip takes LOW,HIGH such as 0.2,0.28; got {arguments.clip!r}: {error}") from error
    with run_errors():
        return Rules(**given)


@contextmanager
def _progress_bar(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Context with a progress bar on stderr, if stderr is a terminal. Yields a function to report the bytes read."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from corral.lab.run.view import PatientConsole

    console = PatientConsole(stderr=True)
    columns = (TextColumn("reading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task("reading", total=total))


def _publish(audit: "Audit", page: Path, arguments: argparse.Namespace, live: float | None = None) -> str:
    """Write the audit's page and its --json file, and return a sentence with the page's path."""
    from corral.lab.audit.page import write_page

    page = arguments.page or page
    size = write_page(audit, page, live)
    if arguments.json not in (None, "-"):
        write_json(Path(arguments.json), audit.as_dict())
    return f"The page is in {page} ({size / 1e6:.1f} MB)."


def _finish(audit: "Audit", page: Path, arguments: argparse.Namespace) -> int:
    """Write an audit's page, JSON and terminal output. Returns 0, or 3 after printing each limit that is exceeded."""
    last = _publish(audit, page, arguments)
    if arguments.json == "-":
        sys.stdout.write(json.dumps(plain(audit.as_dict()), indent=2, allow_nan=False) + "\n")
    else:
        _show(audit, last, quiet=arguments.quiet)
    return max((refuse(text, _BEYOND) for limit in _limits(arguments) if (text := limit.exceeded(audit))), default=0)


def _show(audit: "Audit", last: str, *, quiet: bool) -> None:
    """Print an audit in the terminal: its findings as sentences, tables (unless quiet), and the path of its page."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from corral.lab.audit.words import blocked_rows, bucket_rows, sentences, threshold_row, verdict_rows
    from corral.lab.run.view import PatientConsole

    console = PatientConsole()

    def print_table(rows: Sequence[Mapping[str, Any]], *left_out: str, caption: str | None = None) -> None:
        """Print rows of texts as a table, without the columns in `left_out`."""
        table = Table(box=box.SIMPLE_HEAD, caption=caption, pad_edge=False)
        headings = [heading for heading in rows[0] if heading not in left_out] if rows else []
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=place < 2)
        for row in rows:
            table.add_row(*(Text(row[heading]) for heading in headings))
        if rows:
            console.print(table)

    for sentence in sentences(audit):
        console.print(Text(visible(sentence)), soft_wrap=not console.is_terminal)
    if not quiet and audit.whole:
        print_table(verdict_rows(audit, "kl"))
        for title, rows in {"old p": audit.by_probability, "entropy": audit.by_entropy, "advantage": audit.by_sign}.items():
            print_table(bucket_rows(title, rows, audit), "99.9 %, largest TV", "mean KL", "99.9 %, largest KL")
        print_table(blocked_rows(audit)[:_LISTED], "Id")
    elif not quiet:
        rows, best = [], audit.best
        for one in [one for one in audit.thresholds if one.default or one in best]:
            rows.append(threshold_row(one, audit))
            rows[-1]["Bound"] += " *" if one in best else ""
        print_table(rows, *[*rows[0]][-2:], caption="shares of all tokens; ● published, * fewest errors against the KL ball")
    console.print(Text(visible(last)), soft_wrap=True)


def _limits(arguments: argparse.Namespace) -> "list[Limit]":
    """Parse the limits in the flags --fail-above and --fail-if."""
    from corral.lab.audit.limits import Limit, read_limit

    found = [read_limit(text) for text in arguments.fail_if]
    return found if arguments.fail_above is None else [Limit("wrong", ">", arguments.fail_above, "%"), *found]


def _follow(look: "Callable[[], tuple[Audit, Path] | None]", arguments: argparse.Namespace) -> int:
    """Poll the audited files until Ctrl-C, with a status line, then show the audit. Returns the exit status.

    In a terminal the status line is overwritten; elsewhere it is printed anew after each change.
    """
    from rich.live import Live
    from rich.text import Text

    from corral.lab.audit.folder import NothingYet
    from corral.lab.audit.words import status
    from corral.lab.run.view import PatientConsole

    interval: float = arguments.interval or _INTERVAL
    newest: tuple[Audit, Path] | None = None
    console, shown = PatientConsole(quiet=arguments.quiet), ""
    try:
        with Live(Text("Reading …"), console=console, transient=True, auto_refresh=False) as live:
            while True:
                line = shown
                try:
                    if (found := look()) is not None:
                        newest = found
                        _publish(*newest, arguments, live=interval)
                        line = f"{time.strftime('%H:%M:%S')}  {status(newest[0])}"
                except NothingYet as error:
                    line = f"Waiting: {error}"
                if line != shown and console.is_terminal:
                    live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
                elif line != shown:
                    console.print(Text(line), soft_wrap=True)
                shown = line
                wait(interval)
    except KeyboardInterrupt:
        if newest is None:
            return refuse("interrupted before there was anything to audit.", INTERRUPTED)
        return _finish(*newest, arguments)
    except RunError:
        if newest is not None:
            _publish(*newest, arguments)  # no page goes on calling itself live
        raise
