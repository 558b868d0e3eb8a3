"""The files of runs. What is missing, torn or not a number becomes a note, never an exception.

Reads config.json, metrics.jsonl, summary.json, completions.parquet and, where there is one, tokens.parquet; nothing else.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corral.run.files import RunError

_FILES = ("config.json", "metrics.jsonl")
"""A folder that holds one of these is a run."""

_DEPTH = 4
"""How many folders deep runs are searched for."""

_KEPT_COMPLETIONS = 64
"""Of one run; the first of evenly spaced steps. A page is to be sent to people."""

_TOKEN_COLUMNS = ("token", "kl_before", "kl_after", "log_ratio", "action")
"""Lists of one length in every row of tokens.parquet; kl_after and log_ratio may be left out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as its files tell."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics in order of their step; numbers are numbers, also NaN and infinite ones."""
    completions: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    """What was wrong with the files, in sentences."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings it was started with."""
        return _mapping(self.config.get("settings"))

    @property
    def trainer(self) -> Mapping[str, Any]:
        """Settings of TRL's trainer, resolved; robots have none."""
        return _mapping(self.config.get("trainer"))

    @property
    def own_reduction(self) -> bool | None:
        """Whether the loss was averaged in one of the objective's own ways; None where nothing says so."""
        said = _mapping(self.config.get("reduction")).get("own")
        return said if isinstance(said, bool) else None

    @property
    def objective(self) -> str:
        """Its name."""
        return self._said("objective")

    @property
    def is_robot(self) -> bool:
        """Whether a robot learned, and no language model."""
        return "environment" in self.settings

    @property
    def task(self) -> str:
        """Its name."""
        return self._said("task")

    @property
    def model(self) -> str:
        """Its name; robots have none."""
        return self._said("model", "")

    @property
    def seed(self) -> str:
        """As text: it only tells runs apart, and pairs them."""
        return self._said("seed")

    @property
    def stopped(self) -> str:
        """How it ended, or that it has not."""
        return str(self.summary.get("stopped") or "not ended")

    @property
    def steps(self) -> int:
        """Done so far."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def planned_steps(self) -> int:
        """Steps in its settings; those done where the settings have none."""
        planned = self.settings.get("steps", self.settings.get("iterations"))  # a robot's steps are iterations
        return planned if type(planned) is int and planned > 0 else self.steps

    def values(self, key: str) -> list[tuple[int, float]]:
        """Steps at which a metric was measured, and its finite values."""
        pairs = ((int(line["step"]), line.get(key)) for line in self.lines)
        return [(step, value) for step, value in pairs if isinstance(value, float) and math.isfinite(value)]

    def _said(self, key: str, default: str = "unknown") -> str:
        """A name from the summary, the settings, or the resolved part of the configuration."""
        for said in (self.summary.get(key), self.settings.get(key), self.config.get(key)):
            said = said.get("name") if isinstance(said, Mapping) else said
            if said is not None and said != "":
                return str(said)
        return default


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs in these folders, in the order of their paths."""
    return [read_run(path) for path in find_runs(folders)]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """A folder may be a run, or hold runs up to four folders deep. A sentence if one holds none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder} is no folder. report takes runs' folders, or folders that hold runs.")
        here = sorted(_runs_in(folder, _DEPTH))
        if not here:
            raise RunError(
                f"no runs in {folder}: neither it nor the folders in it, {_DEPTH} deep, hold a {_FILES[0]} or a {_FILES[1]}. "
                f"`corral train --out {folder}/…` makes one."
            )
        found |= {path.resolve(): path for path in here}
    return list(found.values())


def _runs_in(folder: Path, depth: int) -> Iterable[Path]:
    if any((folder / name).is_file() for name in _FILES):
        yield folder
    elif depth:
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _runs_in(inner, depth - 1)


def read_run(path: Path) -> Run:
    """One run's files, and notes about those that cannot be read."""
    notes: list[str] = []
    config, summary = (
        _object(path / "config.json", notes),
        _object(path / "summary.json", notes, "it has not ended, or was killed"),
    )
    lines = _lines(path / "metrics.jsonl", notes)
    robot = "environment" in _mapping(config.get("settings"))
    completions = _rows(path / "completions.parquet", ("step", "completion"), notes, optional=robot)
    tokens = _rows(path / "tokens.parquet", ("step", "token", "action", "kl_before"), notes, optional=True)
    whole = [row for row in tokens if _aligned(row)]
    if len(whole) < len(tokens):
        notes.append(
            f"tokens.parquet: {len(tokens) - len(whole)} of {len(tokens)} rows have lists of unlike lengths: left out."
        )
    return Run(
        path=path,
        config=config,
        summary=summary,
        lines=lines,
        completions=_evenly(completions),
        tokens=_evenly(whole),
        notes=notes,
    )


def _object(path: Path, notes: list[str], missing: str = "its settings are unknown") -> Mapping[str, Any]:
    """A JSON file that holds an object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: {missing}.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} holds no settings.")
        return {}
    return content


def _lines(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Lines of metrics by step; of two with the same step the later one counts."""
    try:
        texts = [text for text in path.read_bytes().split(b"\n") if text.strip()]
    except OSError:
        notes.append("metrics.jsonl is missing: nothing was measured yet.")
        return []
    found: dict[int, Mapping[str, Any]] = {}
    torn = 0
    for text in texts:
        try:
            line = {key: number(value) for key, value in json.loads(text).items()}
            found[int(line["step"])] = line
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            torn += 1
    if torn:
        notes.append(f"metrics.jsonl: {torn} of {len(texts)} lines cannot be read and are left out.")
    bad = sorted(
        {key for line in found.values() for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    )
    if bad:
        notes.append(f"not finite at some steps: {', '.join(bad)}.")
    return [found[step] for step in sorted(found)]


def number(value: Any) -> Any:
    """A value from JSON: numbers as floats, and those that JSON does not have, "inf" and "nan", too; all else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.lower() in ("inf", "-inf", "infinity", "-infinity", "nan"):
        return float(value)
    return value


def _rows(path: Path, needed: Sequence[str], notes: list[str], *, optional: bool = False) -> list[Mapping[str, Any]]:
    """Rows of a parquet file."""
    if not path.is_file():
        if not optional:
            notes.append(f"{path.name} is missing: there are no completions to show.")
        return []
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return []
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        notes.append(f"{path.name} has no column {', '.join(missing)}.")
        return []
    rows: list[Mapping[str, Any]] = table.to_pylist()
    return rows


def _aligned(row: Mapping[str, Any]) -> bool:
    """Whether all lists of a row of tokens have one entry per token."""
    lists = [row[name] for name in _TOKEN_COLUMNS if row.get(name) is not None]
    return all(isinstance(entry, list) and len(entry) == len(row["token"] or ()) for entry in lists)


def _evenly(rows: Sequence[Mapping[str, Any]], most: int = _KEPT_COMPLETIONS) -> list[Mapping[str, Any]]:
    """At most `most` rows: eight of the first, of the last and of evenly spaced steps between."""
    each = 8
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"] or 0), []).append(row)
    steps = sorted(by_step)
    count = min(len(steps), max(most // each, 1))
    chosen = {steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)} if steps else set()
    return [row for step in sorted(chosen) for row in by_step[step][:each]]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
