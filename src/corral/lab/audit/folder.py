"""Folder of an audit: audited tokens and counts of micro-batches in parquet files, rules and settings in audit.json."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from corral.lab.audit.rules import read_rules
from corral.lab.run.files import LockedFolder, disk_errors, read_json, require_regular, write_json, write_whole
from corral.provenance import plain, versions
from corral.validate import RunError


class NothingYet(RunError):
    """Raised when there is nothing to audit yet: `--live` retries, other audits exit."""


_FLOATS = (
    *("advantage", "entropy", "logp_old", "logp_new", "logp_rollout"),
    *("kl", "tv", "tv_binary", "tv_topk", "troll_kl", "troll_tv"),
)

SCHEMA = pa.schema(
    [("update", pa.int64()), ("sequence", pa.int32()), ("position", pa.int32()), ("token", pa.int32()), ("text", pa.string())]
    + [(name, pa.float32()) for name in _FLOATS]
    + [(name, pa.bool_()) for name in ("clipped", "dppo_binary", "dppo_topk", "troll")]
)
"""Columns of audit.parquet, which has a row per audited token. docs/audit.md describes the columns."""


class MicroBatch(NamedTuple):
    """Counts of a micro-batch at the time of its update: all tokens, and tokens blocked by clipping."""

    update: int
    tokens: int
    """Number of tokens of the micro-batch that were trained on."""
    clipped: int
    """Number of tokens of the micro-batch that clipping blocked: their gradient was set to zero."""
    trl: float | None
    """Value of TRL's metric `clip_ratio/region_mean`; None if the trainer logs no such metric."""


UPDATES_SCHEMA = pa.schema([("update", pa.int64()), ("tokens", pa.int64()), ("clipped", pa.int64()), ("trl", pa.float64())])
"""Columns of updates.parquet, which has a row per micro-batch: the fields of `MicroBatch`."""


_POSSIBLE = (
    ("a KL below 0", ("kl", "troll_kl"), 0.0, float("inf")),
    ("a total variation outside 0 to 1", ("tv", "tv_binary", "tv_topk", "troll_tv"), 0.0, 1.0),
    ("an entropy below 0", ("entropy",), 0.0, float("inf")),
    ("a log-probability above 0", ("logp_old", "logp_new", "logp_rollout"), float("-inf"), 0.0),
)
"""Valid ranges of an audit's columns, as (name of the fault, columns, smallest value, largest value)."""

_ROUNDING = 1e-3
"""Tolerance of an audit's valid ranges: probabilities from float32 logits sum to 1 only up to this error."""


class AuditFolder(LockedFolder):
    """Folder with the files of one audit, locked while the audit is written."""

    def __init__(self, path: Path) -> None:
        self.path, self.info = path, path / "audit.json"
        self.table, self.updates = path / "audit.parquet", path / "updates.parquet"

    def check(self, rules: Mapping[str, Any], done: int = 0) -> None:
        """Raise RunError unless the folder is new or empty, or training resumes an audit by the same rules there."""
        there = self.info.exists()
        if self.path.exists() and not there and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunError(f"{self.path} is there already and holds no audit: choose another folder for it.")
        if there and not done:
            raise RunError(
                f"{self.path} holds an audit already: `corral audit {self.path}` shows it. Remove it, or choose another folder."
            )
        if there and plain(_read_info(self.info)["rules"]) != plain(rules):
            raise RunError(f"{self.path} holds an audit by other rules: resume with the same ones, or choose another folder.")

    def begin(self, info: Mapping[str, Any], done: int = 0) -> None:
        """Make the audit's folder, or resume its audit after `done` updates. Rows of later updates are deleted."""
        self.check(info["rules"], done)
        with disk_errors(self.path):
            self.table.mkdir(parents=True, exist_ok=True)
            self.updates.mkdir(exist_ok=True)
            self.hold(self.path)
        for part in (*self.table.glob("update-*.parquet"), *self.updates.glob("update-*.parquet")):
            if int(part.stem.removeprefix("update-")) > done:
                part.unlink()
        write_json(self.info, {**info, "command": sys.argv, "versions": versions()})

    def add(self, update: int, completions: Sequence[pd.DataFrame]) -> None:
        """Write one parquet file with the audited tokens of `completions`, measured after `update` updates."""
        rows = pd.concat([one.assign(update=update, sequence=number) for number, one in enumerate(completions)])
        self._write(self.table, update, rows, SCHEMA)

    def fill(self, info: Mapping[str, Any], found: Mapping[int, Sequence[pd.DataFrame]]) -> Path:
        """Write an audit (measured tokens of every update) into a new folder, and return its path."""
        self.begin(info)
        with closing(self):
            for update, completions in found.items():
                self.add(update, completions)
        return self.path

    def add_updates(self, update: int, made: Sequence[MicroBatch]) -> None:
        """Write one parquet file with the counts of clipped tokens of micro-batches, up to update number `update`."""
        self._write(self.updates, update, pd.DataFrame(made), UPDATES_SCHEMA)

    def _write(self, folder: Path, update: int, rows: pd.DataFrame, schema: pa.Schema) -> None:
        table = pa.Table.from_pandas(rows, schema, preserve_index=False)  # NaN becomes null
        write_whole(folder / f"update-{update:08d}.parquet", lambda beside: pq.write_table(table, beside))


