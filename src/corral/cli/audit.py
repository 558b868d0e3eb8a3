"""`corral audit`: what a run's updates did to its policy, as sentences, tables and a page."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.cli import INTERRUPTED, check_installed, given_flags, refuse
from corral.cli.audit_dump import TEXT_FLAGS, audit_logged, rescore
from corral.cli.audit_live import check_live, follow
from corral.cli.audit_measured import measured_audit
from corral.cli.audit_result import check_files, finish
from corral.cli.eval import FLAGS, eval_settings
from corral.cli.kind import check_kind, kind_of_run
from corral.cli.train import TOOLS, UNSAFE, quiet_libraries
from corral.validate import RunError

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
    from corral.audit.dump.find import find_dump

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
    from corral.llm.audit_models import audit_pair, audit_run
    from corral.run.view import make_view

    settings, rules, say = _settings(arguments), _rules(arguments), make_view(quiet=arguments.quiet).say
    if path is not None:
        return audit_run(path, settings, rules, arguments.out or path / "audit", say)
    label = "-".join("".join(x if x.isalnum() or x in "._" else "-" for x in name).strip("-.")[-40:] for name in (old, new))
    return audit_pair(old, new, settings, rules, arguments.out or Path("audits") / label, say)


def _settings(arguments: argparse.Namespace) -> Any:
    """The flags, each of its setting's type."""
    from corral.llm.eval_settings import EvalSettings

    chosen = eval_settings(arguments, ("tools", *_MODEL_FLAGS))
    return EvalSettings(**{"model": "", "problems": 16, "samples": 8, "backend": "transformers", **chosen})


def _rules(arguments: argparse.Namespace) -> Any:
    """The rules to audit by."""
    from corral.audit.rules import Rules
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
