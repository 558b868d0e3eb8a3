"""Command `corral compare`: train several objectives or algorithms with several seeds, and compare the results."""

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.lab.cli import FAILED, INTERRUPTED, check_installed, check_kind, kind_of, recipe_of, refuse, say
from corral.lab.cli.report import NEEDED
from corral.lab.cli.train import FLAGS, UNSAFE, add_setting_flags, given_settings, quiet_libraries
from corral.lab.jobs import Kind, job_module
from corral.lab.jobs.llm.own_objective import find_objective
from corral.lab.run.settings import COMPARE, coerce, nested, read_file, read_recipe, recipes
from corral.objective import objective_names
from corral.validate import RunError, nearest, pip_install

_EPILOG = """
corral compare --recipe demo --objectives reinforce,ppo_clip,dppo,troll --seeds 3
corral compare --recipe via_point_sparse --algorithms tce,bbrl --seeds 5
corral compare --objectives ppo_clip,troll --sweep learning_rate --sweep num_iterations=1,4
corral compare --objectives ppo_clip,troll,troll:gradient=unprojected
corral compare --recipe evidence-a
corral compare --resume runs/20261115-093000-compare-demo

A contestant may have settings of its own, the objective's or any other: troll:bound=0.1:support=union. Some recipes say
themselves whom to compare, over which settings and seeds; flags win.
Every other setting of `corral train` can be given too, and holds for all: --steps 20, --set task_config.n=4.
Without --recipe and --config, the recipe is `demo`. Ctrl-C stops after the steps that run; --resume continues.
"""

_EXAMPLE: dict[Kind, str] = {"llm": "ppo_clip,troll", "robot": "tce,bbrl"}
"""Example of objectives or algorithms to compare, for error messages."""

_SINGULAR = ("objective", "algorithm")
"""Flags of `corral train` that have a plural form in `corral compare`: --objectives, --algorithms."""

_RESUME_FLAGS = "--jobs, --engine, --stall, --retry-failed, --dry-run and --quiet"
"""Names of the flags that can change when a comparison is resumed, for error messages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral compare` to the parser."""
    parser.epilog = _EPILOG
    parser.add_argument("--objectives", metavar="A,B:KEY=VALUE", help="contestants where a language model learns")
    parser.add_argument("--algorithms", metavar="A,B", help="contestants where a robot learns")
    parser.add_argument("--seeds", metavar="N", type=int, help="runs of each contestant (3)")
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B",
        action="append",
        default=[],
        help="try these values; repeatable. learning_rate alone: half-decades around the recipe's rate",
    )
    parser.add_argument(
        "--common",
        action="store_true",
        help="one reduction and one advantage for all objectives: a difference between them is claimed of such runs alone",
    )
    parser.add_argument("--choose-seeds", metavar="N", type=int, help="seeds of the sweep, before those reported on (2)")
    parser.add_argument("--jobs", metavar="N", type=int, help="runs at a time; by default as many as cores or GPUs allow")
    parser.add_argument("--threads", metavar="N", type=int, help="of each run (1 on a CPU)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster")
    parser.add_argument(
        "--stall", metavar="SECONDS", type=float, default=3600.0, help="silence after which a run counts as hung (3600)"
    )
    add_setting_flags(parser, FLAGS | dict.fromkeys(_SINGULAR, argparse.SUPPRESS) | {"seed": "the first random seed (0)"})
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the comparison; by default a new one under runs/")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="resume the comparison in this folder")
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: try failed runs again")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and start nothing")
    parser.add_argument("--unsafe-code-execution", action="store_true", help=UNSAFE)
    parser.add_argument("--smoke", action="store_true", help="two steps with next to nothing, to see it run")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong, and what was found")
    parser.set_defaults(words=None, choose_by="final", extend=0)  # of a recipe, and of `corral leaderboard`


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run a comparison. Returns the exit status, which is 0 if every training run ended well."""
    check_installed("comparisons need", NEEDED, "report")
    if importlib.util.find_spec("rich") is None:  # of either kind, and looked for before it is known which one learns
        more = f"{pip_install('llm')}. For robots the extra is robot"
        return refuse(f"comparisons train, and training needs more: {more}.", FAILED)
    try:
        return _compare(arguments, rest)
    except KeyboardInterrupt:
        return refuse("interrupted. If it had begun, `corral compare --resume DIR` continues it.", INTERRUPTED)


def _compare(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Create a new comparison, or load the comparison to resume, and run it."""
    resuming = arguments.resume is not None
    comparison = _saved_comparison(arguments, rest) if resuming else _new_comparison(arguments, rest)
    # With statistics and figures: only now, when the names on the command line are known to be right.
    from corral.lab.compare.job import describe, run_comparison, set_up
    from corral.lab.compare.record import refuse_taken
    from corral.lab.compare.view import make_compare_view

    if not arguments.stall > 0:
        raise RunError(f"--stall is in seconds, and more than 0; got {arguments.stall}.")
    config = comparison.config if resuming else arguments.config
    if resuming:
        _say_imports(comparison, config)
    prepared = set_up(comparison, config, engine=arguments.engine, jobs=arguments.jobs)
    try:
        if not resuming:
            refuse_taken(comparison)
        view = make_compare_view(quiet=arguments.quiet)
        view.banner(describe(comparison, prepared))
        if arguments.dry_run:
            for record in comparison.records:
                view.end(f"  {record.label}")
            return 0
        comparison.resume(retry_failed=arguments.retry_failed) if resuming else comparison.begin(config)
        status = run_comparison(comparison, prepared, view, stall=arguments.stall)
    finally:
        prepared.engine.close()
        comparison.close()
    return {"finished": 0, "interrupted": INTERRUPTED}.get(status, FAILED)


