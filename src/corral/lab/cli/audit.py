"""`corral audit`: a dump, a run or an audit's folder, and what clipping did there."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
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
    from corral.lab.audit.stream import Columns, StreamSummary
    from corral.lab.audit.summary import Ball

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
    from corral.lab.audit.models import audit_texts
    from corral.lab.jobs.llm.eval_settings import EvalSettings

    settings = EvalSettings(model=names[0], **eval_settings(arguments, TEXT_FLAGS))
    out = arguments.out or Path("audits") / _label(dump.path)
    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        return audit_texts(dump, (names[0], names[1]), settings, rules, out, progress)


def audit_logged(dump: "Dump", rules: "Rules", arguments: argparse.Namespace) -> Audited:
    """One pass over a dump."""
    from corral.lab.audit.stream import audit_dump

    with _progress_bar(dump.bytes, quiet=arguments.quiet) as progress:
        summary, sample = audit_dump(dump, rules, progress)
    return describe_dump(dump, rules, summary, sample, arguments)


def describe_dump(
    dump: "Dump", rules: "Rules", summary: "StreamSummary", sample: "Columns", arguments: argparse.Namespace
) -> Audited:
    """The numbers of a dump, and what shows them."""
    from corral.lab.audit.page import write_stream_page
    from corral.lab.audit.stream import with_texts
    from corral.lab.audit.threshold import AUDITED
    from corral.lab.cli.audit_view import show_stream

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
    from corral.lab.audit.models import load_tokenizer

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

    from corral.lab.run.view import PatientConsole

    console = PatientConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("reading"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)


def measured_audit(folder: Path, arguments: argparse.Namespace) -> Audited:
    """An audit in a folder, with what shows it."""
    from corral.lab.audit.folder import read_audit
    from corral.lab.audit.page import write_audit_page
    from corral.lab.audit.stream import Tally
    from corral.lab.audit.summary import summarise, table_columns
    from corral.lab.audit.tokens import audit_tokens
    from corral.lab.cli.audit_view import show

    info, table = read_audit(folder)
    summary = summarise(table, info["rules"])

    def numbers() -> dict[str, Any]:
        tally = Tally(info["rules"]["kl_bound"], info["rules"]["tv_bound"])
        tally.add(audit_tokens(table_columns(table)))
        tally.sequences = summary.sequences
        verdicts = {name: _plain_row(row) for name, row in summary.verdicts.items()}
        return {
            **tally.summary().as_dict(),
            "verdicts": verdicts,
            "what": info.get("what"),
            "rules": info["rules"],
            "updates_made": info["updates_made"],
            "one_update_per_batch": info.get("one_update_per_batch"),
        }

    return Audited(
        page=folder / "audit.html",
        write_page=lambda page, live: write_audit_page(info, table, summary, page, live),
        numbers=numbers,
        show=lambda last: show(summary, info, last, quiet=arguments.quiet),
        clipping=summary.verdicts["clipped"]["kl"],
        newest=f"update {table['update'][-1].as_py():,}",
    )


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose values may be dataclasses, for JSON."""
    return {key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value for key, value in row.items()}


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
    from corral.lab.audit.folder import NothingYet

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
        from corral.lab.audit.stream import DumpAudit

        self.arguments, self.rules, self.check_audit, self.tell = arguments, rules, check_audit, tell
        self.stream = DumpAudit(rules)
        self.parts: frozenset[Path] = frozenset()

    def look(self) -> Audited | None:
        """The audit of what is there now; None if that is no more than last time."""
        from corral.lab.audit.dump import find_dump

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
    from corral.lab.audit.words import percent

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


_NEEDED = ("numpy", "pyarrow", "rich")
"""Packages without which an audit cannot be shown; what compares models needs more."""

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
    """The flags."""
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
    """Measure models, unless there is an audit already, and show it."""
    if rest:
        return refuse(f"audit has no {rest[0]!r}. `corral audit --help` lists what it has.")
    check_installed("audits need", _NEEDED, "report")
    check_files(arguments)
    from corral.lab.audit.dump import find_dump

    path: Path | None = arguments.path
    check_live(arguments)
    if arguments.live:
        _refuse_flags(arguments, ("old", "new", "model", *_MODEL_FLAGS, "out"), "--live loads no model")
        return follow(arguments, _rules(arguments), lambda: _existing_audit(arguments))
    try:
        if path is not None and (path / "audit.json").is_file():
            return finish(measured_audit(_existing_audit(arguments), arguments), arguments)
        if path is None or (path / "config.json").is_file():
            return finish(measured_audit(_audit_models(arguments), arguments), arguments)
        dump = find_dump(path)
        if dump.texts:
            names = [name for name in _MODEL_FLAGS if name not in TEXT_FLAGS]
            _refuse_flags(arguments, ("old", "new", "tokenizer", *names), f"{path} holds logged texts")
            return finish(measured_audit(rescore(dump, _rules(arguments), arguments), arguments), arguments)
        _refuse_flags(arguments, ("old", "new", "model", *_MODEL_FLAGS, "out"), f"{path} is a dump of logged tokens")
        return finish(audit_logged(dump, _rules(arguments), arguments), arguments)
    except KeyboardInterrupt:
        return refuse("interrupted.", INTERRUPTED)


def _existing_audit(arguments: argparse.Namespace) -> Path:
    """The folder of an audit that is measured; a RunError for flags that could not change it."""
    _refuse_flags(
        arguments,
        ("old", "new", "model", "tokenizer", *_MODEL_FLAGS, "clip", "kl-bound", "tv-bound", "out"),
        f"{arguments.path} is an audit that was measured already",
    )
    return arguments.path


def _refuse_flags(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    given = [name for name, value in given_flags(arguments, names).items() if value != []]
    given += [name for name in ("set", "tools", "unsafe_code_execution") if vars(arguments)[name]]
    if given:
        raise RunError(f"{why}, so --{given[0].replace('_', '-')} cannot be given with it.")


def _audit_models(arguments: argparse.Namespace) -> Path:
    """Compare saved weights; the folder that it was written to."""
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
    from corral.lab.run.view import make_view

    settings, rules, say = _settings(arguments), _rules(arguments), make_view(quiet=arguments.quiet).say
    if path is not None:
        return audit_run(path, settings, rules, arguments.out or path / "audit", say)
    label = "-".join("".join(x if x.isalnum() or x in "._" else "-" for x in name).strip("-.")[-40:] for name in (old, new))
    return audit_pair(old, new, settings, rules, arguments.out or Path("audits") / label, say)


def _settings(arguments: argparse.Namespace) -> Any:
    """The flags, each of its setting's type."""
    from corral.lab.jobs.llm.eval_settings import EvalSettings

    chosen = eval_settings(arguments, ("tools", *_MODEL_FLAGS))
    return EvalSettings(**{"model": "", "problems": 16, "samples": 8, "backend": "transformers", **chosen})


def _rules(arguments: argparse.Namespace) -> Any:
    """The rules to audit by."""
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