def read_audit(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Read an audit's folder: audit.json, and a table of all audited tokens sorted by update, completion and position.

    Two keys are added: `left_out`, the number of rows that are not whole, by reason, and `updates_made`, what clipping did in
    the updates (None where that was not recorded).
    """
    folder = AuditFolder(path)
    if not path.is_dir() or not folder.info.is_file():
        raise RunError(f"{path} holds no audit: it has no audit.json.")
    info = _read_info(folder.info)
    rows = _read_rows(folder.table, SCHEMA)
    if rows.empty:
        raise NothingYet(
            f"the audit in {path} has no tokens yet: it is filled after the updates on the first batch of rollouts."
        )
    whole = rows[rows.drop(columns="logp_rollout").notna().all(axis=1)]  # infinities are numbers
    if whole.empty:
        raise RunError(
            f"{folder.table} has no token with a number in every column, as audits write them: there is nothing to show."
        )
    _refuse_impossible(whole, folder.table)
    damaged = len(rows) - len(whole)
    info["left_out"] = {"tokens without a number in every column": damaged} if damaged else {}
    info["updates_made"] = _count_updates(_read_rows(folder.updates, UPDATES_SCHEMA), folder.updates)
    info.setdefault("one_update_per_batch", None)
    types = {field.name: field.type.to_pandas_dtype() for field in SCHEMA}  # a column with a null had another one
    return info, whole.astype(types).sort_values(["update", "sequence", "position"], kind="stable", ignore_index=True)


def _read_rows(path: Path, schema: pa.Schema) -> pd.DataFrame:
    """Read all rows of a folder of parquet files. A missing folder has no rows, and a missing column is read as null."""
    try:
        for part in path.iterdir() if path.is_dir() else (path,):
            require_regular(part)
        table = pq.read_table(path, schema=schema) if path.exists() else schema.empty_table()
        return table.to_pandas()
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"{path} is not what an audit writes: {reason}") from error


def _count_updates(rows: pd.DataFrame, path: Path) -> dict[str, Any] | None:
    """Summarise an audit's micro-batches: mean share of blocked tokens, mean of TRL's clip ratio. Returns None without any."""
    if rows.empty:
        return None
    if rows[["update", "tokens", "clipped"]].isna().any(axis=None):
        raise RunError(f"{path} is not what an audit writes: it has rows without a number of tokens.")
    return {
        "updates": rows["update"].nunique(),
        "micro_batches": len(rows),
        "blocked": float((rows["clipped"] / rows["tokens"].clip(lower=1)).mean()),
        "trl": float(rows["trl"].mean()) if rows["trl"].notna().any() else None,
    }


def _refuse_impossible(rows: pd.DataFrame, path: Path) -> None:
    """Raise RunError if a column of an audit has impossible values, such as a negative KL: the file was damaged or changed."""
    for what, names, least, most in _POSSIBLE:
        for name in names:
            count = int(((rows[name] < least - _ROUNDING) | (rows[name] > most + _ROUNDING)).sum())
            if count:
                raise RunError(
                    f"{path} has {what} in {count} of {len(rows)} tokens (column {name}), which no measurement gives: the "
                    f"audit was damaged or changed. Measure it again."
                )


def _read_info(path: Path) -> dict[str, Any]:
    """Read audit.json and check the rules in it."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    try:
        rules = read_rules(content["rules"]).as_dict()
        bounds = {name: float(rules[name]) for name in ("kl_bound", "tv_bound")}  # an integer may be too large for one
        return {**content, "rules": {**rules, **bounds}}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path} is not what an audit writes: its rules cannot be read ({error}).") from error
