"""Trackers of metrics (TensorBoard, wandb, trackio) for robots' runs. Language models log through transformers."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corral.provenance import plain
from corral.validate import RunError, nearest

TRACKERS = ("tensorboard", "wandb", "trackio")
"""Names of the metrics trackers. Each is also the name of a Python package."""


def missing_packages(needed: Iterable[tuple[str, str]]) -> list[str]:
    """Return an error sentence for each required package that is not installed.
    `needed` has settings, each with the package that it needs."""
    return [
        f"`{setting}` needs the package {package}, which is not installed: pip install {package}, or leave it out."
        for setting, package in needed
        if find_spec(package) is None
    ]


def tracker_names(report_to: str) -> list[str]:
    """Parse `none`, `wandb` or `tensorboard,wandb` into tracker names. Raises RunError for an unknown name."""
    names = [name for name in report_to.split(",") if name != "none"]
    for name in names:
        if name not in TRACKERS:
            raise RunError(f"`report_to` has {name!r}, and robots report to {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}")
    return names


def check_trackers(report_to: str) -> None:
    """Raise a RunError if the package of a metrics tracker in `report_to` is not installed."""
    for sentence in missing_packages((f"report_to={name}", name) for name in tracker_names(report_to)):
        raise RunError(sentence)


@contextmanager
def tracking(report_to: str, run: Path, config: Mapping[str, Any], done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Context that yields a function to send a step's metrics to every tracker of a run.

    TensorBoard's files are in the run's folder, or in TENSORBOARD_LOGGING_DIR, where repeated steps replace earlier ones.
    WANDB_PROJECT and TRACKIO_PROJECT name the project, by default `corral`.

    Args:
        run: the run's folder, whose name is the run's name in a tracker.
        config: the run's settings.
        done: the number of steps before this process, which are in the trackers already.
    """
    project = {name: os.environ.get(f"{name.upper()}_PROJECT", "corral") for name in TRACKERS}
    with ExitStack() as stack:
        writer: Any = None
        logs: list[Callable[..., object]] = []
        for name in tracker_names(report_to):
            if name == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                where = os.environ.get("TENSORBOARD_LOGGING_DIR", str(run / "tensorboard"))
                writer = stack.enter_context(SummaryWriter(where, purge_step=done + 1 if done else None))
                writer.add_text("settings", json.dumps(plain(config)))
            elif name == "wandb":
                import wandb

                opened = wandb.init(project=project[name], name=run.name, config=plain(config))
                logs.append(stack.enter_context(opened).log)
            else:
                import trackio

                opened = trackio.init(project=project[name], name=run.name, config=plain(config), resume="allow", embed=False)
                stack.callback(opened.finish)
                logs.append(opened.log)

        def send(line: Mapping[str, Any]) -> None:
            numbers = {f"train/{key}": float(value) for key, value in line.items() if isinstance(value, int | float)}
            for log in logs:
                log(numbers, step=line["step"])
            if writer is not None:
                for name, value in numbers.items():
                    writer.add_scalar(name, value, line["step"])
                writer.flush()

        yield send
