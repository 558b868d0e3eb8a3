"""Time estimates: from earlier runs with the same cost, else from what shipped recipes took on one core."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from corral.compare.folder import read_summary
from corral.compare.plan import Kind
from corral.run.files import read_json
from corral.run.text import count

_COST_SETTINGS: dict[Kind, tuple[str, ...]] = {
    "llm": (
        "model", "task", "task_config", "device", "per_device_train_batch_size", "steps_per_generation", "num_generations",
        "max_completion_length", "eval_every", "eval_size",
    ),
    "robot": ("environment", "learner.episodes", "eval_every", "eval_size"),
}  # fmt: skip
"""Settings that determine most of a step's cost."""

_KNOWN = {"demo": 3.4, "via_point": 0.5, "via_point_sparse": 0.35, "via_point_sparse_short": 0.5}
"""Seconds per step of a recipe as it ships, on one core; step-based baselines take several times as long."""


def seconds_per_step(kind: Kind, settings: Any, recipe: str | None, folders: Iterable[Path]) -> tuple[float, str] | None:
    """Seconds that a step takes, and where that is known from; None if it is not.

    Args:
        settings: resolved, of one contestant.
        folders: where earlier runs may be, three folders deep.
    """
    mine = _cost_settings(kind, settings.flat())
    paces = []
    for folder in folders:
        for path in [file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/config.json")]:
            try:
                given = read_json(path)["settings"]
                summary = read_summary(path.parent)
                if _cost_settings(kind, given) == mine and summary["stopped"] == "finished":
                    paces.append(summary["seconds"] / summary["steps"])
            except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                continue  # no run, or a damaged one
    if paces:
        return median(paces), f"as {count(len(paces), 'earlier run')} here took"
    if recipe in _KNOWN:
        return _KNOWN[recipe], f"as {recipe} took on one core elsewhere"
    return None


def _cost_settings(kind: Kind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a step's cost depends on."""
    found = {}
    for key in _COST_SETTINGS[kind]:
        value: Any = settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value
    return found


def duration(seconds: float) -> str:
    """`45 s`, `13 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
