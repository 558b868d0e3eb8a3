"""Run folders: atomic writes of config, metrics, completions and checkpoints, and the choice of a checkpoint to load."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from corral.lab.run.files import (
    MOST_METRICS,
    LockedFolder,
    digest,
    disk_errors,
    read_json,
    read_regular,
    read_settings,
    require_regular,
    sync,
    write_json,
    write_whole,
)
from corral.provenance import commit, plain, versions
from corral.validate import RunError

Stopped = Literal["finished", "interrupted", "collapsed", "failed"]

LOG = "log.txt"
"""File name, in a run's folder, of the log of processes that `corral compare` starts."""

_INFINITE = {"inf": float("inf"), "-inf": float("-inf")}
"""Values of the texts that stand for infinite numbers in metrics.jsonl, because JSON lacks infinity."""


_COMPLETIONS = pa.schema(
    [("step", pa.int64()), ("update", pa.int64()), ("prompt", pa.string()), ("completion", pa.string())]
    + [(name, pa.float64()) for name in ("reward", "advantage")]
)

TOKENS = pa.schema(
    [("step", pa.int64()), ("update", pa.int64())]
    + [(name, pa.float64()) for name in ("reward", "advantage", "bound")]
    + [(name, pa.list_(pa.string())) for name in ("token", "action")]
    + [(name, pa.list_(pa.float32())) for name in ("kl_before", "kl_after", "log_ratio")]
)


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint of a run on disk."""

    path: Path
    step: int

    def files(self) -> dict[str, tuple[int, str]]:
        """Return the size in bytes and the SHA-256 digest of each file in the checkpoint, keyed by file name."""
        return _read_manifest(self.path)[1]


class RunFolder(LockedFolder):
    """Folder with the files of a run, which only the main process opens for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.summary = path / "config.json", path / "metrics.jsonl", path / "summary.json"
        self.completions, self.checkpoints = path / "completions.parquet", path / "checkpoints"
        self.tokens, self.writing = path / "tokens.parquet", self.checkpoints / ".writing"
        self.completions_kept: list[dict[str, Any]] = []
        """Rows of completions.parquet in memory, written with the next checkpoint and at the end of the run."""
        self.tokens_kept: list[dict[str, Any]] = []
        """Rows of tokens.parquet in memory, written together with the completions."""

    @classmethod
    def create(cls, out: Path | str | None, label: str, *, smoke: bool = False) -> "RunFolder":
        """Create a run folder: `out`, which must be new or hold only a log, or a new folder under runs/.
        The new folder is named by time and `label`.

        Smoke runs are apart, under smoke-runs/: a report on runs/ is not to count them.
        """
        path = Path(default_name(label, smoke=smoke) if out is None else out)
        with disk_errors(path):
            if out is not None and path.exists() and not (path.is_dir() and {file.name for file in path.iterdir()} <= {LOG}):
                resumable = path.is_dir() and (path / "config.json").exists()
                hint = f"continue that run with --resume {path}, or choose" if resumable else "choose"
                raise RunError(f"{path} is there already and is not an empty folder: {hint} another --out.")
            folder = cls(_unused(path) if out is None else path)
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            folder.hold(folder.path)
        return folder

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> "RunFolder":
        """Open an existing run folder, for reading or to resume the run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise RunError(f"{path} is no run: it has no config.json. --resume takes the folder that `corral train` printed.")
        if write:
            with disk_errors(path):
                folder.checkpoints.mkdir(exist_ok=True)
                folder.hold(path)
        return folder

    def write_config(self, content: dict[str, Any]) -> None:
        """Write config.json, which holds the run's settings, versions and git commit."""
        write_json(self.config, content | {"versions": versions(), "commit": commit()})

    def read_config(self) -> dict[str, Any]:
        """Read config.json of the run."""
        return read_settings(self.config, "a run")

    def lines(self) -> list[dict[str, Any]]:
        """Read all complete lines of the run's metrics.jsonl."""
        if not self.metrics.exists():
            return []
        try:
            texts = read_regular(self.metrics, MOST_METRICS).split(b"\n")
        except (OSError, ValueError) as error:
            raise RunError(f"{self.metrics} cannot be read: {error}") from error
        lines = []
        for text in texts:
            # The last one, if the machine went down in the middle of it, and whatever no run writes.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                line = {key: _INFINITE.get(str(value), value) for key, value in json.loads(text).items()}
                if type(line["step"]) is int:
                    lines.append(line)
        return lines

    def cut_back(self, step: int) -> list[dict[str, Any]]:
        """Drop metrics and completions after `step`, since a resumed run repeats those steps. Returns the remaining metrics."""
        lines = [line for line in self.lines() if line["step"] <= step]
        text = "".join(json.dumps(plain(line)) + "\n" for line in lines)
        write_whole(self.metrics, lambda beside: beside.write_text(text))
        self.completions_kept, self.tokens_kept = (_rows_until(path, step) for path in (self.completions, self.tokens))
        self.summary.unlink(missing_ok=True)
        return lines

    def write_completions(self) -> None:
        """Write all stored completions, and their tokens if the run stores tokens."""
        tables = {self.completions: pa.Table.from_pylist(self.completions_kept, schema=_COMPLETIONS)}
        if self.tokens_kept or self.tokens.exists():  # after a resume from an earlier step there may be none any more
            tables[self.tokens] = pa.Table.from_pylist(self.tokens_kept, schema=TOKENS)
        for path, table in tables.items():
            write_whole(path, partial(pq.write_table, table))

    def publish(self, name: str, step: int, keep: int) -> None:
        """Publish the checkpoint in `writing` under the name `name`, with a manifest, and remove old checkpoints.
        All but the `keep` newest are removed."""
        source, target = self.writing / name, self.checkpoints / name
        files = sorted(path for path in source.rglob("*") if path.is_file())
        listed = {str(path.relative_to(source)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}
        for path in files:
            sync(path)
        write_json(source / "manifest.json", {"step": step, "files": listed})
        shutil.rmtree(target, ignore_errors=True)  # a damaged one of the same name
        os.replace(source, target)
        sync(self.checkpoints)
        self.drop_unfinished()
        for old in self.checkpoint_paths()[keep:]:
            shutil.rmtree(old, ignore_errors=True)

    def drop_unfinished(self) -> None:
        """Remove a checkpoint whose writing did not finish."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def last_whole_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """Find the newest checkpoint that matches its manifest, and the reasons why newer checkpoints are not used."""
        complaints: list[str] = []
        for path in self.checkpoint_paths():
            why = damage(path)
            if why is None:
                return Checkpoint(path, _read_manifest(path)[0]), complaints
            complaints.append(f"{path.name} is damaged ({why}) and is not used.")
        return None, complaints

    def whole_checkpoints(self) -> dict[int, Checkpoint]:
        """Find all checkpoints that match their manifests, keyed by step."""
        whole = [Checkpoint(path, _read_manifest(path)[0]) for path in self.checkpoint_paths() if damage(path) is None]
        return {found.step: found for found in whole}

    def checkpoint_paths(self) -> list[Path]:
        """List the paths of the run's checkpoints, newest first."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
        return sorted(found, key=lambda path: -int(path.name.split("-")[1]))


def default_name(label: str, *, smoke: bool = False) -> Path:
    """Return the default folder runs/TIME-label of a run.
    Characters of the label that are unsafe for file systems and shells are replaced."""
    name = re.sub(r"[^\w.+-]+", "-", f"{time.strftime('%Y%m%d-%H%M%S')}-{label}", flags=re.ASCII)
    return Path("smoke-runs" if smoke else "runs") / name


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Read the rows of a parquet file whose `step` is at most `step`. Returns an empty list for an unreadable file."""
    if path.exists():
        # Completions that were damaged from outside are worth no failure.
        with contextlib.suppress(pa.ArrowException, OSError, ValueError):
            require_regular(path)
            return [row for row in pq.read_table(path.absolute()).to_pylist() if row["step"] <= step]
    return []


def damage(checkpoint: Path) -> str | None:
    """Describe the damaged files of a checkpoint in a sentence. Returns None if all files are intact."""
    try:
        _, files = _read_manifest(checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or unreadable"
    if not files:
        return "its manifest lists no file"
    for path in checkpoint.rglob("*"):  # listed or not, libraries may read it
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return f"{path.relative_to(checkpoint)} is no file of its own"
    for name, (size, sha256) in files.items():
        path = checkpoint / name
        if Path(os.path.normpath(path)) != path or checkpoint not in path.parents:
            return f"{name} is outside its folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if digest(path) != sha256:
            return f"{name} is not what was written"
    return None


def _read_manifest(checkpoint: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Read a checkpoint's step, and its files' sizes and digests, from its manifest.
    Raises an error if the manifest is malformed."""
    manifest = read_json(checkpoint / "manifest.json")
    if type(manifest["step"]) is not int or not 0 <= manifest["step"] <= 2**53:
        raise ValueError("the step is no number of a step.")
    return manifest["step"], {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}


def _unused(path: Path) -> Path:
    """Create the folder `path`, or the first of path-2, path-3, … that does not exist.
    Creating it keeps other processes out."""
    for count in range(1, 1000):
        candidate = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise RunError(f"{path} and 999 more like it exist already.")


def choose_checkpoint(folder: RunFolder, which: str) -> tuple[Checkpoint, list[str]]:
    """Choose an intact checkpoint of a run: "latest", "best" for the highest measured success, or the number of a step."""
    if which == "latest":
        newest, complaints = folder.last_whole_checkpoint()
        if newest is None:
            why = f": {' '.join(complaints)}" if complaints else ". It ended before the first one was written."
            raise RunError(f"the run in {folder.path} has no whole checkpoint{why}")
        return newest, complaints
    whole = folder.whole_checkpoints()
    there = f"It has whole checkpoints of steps {', '.join(map(str, sorted(whole))) or '(none)'}."
    if which == "best":
        measured = {line["step"]: line["success"] for line in folder.lines() if isinstance(line.get("success"), float | int)}
        candidates = [step for step in whole if step in measured]
        if not candidates:
            raise RunError(f"no checkpoint of {folder.path} is of a step where success was measured. {there}")
        return whole[max(candidates, key=lambda step: (measured[step], step))], []
    if not re.fullmatch(r"[0-9]{1,18}", which):
        raise RunError(f"--checkpoint is latest, best or the number of a step; got {which!r}.")
    if int(which) not in whole:
        raise RunError(f"{folder.path} keeps no whole checkpoint of step {which}. {there}")
    return whole[int(which)], []


def read_run(path: Path) -> dict[str, Any] | None:
    """Read config.json of a language model's run. Returns None if the folder holds no such run."""
    try:
        content = read_json(path / "config.json")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"settings", "objective"} <= content.keys() else None
