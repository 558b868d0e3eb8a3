"""Trackers of metrics (TensorBoard, wandb, trackio) for robots' runs; language models log through transformers."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corral.provenance import plain
from corral.validate import RunError, nearest

TRACKERS = ("tensorboard", "wandb", "trackio")
"""Names of the trackers; each is also the name of a Python package."""

_PROJECT = "corral"

_Log = Callable[[dict[str, float], int], object]
"""Function (metrics, step) that sends metrics to a tracker."""


def missing_package(setting: str, package: str) -> Iterator[str]:
    """Yield an error sentence if the package that a setting needs is not installed."""
    if find_spec(package) is None:
        yield f"`{setting}` needs the package {package}, which is not installed: pip install {package}, or leave it out."


def tracker_names(report_to: str) -> list[str]:
    """Parse `none`, `wandb` or `tensorboard,wandb` into tracker names; raises RunError for an unknown name."""
    names = [name for name in report_to.split(",") if name != "none"]
    for name in names:
        if name not in TRACKERS:
            raise RunError(f"`report_to` has {name!r}, and robots report to {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}")
    return names


def check_trackers(report_to: str) -> None:
    """Raise a RunError if the package of a tracker is not installed."""
    for name in tracker_names(report_to):
        for sentence in missing_package(f"report_to={name}", name):
            raise RunError(sentence)


@contextmanager
def tracking(report_to: str, run: Path, config: Mapping[str, Any], done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Context with a function that sends a line of metrics to every tracker of a run.

    Args:
        run: the run's folder, whose name is the run's name in a tracker.
        config: the run's settings.
        done: the number of steps before this process, which are in the trackers already.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_OPEN[name](run, plain(config), done)) for name in tracker_names(report_to)]

        def send(line: Mapping[str, Any]) -> None:
            numbers = {f"train/{key}": float(value) for key, value in line.items() if isinstance(value, int | float)}
            for log in logs:
                log(numbers, line["step"])

        yield send


@contextmanager
def _tensorboard(run: Path, config: dict[str, Any], done: int) -> Iterator[_Log]:
    """Open TensorBoard files in the run's folder, or in TENSORBOARD_LOGGING_DIR. Repeated steps replace earlier ones."""
    from torch.utils.tensorboard import SummaryWriter

    where = os.environ.get("TENSORBOARD_LOGGING_DIR", str(run / "tensorboard"))
    with SummaryWriter(where, purge_step=done + 1 if done else None) as writer:
        writer.add_text("settings", json.dumps(config))

        def log(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield log


@contextmanager
def _wandb(run: Path, config: dict[str, Any], done: int) -> Iterator[_Log]:
    """Open a run in wandb's project WANDB_PROJECT, or `corral`; wandb's variables decide on everything else."""
    import wandb

    with wandb.init(project=os.environ.get("WANDB_PROJECT", _PROJECT), name=run.name, config=config) as opened:
        yield lambda numbers, step: opened.log(numbers, step=step)


@contextmanager
def _trackio(run: Path, config: dict[str, Any], done: int) -> Iterator[_Log]:
    """Open a run in trackio's project TRACKIO_PROJECT, or `corral`; trackio's variables decide on everything else."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
    opened = trackio.init(project=project, name=run.name, config=config, resume="allow", embed=False)
    try:
        yield lambda numbers, step: opened.log(numbers, step=step)
    finally:
        opened.finish()


_OPEN: dict[str, Callable[[Path, dict[str, Any], int], AbstractContextManager[_Log]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
