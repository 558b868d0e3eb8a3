"""A digest of a run's data, kept in config.json: a resumed run refuses data that are not those it began with."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from corral.llm.settings import Settings
from corral.task import Task, columns_of
from corral.task.dataset import FiniteTask
from corral.validate import RunError


def describe_data(task: Task, train: Sequence[str], held_out: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How many rows a run uses to train on and to measure success on, and the digest of each."""
    return {
        name: {"rows": len(prompts), "sha256": digests(task, prompts)[len(prompts)]}
        for name, prompts in (("train", train), ("held_out", held_out))
    }


def digests(task: Task, prompts: Sequence[str], *counts: int) -> dict[int, str]:
    """SHA-256 of all these rows in their order, and of the first `counts` of them, by how many rows they are of.

    A row is its prompt, and where the task has data its answer and its other columns.
    """
    found, running = dict[int, str](), hashlib.sha256()
    for number, prompt in enumerate(prompts):
        if number in counts:
            found[number] = running.hexdigest()
        row = [task.answer(prompt), task.row(prompt)] if isinstance(task, FiniteTask) else columns_of(task, [prompt])
        running.update(_ENCODE([prompt, row]).encode())
    return found | {len(prompts): running.hexdigest()}


def _as_plain(value: Any) -> Any:
    """What JSON does not have, as text or a table that is the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_ENCODE = json.JSONEncoder(default=_as_plain).encode
"""Made once: a million rows take as long again where each makes its own."""


def changed_data(
    before: Any, settings: Settings, task: Task, train: Sequence[str], held_out: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """What has changed since a run began, in words, and the description of its data now.

    Args:
        before: what its config.json says of them; a RunError where that cannot be read.
        train: the rows that the resumed run will see, which may be more or fewer.
    """
    words, now = [], {}
    for name, prompts, what in (("train", train, "to train on"), ("held_out", held_out, "that are held out")):
        entry = before.get(name) if isinstance(before, Mapping) else None
        if not isinstance(entry, Mapping) or type(entry.get("rows")) is not int or not 0 <= entry["rows"] < 2**40:
            raise RunError(f"config.json is not what a run writes: `data` has no number of rows {what}.")
        rows = entry["rows"]
        if rows > len(prompts) and name == "train":  # a shorter run; the first rows of a longer draw are those of a shorter one
            prompts = task.train_prompts(rows, settings.seed)
        found = digests(task, prompts, rows)
        if found.get(rows) != entry.get("sha256"):
            words.append(f"the {rows:,} rows {what}")
        now[name] = {"rows": len(prompts), "sha256": found[len(prompts)]}
    return words, now
