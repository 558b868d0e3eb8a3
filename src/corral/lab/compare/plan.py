"""Plan of a comparison: compared methods, settings and seeds, commands of the runs, and checks that all budgets are equal."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from corral.lab.jobs import Kind, resolve
from corral.lab.jobs.llm.own_objective import find_objective
from corral.lab.report.read import ChooseBy, PlannedRun, is_number, setting_pairs, setting_text, value_text
from corral.lab.run.settings import guess
from corral.validate import RunError, check_keys

Setting = Mapping[str, Any]
ChosenSettings = Mapping[str, Setting]

RATE = "learning_rate"
"""Name of the learning rate, the only setting that can be swept without a list of values."""

_NOT_SWEPT = {
    "objective": "--objectives",
    "algorithm": "--algorithms",
    "seed": "--seeds",
    "steps": "one budget for all: --steps",
    "iterations": "one budget for all: --iterations",
}
"""Mapping from each setting that cannot be swept to the flag that sets it."""

_AROUND = 2
"""Number of learning rates, in steps of half a decade, that a sweep tries on either side of the recipe's learning rate."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Plan of a comparison: the same settings, seeds and budget for every compared method.

    With a sweep, each contestant's setting is chosen on `choose_seeds` and reported on `report_seeds`, which it has never seen:
    the best of several noisy numbers is too good.
    """

    kind: Kind
    contestants: tuple[str, ...]
    """Compared methods: names of objectives, or of robot algorithms."""
    sweep: Mapping[str, tuple[Any, ...]]
    choose_seeds: tuple[int, ...]
    report_seeds: tuple[int, ...]
    choose_by: ChooseBy = "final"
    """Score by which the best setting is chosen: "final" value, or "area" (mean over the run)."""
    extend: int = 0
    """Largest number of values that are added to a sweep beyond either end, if a method's best value lies at that end."""
    added: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that have been added to the sweep, by setting."""

    def __post_init__(self) -> None:
        if not self.contestants or not self.report_seeds:
            raise RunError("a comparison needs contestants and at least one seed.")
        _refuse_duplicates("contestants", self.contestants)
        for key, values in self.sweep.items():
            _refuse_duplicates(f"values of the sweep over {key}", values)
        if len(self.contestants) == 1 and not self.sweep:
            raise RunError(
                f"{self.contestants[0]} alone has nothing to be compared with: name another contestant, or a --sweep."
            )

    @property
    def settings(self) -> list[dict[str, Any]]:
        """All combinations of the swept values, with added values last. Without a sweep, one empty combination."""
        axes = [(*values, *self.added.get(key, ())) for key, values in self.sweep.items()]
        return [dict(zip(self.sweep, values, strict=True)) for values in product(*axes)]

    @property
    def count(self) -> int:
        """Total number of runs of the plan, including runs whose setting is chosen later."""
        return len(self.contestants) * (len(self.settings) * len(self.choose_seeds) + len(self.report_seeds))

    def sweep_runs(self) -> list[PlannedRun]:
        """List the sweep's runs: all compared methods with all settings, on the seeds for choosing. Empty without a sweep."""
        return [
            make_run(contestant, setting, seed, "sweep")
            for seed, setting, contestant in product(self.choose_seeds, self.settings, self.contestants)
        ]

    def report_runs(self, chosen: ChosenSettings) -> list[PlannedRun]:
        """List the final runs: each compared method with its chosen setting, on fresh seeds. Empty if no setting is chosen."""
        own = chosen if self.sweep else {contestant: {} for contestant in self.contestants}
        return [
            make_run(contestant, own[contestant], seed, "report")
            for seed, contestant in product(self.report_seeds, self.contestants)
            if contestant in own
        ]

    def grown(self, chosen: ChosenSettings) -> "ComparisonPlan":
        """Return a plan with another value beyond each end of a sweep where a method's best value lies, at most `extend`."""
        added = dict(self.added)
        for key, given in self.sweep.items():
            ends, best = sorted(value for value in given if is_number(value)), {setting.get(key) for setting in chosen.values()}
            for end, sign in ((0, -1), (-1, 1)):
                values = sorted([*ends, *added.get(key, ())], reverse=sign > 0)
                beyond = sum(sign * value > sign * ends[end] for value in values)
                if len(values) > 1 and values[0] in best and beyond < self.extend:
                    added[key] = (*added.get(key, ()), float(f"{values[0] ** 2 / values[1]:.3g}"))
        return replace(self, added=added)


