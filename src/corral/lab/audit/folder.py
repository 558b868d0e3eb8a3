"""The folder of an audit of a trainer: rows written batch by batch, rules and progress."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from corral.lab.audit.rules import read_rules
from corral.lab.run.files import LockedFolder, disk_sentence, read_json, require_regular, write_json, write_whole
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
"""Columns of audit.parquet, described in docs/audit.md."""


class MicroBatch(NamedTuple):
    """Counts of a micro-batch at the time of its update: all tokens, and tokens blocked by clipping."""

    update: int
    tokens: int
    """Tokens that were trained on."""
    clipped: int
    """Number of tokens whose gradient clipping set to zero."""
    trl: float | None
    """TRL's own `clip_ratio/region_mean`; None if the trainer logs no such metric."""


UPDATES_SCHEMA = pa.schema([("update", pa.int64()), ("tokens", pa.int64()), ("clipped", pa.int64()), ("trl", pa.float64())])
"""Columns of updates.parquet, the fields of `MicroBatch`."""


_POSSIBLE = (
    ("a KL below 0", ("kl", "troll_kl"), 0.0, float("inf")),
    ("a total variation outside 0 to 1", ("tv", "tv_binary", "tv_topk", "troll_tv"), 0.0, 1.0),
    ("an entropy below 0", ("entropy",), 0.0, float("inf")),
    ("a log-probability above 0", ("logp_old", "logp_new", "logp_rollout"), float("-inf"), 0.0),
)
"""Valid ranges of columns: a name for the fault, the columns, the smallest and the largest number."""

_ROUNDING = 1e-3
"""Tolerance of these ranges: probabilities of float32 logits sum to 1 up to this error."""