def _say_imports(comparison: Any, config: Path | None) -> None:
    """Print the user code that a resumed comparison will import from its folder."""
    from corral.lab.jobs.llm.settings import named_code

    settings = job_module(comparison.plan.kind, "settings")
    layers = [
        *([read_file(config)] if config is not None else []),
        nested(comparison.training.settings.items(), settings.TABLES),
    ]
    code = [f"{flag} {path}" for layer in layers for flag, path in named_code(layer)]
    code += [f"--objectives {name}" for name in comparison.plan.contestants if ":" in name.split(" ")[0]]
    code += ["--unsafe-code-execution"] if comparison.training.unsafe_code_execution else []
    if code:
        say(f"using what the comparison's own settings name: {', '.join(code)}")


def _new_comparison(arguments: argparse.Namespace, rest: list[str]) -> Any:
    """Build the comparison that the command line describes, without starting it."""
    if arguments.retry_failed:
        raise RunError("--retry-failed goes with --resume DIR.")
    _take_from_recipe(arguments)
    if arguments.threads is not None and arguments.threads < 1:
        raise RunError(f"--threads must be at least 1; got {arguments.threads}.")
    given = dict(given_settings(arguments, rest))
    for name in _SINGULAR:
        if name in given:
            raise RunError(f"compare takes several: --{name}s {given[name]},….")
    first = coerce("seed", given.pop("seed", 0), int)
    kind = kind_of(arguments)
    contestants = _contestants(kind, arguments)
    _check_names(kind, arguments, given)
    from corral.lab.compare.plan import Training, make_plan, parse_sweeps, rate_grid, share_reduction
    from corral.lab.compare.record import Comparison
    from corral.lab.run.folder import default_name

    training = Training(
        recipe=recipe_of(arguments),
        config=None if arguments.config is None else f"settings{arguments.config.suffix}",
        smoke=arguments.smoke,
        unsafe_code_execution=arguments.unsafe_code_execution,
        settings=given,
        threads=arguments.threads,
    )
    swept = parse_sweeps(arguments.sweep)
    for key, values in swept.items():
        if values is not None and key in given:
            raise RunError(f"`{key}` is both given and swept. Leave out one of the two.")
    _check_installed(kind)
    if arguments.common:
        training = share_reduction(kind, contestants, training, swept, arguments.config)
    # Only the learning rate can be without values.
    sweep = {key: values or rate_grid(kind, contestants, training, arguments.config) for key, values in swept.items()}
    seeds, choosing = (3 if arguments.seeds is None else arguments.seeds), arguments.choose_seeds
    if choosing is not None and not sweep:
        raise RunError("--choose-seeds goes with --sweep: without one there is nothing to choose.")
    plan = make_plan(
        kind, contestants, sweep, seeds=seeds, choosing=2 if choosing is None else choosing, first=first,
        choose_by=arguments.choose_by, extend=arguments.extend,
    )  # fmt: skip
    out = arguments.out or default_name(f"compare-{training.recipe or kind}", smoke=arguments.smoke)
    command = shlex.join(["corral", *(arguments.words or sys.argv[1:])])
    return Comparison(path=out, plan=plan, training=training, command=command)


