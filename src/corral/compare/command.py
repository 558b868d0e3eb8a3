"""A planned run as a command line: `corral train …`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from corral.compare.plan import RATE, Kind, PlannedRun

_CONTESTANT: dict[Kind, str] = {"llm": "objective", "robot": "algorithm"}
"""The setting in which contestants differ."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all runs share, as it was given to `corral compare`."""

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
    from corral.objective import OBJECTIVES  # and torch with it, which most comparisons do not need to be refused

    own = [item.name for item in fields(OBJECTIVES[name][1])]
    given = dict(pair.split("=", 1) for pair in pairs)
    return name, {f"objective_config.{key}" if key in own else key: value for key, value in given.items()}


def contestant_key(kind: Kind, contestant: str, key: str) -> str:
    """What a contestant calls a swept setting: algorithms of robots have a learning rate each, under names of their own."""
    if kind == "robot" and key == RATE:
        return "learner.rate" if contestant.startswith("sb3-") else "learner.policy_rate"
    return key


def _flag_text(value: Any) -> str:
    """A value as flags are written."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