class AuditFolder(LockedFolder):
    """The files of one audit."""

    def __init__(self, path: Path) -> None:
        self.path, self.info = path, path / "audit.json"
        self.table, self.updates = path / "audit.parquet", path / "updates.parquet"

    def check(self, rules: Mapping[str, Any], done: int = 0) -> None:
        """Refuse a folder with other content than an audit by equal rules that can be resumed after `done` updates."""
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
        """Make the folder, or resume its audit after `done` updates; later rows are dropped and repeated."""
        self.check(info["rules"], done)
        try:
            self.table.mkdir(parents=True, exist_ok=True)
            self.updates.mkdir(exist_ok=True)
            self.hold(self.path)
        except OSError as error:
            raise RunError(disk_sentence(error, self.path)) from error
        for part in (*self.table.glob("update-*.parquet"), *self.updates.glob("update-*.parquet")):
            if int(part.stem.removeprefix("update-")) > done:
                part.unlink()
        write_json(self.info, {**info, "versions": versions()})

    def add(self, update: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write the tokens of completions measured after `update` updates into a file of their own."""
        parts = []
        for sequence, columns in enumerate(completions):
            count = len(columns["token"])
            fixed = {"update": [update] * count, "sequence": [sequence] * count}
            parts.append(pa.table({name: _array(name, {**columns, **fixed}[name]) for name in SCHEMA.names}, schema=SCHEMA))
        rows = pa.concat_tables(parts)
        write_whole(self.table / f"update-{update:08d}.parquet", lambda beside: pq.write_table(rows, beside))

    def fill(self, info: Mapping[str, Any], found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Path:
        """Write a new audit with the completions of every update, and return its folder."""
        self.begin(info)
        try:
            for update, completions in found.items():
                self.add(update, completions)
        finally:
            self.close()
        return self.path

    def add_updates(self, update: int, made: Sequence[MicroBatch]) -> None:
        """Write the micro-batches of updates up to this update into a file of their own."""
        rows = pa.table([list(column) for column in zip(*made, strict=True)], schema=UPDATES_SCHEMA)
        write_whole(self.updates / f"update-{update:08d}.parquet", lambda beside: pq.write_table(rows, beside))


def read_audit(path: Path) -> tuple[dict[str, Any], pa.Table]:
    """The content of audit.json, and all rows in the order of updates, completions and positions.

    Two keys are added: `left_out`, the number of rows that are not whole, by reason, and `updates_made`, what clipping did in
    the updates (None where that was not recorded).
    """
    folder = AuditFolder(path)
    if not path.is_dir() or not folder.info.is_file():
        raise RunError(f"{path} holds no audit: it has no audit.json.")
    info = _read_info(folder.info)
    try:
        for part in folder.table.iterdir() if folder.table.is_dir() else (folder.table,):
            require_regular(part)
        table = pq.read_table(folder.table) if folder.table.exists() else SCHEMA.empty_table()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(f"{folder.table} cannot be read: {str(error).splitlines()[0]}") from error
    if not len(table):
        raise NothingYet(
            f"the audit in {path} has no tokens yet: it is filled after the updates on the first batch of rollouts."
        )
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise RunError(f"{folder.table} has no column {', '.join(missing)}. Was it made by another version of corral?")
    try:
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except pa.ArrowException as error:
        raise RunError(f"{folder.table} is not what an audit writes: {str(error).splitlines()[0]}") from error
    whole = table.filter(_is_whole(table))
    if not len(whole):
        raise RunError(
            f"{folder.table} has no token with a number in every column, as audits write them: there is nothing to show."
        )
    _refuse_impossible(whole, folder.table)
    damaged = len(table) - len(whole)
    info["left_out"] = {"tokens without a number in every column": damaged} if damaged else {}
    info["updates_made"] = _read_updates(folder.updates)
    info.setdefault("one_update_per_batch", None)
    return info, whole.sort_by([(name, "ascending") for name in ("update", "sequence", "position")])


def table_columns(table: pa.Table) -> dict[str, NDArray[Any]]:
    """NumPy columns of an audit's rows, with NaN for null."""
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _read_updates(path: Path) -> dict[str, Any] | None:
    """Counts of updates and micro-batches, and two means over micro-batches: the share blocked, and TRL's clip ratio."""
    if not any(path.glob("update-*.parquet")):
        return None
    try:
        rows = pq.read_table(path).select(UPDATES_SCHEMA.names).cast(UPDATES_SCHEMA)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RunError(f"{path} is not what an audit writes: {(str(error).splitlines() or [''])[0]}") from error
    tokens, clipped, trl = (rows[name].drop_null().to_pylist() for name in ("tokens", "clipped", "trl"))
    if not len(tokens) == len(clipped) == len(rows) or not len(rows):
        raise RunError(f"{path} is not what an audit writes: it has rows without a number of tokens.")
    shares = [part / max(whole, 1) for whole, part in zip(tokens, clipped, strict=True)]
    return {
        "updates": len(pc.unique(rows["update"])),
        "micro_batches": len(rows),
        "blocked": sum(shares) / len(shares),
        "trl": sum(trl) / len(trl) if trl else None,
    }


def _is_whole(table: pa.Table) -> pa.ChunkedArray:
    """Mark rows with a number in every column. Infinities are numbers, and logp_rollout may be missing."""
    found = pc.is_valid(table["update"])
    for field in SCHEMA:
        if field.name != "logp_rollout":
            found = pc.and_(found, pc.invert(pc.is_null(table[field.name], nan_is_null=pa.types.is_floating(field.type))))
    return found


def _refuse_impossible(table: pa.Table, path: Path) -> None:
    """Refuse impossible numbers beyond rounding: the file was damaged or changed, and no row of it is trusted."""
    for what, names, least, most in _POSSIBLE:
        for name in names:
            column = table[name].drop_null()
            outside = pc.or_(pc.less(column, least - _ROUNDING), pc.greater(column, most + _ROUNDING))
            if (count := pc.sum(outside).as_py() or 0) > 0:
                raise RunError(
                    f"{path} has {what} in {count} of {len(table)} tokens (column {name}), which no measurement gives: the "
                    f"audit was damaged or changed. Measure it again."
                )


def _read_info(path: Path) -> dict[str, Any]:
    """The content of audit.json."""
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


def _array(name: str, values: Any) -> pa.Array:
    """A column in its declared type; a missing logp_rollout is null."""
    kind = SCHEMA.field(name).type
    if isinstance(values, Tensor):
        values = values.numpy()
    return pa.array(values, type=kind, from_pandas=name == "logp_rollout")