def _take_from_recipe(arguments: argparse.Namespace) -> None:
    """Take compared methods, sweep and seeds from the recipe's table `[compare]`, unless flags give them."""
    found = recipes().get(arguments.recipe)
    table = read_file(found).get(COMPARE, {}) if found is not None else {}
    if table and arguments.objectives is None and arguments.algorithms is None:
        arguments.objectives = ",".join(table["objectives"])
    if not arguments.sweep:
        arguments.sweep = [f"{key}={','.join(map(str, values))}" for key, values in table.get("sweep", {}).items()]
    if arguments.seeds is None and "seeds" in table:
        arguments.seeds = coerce("seeds", table["seeds"], int)
    arguments.choose_by, arguments.extend = table.get("choose_by", "final"), coerce("extend", table.get("extend", 0), int)


def _contestants(kind: Kind, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Parse the objectives or algorithms to compare. Raises RunError for a wrong flag or an unknown name."""
    objectives, algorithms = arguments.objectives, arguments.algorithms
    what, given, other = ("objective", objectives, algorithms) if kind == "llm" else ("algorithm", algorithms, objectives)
    # Objectives that an imported package has registered are among them.
    known = objective_names() if kind == "llm" else [*job_module("robot", "settings").ALGORITHMS]
    if other is not None:
        learns = "a language model learns" if kind == "llm" else "a robot learns"
        instead = " For a robot, name its recipe: --recipe via_point_sparse." if kind == "llm" else ""
        raise RunError(f"here {learns}, and its contestants are {what}s: --{what}s {_EXAMPLE[kind]}.{instead}")
    if given is None:
        raise RunError(f"whom to compare? --{what}s {_EXAMPLE[kind]}. There are: {', '.join(known)}.")
    names = _split_names(given)
    for name, *pairs in (name.split(" ") for name in names):
        if kind == "llm" and ":" in name:
            find_objective(name)
        elif name not in known:
            raise RunError(f"there is no {what} {name!r}.{nearest(name, known)}")
        if pairs and kind == "robot":
            raise RunError(f"algorithms have no settings of their own here: {name}:{pairs[0]}. Use --sweep.")
        for pair in pairs:
            if not all(pair.partition("=")):
                raise RunError(f"a contestant with settings of its own is {name}:KEY=VALUE; got {name}:{pair}.")
    return names


def _check_names(kind: Kind, arguments: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Refuse unknown settings before torch and statistics are imported.
    Settings of a single compared method are checked later."""
    settings = job_module(kind, "settings")
    layer = nested(given.items(), settings.TABLES)
    recipe = recipe_of(arguments)
    before = [read_recipe(recipe)] if recipe else []
    before += [read_file(arguments.config)] if arguments.config else []
    settings.resolve([*before, {key: value for key, value in layer.items() if key != "objective_config"}])


def _split_names(given: str) -> tuple[str, ...]:
    """Split the methods to compare at commas. `troll:bound=0.1` becomes `troll bound=0.1`, its name in reports.

    An objective of the user's own keeps the colon of its path: `mine.py:loss:scale=2` becomes `mine.py:loss scale=2`.
    """
    names = []
    for name in given.split(","):
        first, *others = (part.strip() for part in name.split(":"))
        if others and "=" not in others[0] and first not in objective_names():
            first = f"{first}:{others.pop(0)}"
        names.append(" ".join([first, *others]))
    return tuple(names)


def _saved_comparison(arguments: argparse.Namespace, rest: list[str]) -> Any:
    """Load the stored comparison to resume. Other flags must repeat its original values."""
    from corral.lab.compare.plan import parse_sweeps
    from corral.lab.compare.record import list_differences, read

    comparison = read(arguments.resume)
    _check_installed(comparison.plan.kind)
    if arguments.out is not None or arguments.config is not None:
        raise RunError("--resume uses the comparison's own folder and settings: --out and --config cannot be given with it.")
    flags, names = vars(arguments), arguments.objectives or arguments.algorithms
    given = {key: flags[key] for key in ("seeds", "choose_seeds", "recipe", "threads")}
    given |= {"contestants": _split_names(names) if names else None}
    given |= {key: flags[key] or None for key in ("smoke", "common", "unsafe_code_execution")}
    given |= {f"sweep {key}": values and tuple(values) for key, values in parse_sweeps(arguments.sweep).items()}
    given = {key: value for key, value in given.items() if value is not None} | dict(given_settings(arguments, rest))
    other = list_differences(comparison.flags, given, given)
    if other:
        raise RunError(
            f"{comparison.path} is another comparison: {'; '.join(other)}. With --resume, only {_RESUME_FLAGS} can be given."
        )
    return comparison


def _check_installed(kind: Kind) -> None:
    """Raise a RunError if a package for training is missing, and silence the messages of libraries."""
    check_kind(kind, "training")
    if kind == "llm":
        quiet_libraries()
