"""Training runs of robots: build environments and a learner from settings, and train in a resumable run folder."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import corral
from corral.lab.jobs.robot.evaluate import measure
from corral.lab.jobs.robot.prepare import STATE, Agent, check_used, find_environment, parameters, prepare, restore
from corral.lab.jobs.robot.settings import EPISODIC, Settings, resolve
from corral.lab.run import life
from corral.lab.run.folder import Checkpoint
from corral.lab.run.guard import CollapseLimits, Guard
from corral.lab.run.life import Job, Outcome, Recorder
from corral.lab.run.settings import changed_fields
from corral.lab.run.text import count
from corral.lab.run.trackers import check_trackers, tracking
from corral.lab.run.view import RunView
from corral.numerics import drop_gradients, gradient_state
from corral.robot.learner import Learner

LIMITS = CollapseLimits(kl=10.0)
"""Metric thresholds beyond which a robot's training counts as collapsed.
KL is per plan, not per token: a healthy BBRL run begins at .6 before its projection."""

_WATCHED = ("success", "tr/kl_before", "std", "skipped")
"""Metrics in which the guard looks for a collapse of a robot's training.
The mean standard deviation replaces entropy: the entropy of a density has no zero, and is negative in healthy runs."""


def train(
    settings: Settings | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    quiet: bool = False,
    smoke: bool = False,
    verbose: bool = False,
) -> Outcome:
    """Train a new robot run in the folder `out`, or in a new folder under runs/ (under smoke-runs/ with `smoke`)."""
    settings = settings if isinstance(settings, Settings) else resolve([settings])
    check_used(settings)
    name = re.sub(r"-v\d+$", "", re.split("[/:]", settings.environment)[-1])
    label = f"{name}-{settings.algorithm}-{settings.seed}"
    return life.train(RobotRun(settings), label, out=out, quiet=quiet, smoke=smoke, verbose=verbose)


def resume(
    path: Path | str,
    *,
    quiet: bool = False,
    guard: str | None = None,
    report_to: str | None = None,
    iterations: int | str | None = None,
    simulator: str | None = None,
    verbose: bool = False,
) -> Outcome:
    """Resume the robot run in `path` from its last intact checkpoint. Steps after that checkpoint are repeated, bit for bit.

    `iterations` gives it a new end; rates and bounds that change over a run follow the schedule of that length. Another
    `simulator` plays the plans from here on: a run that began on a GPU goes on without one.
    """
    changes = {"guard": guard, "report_to": report_to, "iterations": iterations, "simulator": simulator}
    given = {key: value for key, value in changes.items() if value is not None}

    def make(content: dict[str, Any]) -> RobotRun:
        return RobotRun(resolve([content["settings"], given]))

    return life.resume(make, Path(path), quiet=quiet, extended=iterations is not None, verbose=verbose)


class RobotRun(Job):
    """Training run of a robot: the learner's steps, evaluations and checkpoints."""

    length, beside, pace = "iterations", "return", ("env_steps", "steps_per_second")
    settings: Settings
    agent: Agent
    record: Recorder
    track: Callable[[Mapping[str, Any]], None]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.about = {"objective": settings.algorithm, "task": settings.environment}
        self.about |= {"model": "gaussian-prodmp" if settings.algorithm in EPISODIC else "gaussian-mlp", "seed": settings.seed}
        self.guard = Guard(settings.guard, LIMITS, select=select_watched)

    def prepare(self) -> None:
        check_trackers(self.settings.report_to)
        self.agent = prepare(self.settings)

    def describe(self) -> dict[str, Any]:
        settings, agent, environment = self.settings, self.agent, find_environment(self.settings)
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
                "name": self.about["model"],
                "parameters": parameters(agent),
                "prodmp": asdict(agent.prodmp) if planned else None,
            },
            "command": sys.argv,
        }

    def check_changes(self, content: Mapping[str, Any], done: int, path: Path, view: RunView) -> dict[str, Any]:
        """Record that the simulator changed when a robot's run was resumed, because results then differ from that step on."""
        if self.settings.simulator == content["settings"].get("simulator", Settings.simulator):  # older runs may not have it
            return {}
        return life.changed_setting(content, "simulator", self.settings.simulator, done, "simulated")

    def load(self, checkpoint: Checkpoint) -> None:
        restore(self.agent, checkpoint)

    def fit(self, record: Recorder) -> None:
        """Train until all steps of the run are done."""
        self.record = record
        if self.settings.guard != "off":
            for name, optimizer in self.agent.optimizers.items():
                optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: self.check_update(name, optimizer))
        record.begin(banner(self.settings, self.agent, record.path, record.view.verbose))
        done = self.agent.iteration
        with tracking(self.settings.report_to, record.path, self.settings.flat(), done) as self.track:
            if not record.lines:
                self.add({"step": 0, "update": 0, **self.measure(), "reward": None, "env_steps": 0})
            record.patient = True
            for _ in range(done, self.settings.iterations):
                if self.step():
                    break

    def step(self) -> bool:
        """Train on one batch of episodes, write its metrics and any due checkpoint, and return whether to stop the run."""
        settings, record, metrics = self.settings, self.record, self.agent.step()
        step = self.agent.iteration
        line = {"step": step, "update": self.agent.updates, "success": None, "return": None}
        line |= self.measure() if record.is_due(step, settings.eval_every) else {}
        line |= {"reward": metrics.pop("return"), "batch_success": metrics.pop("success"), **metrics}
        self.add(line | {"env_steps": self.agent.env_steps})
        stop = record.interrupted or record.guard.collapsed is not None  # a signal from here on is for the next step
        if stop or record.is_due(step, settings.checkpoint_every):
            self.save()
        return stop

    def measure(self) -> dict[str, float | None]:
        """Evaluate the robot's policy on held-out contexts. The random generators of training stay unchanged."""
        return measure(self.agent, find_environment(self.settings), self.settings.eval_size)

    def add(self, line: dict[str, Any]) -> None:
        """Check one step's metrics for a collapse, record them, and send them to the trackers."""
        self.record.guard.observe(line)
        self.record.add(line)
        self.track(line)

    def save(self) -> None:
        """Write a checkpoint of the current training step atomically."""
        folder, step = self.record.folder, self.agent.iteration
        assert folder is not None  # robots learn in one process
        name = f"checkpoint-{step}"
        with self.record.saving(folder.checkpoints / name):
            (folder.writing / name).mkdir(parents=True)
            torch.save(self.agent.state(), folder.writing / name / STATE)
            folder.publish(name, step, self.settings.keep_checkpoints)

    def check_update(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Delete the gradients of an update if any gradient is not finite, so that the optimizer changes nothing."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        poisoned = not gradient_state(parameters)[0]
        update = f"an update of the {name} in step {self.agent.iteration + 1}"
        self.record.guard.judge(update, poisoned="gradient" if poisoned else None)
        if poisoned:
            drop_gradients(parameters)

    def close(self) -> None:
        self.agent.plant.close()


def select_watched(line: Mapping[str, Any]) -> dict[str, Any]:
    """Select the metrics of a training step in which the guard looks for a collapse."""
    return {key: line[key] for key in _WATCHED if key in line}


def banner(settings: Settings, agent: Agent, where: Path, verbose: bool = False) -> list[tuple[str, str]]:
    """Compose the heading of a robot's run as (name, sentence) lines. `verbose` includes settings at their defaults."""
    environment, config, learns_plans = find_environment(settings), agent.config, isinstance(agent, Learner)
    options = ", ".join(f"{key}={value}" for key, value in settings.environment_config.items())
    given = {key: value for key, value in changed_fields(config).items() if key in settings.learner}
    chosen = ", ".join(f"{key}={value}" for key, value in (vars(config) if verbose else given).items())
    policy = "one action at a time, by stable-baselines3"
    if learns_plans:
        prodmp, every = agent.prodmp, config.replan_every
        joints = f"{prodmp.dof} joints × ({prodmp.basis} weights + goal)"
        often = "one plan per episode" if every is None else f"a plan every {count(every, 'step')}"
        policy = f"{often}, a Gaussian over {prodmp.parameters} parameters: {joints}"
        updates = f"{count(config.critic_epochs, 'update')} of the critic and {config.policy_epochs} of the policy"
        if config.plans_per_context > 1:
            updates = f"{count(config.policy_epochs, 'update')} of the policy, {config.plans_per_context} plans a context"
        if config.policy_epochs == 1:
            updates += "; at its only one the policy is still the old one, and no trust region acts"
    elif hasattr(agent.model, "actor"):  # SAC; stable-baselines3 need not be there to ask for its class
        updates = f"updates as it goes, {config.gradient_steps} for every {config.train_freq} steps"
    else:
        updates = f"{config.epochs} {'pass' if config.epochs == 1 else 'passes'} of {count(config.minibatches, 'update')}"
    places = [f"cpu ({count(torch.get_num_threads(), 'thread')})"]
    places += ["plans simulated by MuJoCo Warp on a GPU"] if settings.simulator == "warp" else []
    places += [f"updates on {config.device}"] if config.device != "cpu" else []
    each = f"{environment.steps} steps of {environment.dt:g} s"
    return [
        ("corral", f"{corral.__version__}: {settings.environment}" + (f" ({options})" if options else "")),
        ("algorithm", settings.algorithm + (f" ({chosen})" if chosen else "")),
        ("policy", policy),
        ("step", f"{count(config.episodes, 'episode')} of {each}, then {updates}"),
        ("device", f"{', '.join(places)}; {settings.dtype if learns_plans else 'float32'}"),  # baselines have no other
        ("run", str(where)),
    ]
