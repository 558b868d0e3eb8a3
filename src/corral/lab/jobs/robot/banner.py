"""The banner of a robot's run: environment, algorithm, policy, updates, device."""

from pathlib import Path

import torch

import corral
from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.prepare import Agent
from corral.lab.jobs.robot.settings import Settings
from corral.lab.run.text import count
from corral.robot.learner import Learner


def banner(settings: Settings, agent: Agent, where: Path) -> list[tuple[str, str]]:
    """Names and sentences, in the order in which they are shown."""
    environment, config = ENVIRONMENTS[settings.environment], agent.config
    options = ", ".join(f"{key}={value}" for key, value in settings.environment_config.items())
    chosen = ", ".join(f"{key}={value}" for key, value in settings.learner.items())
    each = f"{environment.steps} steps of {environment.dt:g} s"
    return [
        ("corral", f"{corral.__version__}: {settings.environment}" + (f" ({options})" if options else "")),
        ("algorithm", settings.algorithm + (f" ({chosen})" if chosen else "")),
        ("policy", _policy(agent)),
        ("step", f"{count(config.episodes, 'episode')} of {each}, then {_updates(agent)}"),
        ("device", f"{_device(settings, agent)}; {_precision(settings, agent)}"),
        ("run", str(where)),
    ]


def _policy(agent: Agent) -> str:
    """One line on the policy: a Gaussian over plans, or actions step by step."""
    if not isinstance(agent, Learner):
        return "one action at a time, by stable-baselines3"
    prodmp, every = agent.prodmp, agent.config.replan_every
    joints = f"{prodmp.dof} joints × ({prodmp.basis} weights + goal)"
    often = "one plan per episode" if every is None else f"a plan every {count(every, 'step')}"
    return f"{often}, a Gaussian over {prodmp.parameters} parameters: {joints}"


def _updates(agent: Agent) -> str:
    """One line on the updates per batch of episodes."""
    config = agent.config
    if isinstance(agent, Learner):
        alone = (
            "; at its only one the policy is still the old one, and no trust region acts" if config.policy_epochs == 1 else ""
        )
        if config.plans_per_context > 1:
            return f"{count(config.policy_epochs, 'update')} of the policy, {config.plans_per_context} plans a context{alone}"
        return f"{count(config.critic_epochs, 'update')} of the critic and {config.policy_epochs} of the policy{alone}"
    if hasattr(agent.model, "actor"):  # SAC; stable-baselines3 need not be there to ask for its class
        return f"updates as it goes, {config.gradient_steps} for every {config.train_freq} steps"
    return f"{config.epochs} {'pass' if config.epochs == 1 else 'passes'} of {count(config.minibatches, 'update')}"


def _device(settings: Settings, agent: Agent) -> str:
    """Where a run computes, and what of it elsewhere."""
    places = [f"cpu ({count(torch.get_num_threads(), 'thread')})"]
    places += ["plans simulated by MuJoCo Warp on a GPU"] if settings.simulator == "warp" else []
    places += [f"updates on {agent.config.device}"] if agent.config.device != "cpu" else []
    return ", ".join(places)


def _precision(settings: Settings, agent: Agent) -> str:
    """The numbers that networks are made of."""
    return settings.dtype if isinstance(agent, Learner) else "float32"