def make_plan(
    kind: Kind, contestants: Sequence[str], sweep: Mapping[str, Sequence[Any]], *, seeds: int, choosing: int, first: int = 0,
    choose_by: ChooseBy = "final", extend: int = 0,
) -> ComparisonPlan:  # fmt: skip
    """Make a comparison's plan that reports on `seeds` seeds. With a sweep, settings are chosen on `choosing` other seeds."""
    for name, number in (("seeds", seeds), ("choose-seeds", choosing)):
        if number < 1:
            raise RunError(f"--{name} must be at least 1; got {number}.")
    split = first + (choosing if sweep else 0)
    return ComparisonPlan(
        kind=kind,
        contestants=tuple(contestants),
        sweep={key: tuple(values) for key, values in sweep.items()},
        choose_seeds=tuple(range(first, split)),
        report_seeds=tuple(range(split, split + seeds)),
        choose_by=choose_by,
        extend=extend,
    )


def make_run(contestant: str, setting: Setting, seed: int, stage: str) -> PlannedRun:
    """Make a planned run, whose folder is named after compared method, setting and seed."""
    name = "_".join([contestant, *setting_pairs(setting), f"seed{seed}"])
    return PlannedRun(folder=_slug(name), contestant=contestant, setting=dict(setting), seed=seed, stage=stage)


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[Any] | None]:
    """Parse the values of `--sweep` flags, such as `learning_rate=1e-4,3e-4`, into lists by setting.

    A bare `learning_rate` becomes None, which stands for half-decades around the recipe's rate.
    """
    found: dict[str, list[Any] | None] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if key in _NOT_SWEPT:
            raise RunError(f"`{key}` cannot be swept. Use {_NOT_SWEPT[key]}.")
        if key in found:
            raise RunError(f"--sweep {key} is given twice. Give all its values at once: --sweep {key}=first,second.")
        if not equals and key != RATE:
            raise RunError(f"--sweep {key} needs values: --sweep {key}=first,second. Only {RATE} has a grid of its own.")
        given = [value.strip() for value in values.split(",")]
        if equals and not all(given):
            raise RunError(f"--sweep {text}: a value is empty. Values have commas between them: --sweep {key}=first,second.")
        found[key] = [guess(value) for value in given] if equals else None
        _refuse_duplicates(f"values of --sweep {key}", found[key] or ())
    return found


def half_decades(rates: Sequence[float]) -> list[float]:
    """Make a grid of learning rates around `rates`, in steps of a factor √10 and rounded to two digits.

    They run from a decade below the lowest rate to a decade above the highest.

        r_k = r_min · 10^(k/2),   k = −2, −1, …,   r_k ≤ 10 r_max

    So the recipe's own rate is one of them where all contestants have the same.
    """
    low, high = min(rates), max(rates)
    if not (low > 0 and math.isfinite(high)):
        raise RunError(f"a grid around a learning rate of {low} cannot be made. Give values: --sweep {RATE}=1e-4,3e-4.")
    last = _AROUND + math.floor(2 * math.log10(high / low) + 1e-9)
    return [float(f"{low * 10 ** (step / 2):.1e}") if step else low for step in range(-_AROUND, last + 1)]


