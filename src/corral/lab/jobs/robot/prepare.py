"""Preparation of a robot's run: build environments and learner, and check settings, before any file is written.
Also `--dry-run`."""

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gymnasium.envs.registration import registry

from corral.lab.environments import ENVIRONMENTS, Environment, make_envs
from corral.lab.jobs.robot.settings import ALGORITHMS, EPISODIC, Settings, coerce_fields, config_class, learner_class, resolve
from corral.lab.run.folder import Checkpoint, RunFolder, choose_checkpoint
from corral.lab.run.settings import coerce, toml_lines
from corral.robot.config import DTYPES
from corral.robot.episode import Plant
from corral.robot.learner import Learner
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Tracking
from corral.validate import RunError, nearest, run_errors, suggest

STATE = "state.pt"
"""File name of the learner's state in a checkpoint folder."""

Agent = Any
"""Robot learner of either kind: a `Learner` of plans, or a step-based `Baseline`.
Both have step, evaluate, explore, state, restore, iteration, updates, env_steps, networks, optimizers and config."""


def prepare(settings: Settings) -> Agent:
    """Build the environments and the learner of a robot's run from its settings. Raises RunError for wrong settings."""
    environment = find_environment(settings)
    with run_errors((ValueError, ImportError)):
        config, learner = learner_config(settings), learner_class(settings.algorithm)
        if planned := settings.algorithm in EPISODIC:
            usual: dict[str, Any] = {"basis": 5, "tau": environment.steps * environment.dt}
            prodmp = ProDMP(
                environment.tracking.dof, **usual | coerce_fields("prodmp", ProDMP, settings.prodmp, without=["dof"])
            )
        simulator = None
        if settings.simulator == "warp":
            if not planned:
                raise ValueError(
                    f"simulator='warp' plays whole plans, and {settings.algorithm} chooses an action at every step. Leave it "
                    f"at 'mujoco', or choose tce, bbrl or top_erl."
                )
            from corral.lab.environments.warp_batch import WarpSimulator

            simulator = WarpSimulator()
        name, given, workers = settings.environment, settings.environment_config, settings.workers
        if environment.maker is None:
            envs = make_envs(name, config.episodes, workers=workers, simulator=simulator, **given)
        else:
            from corral.lab.environments.own import make_own

            envs = make_own(name, environment.maker, config.episodes, environment.steps, given, workers)
        plant = Plant(envs, environment.tracking, environment.steps)
        if planned:
            return learner(plant, prodmp, environment.dt, config, seed=settings.seed, dtype=DTYPES[settings.dtype])
        return learner(plant, settings.algorithm, config, seed=settings.seed)


