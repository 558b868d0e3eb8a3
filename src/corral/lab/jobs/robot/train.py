"""A training run: settings → environments and a learner → a resumable run folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.banner import banner
from corral.lab.jobs.robot.measure import measure
from corral.lab.jobs.robot.prepare import Agent, describe, model_name, optimizers, prepare, updates_of
from corral.lab.jobs.robot.settings import Settings, resolve
from corral.lab.jobs.robot.unused import check_used
from corral.lab.run.ending import Interruptible, Outcome, attempt, close, extend, last_words, record_change, summarise
from corral.lab.run.files import disk_sentence, is_disk_full
from corral.lab.run.folder import Checkpoint, RunFolder, Stopped
from corral.lab.run.guard import CollapseLimits, Guard
from corral.lab.run.view import RunView, make_view
from corral.numerics import drop_gradients, gradient_state
from corral.provenance import versions
from corral.validate import RunError

STATE = "state.pt"
"""File of a checkpoint with the learner's state."""

LIMITS = CollapseLimits(kl=10.0)
"""KL is here of a whole plan and not of a token; a healthy BBRL begins at .6 before its projection."""

_NOT_MEASURED: dict[str, float | None] = dict.fromkeys(("success", "return"))
"""Metrics of a line without an evaluation."""

_WATCHED = ("success", "tr/kl_before", "std")
"""Metrics that a collapse shows in. Not the entropy: that of a density has no zero, and falls below it in good health; the mean
standard deviation that it stands for has one."""


def train(
    settings: Settings | Mapping[str, Any], *, out: Path | str | None = None, quiet: bool = False, smoke: bool = False
) -> Outcome:
    """A new run, in `out` or in a new folder under runs/; under smoke-runs/ where it is none to keep."""
    settings = settings if isinstance(settings, Settings) else resolve([settings])
    check_used(settings)
    agent = prepare(settings)
    name = settings.environment.rpartition("/")[2].rpartition("-v")[0]
    folder = RunFolder.create(out, f"{name}-{settings.algorithm}-{settings.seed}", smoke=smoke)
    folder.write_config(describe(settings, agent))
    return _run(RobotRun(settings=settings, agent=agent, folder=folder, view=make_view(quiet=quiet)))


def resume(
    path: Path | str,
    *,
    quiet: bool = False,
    guard: str | None = None,
    iterations: int | str | None = None,
    simulator: str | None = None,
) -> Outcome:
    """Go on with the run in `path` from its last whole checkpoint; what came after that happens again, the same.

    `iterations` gives it a new end; rates and bounds that change over a run follow the schedule of that length. Another
    `simulator` plays the plans from here on: a run that began on a GPU goes on without one.
    """
    path = Path(path)
    folder = RunFolder.open(path)
    view = make_view(quiet=quiet)
    content = folder.read_config()
    changes = {"guard": guard, "iterations": iterations, "simulator": simulator}
    settings = resolve([content["settings"], {key: value for key, value in changes.items() if value is not None}])
    checkpoint, complaints = folder.last_whole_checkpoint()
    if iterations is not None:
        extend(folder, content, {"iterations": settings.iterations}, checkpoint)
    for sentence in complaints:
        view.warn(sentence)
    if checkpoint is not None and checkpoint.step >= settings.iterations:
        summary = _summary(settings, folder.lines(), "finished", None)
        folder.write_summary(summary)
        folder.close()
        view.end(last_words(summary, path))
        return Outcome(path, summary)
    if content.get("versions") != versions():
        view.warn("versions differ from those the run began with: it goes on, but perhaps not bit for bit the same.")
    try:
        agent = prepare(settings)
    except RunError:
        folder.close()
        raise
    if simulator is not None:
        after = checkpoint.step if checkpoint is not None else 0
        record_change(folder, folder.read_config(), {"simulator": settings.simulator}, after, "simulated")
    if checkpoint is None:
        view.say(f"{path} has no whole checkpoint: the run starts from the beginning.")
    else:
        view.say(f"going on after step {checkpoint.step}, from {checkpoint.path}")
        restore(agent, checkpoint)
    folder.drop_unfinished()
    lines = folder.cut_back(checkpoint.step if checkpoint is not None else -1)
    return _run(RobotRun(settings=settings, agent=agent, folder=folder, view=view, lines=lines))


