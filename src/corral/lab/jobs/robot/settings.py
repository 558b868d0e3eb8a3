"""Settings of a robot's run, merged from recipe, file and flags, with every name and type checked."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

from corral.lab.run.settings import RunSettings, add_layer, coerce
from corral.lab.run.trackers import tracker_names
from corral.validate import RunError, limited, nearest

_Algorithm = Literal[
    "tce", "bbrl", "top_erl", "sb3-ppo", "sb3-ppo-gsde", "sb3-ppo-pink", "sb3-sac", "sb3-sac-gsde", "sb3-sac-pink", "sb3-trpl"
]  # fmt: skip
ALGORITHMS: tuple[str, ...] = get_args(_Algorithm)

EPISODIC = {"tce": ("robot.tce", "TCE"), "bbrl": ("robot.bbrl", "BBRL"), "top_erl": ("robot.top_erl", "TopERL")}
"""Module and class of each algorithm that learns plans. All other algorithms are step-based baselines."""

TABLES = ("environment_config", "tracking", "prodmp", "learner")
"""Names of the settings that are tables, in which a later source of settings changes single keys.
The command line imports this name for either kind of run."""

_OF_THE_CRITIC = {f"learner.critic_{name}" for name in ("epochs", "rate", "hidden", "dtype", "inputs")}
_OF_THE_CRITIC |= {"learner.lam", "learner.normalise_critic"}

_ELSEWHERE = {
    "steps": "iterations",
    "objective": "algorithm",
    "task": "environment",
    "task_config": "environment_config",
    "objective_config": "learner",
    "model": "prodmp and learner",
    "learning_rate": "learner.policy_rate, learner.critic_rate or, for baselines, learner.rate",
}
"""Language-model settings that robot runs lack, each with the robot setting to use instead."""


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Settings of a robot's training run."""

    environment: str = "corral/ViaPointReacher-v0"
    """Environment to learn in: one of corral's, any id of Gymnasium's, or a class of your own.
    Give a class as `module:Class` or `file.py:Class`."""
    environment_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment, such as the kind of reward, as a table."""
    tracking: dict[str, Any] = field(default_factory=dict)
    """Controller for an environment that is not corral's, as a table of fields of corral.robot.tracking.Tracking.
    It also takes the number of `steps` in an episode (by default Gymnasium's), and the seconds `dt` of a step (by default
    read from Gymnasium's MuJoCo tasks)."""
    algorithm: _Algorithm = "tce"
    """Algorithm that learns motion plans (tce, bbrl, top_erl), or a step-based baseline of stable-baselines3 (sb3-…).
    Plans are credited in segments (tce), as a whole (bbrl) or by a critic of past episodes (top_erl)."""
    prodmp: dict[str, Any] = field(default_factory=dict)
    """Settings of the trajectory generator corral.robot.ProDMP, as a table. Baselines have no trajectory.
    The number of joints comes from the environment."""
    learner: dict[str, Any] = field(default_factory=dict)
    """Settings of the algorithm, as a table of fields of TCEConfig, BBRLConfig, TopERLConfig or BaselineConfig."""
    iterations: int = limited(125, at_least=1)
    """Number of training steps, each on one batch of episodes."""
    eval_every: int = 5
    eval_size: int = 256
    dtype: Literal["float64", "float32"] = "float64"
    """Floating-point precision of networks and plans. Baselines always use float32."""
    workers: int | None = limited(None, at_least=1)
    """Number of threads that step the environments, by default one per core. Results do not depend on the number."""
    simulator: Literal["mujoco", "warp"] = "mujoco"
    """Simulator for training episodes: MuJoCo on the CPU, or MuJoCo Warp on a GPU in float32.
    Warp needs corral[warp], and supports plans on hopper jump and box pushing. Evaluations always use MuJoCo."""

    report_to: str = "none"
    """Trackers that the metrics are sent to: none, tensorboard, wandb, trackio, or several separated by commas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tracker_names(self.report_to)
        if "iterations" in self.learner:
            raise RunError("`learner.iterations` is decided by the run. Use iterations.")
        if "dof" in self.prodmp:
            raise RunError("`prodmp.dof` is decided by the environment's joints: leave it out.")

    def flat(self) -> dict[str, Any]:
        """Return all settings in one flat table, as in a settings file."""
        return dataclasses.asdict(self)


def resolve(layers: Sequence[Mapping[str, Any]]) -> Settings:
    """Merge a robot run's settings from several sources, of which later sources win.
    A table named after the algorithm, such as [bbrl], goes into [learner].

    So one recipe serves every algorithm: [learner] holds what they share, and each has a table of its own.
    """
    algorithm = next((layer["algorithm"] for layer in reversed(layers) if "algorithm" in layer), Settings.algorithm)
    merged: dict[str, Any] = {}
    for layer in layers:
        own = layer.get(str(algorithm), {})
        if not isinstance(own, Mapping):
            raise RunError(f"`{algorithm}` is a table of settings; got {own!r}.")
        if coerce("as_published", layer.get("as_published", False), bool):
            from corral.robot.config import AS_PUBLISHED  # torch, for which few commands have to wait

            add_layer(merged, {"learner": AS_PUBLISHED.get(algorithm, {})}, TABLES)
        add_layer(merged, {key: value for key, value in layer.items() if key not in (*ALGORITHMS, "as_published")}, TABLES)
        add_layer(merged, {"learner": own}, TABLES)
    hints = get_type_hints(Settings)
    for key in merged:
        if key in _ELSEWHERE:
            raise RunError(f"robots have no setting `{key}`. Use {_ELSEWHERE[key]}.")
        if key not in hints:
            raise RunError(f"there is no setting `{key}`.{nearest(key, [*hints, *ALGORITHMS])}")
    return Settings(**{key: coerce(key, value, hints[key]) for key, value in merged.items()})


def check_flags(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse command-line flags (`given`) that have no effect on a robot's run with these settings.

    A recipe or a file serves several algorithms and ways to run them, so it may hold such things; a flag means this run.
    """
    named = [f"{table}.{key}" for table in ("prodmp", "learner") for key in given.get(table, {})]
    plans, algorithm = settings.learner.get("plans_per_context", 1), settings.algorithm
    for key in named:
        why = None
        if key.startswith("prodmp.") and algorithm.startswith("sb3-"):
            why = f"{algorithm} chooses an action at every step and has no trajectory. Leave it out, or choose tce or bbrl."
        elif key in _OF_THE_CRITIC and plans != 1:
            why = f"with learner.plans_per_context={plans} no critic is fitted. Leave it out, or set plans_per_context to 1."
        elif key == "learner.replan_from" and settings.learner.get("replan_every") is None and algorithm != "top_erl":
            why = "one plan serves the whole episode. Set learner.replan_every too, or leave it out."
        elif key in ("learner.floor_in_region", "learner.floor_over") and settings.learner.get("entropy_floor") is None:
            why = "there is no floor of the entropy. Set learner.entropy_floor too, or leave it out."
        if why is not None:
            raise RunError(f"`{key}` would change nothing: {why}")
    if "as_published" in given:
        from corral.robot.config import AS_PUBLISHED

        if algorithm not in AS_PUBLISHED:
            raise RunError(f"`as_published` would change nothing: it is for {' and '.join(AS_PUBLISHED)}, not for {algorithm}.")
    if "dtype" in given and algorithm.startswith("sb3-") and settings.dtype != "float32":
        raise RunError(f"`dtype` is float32 for {algorithm}, as stable-baselines3 has it; got {settings.dtype}. Leave it out.")


def learner_class(algorithm: str) -> Any:
    """Import the class that implements a robot algorithm."""
    module, name = EPISODIC.get(algorithm, ("lab.baselines.stable", "Baseline"))
    return vars(import_module(f"corral.{module}"))[name]


def config_class(algorithm: str) -> Any:
    """Import the settings class of a robot algorithm. For baselines this does not import stable-baselines3."""
    module, name = EPISODIC.get(algorithm, ("lab.baselines.config", "Baseline"))
    return vars(import_module(f"corral.{module}"))[f"{name}Config"]


def coerce_fields(owner: str, config_cls: type, given: Mapping[str, Any], *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields. Lists become tuples. Raises RunError for unknown names."""
    known = [item.name for item in dataclasses.fields(config_cls) if item.name not in without]
    hints, out = get_type_hints(config_cls), {}
    for key, value in given.items():
        if key not in known:
            raise RunError(f"{owner}: there is no setting `{key}`.{nearest(key, known)}")
        value = coerce(f"{owner}.{key}", value, hints[key])
        if get_origin(hints[key]) is tuple:
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
        out[key] = value
    return out
