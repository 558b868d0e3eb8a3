"""Command `corral train`: start training with settings from a recipe, a file and flags."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.lab.cli import FAILED, INTERRUPTED, check_kind, given_flags, kind_of, recipe_of, refuse, say
from corral.lab.jobs import Kind, job_module, resolve
from corral.lab.run.settings import recipes
from corral.lab.run.text import columns
from corral.validate import RunError, UserCodeError

FLAGS = {
    "model": "tiny, tiny-sums, smollm2, gemma, a folder, a hub id, or a run: its newest checkpoint",
    "task": "what to learn (`corral explain TASK`), or module:Class",
    "instruction": "what the model reads, with {problem} where the task's prompt goes",
    "objective": "how: troll, dppo, ppo_clip, … (`corral explain NAME`), or your own: file.py:function",
    "seed": "random seed",
    "steps": "batches of rollouts",
    "environment": "a robot's: one of corral's, a Gymnasium id or module:Class (docs/environments.md)",
    "algorithm": "of a robot: tce, bbrl, top_erl, sb3-ppo, sb3-sac, …",
    "iterations": "of a robot: batches of episodes",
    "learning-rate": "of AdamW; auto finds one",
    "tool": "who answers within completions: calculator, or module:Class (docs/tools.md)",
    "environment-factory": "TRL's: an environment whose methods a chat model calls, module:Class or file.py:Class",
    "lora.r": "rank of an adapter to train instead of all weights; all of peft's LoraConfig: --lora.lora_alpha, …",
    "guard": "on a collapse: warn, stop or off",
    "report-to": "none, tensorboard, wandb, trackio, or several of them with commas between",
}
"""Settings whose flags are listed in the help of `corral train`.
Every other setting has a flag too, or can be given with --set."""

_EPILOG = """
Any setting can be given as a flag or with --set: --num-generations 16, --set objective_config.bound=0.1.
Later ones win: recipe, then file, then --smoke, then flags. Without --recipe and --config, the recipe is `demo`.
`corral explain settings` lists all settings of a run, `corral explain NAME` says what a recipe, task, objective,
algorithm or setting is. TRL's GRPOConfig has more settings: each of them is a flag too.
With --resume, --steps (of a robot --iterations) extends a run; --guard, --report-to, --quiet and a robot's --simulator
can be changed. Data that have changed since are refused, unless with --changed-data.
"""

_REWARD = "pay for module:function or file.py:function, with a weight file.py:function=0.5; repeatable (docs/rewards.md)"

TOOLS = "TRL's: a function that a chat model may call, module:function or file.py:function; repeatable (docs/tools.md)"

UNSAFE = "where the system has no sandbox, run the model's programs as yourself (docs/safety.md)"

_RESUME_SETTINGS: dict[Kind, tuple[str, ...]] = {
    "llm": ("guard", "report_to", "steps"),
    "robot": ("guard", "iterations", "report_to", "simulator"),
}
"""Settings that can be changed when a run is resumed, keyed by kind of run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral train` to the parser."""
    parser.epilog, parser.names = _EPILOG, _names  # type: ignore[attr-defined]  # of the command line's own parser
    add_setting_flags(parser, FLAGS)
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run; by default a new one under runs/")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="resume the run in this folder")
    parser.add_argument("--changed-data", action="store_true", help="with --resume: go on although the data have changed")
    parser.add_argument("--unsafe-code-execution", action="store_true", help=UNSAFE)
    parser.add_argument("--smoke", action="store_true", help="two steps with next to nothing, to see it run; under smoke-runs/")
    parser.add_argument(
        "--dry-run", action="store_true", help="settings as a file for --config, what would be fetched, memory; trains nothing"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--quiet", action="store_true", help="say only what is wrong, and how it ended")
    output.add_argument("--verbose", action="store_true", help="show every metric, and every setting in the heading")


def add_setting_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add the flags for settings to the parser: a recipe, a file, `flags` with their help, rewards, and --set."""
    parser.add_argument("--recipe", metavar="NAME", help="settings that ship with corral")
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in a TOML or YAML file")
    for name, what in flags.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=what)
    parser.add_argument("--reward", metavar="FUNCTION", action="append", help=_REWARD)
    parser.add_argument("--tools", metavar="FUNCTION", action="append", help=TOOLS)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any other setting; repeatable")


def _names() -> str:
    """Return the names of recipes and tasks, to print below the help."""
    from corral.lab.tasks import names

    return f"\nrecipes:\n{columns(recipes(studies=False))}\ntasks:\n{columns(names())}\n"


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Train or resume a run, or print the plan with --dry-run. Returns the exit status."""
    try:
        kind = kind_of(arguments)
        check_kind(kind, "training")
        if arguments.resume:
            summary = _resume(kind, arguments, rest)
        elif arguments.changed_data:
            raise RunError("--changed-data goes with --resume DIR: a new run begins with the data that it finds.")
        else:
            recipe = recipe_of(arguments)
            unsafe = [("task_config.unsafe_code_execution", "true")] if arguments.unsafe_code_execution else []
            given = [*given_settings(arguments, rest), *unsafe]
            settings = resolve(kind, recipe, arguments.config, given, smoke=arguments.smoke)
            if kind == "llm":
                if not arguments.dry_run:  # which names missing packages besides everything else
                    settings.check_packages()
                quiet_libraries()
            if arguments.dry_run:
                say(*job_module(kind, "prepare").rehearse(settings))
                return 0
            train = job_module(kind, "train").train
            how = {"quiet": arguments.quiet, "verbose": arguments.verbose, "smoke": arguments.smoke}
            summary = train(settings, out=arguments.out, **how).summary
    except RunError as error:
        if error.__cause__ is not None and isinstance(error, UserCodeError):
            traceback.print_exception(error.__cause__)  # the user's own function: they need to see where
        raise
    except KeyboardInterrupt:
        return refuse("interrupted before the first step.", INTERRUPTED)
    return {"finished": 0, "interrupted": INTERRUPTED}.get(summary["stopped"], FAILED)


def _resume(kind: Kind, arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Resume a run with its stored settings, except for its length and settings that do not affect the training."""
    given = dict(given_settings(arguments, rest))
    changes = {key: given.pop(key, None) for key in _RESUME_SETTINGS[kind]}
    others = ("recipe", "config", "out", "smoke", "dry_run", "unsafe_code_execution")
    named = [name.replace("_", "-") for name in others if vars(arguments)[name]]
    if given or named:
        allowed = ", ".join(f"--{key.replace('_', '-')}" for key in _RESUME_SETTINGS[kind])
        raise RunError(
            f"--resume uses the run's own settings, so {', '.join([*given, *named])} cannot be given with it; only "
            f"{allowed}, --quiet and --verbose can."
        )
    if kind == "llm":
        quiet_libraries()
    elif arguments.changed_data:
        raise RunError(f"--changed-data is for language models, and {arguments.resume} is a robot's run, which has no data.")
    how = {"quiet": arguments.quiet, "verbose": arguments.verbose}
    more = {"changed_data": arguments.changed_data} if kind == "llm" else {}
    summary: dict[str, Any] = job_module(kind, "train").resume(arguments.resume, **how, **changes, **more).summary
    return summary


def given_settings(arguments: argparse.Namespace, rest: list[str]) -> list[tuple[str, Any]]:
    """Collect settings from the command line in order: named flags, --set, other flags, rewards, tools."""
    pairs = [*given_flags(arguments, FLAGS).items()]
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise RunError(f"--set takes key=value; got {text!r}.")
        pairs.append((key, value))
    rest = list(rest)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise RunError(f"{flag!r} belongs to no flag. Settings are given as --key value, a recipe as --recipe NAME.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        pairs.append((key.replace("-", "_"), value))
    # All rewards and tools count, however they were given: of any other setting the last one does.
    for name in ("reward", "tools"):
        every = [*(vars(arguments)[name] or []), *(value for key, value in pairs if key == name)]
        pairs += [(name, every)] if every else []
    return pairs


def quiet_libraries() -> None:
    """Silence telemetry, progress bars, and library messages below the level of a warning."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt to reach a hub that is not there
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