def restore(agent: Agent, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's state into the learner; a RunError where it does not fit. No code of the file is run."""
    try:
        agent.restore(torch.load(checkpoint.path / STATE, weights_only=True, map_location="cpu"))
    except Exception as error:  # pickle, torch, zip files and NumPy have one each
        reason = (str(error).splitlines() or [""])[0]
        raise RunError(
            f"{checkpoint.path / STATE} is no state of this learner, though it matches its manifest: {type(error).__name__}: "
            f"{reason} Remove that checkpoint, and the one before it is used."
        ) from error


def _run(job: "RobotRun") -> Outcome:
    """Train, and write down how it ended, however it ended."""
    folder, view = job.folder, job.view
    stopped, error = attempt(job.train, folder.path)
    view.close()
    job.agent.plant.close()
    summary = _summary(job.settings, job.lines, stopped, job.guard.collapsed or (str(error) if error else None))
    close(folder, (lambda: folder.write_summary(summary),), view)
    if error is not None:
        raise error
    view.end(last_words(summary, folder.path))
    return Outcome(folder.path, summary)


@dataclass(kw_only=True)
class RobotRun(Interruptible):
    """A run in progress: the learner's steps, evaluations, lines of metrics and checkpoints."""

    settings: Settings
    agent: Agent
    folder: RunFolder
    view: RunView
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Metrics so far; after a resume, those that were kept."""

    def __post_init__(self) -> None:
        self.started = time.monotonic() - (self.lines[-1]["seconds"] if self.lines else 0.0)
        self.guard = Guard(self.settings.guard, LIMITS, say=self.view.warn)
        self.guard.restore(map(select_watched, self.lines))
        if self.settings.guard != "off":
            for name, optimizer in optimizers(self.agent).items():
                optimizer.register_step_pre_hook(lambda optimizer, *_, name=name: self.check_update(name, optimizer))

    def train(self) -> Stopped:
        """Every step that is left."""
        with self.stop_on_signals():
            done, last = self.agent.iteration, self.settings.iterations
            self.view.begin(banner(self.settings, self.agent, self.folder.path), last, done)
            if not self.lines:
                self.add({"step": 0, "update": 0, **self.measure(), "reward": None, "env_steps": 0})
            self.patient = True
            for _ in range(done, last):
                if self.step():
                    break
        return "collapsed" if self.guard.collapsed else "finished" if self.agent.iteration == last else "interrupted"

    def step(self) -> bool:
        """One batch of episodes with its updates, its line, and a checkpoint where one is due. Returns whether to stop."""
        settings, metrics = self.settings, self.agent.step()
        step, last = self.agent.iteration, self.agent.iteration == settings.iterations
        line = {"step": step, "update": updates_of(self.agent), **_NOT_MEASURED}
        line |= self.measure() if last or step % settings.eval_every == 0 else {}
        line |= {"reward": metrics.pop("return"), "batch_success": metrics.pop("success"), **metrics}
        self.add(line | {"env_steps": self.agent.env_steps})
        stop = self.interrupted or self.guard.collapsed is not None  # a signal from here on is for the next step
        if stop or last or step % settings.checkpoint_every == 0:
            self.save()
        return stop

    def measure(self) -> dict[str, float | None]:
        """Evaluate the policy on held-out contexts. Training draws from generators of its own."""
        return measure(self.agent, ENVIRONMENTS[self.settings.environment], self.settings.eval_size)

    def add(self, line: dict[str, Any]) -> None:
        """Log one line of metrics: to the guard, the folder and the view."""
        seconds = time.monotonic() - self.started
        if self.lines:
            before = self.lines[-1]
            pace = (line["env_steps"] - before["env_steps"]) / max(seconds - before["seconds"], 1e-9)
            line |= {"steps_per_second": pace, "skipped": self.guard.skipped}
        self.guard.observe(select_watched(line))
        line |= {"seconds": seconds}
        if self.guard.news:
            line["warnings"], self.guard.news = self.guard.news, []
        self.lines.append(line)
        self.folder.append(line)
        self.view.line(line)

    def save(self) -> None:
        """A checkpoint of this step, whole or not at all."""
        name = f"checkpoint-{self.agent.iteration}"
        try:
            (self.folder.writing / name).mkdir(parents=True)
            torch.save(self.agent.state(), self.folder.writing / name / STATE)
            self.folder.publish(name, self.agent.iteration, self.settings.keep_checkpoints)
        except (OSError, RuntimeError) as error:  # torch has one of its own for a full disk
            self.folder.drop_unfinished()
            if isinstance(error, OSError) or is_disk_full(error):
                raise RunError(disk_sentence(error, self.folder.checkpoints / name)) from error
            raise

    def check_update(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """An update with a non-finite gradient is skipped: without gradients, optimizers leave everything as it is.

        Not one that a CUDA graph captures: it cannot ask the host, and its replays run no hooks. GraphedSAC checks its networks
        after them.
        """
        if is_captured():
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        poisoned = not gradient_state(parameters)[0]
        step = self.agent.iteration + 1
        self.guard.judge(f"an update of the {name} in step {step}", poisoned="gradient" if poisoned else None)
        if poisoned:
            drop_gradients(parameters)


def is_captured() -> bool:
    """Whether a CUDA graph records what is launched now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def select_watched(line: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a line that the guard watches."""
    return {key: line[key] for key in (*_WATCHED, "skipped") if key in line}


def _summary(settings: Settings, lines: list[dict[str, Any]], stopped: Stopped, why: str | None) -> dict[str, Any]:
    """The content of summary.json."""
    about = {"objective": settings.algorithm, "task": settings.environment, "model": model_name(settings)}
    return summarise(about | {"seed": settings.seed}, lines, stopped, why, also="return")
