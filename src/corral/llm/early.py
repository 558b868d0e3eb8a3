"""What can be refused of settings before torch and TRL are imported: names, packages, and settings of tasks without data."""

import dataclasses
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from corral.llm.known import objective_fields
from corral.naming import check_keys, nearest
from corral.run.settings import guess
from corral.task import TASKS, make_task
from corral.task.dataset import FiniteTask
from corral.task.draws import ProceduralTask
from corral.task.tool import make_tool
from corral.validate import RunError

_PACKAGES = {"use_vllm": "vllm", "deepspeed": "deepspeed"}
"""Settings of TRL's, and what they need."""


def missing_packages(settings: Mapping[str, Any]) -> Iterator[str]:
    """What settings, the run's own and TRL's side by side, need and is not installed, as sentences."""
    names = str(settings.get("report_to") or "").split(",")
    reports = [(f"report_to={name}", name) for name in names if name in ("wandb", "trackio", "tensorboard")]
    asked = [(key, package) for key, package in _PACKAGES.items() if guess(settings.get(key)) not in (None, False, "")]
    for setting, package in reports + asked:
        if find_spec(package) is None:
            yield f"`{setting}` needs the package {package}, which is not installed: pip install {package}, or leave it out."


def check_packages(settings: Mapping[str, Any]) -> None:
    """Refuse what needs a package that is not there; the libraries would say so in a traceback, or after minutes."""
    for sentence in missing_packages(settings):
        raise RunError(sentence)


def check_objective_config(objective: str, config: Mapping[str, Any]) -> None:
    """Refuse settings that the objective does not have."""
    known = objective_fields()[objective]
    for key in config:
        if key not in known:
            raise RunError(f"{objective}: there is no setting `{key}`.{nearest(key, known)}")


def check_task_config(task: str, config: Mapping[str, Any]) -> None:
    """Refuse settings that the task does not have, what a task that needs no data refuses, and nothing to train on."""
    task_cls = TASKS.get(task)
    if not dataclasses.is_dataclass(task_cls):
        return
    try:
        check_keys(task, task_cls, config)
        if issubclass(task_cls, ProceduralTask):
            make_task(task, **config)
    except ValueError as error:
        raise RunError(str(error)) from error
    if issubclass(task_cls, FiniteTask) and config.get("held_out", task_cls.held_out) == 1:
        raise RunError(
            f"{task} is for evaluation: all of its problems are held out, and none is left to train on. Train on "
            f"a file (--set task_config.path=FILE) with these held out (--set task_config.held_out=FILE), or hold out a share."
        )


def check_tool(name: str) -> None:
    """Refuse a packaged tool that does not exist; one's own is imported later."""
    if name and ":" not in name:
        try:
            make_tool(name)
        except ValueError as error:
            raise RunError(str(error)) from error
