"""The files of an evaluation: completions with their rewards, the estimates made of them, and paired comparisons.

eval.json            settings, estimates, versions
completions.parquet  every completion, to read
plan.json, parts/    while it runs: its settings, and the completions of every finished batch
"""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corral.llm.passk import RIGHT, difference, estimate, sampled_estimates
from corral.run.files import disk_sentence, lock, read_json, require_regular, write_json, write_whole
from corral.run.interval import LEVEL, Estimate
from corral.validate import RunError

Row = dict[str, Any]

_ROWS = pa.schema(
    [
        ("problem", pa.int64()),
        ("sample", pa.int64()),
        ("greedy", pa.bool_()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("tokens", pa.int64()),
        ("ended", pa.bool_()),
    ]
)


class EvalFolder:
    """The files of one evaluation, resumable: every batch is kept as it comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result, self.completions = path / "eval.json", path / "completions.parquet"
        self.plan, self.parts = path / "plan.json", path / "parts"
        self._lock: int | None = None

    def read_result(self, plan: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a finished evaluation, else None; RunError where the folder holds another plan, or something else."""
        for path in (self.result, self.plan):
            if path.is_file():
                content = _read_json(path)
                self._refuse_another(content["settings"], plan)
                return content if path == self.result else None
        if not self.path.exists():
            return None
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {".lock", "parts"}:
            return None  # empty, or it ended before the plan was written
        raise RunError(f"{self.path} is there already and is no evaluation: choose another --out.")

    def _refuse_another(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        other = [key for key in new if old.get(key) != new[key]]
        if other:
            was, now = ({key: content.get(key) for key in other} for content in (old, new))
            raise RunError(
                f"{self.path} holds another evaluation: {', '.join(other)} differ ({_render_settings(was)} there, "
                f"{_render_settings(now)} now). Choose another --out, or remove that folder."
            )

    def open(self, content: dict[str, Any]) -> None:
        """Lock the folder, and write the plan."""
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path)
        except OSError as error:
            raise RunError(disk_sentence(error, self.path)) from error
        if not self.plan.exists():
            write_json(self.plan, content)

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def part(self, index: int) -> list[Row] | None:
        """The completions of a batch; None where it is missing or damaged."""
        path = self.parts / f"{index:06}.parquet"
        try:
            return pq.read_table(path, schema=_ROWS).to_pylist() if path.is_file() else None
        except pa.ArrowInvalid:
            return None

    def add(self, index: int, rows: list[Row]) -> None:
        """Write the completions of a batch."""
        _write_rows(self.parts / f"{index:06}.parquet", rows)

    def finish(self, rows: list[Row], result: dict[str, Any]) -> None:
        """Write all completions into one file, then the result, and delete the parts."""
        _write_rows(self.completions, rows)
        write_json(self.result, result)
        shutil.rmtree(self.parts, ignore_errors=True)
        self.plan.unlink(missing_ok=True)


def _write_rows(path: Path, rows: list[Row]) -> None:
    """Write a parquet file atomically."""
    table = pa.Table.from_pylist(rows, schema=_ROWS)
    write_whole(path, lambda beside: pq.write_table(table, beside))


def _read_json(path: Path) -> dict[str, Any]:
    """Read eval.json or plan.json."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise RunError(f"{path} is not what an evaluation writes: it has no settings.")
    return content


def _read_rows(path: Path) -> list[Row]:
    """Read every completion of a finished evaluation."""
    try:
        require_regular(path)
        rows: list[Row] = pq.read_table(path, schema=_ROWS).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return rows


def _render_settings(values: dict[str, Any]) -> str:
    """Settings in a sentence."""
    text = ", ".join(f"{key} {value}" for key, value in values.items())
    return text if len(text) <= 160 else text[:159] + "…"


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The estimates and token counts of an evaluation, from its completions."""
    greedy, sampled = _rewards_by_problem(rows)
    estimates = {"greedy": estimate([float(reward >= RIGHT) for reward in greedy]), **sampled_estimates(sampled)}
    if any(0 < reward < RIGHT for reward in greedy):
        estimates["greedy reward"] = estimate(greedy)
    lengths = [row["tokens"] for row in rows]
    return {
        "problems": len(greedy),
        "samples": len(sampled[0]),
        "level": LEVEL,
        "estimates": {name: asdict(found) for name, found in estimates.items()},
        "tokens": {
            "mean": sum(lengths) / len(lengths),
            "longest": max(lengths),
            "cut": sum(not row["ended"] for row in rows) / len(rows),
        },
    }


def _rewards_by_problem(rows: Sequence[Row]) -> tuple[list[float], list[list[float]]]:
    """Rewards by problem: of the greedy completion, and of the samples in their order."""
    count = 1 + max(row["problem"] for row in rows)
    greedy, sampled = [0.0] * count, [dict[int, float]() for _ in range(count)]
    for row in rows:
        if row["greedy"]:
            greedy[row["problem"]] = row["reward"]
        else:
            sampled[row["problem"]][row["sample"]] = row["reward"]
    return greedy, [[rewards[index] for index in sorted(rewards)] for rewards in sampled]


def read_evaluation(path: Path) -> tuple[str | None, tuple[list[float], list[list[float]]]]:
    """The hash of the problems of an evaluation, and their rewards."""
    problems = _read_json(path / "eval.json")["settings"].get("problems_sha256")
    return problems, _rewards_by_problem(_read_rows(path / "completions.parquet"))


def compare(first: Path, second: Path) -> dict[str, Estimate]:
    """How much better the second evaluation is than the first, problem by problem; both must have asked the same ones."""
    problems, found = zip(*map(read_evaluation, (first, second)), strict=True)
    if len(set(problems)) != 1:
        raise RunError(f"{first} and {second} asked different problems: give both the same --task, --problems and --seed.")
    greedy = [[float(reward >= RIGHT) for reward in rewards] for rewards, _ in found]
    rights = [[sum(reward >= RIGHT for reward in row) / len(row) for row in sampled] for _, sampled in found]
    means = [[min(1.0, math.fsum(row) / len(row)) for row in sampled] for _, sampled in found]
    pairs = (("greedy", greedy), ("pass@1", rights), ("avg", means))
    return {name: difference(before, after) for name, (before, after) in pairs}
