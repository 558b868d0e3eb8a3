"""Preparation of a robot's run: environments and learner, checked before anything is written. Also `--dry-run`."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from typing import Any

import torch

from corral.lab.baselines.config import BaselineConfig
from corral.lab.environments import ENVIRONMENTS, Environment, make_envs
from corral.lab.jobs.robot.settings import ALGORITHMS, Settings, coerce_fields
from corral.lab.run.settings import toml_lines
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.config import DTYPES
from corral.robot.episode import Plant
from corral.robot.learner import Learner
from corral.robot.prodmp import ProDMP
from corral.robot.tce import TCE, TCEConfig
from corral.robot.vector import Simulator
from corral.validate import RunError, nearest

EPISODIC: dict[str, tuple[type[Learner], type]] = {"tce": (TCE, TCEConfig), "bbrl": (BBRL, BBRLConfig)}

Agent = Any
"""A `Learner` or a `Baseline`: both have step, evaluate, explore, state, restore, iteration, env_steps and config."""


def prepare(settings: Settings) -> Agent:
    """Build the environments and the learner that the settings name, and refuse wrong settings."""
    environment = find_environment(settings.environment)
    check_environment_config(environment, settings.environment_config)
    try:
        if settings.algorithm in EPISODIC:
            config = learner_config(settings)
            given: dict[str, Any] = {"basis": 5, "tau": environment.steps * environment.dt}
            given |= coerce_fields("prodmp", ProDMP, settings.prodmp, without=["dof"])
            prodmp = ProDMP(environment.tracking.dof, given.pop("basis"), given.pop("tau"), **given)
            make, plant = EPISODIC[settings.algorithm][0], _plant(settings, environment, config.episodes)
            return make(plant, prodmp, environment.dt, config, seed=settings.seed, dtype=DTYPES[settings.dtype])
        from corral.lab.baselines.stable import Baseline

        config = learner_config(settings)
        plant = _plant(settings, environment, config.episodes)
        return Baseline(plant, settings.algorithm, config, seed=settings.seed)
    except (ValueError, ImportError) as error:
        raise RunError(str(error)) from error


def to_play(settings: Settings) -> Settings:
    """The settings without a GPU, which playing does not need."""
    learner = {key: value for key, value in settings.learner.items() if key != "device"}
    return replace(settings, learner=learner, simulator="mujoco")


def find_environment(name: str) -> Environment:
    """The registered environment of this name."""
    if name not in ENVIRONMENTS:
        raise RunError(f"there is no environment {name!r}.{nearest(name, ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def check_environment_config(environment: Environment, given: Mapping[str, Any]) -> None:
    """Refuse settings that the environment lacks: Gymnasium and vectorised environments report them late or never."""
    module, _, name = environment.entry_point.partition(":")
    try:
        maker = getattr(importlib.import_module(module), name)  # an entry point is text
    except ImportError as error:
        raise RunError(str(error)) from error
    known = [key for key in inspect.signature(maker).parameters if key != "render_mode"]
    for key in given:
        if key not in known:
            raise RunError(f"{name} has no setting `{key}`.{nearest(key, known)}")


def learner_config(settings: Settings) -> Any:
    """The algorithm's settings, each checked: TCEConfig, BBRLConfig or BaselineConfig."""
    config_cls = EPISODIC[settings.algorithm][1] if settings.algorithm in EPISODIC else BaselineConfig
    given = coerce_fields(settings.algorithm, config_cls, settings.learner, without=["iterations"])
    return config_cls(iterations=settings.iterations, **given)


def _plant(settings: Settings, environment: Environment, episodes: int) -> Plant:
    envs = make_envs(settings.environment, episodes, workers=settings.workers, **settings.environment_config)
    return Plant(envs, environment.tracking, environment.steps, _simulator(settings))


def _simulator(settings: Settings) -> Simulator | None:
    """The physics engine used in MuJoCo's place, imported only if it was chosen."""
    if settings.simulator == "mujoco":
        return None
    if settings.algorithm not in EPISODIC:
        raise ValueError(
            f"simulator='warp' plays whole plans, and {settings.algorithm} chooses an action at every step. Leave it at "
            f"'mujoco', or choose tce or bbrl."
        )
    from corral.lab.environments.warp_batch import WarpSimulator

    return WarpSimulator()


