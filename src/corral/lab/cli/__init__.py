"""Command line of corral: `corral COMMAND`. `corral --help` lists the commands."""

import argparse
import errno
import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import corral
from corral.lab.jobs import Kind
from corral.lab.run.files import DENIED, read_json
from corral.lab.run.settings import read_file, recipes
from corral.lab.run.text import visible, visible_output
from corral.trl import IncompatibleTRL
from corral.validate import RunError, nearest, pip_install

FAILED, INTERRUPTED = 1, 128 + signal.SIGINT
"""Exit statuses of commands that failed or were interrupted."""

COMMANDS = {
    "train": "train a language model or a robot under a trust region; without arguments, the embedded demo",
    "compare": "objectives or algorithms side by side: equal budgets, seeds, a sweep, and what may be claimed",
    "leaderboard": "rank an objective of your own in one cell of the table: passes, lag, tuned rates, fresh seeds",
    "eval": "how well a run or a model does on what is held out: pass@k, or return, success and smoothness, with intervals",
    "audit": "what clipping did to the run you have: true divergences, tokens blocked or passed wrongly, what others would do",
    "export": "a run's weights as a plain model folder, or a robot's policy as a file that NumPy alone can read",
    "explore": "a page that shows three trust regions around a policy that you drag",
    "report": "runs as one page: curves, intervals, who beats whom, completions, failures",
    "bench": "run a benchmark again on this machine, from a source checkout",
    "explain": "what an objective, a recipe, a task, an algorithm or a setting is",
    "doctor": "what is installed, what is supported, what is missing and how to get it",
}
"""Commands of corral with their help texts.
Each command is a module in this folder with `add_arguments(parser)` and `run(arguments)`, imported on use."""

_OPEN = ("train", "compare", "leaderboard", "bench")
"""Commands that accept flags unknown to the argument parser, because each setting of a run can be given as a flag.
Their `run` takes these words as `rest`."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence, without argparse's usage text."""

    names: Callable[[], str] | None = None
    """Function that returns the end of the help text. It is called only on --help, since its imports take long."""

    def format_help(self) -> str:
        return super().format_help() + (self.names() if self.names is not None else "")

    def error(self, message: str) -> NoReturn:
        """Print the parse error, and exit with status 2."""
        raise SystemExit(refuse(f"{message}. `{self.prog} --help` lists what there is."))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status.
    It is 0 for success, 1 for a failure, 2 if not understood, and 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="corral",
        description="Trust regions for reinforcement learning.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<11} {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"corral {corral.__version__}")
    parser.add_argument("command", nargs="?", help="one of those below; `corral COMMAND --help` says more")
    with visible_output():
        arguments = parser.parse_args(words[:1])
        if arguments.command is None:
            parser.print_help()
            return 0
        if arguments.command not in COMMANDS:
            return refuse(f"there is no command {arguments.command!r}.{nearest(arguments.command, COMMANDS)}")
        name = arguments.command
        module = importlib.import_module(f"{__name__}.{name}")
        layout = argparse.RawDescriptionHelpFormatter
        parser = _Parser(prog=f"corral {name}", description=COMMANDS[name], formatter_class=layout, allow_abbrev=False)
        module.add_arguments(parser)
        arguments, rest = parser.parse_known_args(words[1:])
        if rest and name not in _OPEN:
            return refuse(f"{name} has no {rest[0]!r}. `corral {name} --help` lists what it has.")
        # A RunError, a TRL that does not fit and a place that may not be used become a sentence.
        try:
            return int(module.run(arguments, rest) if name in _OPEN else module.run(arguments))
        except (RunError, IncompatibleTRL) as error:
            return refuse(str(error), FAILED)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                return refuse(f"{error.strerror}: {str(error.filename)[:80]}…", FAILED)
            if error.errno not in DENIED or error.filename is None:
                raise
            return refuse(f"{error.filename} cannot be used: {error.strerror}. Choose another place.", FAILED)


def refuse(sentence: str, status: int = 2) -> int:
    """Print the reason for a refusal on stderr, and return the exit status."""
    sys.stderr.write(f"corral: {visible(sentence)}\n")
    return status


def say(*lines: str) -> None:
    """Print lines on stdout without markup, since names and paths may contain any character."""
    sys.stdout.write("".join(f"{visible(line)}\n" for line in lines))


def given_flags(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the flags that were given, keyed by setting name: --top-p becomes top_p."""
    values = {name.replace("-", "_"): vars(arguments)[name.replace("-", "_")] for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_installed(what: str, packages: Iterable[str], extra: str) -> None:
    """Raise a RunError if a Python package is missing, such as `reports need rliable. Install them: …`."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        raise RunError(f"{what} {', '.join(absent)}. Install them: {pip_install(extra)}.")


_NEEDED: dict[Kind, tuple[str, ...]] = {
    "llm": ("transformers", "trl", "accelerate", "rich"),
    "robot": ("gymnasium", "mujoco", "rich", "pyarrow"),
}
"""Packages required for training, keyed by kind of run (llm or robot)."""


def kind_of(arguments: argparse.Namespace) -> Kind:
    """Find the kind of run (llm or robot) that command-line flags describe.
    It follows from the run, the recipe's folder, or an `environment` in the file."""
    if arguments.resume is not None:
        return kind_of_run(arguments.resume)
    if arguments.recipe is not None:
        found = recipes().get(arguments.recipe)
        return "robot" if found is not None and found.parent.name == "robot" else "llm"
    if arguments.config is not None:
        return "robot" if arguments.environment or "environment" in read_file(arguments.config) else "llm"
    return "robot" if arguments.environment else "llm"


def recipe_of(arguments: argparse.Namespace) -> str | None:
    """Choose the recipe: the flag --recipe, or the demo if neither a settings file nor an environment is given."""
    return arguments.recipe or (None if arguments.config or arguments.environment else "demo")


def kind_of_run(path: Path) -> Kind:
    """Return the kind of the run in a folder, "llm" or "robot". Returns "llm" if the folder holds no run."""
    try:
        content = read_json(path / "config.json")
        return "robot" if "environment" in content["settings"] else "llm"
    except (OSError, ValueError, KeyError, TypeError):
        return "llm"


def check_kind(kind: Kind, what: str) -> None:
    """Raise a RunError if a package is missing for `what`, such as "training", with this kind of run."""
    check_installed(f"{what} needs", _NEEDED[kind], kind)
