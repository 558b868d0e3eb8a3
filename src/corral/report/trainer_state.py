"""The output folder of a trainer of TRL's as a run: its newest checkpoint's trainer_state.json holds every logged line.

A CorralTrainer also writes what it was asked for there, as the state of the callback `RunRecord`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"

_RECORD = "RunRecord"
"""The callback under whose name a CorralTrainer writes its settings."""


def newest_state(folder: Path) -> Path | None:
    """The trainer_state.json of a folder or of its newest checkpoint; None if there is none."""
    if (folder / STATE).is_file():
        return folder / STATE
    found = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name.removeprefix("checkpoint-").isdigit()]
    return max(found, key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), default=None)


def settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The content that config.json has in a run's folder, as far as a trainer_state.json has it."""
    callbacks = state.get("stateful_callbacks")
    record = callbacks.get(_RECORD) if isinstance(callbacks, dict) else None
    arguments = record.get("args") if isinstance(record, dict) else None
    about = arguments.get("about") if isinstance(arguments, dict) else None
    content = dict(about) if isinstance(about, dict) else {}
    settings = content.get("settings")
    return {**content, "settings": {**(settings if isinstance(settings, dict) else {}), "steps": state.get("max_steps")}}


def lines_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Logged lines of training and evaluation, those of one update together; a step is an update here."""
    found: dict[int, dict[str, Any]] = {}
    history = state.get("log_history")
    for logged in history if isinstance(history, list) else ():
        step = logged.get("step") if isinstance(logged, dict) else None
        if type(step) is int and step >= 0 and "train_runtime" not in logged:  # the last line sums the run up
            found.setdefault(step, {}).update(logged, update=step)
    return [found[step] for step in sorted(found)]


def has_ended(state: Mapping[str, Any]) -> bool:
    """Whether all updates that were planned are done."""
    done, planned = state.get("global_step"), state.get("max_steps")
    return type(done) is int and type(planned) is int and 0 < planned <= done