def parameters(agent: Agent) -> int:
    """Number of trained parameters."""
    networks = [agent.policy, agent.critic] if isinstance(agent, Learner) else [agent.model.policy]
    return sum(p.numel() for network in networks for p in network.parameters())


def optimizers(agent: Agent) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by the name of the trained network."""
    if isinstance(agent, Learner):
        return {"critic": agent.critic_optimizer, "policy": agent.policy_optimizer}
    model = agent.model
    if hasattr(model, "actor"):  # SAC
        return {"critic": model.critic.optimizer, "policy": model.actor.optimizer, "temperature": model.ent_coef_optimizer}
    return {"policy": model.policy.optimizer}


def updates_of(agent: Agent) -> int:
    """Number of policy updates so far."""
    return agent.iteration * agent.config.policy_epochs if isinstance(agent, Learner) else int(agent.model._n_updates)


def describe(settings: Settings, agent: Agent) -> dict[str, Any]:
    """The content of config.json."""
    environment = ENVIRONMENTS[settings.environment]
    planned = isinstance(agent, Learner)
    controlled = planned or agent.config.controller_span is not None
    return {
        "settings": settings.flat(),
        "objective": {"name": settings.algorithm, **asdict(agent.config)},
        "task": {
            "name": settings.environment,
            **settings.environment_config,
            "steps": environment.steps,
            "dt": environment.dt,
            "tracking": asdict(environment.tracking) if controlled else None,
            **({"simulator": f"mujoco-warp {version('mujoco-warp')}"} if settings.simulator == "warp" else {}),
        },
        "model": {
            "name": model_name(settings),
            "parameters": parameters(agent),
            "prodmp": asdict(agent.prodmp) if planned else None,
        },
        "command": sys.argv,
    }


def model_name(settings: Settings) -> str:
    """The policy class, as config.json names it."""
    return "gaussian-prodmp" if settings.algorithm in EPISODIC else "gaussian-mlp"


_TRPL = ("sb3-trpl",)
_SAC = tuple(name for name in ALGORITHMS if name.startswith("sb3-sac"))
_PPO = tuple(name for name in ALGORITHMS if name.startswith("sb3-ppo")) + _TRPL
_COLOURED = tuple(name for name in ALGORITHMS if name.endswith("-pink"))

_SOME_BASELINES = {
    "epochs": _PPO,
    "minibatches": _PPO,
    "train_freq": _SAC,
    "gradient_steps": _SAC,
    "device": _SAC,
    "noise_colour": _COLOURED,
    **dict.fromkeys(("projection", "mean_bound", "cov_bound", "regression", "deployed_bound"), _TRPL),
}
"""Baselines that read a setting, for settings that only some baselines read."""


def used_by(algorithm: str) -> set[str]:
    """Names of the `learner` settings that an algorithm reads."""
    if algorithm in EPISODIC:
        return {item.name for item in fields(EPISODIC[algorithm][1])}
    names = {item.name for item in fields(BaselineConfig)}
    return {name for name in names if algorithm in _SOME_BASELINES.get(name, (algorithm,))}


def check_used(settings: Settings) -> None:
    """Refuse a new run with settings of another algorithm, or of an event that the environment does not report.

    Only new ones: a folder from before this was refused can still be resumed and evaluated. A name that no algorithm has is
    left to `prepare`, which names the nearest.
    """
    for key in settings.learner:
        owners = [name for name in ALGORITHMS if key in used_by(name)]
        if owners and settings.algorithm not in owners:
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
    """Lines of a TOML file with these settings, after comments about the episodes and the networks."""
    check_used(settings)
    agent = prepare(settings)
    try:
        count, episodes = parameters(agent), agent.config.episodes
    finally:
        agent.plant.close()
    steps = ENVIRONMENTS[settings.environment].steps
    size = 8 if settings.dtype == "float64" and isinstance(agent, Learner) else 4  # baselines are float32
    return [
        f"# {settings.iterations:,} batches of {episodes:,} episodes of {steps} steps: "
        f"{settings.iterations * episodes * steps:,} steps of the environment",
        "# would fetch nothing",
        f"# {count:,} parameters are trained: {4 * size * count / 1e6:.2g} MB with gradients and Adam's moments",
        *toml_lines(settings.flat()),
    ]