def restore(agent: Agent, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state into the learner, without running code in the file. Raises RunError if it does not fit."""
    try:
        agent.restore(torch.load(checkpoint.path / STATE, weights_only=True, map_location="cpu"))
    except Exception as error:  # pickle, torch, zip files and NumPy have one each
        reason = (str(error).splitlines() or [""])[0]
        raise RunError(
            f"{checkpoint.path / STATE} is no state of this learner, though it matches its manifest: {type(error).__name__}: "
            f"{reason} Remove that checkpoint, and the one before it is used."
        ) from error


@contextmanager
def restored(run: Path, checkpoint: str) -> Iterator[tuple[Settings, Agent, Checkpoint, list[str]]]:
    """Load a robot's run on the CPU: settings, learner, checkpoint, and reasons why newer checkpoints were not used."""
    folder = RunFolder.open(run, write=False)
    settings = resolve([folder.read_config()["settings"]])
    chosen, complaints = choose_checkpoint(folder, checkpoint)
    learner = {key: value for key, value in settings.learner.items() if key != "device"}
    agent = prepare(replace(settings, learner=learner, simulator="mujoco"))
    with closing(agent.plant):
        restore(agent, chosen)
        yield settings, agent, chosen, complaints


def find_environment(settings: Settings) -> Environment:
    """Find the environment that the settings name, and check its settings.
    It is one of corral's, or any other with a `tracking` table."""
    name, table = settings.environment, settings.tracking
    if name not in ENVIRONMENTS:
        if ":" not in name and (name.startswith("corral/") or (not table and name not in registry)):
            raise RunError(
                f"there is no environment {name!r}.{suggest(name, {*ENVIRONMENTS, *registry})} There are "
                f"{', '.join(ENVIRONMENTS)}, "
                f"and with a table `tracking` any id of Gymnasium's, or module:Class (docs/environments.md)."
            )
        return _own_environment(name, json.dumps(table), json.dumps(settings.environment_config), settings.simulator)
    if table:
        raise RunError(f"`tracking` is for environments that are not corral's: {name} has its own controller. Leave it out.")
    environment = ENVIRONMENTS[name]
    module, _, maker = (environment.vector_entry_point or environment.entry_point).partition(":")
    with run_errors(ImportError):
        made = vars(importlib.import_module(module))[maker]
    # Gymnasium and vectorised environments report a wrong name late or never.
    known = inspect.signature(made).parameters.keys() - {"render_mode", "num_envs", "max_episode_steps", "workers"}
    for key in settings.environment_config:
        if key not in known:
            raise RunError(f"{environment.entry_point.rpartition(':')[2]} has no setting `{key}`.{nearest(key, known)}")
    return environment


@lru_cache(maxsize=8)
def _own_environment(name: str, table: str, config: str, simulator: str) -> Environment:
    """Describe an environment from outside corral, given its settings as JSON. Makes one copy to read its properties."""
    from corral.lab.environments.own import probe

    if simulator != "mujoco":
        raise RunError(f"simulator={simulator!r} plays hopper jump and box pushing alone, not {name}. Leave it at 'mujoco'.")
    read = json.loads(table)
    steps = coerce("tracking.steps", read.pop("steps", None), int | None)
    dt = coerce("tracking.dt", read.pop("dt", None), float | None)
    return probe(name, coerce_fields("tracking", Tracking, read), steps, dt, json.loads(config))


def learner_config(settings: Settings) -> Any:
    """Build the algorithm's settings object from a run's settings, with every value checked."""
    config_cls = config_class(settings.algorithm)
    given = coerce_fields(settings.algorithm, config_cls, settings.learner, without=["iterations"])
    return config_cls(iterations=settings.iterations, **given)


def parameters(agent: Agent) -> int:
    """Number of trainable parameters of a learner's networks."""
    return sum(p.numel() for network in agent.networks.values() for p in network.parameters() if p.requires_grad)


_SOME_BASELINES = {
    "epochs": ("ppo", "trpl"),
    "minibatches": ("ppo", "trpl"),
    **dict.fromkeys(("train_freq", "gradient_steps", "device"), ("sac",)),
    "noise_colour": ("pink",),
    **dict.fromkeys(("projection", "mean_bound", "cov_bound", "regression", "deployed_bound"), ("trpl",)),
}
"""Settings that apply only to baselines with certain name parts, such as "sac", and these name parts."""


def used_by(algorithm: str) -> set[str]:
    """Names of the `learner` settings that have an effect on an algorithm."""
    names = {item.name for item in fields(config_class(algorithm))}
    if algorithm in EPISODIC:
        return names
    return {name for name in names if any(word in algorithm for word in _SOME_BASELINES.get(name, ("sb3",)))}


def check_used(settings: Settings) -> None:
    """Refuse a new run with settings of another algorithm, or for an event that the environment does not report.

    Run folders that have such settings already can still be resumed and evaluated. Names that no algorithm has are refused by
    `prepare`, with the nearest name.
    """
    for key in settings.learner:
        if key not in used_by(settings.algorithm) and (owners := [name for name in ALGORITHMS if key in used_by(name)]):
            raise RunError(
                f"{settings.algorithm}: there is no setting `{key}`: it belongs to {', '.join(owners)}. Leave it out, choose "
                f"another algorithm, or in a file put it into the table of its own, [{owners[0]}]."
            )
    known = ENVIRONMENTS.get(settings.environment)
    if known is not None and not known.tells_event and settings.learner.get("move_to_event"):
        there = ", ".join(name for name, other in ENVIRONMENTS.items() if other.tells_event)
        raise RunError(
            f"{settings.algorithm}: `learner.move_to_event` moves rewards to an event, and {settings.environment} tells of "
            f"none; {there} does. Leave it out."
        )


def rehearse(settings: Settings) -> list[str]:
    """Compose the lines that `--dry-run` prints: settings as TOML, after comments about episodes and networks."""
    check_used(settings)
    agent = prepare(settings)
    with closing(agent.plant):
        count, episodes, steps = parameters(agent), agent.config.episodes, agent.plant.steps
    size = 8 if settings.dtype == "float64" and isinstance(agent, Learner) else 4  # baselines are float32
    return [
        f"# {settings.iterations:,} batches of {episodes:,} episodes of {steps} steps: "
        f"{settings.iterations * episodes * steps:,} steps of the environment",
        "# would fetch nothing",
        f"# {count:,} parameters are trained: {4 * size * count / 1e6:.2g} MB with gradients and Adam's moments",
        *toml_lines(settings.flat()),
    ]
