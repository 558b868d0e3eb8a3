"""Plans of a comparison: objectives, settings and seeds, and the command of each run."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from corral.lab.report.read import PlannedRun, setting_pairs, value_text
from corral.lab.run.settings import guess
from corral.objective import OBJECTIVES
from corral.validate import RunError

Kind = Literal["llm", "robot"]
Setting = Mapping[str, Any]
ChosenSettings = Mapping[str, Setting]

RATE = "learning_rate"
"""The one setting that can be swept without saying over which values."""

_NOT_SWEPT = {
    "objective": "--objectives",
    "algorithm": "--algorithms",
    "seed": "--seeds",
    "steps": "one budget for all: --steps",
    "iterations": "one budget for all: --iterations",
}
"""Settings that a comparison decides otherwise, and how."""

_AROUND = 2
"""Half-decades to either side of the recipe's learning rate."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """The runs of a comparison: the same settings, seeds and budget for every contestant.

    With a sweep, each contestant's setting is chosen on `choose_seeds` and reported on `report_seeds`, which it has never seen:
    the best of several noisy numbers is too good.
    """

    kind: Kind
    contestants: tuple[str, ...]
    """Objectives, or algorithms of a robot."""
    sweep: Mapping[str, tuple[Any, ...]]
    choose_seeds: tuple[int, ...]
    report_seeds: tuple[int, ...]

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
        """Every combination of the swept values; one empty setting without a sweep."""
        return [dict(zip(self.sweep, values, strict=True)) for values in product(*self.sweep.values())]

    @property
    def count(self) -> int:
        """Runs in all, with those whose setting is chosen on the way."""
        return len(self.contestants) * (len(self.settings) * len(self.choose_seeds) + len(self.report_seeds))

    def sweep_runs(self) -> list[PlannedRun]:
        """Runs of all contestants with all settings on the seeds for choosing; none without a sweep."""
        return [
            make_run(contestant, setting, seed, "sweep")
            for seed, setting, contestant in product(self.choose_seeds, self.settings, self.contestants)
        ]

    def report_runs(self, chosen: ChosenSettings) -> list[PlannedRun]:
        """Each contestant with its chosen setting on the fresh seeds. One for which none could be chosen is left out."""
        own = chosen if self.sweep else {contestant: {} for contestant in self.contestants}
        return [
            make_run(contestant, own[contestant], seed, "report")
            for seed, contestant in product(self.report_seeds, self.contestants)
            if contestant in own
        ]


def make_plan(
    kind: Kind, contestants: Sequence[str], sweep: Mapping[str, Sequence[Any]], *, seeds: int, choosing: int, first: int = 0
) -> ComparisonPlan:
    """A plan with `seeds` seeds to report on and, if there is a sweep, `choosing` others before them to choose on."""
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
    )


def make_run(contestant: str, setting: Setting, seed: int, stage: str) -> PlannedRun:
    """A run, with a folder named by contestant, setting and seed."""
    name = "_".join([contestant, *setting_pairs(setting), f"seed{seed}"])
    return PlannedRun(folder=_slug(name), contestant=contestant, setting=dict(setting), seed=seed, stage=stage)


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[Any] | None]:
    """`key=v1,v2` → values, and a bare `learning_rate` → None, which stands for half-decades around the recipe's rate."""
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


def half_decades(rates: Sequence[float], around: int = _AROUND) -> list[float]:
    """Rates √10 apart, of two digits, from `around` half-decades below the lowest of `rates` to as many above the highest.

        r_k = r_min · 10^(k/2),   k = −around …,   r_k ≤ r_max · 10^(around/2)

    So the recipe's own rate is one of them where all contestants have the same.
    """
    low, high = min(rates), max(rates)
    if not (low > 0 and math.isfinite(high)):
        raise RunError(f"a grid around a learning rate of {low} cannot be made. Give values: --sweep {RATE}=1e-4,3e-4.")
    last = around + math.floor(2 * math.log10(high / low) + 1e-9)
    return [float(f"{low * 10 ** (step / 2):.1e}") if step else low for step in range(-around, last + 1)]


def _refuse_duplicates(what: str, values: Sequence[Any]) -> None:
    """A sentence if a value is there twice: 1e-4 and .0001 are one. Folders have these names, so three digits must differ."""
    names = [_slug(value_text(value)) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RunError(f"{what}: {value_text(values[index])} is there twice.")


def _slug(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^\w.=+-]", "-", text)


_CONTESTANT: dict[Kind, str] = {"llm": "objective", "robot": "algorithm"}
"""The setting in which contestants differ."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings and flags that all runs share, as given to `corral compare`."""

    recipe: str | None = None
    config: str | None = None
    """Name of the file of settings; the comparison's folder keeps a copy."""
    smoke: bool = False
    common: bool = False
    """Whether all objectives were given one reduction and one advantage; it is in `settings`."""
    unsafe_code_execution: bool = False
    settings: Mapping[str, str | list[str]] = field(default_factory=dict)
    """Flags by the name of their setting; a list where a flag was given several times."""
    threads: int | None = None
    """Of each process; None leaves that to the process."""


def start_arguments(kind: Kind, training: Training, run: PlannedRun, where: Path) -> list[str]:
    """Arguments of `corral` that start a run in its folder under `where`."""
    words = ["train"]
    words += [f"--recipe={training.recipe}"] if training.recipe else []
    words += [f"--config={where / training.config}"] if training.config else []
    words += ["--smoke"] if training.smoke else []
    words += ["--unsafe-code-execution"] if training.unsafe_code_execution else []
    shared = run_settings(kind, training, run).items()
    pairs = [(key, str(one)) for key, value in shared for one in (value if isinstance(value, list) else [value])]
    # `=` keeps a value that begins with a dash with its flag.
    return [*words, *(f"--{key.replace('_', '-')}={value}" for key, value in pairs), f"--out={where / run.folder}"]


def resume_arguments(run: PlannedRun, where: Path) -> list[str]:
    """Arguments of `corral` that resume a run."""
    return ["train", f"--resume={where / run.folder}"]


def run_settings(kind: Kind, training: Training, run: PlannedRun) -> dict[str, Any]:
    """Flags of one run by the name of their setting: what all share, then what it alone has."""
    name, variant = split_contestant(run.contestant)
    own = {contestant_key(kind, name, key): _flag_text(value) for key, value in run.setting.items()}
    shared = training.settings
    if kind == "robot" and name.startswith("sb3-"):  # no trajectory, and float32: what the others were given is not for it
        shared = {key: value for key, value in shared.items() if key != "dtype" and not key.startswith("prodmp.")}
    return {**shared, _CONTESTANT[kind]: name, **variant, **own, "seed": run.seed}


def split_contestant(contestant: str) -> tuple[str, dict[str, str]]:
    """`troll bound=0.1 support=union` → its objective, and flags: the objective's own settings, or any of a run's."""
    name, *pairs = contestant.split(" ")
    if not pairs:
        return name, {}
    own = [item.name for item in fields(OBJECTIVES[name][1])]
    given = dict(pair.split("=", 1) for pair in pairs)
    return name, {f"objective_config.{key}" if key in own else key: value for key, value in given.items()}


def contestant_key(kind: Kind, contestant: str, key: str) -> str:
    """The name that a contestant has for a swept setting: robots' algorithms have different names for their learning rate."""
    if kind == "robot" and key == RATE:
        return "learner.rate" if contestant.startswith("sb3-") else "learner.policy_rate"
    return key


def _flag_text(value: Any) -> str:
    """A value as flags are written."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
