"""Checks before the first run: every planned run resolves, and all budgets are equal."""

import dataclasses
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.lab.compare.plan import ComparisonPlan, Kind, Setting, Training, half_decades, make_run, run_settings
from corral.lab.report.read import PlannedRun, setting_text
from corral.lab.run.settings import nested, read_file, read_named, recipes
from corral.validate import RunError, check_keys

WEIGHTS = ("loss_type", "advantage", "scale_rewards", "multi_objective_aggregation")
"""Settings that weigh tokens and rewards for any objective: if they differ, a comparison also compares them."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of every run."""

    steps: int
    samples: int
    """Completions or episodes per step."""
    what: str
    """Kind of the samples: completions or episodes."""


def check_plan(plan: ComparisonPlan, training: Training, config: Path | None = None) -> Budget:
    """Resolve every contestant with every setting as `corral train` does; a RunError for the first invalid run.

    Returns:
        The budget, which is the same for all: a contestant or setting with another one is refused too.
    """
    first: tuple[str, Budget] | None = None
    for contestant in plan.contestants:
        for setting in plan.settings:
            run = make_run(contestant, setting, plan.report_seeds[0], "report")
            name = f"{contestant} {setting_text(setting)}".strip()
            try:
                budget = _budget(plan.kind, resolve_run(plan.kind, training, run, config))
            except (RunError, ValueError, TypeError, ImportError) as error:
                raise RunError(f"{name}: {str(error).removeprefix(f'{contestant}: ')}") from error
            first = first or (name, budget)
            if budget != first[1]:
                raise RunError(
                    f"budgets differ: {first[0]} would have {budget_text(first[1])}, {name} {budget_text(budget)}. "
                    f"Contestants are compared with equal ones: change the setting that makes them differ."
                )
    assert first is not None
    return first[1]


def resolve_run(kind: Kind, training: Training, run: PlannedRun, config: Path | None = None) -> Any:
    """Resolve the settings of one run from recipe, file, --smoke and flags."""
    settings, smoke = (importlib.import_module(f"corral.lab.jobs.{kind}.{name}") for name in ("settings", "smoke"))
    layers = [read_named(training.recipe, recipes(settings.RECIPES))] if training.recipe else []
    layers += [read_file(config)] if config is not None else []
    given = nested(run_settings(kind, training, run).items(), settings.TABLES)
    layers += smoke.smoke_layers([*layers, given]) if training.smoke else []
    resolved = settings.resolve([*layers, given])
    if kind == "robot":
        settings.check_flags(resolved, given)
    return resolved


def _budget(kind: Kind, settings: Any) -> Budget:
    """Steps, and samples per step. Other errors in the settings also surface here."""
    if kind == "llm":
        from corral.lab.jobs.llm.prepare import trainer_config
        from corral.lab.tasks import find_task

        task_cls = find_task(settings.task)
        if dataclasses.is_dataclass(task_cls):  # names alone: to make the task could take its data from the hub
            check_keys(settings.task, task_cls, settings.task_config)
        config: Any = trainer_config(settings, max_completion_length=1)
        return Budget(steps=settings.steps, samples=config.generation_batch_size, what="completions")
    from corral.lab.jobs.robot.prepare import check_environment_config, find_environment

    check_environment_config(find_environment(settings.environment), settings.environment_config)
    return Budget(steps=settings.iterations, samples=_learner_config(settings).episodes, what="episodes")


def _learner_config(settings: Any) -> Any:
    """Build the settings of a robot algorithm."""
    from corral.lab.jobs.robot.prepare import check_used, learner_config

    check_used(settings)
    return learner_config(settings)


def rate_grid(kind: Kind, contestants: tuple[str, ...], training: Training, config: Path | None = None) -> list[float]:
    """Half-decades around the learning rates that the contestants would use."""
    if kind == "llm":
        return half_decades([args.learning_rate for args in trainer_configs(contestants, training, config).values()])
    rates = []
    for contestant in contestants:
        learner = _learner_config(resolve_run(kind, training, make_run(contestant, {}, 0, "report"), config))
        rates.append(learner.rate if contestant.startswith("sb3-") else learner.policy_rate)
    return half_decades(rates)


def trainer_configs(
    contestants: Iterable[str], training: Training, config: Path | None = None, setting: Setting | None = None
) -> dict[str, Any]:
    """Build the CorralConfig of each objective with one setting of a sweep, or without a sweep."""
    from corral.lab.jobs.llm.prepare import trainer_config

    found = {}
    for contestant in contestants:
        try:
            settings = resolve_run("llm", training, make_run(contestant, setting or {}, 0, "report"), config)
            found[contestant] = trainer_config(settings, max_completion_length=1)
        except (ValueError, TypeError) as error:
            raise RunError(f"{contestant}: {str(error).removeprefix(f'{contestant}: ')}") from error
    return found


def share_reduction(
    kind: Kind, contestants: tuple[str, ...], training: Training, sweep: Iterable[str], config: Path | None = None
) -> Training:
    """Add a common reduction to the training: the first one that gives every objective its own gradient.

    Advantages are the same for all anyway, as long as none is swept.
    """
    if kind != "llm":
        raise RunError("--common is about objectives: algorithms of robots have no reduction to share.")
    for key in WEIGHTS:
        if key in sweep:
            raise RunError(f"--common keeps `{key}` the same for all, and --sweep {key} would not. Leave out one of the two.")
    from corral.trl.api import REDUCTIONS

    configs = trainer_configs(contestants, training, config)
    own = [args.make_objective().config.reductions for args in configs.values()]
    wanted = [args.loss_type for args in configs.values()]
    for loss_type in wanted if "loss_type" in training.settings else [*wanted, *REDUCTIONS]:
        if all(REDUCTIONS[loss_type] in named for named in own):
            return replace(training, common=True, settings={**training.settings, "loss_type": loss_type})
    named = "; ".join(f"{name} {', '.join(each)}" for name, each in zip(configs, own, strict=True))
    raise RunError(f"--common: no reduction that was asked for is every objective's own. They are: {named}.")


def budget_text(budget: Budget) -> str:
    """Budget in words: `40 steps of 512 completions`."""
    return f"{budget.steps} steps of {budget.samples} {budget.what}"