def _refuse_duplicates(what: str, values: Sequence[Any]) -> None:
    """Raise RunError for repeated values, such as 1e-4 and .0001.

    Folders are named after values, so that the first three digits must differ.
    """
    names = [_slug(value_text(value)) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RunError(f"{what}: {value_text(values[index])} is there twice.")


def _slug(text: str) -> str:
    """Make a text usable in a file name, by replacing special characters with dashes."""
    return re.sub(r"[^\w.=+-]", "-", text)


_CONTESTANT: dict[Kind, str] = {"llm": "objective", "robot": "algorithm"}
"""Mapping from kind of run, "llm" or "robot", to the setting that names the compared method."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings and flags of `corral compare` that all runs of a comparison share."""

    recipe: str | None = None
    config: str | None = None
    """Name of the copy of the settings file in the comparison's folder."""
    smoke: bool = False
    common: bool = False
    """True if `--common` gave all objectives the same loss reduction; `settings` holds this reduction."""
    unsafe_code_execution: bool = False
    settings: Mapping[str, str | list[str]] = field(default_factory=dict)
    """Values of flags by the name of their setting, with a list for a repeated flag."""
    threads: int | None = None
    """Number of threads of each run's process; None leaves the number to the process."""


def run_arguments(kind: Kind, training: Training, run: PlannedRun, where: Path) -> list[str]:
    """Return the arguments of `corral` that start a run in its folder under `where`, or resume a run that has begun there."""
    if (where / run.folder / "config.json").is_file():
        return ["train", f"--resume={where / run.folder}"]
    words = ["train"]
    words += [f"--recipe={training.recipe}"] if training.recipe else []
    words += [f"--config={where / training.config}"] if training.config else []
    words += ["--smoke"] if training.smoke else []
    words += ["--unsafe-code-execution"] if training.unsafe_code_execution else []
    shared = run_settings(kind, training, run).items()
    pairs = [(key, str(one)) for key, value in shared for one in (value if isinstance(value, list) else [value])]
    # `=` keeps a value that begins with a dash with its flag.
    return [*words, *(f"--{key.replace('_', '-')}={value}" for key, value in pairs), f"--out={where / run.folder}"]


def run_settings(kind: Kind, training: Training, run: PlannedRun) -> dict[str, Any]:
    """Collect the flags of one run by setting: flags that all runs share, then flags of its compared method and of the run.

    A contestant such as `troll bound=0.1 support=union` is an objective's name and settings: its own, or the run's.
    """
    name, *pairs = run.contestant.split(" ")
    known = [item.name for item in fields(find_objective(name))] if pairs else []
    given = dict(pair.split("=", 1) for pair in pairs)
    variant = {f"objective_config.{key}" if key in known else key: value for key, value in given.items()}
    flags = {key: str(value).lower() if isinstance(value, bool | None) else str(value) for key, value in run.setting.items()}
    own = {contestant_key(kind, name, key): value for key, value in flags.items()}
    shared = training.settings
    if kind == "robot" and name.startswith("sb3-"):  # no trajectory, and float32: what the others were given is not for it
        shared = {key: value for key, value in shared.items() if key != "dtype" and not key.startswith("prodmp.")}
    return {**shared, _CONTESTANT[kind]: name, **variant, **own, "seed": run.seed}


def contestant_key(kind: Kind, contestant: str, key: str) -> str:
    """Translate the name of a swept setting for a compared method, as robot algorithms name their learning rate differently."""
    if kind == "robot" and key == RATE:
        return "learner.rate" if contestant.startswith("sb3-") else "learner.policy_rate"
    return key


# -------------------------------------------------------------------------------------------------- before the first run

WEIGHTS = ("loss_type", "advantage", "scale_rewards", "multi_objective_aggregation")
"""Settings that weigh tokens and rewards for any objective. If they differ, a comparison also compares these weights."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Training budget of a run, which is the same for all runs of a comparison."""

    steps: int
    samples: int
    """Number of completions or episodes per training step."""
    what: str
    """Kind of samples that `samples` counts: "completions" or "episodes"."""


def check_plan(plan: ComparisonPlan, training: Training, config: Path | None = None) -> Budget:
    """Resolve the settings of every compared method as `corral train` does. Raises RunError for the first invalid run.

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
    """Resolve the settings of one run from recipe, settings file, `--smoke` and flags."""
    return resolve(kind, training.recipe, config, run_settings(kind, training, run).items(), smoke=training.smoke)


def _budget(kind: Kind, settings: Any) -> Budget:
    """Compute a run's training budget from its settings. Invalid settings raise an error here."""
    if kind == "llm":
        from corral.lab.jobs.llm.prepare import trainer_config
        from corral.lab.tasks import find_task

        task_cls = find_task(settings.task)
        if is_dataclass(task_cls):  # names alone: to make the task could take its data from the hub
            check_keys(settings.task, task_cls, settings.task_config)
        config: Any = trainer_config(settings, max_completion_length=1)
        return Budget(steps=settings.steps, samples=config.generation_batch_size, what="completions")
    from corral.lab.jobs.robot.prepare import find_environment

    find_environment(settings)
    return Budget(steps=settings.iterations, samples=_learner_config(settings).episodes, what="episodes")


def _learner_config(settings: Any) -> Any:
    """Build the learner settings of a robot algorithm from the run's settings."""
    from corral.lab.jobs.robot.prepare import check_used, learner_config

    check_used(settings)
    return learner_config(settings)


def rate_grid(kind: Kind, contestants: tuple[str, ...], training: Training, config: Path | None = None) -> list[float]:
    """Make a grid of learning rates, half a decade apart, around the rates that the compared methods would use."""
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
    """Build the CorralConfig of each compared method, by name. `setting` is one combination of swept values, if given."""
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
    """Return `training` with one reduction for all objectives: the first that every objective lists as its own.

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
    """Format a training budget: `40 steps of 512 completions`."""
    return f"{budget.steps} steps of {budget.samples} {budget.what}"
