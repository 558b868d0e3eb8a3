"""More than a hundred folders that nothing of ours would write, each with one thing wrong: name → how to damage a sound one."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HUGE = 10**400
"""An integer that no float can hold."""

_DEEP: Any = 1
for _ in range(700):
    _DEEP = {"a": _DEEP}

Damage = Callable[[Path], None]


def _json(name: str, changes: dict[str, Any], folder: Path) -> None:
    """Keys of a JSON file replaced; `a.b` is b within a."""
    content = json.loads((folder / name).read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        inner = content
        for part in outer:
            inner = inner[part]
        inner[last] = value
    (folder / name).write_text(json.dumps(content))


def _text(name: str, text: str | bytes, folder: Path) -> None:
    """A file replaced."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def _last_line(key: str, value: Any, folder: Path) -> None:
    """A metric of the last step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1][key] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _column(name: str, key: str, values: list[Any], folder: Path) -> None:
    """A column of a parquet file, which then has as many rows."""
    table = pq.read_table(folder / name).slice(0, len(values))
    table = table.drop([key]) if key in table.column_names else table
    pq.write_table(table.append_column(key, pa.array(values)), folder / name)


def _as_fifo(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def _as_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def _as_link(name: str, folder: Path) -> None:
    """The file lies elsewhere, and a link leads there."""
    (folder / name).rename(folder.parent / f"elsewhere-{name}")
    (folder / name).symlink_to(folder.parent / f"elsewhere-{name}")


_SETTINGS: list[tuple[str, Any]] = [
    ("settings", []), ("settings", _DEEP), ("settings.steps", "many"), ("settings.steps", HUGE), ("settings.steps", -3),
    ("settings.seed", float("inf")), ("settings.seed", [1]), ("settings.seed", {"a": 1}), ("settings.seed", "\ud800"),
    ("settings.learning_rate", HUGE), ("settings.learning_rate", [1, 2]), ("settings.objective_config", [1]),
    ("settings.objective_config", _DEEP), ("settings.task_config", "x"), ("settings.environment", None),
    ("objective", ["troll"]), ("objective", {"name": {"a": 1}}), ("objective", _DEEP), ("task", 3), ("model", [None]),
    ("trainer", "none"), ("trainer.loss_type", {"a": 1}), ("command", [1, None, "train", {"a": 2}]), ("command", {"a": 1}),
    ("versions", ["1"]), ("versions", {"torch": {"a": 1}}), ("commit", {"a": 1}), ("reduction", "own"),
]  # fmt: skip

_METRICS: list[tuple[str, Any]] = [
    ("step", "x"), ("step", None), ("step", float("nan")), ("step", float("inf")), ("step", HUGE), ("step", [1]),
    ("step", 1e300), ("step", -5), ("success", "high"), ("success", HUGE), ("success", {"a": 1}), ("success", True),
    ("success", float("inf")), ("success", 1e308), ("seconds", "long"), ("seconds", float("nan")), ("seconds", [1]),
    ("num_tokens", "many"),
    ("num_tokens", float("inf")), ("skipped", "two"), ("update", "x"), ("update", float("inf")), ("update", 1e300),
    ("entropy", [1]), ("tr/kl_before", "far"), ("tr/kl_before", -1.0), ("tr/kl_max", float("nan")), ("tr/kl_max", "-inf"),
    ("warnings", "one"), ("warnings", [None, {"a": 1}, "\ud800"]), ("greedy", "x"), ("env_steps", "x"), ("return", "x"),
]  # fmt: skip

_COMPLETIONS: list[tuple[str, list[Any]]] = [
    ("step", ["one", "two"]), ("step", [None, None]), ("step", [float("nan"), 1.0]), ("step", [float("inf"), 1.0]),
    ("step", [[1], [2]]), ("completion", [1, 2]), ("completion", [b"\xff\xfe", b"x"]), ("completion", [["a"], None]),
    ("completion", [{"role": "user"}, None]), ("reward", ["good", "bad"]), ("reward", [[1.0], None]), ("prompt", [[1], [2]]),
    ("advantage", [b"x", b"y"]),
]  # fmt: skip

_TOKENS: list[tuple[str, list[Any]]] = [
    ("token", [None]), ("token", [[1, 2]]), ("token", ["19-10"]), ("token", [3]), ("action", [None]), ("action", [[1, 2]]),
    ("action", ["clipped"]), ("kl_before", [None]), ("kl_before", [["far"] * 12]), ("kl_before", [[None] * 12]),
    ("kl_before", [[float("nan")] * 12]), ("kl_before", [0.1]), ("kl_before", [[-1.0] * 12]), ("kl_after", [["x"] * 12]),
    ("log_ratio", [["x"] * 12]), ("log_ratio", [[float("inf")] * 12]), ("bound", ["small"]), ("bound", [float("nan")]),
    ("bound", [-1.0]), ("bound", [0.0]), ("step", ["x"]), ("step", [None]), ("reward", [["x"]]),
]  # fmt: skip

_FILES = ("config.json", "metrics.jsonl", "summary.json", "completions.parquet", "tokens.parquet")

RUNS: dict[str, Damage] = {
    **{f"config {key} {str(value)[:12]}": partial(_json, "config.json", {key: value}) for key, value in _SETTINGS},
    **{f"metric {key} {str(value)[:12]}": partial(_last_line, key, value) for key, value in _METRICS},
    **{f"completion {key} {value}": partial(_column, "completions.parquet", key, value) for key, value in _COMPLETIONS},
    **{f"tokens {key} {str(value)[:24]}": partial(_column, "tokens.parquet", key, value) for key, value in _TOKENS},
    **{f"fifo {name}": partial(_as_fifo, name) for name in _FILES},
    **{f"folder {name}": partial(_as_folder, name) for name in _FILES},
    **{f"link {name}": partial(_as_link, name) for name in _FILES},
    "deep config": partial(_text, "config.json", '{"a":' * 100_000),
    "deep metrics": partial(_text, "metrics.jsonl", "[" * 100_000),
    "long number": partial(_text, "summary.json", '{"seed": ' + "9" * 10_000 + "}"),
    "bytes": partial(_text, "metrics.jsonl", b'{"step": 1, "success": "\xff"}\n'),
    "summary stopped": partial(_json, "summary.json", {"stopped": ["finished"]}),
    "summary why": partial(_json, "summary.json", {"stopped": "failed", "why": {"a": 1}}),
}
"""Of a run."""


def _part(key: str, values: Any, folder: Path) -> None:
    """A column of an audit's table."""
    (part,) = (folder / "audit.parquet").iterdir()
    table = pq.read_table(part)
    place = table.column_names.index(key)
    pq.write_table(table.set_column(place, key, pa.array([values] * len(table))), part)


_ROWS: list[tuple[str, Any]] = [
    ("kl", None), ("kl", float("nan")), ("kl", -1.0), ("kl", "far"), ("tv", None), ("tv", float("nan")), ("advantage", None),
    ("advantage", float("nan")), ("entropy", None), ("entropy", float("nan")), ("logp_old", None), ("logp_old", float("nan")),
    ("logp_new", None), ("logp_new", float("-inf")), ("logp_old", float("-inf")), ("logp_rollout", float("inf")),
    ("text", None), ("text", b"\xff"), ("text", 3), ("update", None), ("update", "x"), ("position", None), ("sequence", 2**40),
    ("token", None),     ("clipped", None), ("troll", "yes"), ("troll_tv", None), ("tv_topk", float("nan")),
]  # fmt: skip

AUDITS: dict[str, Damage] = {
    **{f"audit {key} {value}": partial(_part, key, value) for key, value in _ROWS},
    "audit rules": partial(_json, "audit.json", {"rules": None}),
    "audit rules deep": partial(_json, "audit.json", {"rules": _DEEP}),
    "audit bound": partial(_json, "audit.json", {"rules.kl_bound": "far"}),
    "audit bound nan": partial(_json, "audit.json", {"rules.tv_bound": float("nan")}),
    "audit bound huge": partial(_json, "audit.json", {"rules.tv_bound": HUGE}),
    "audit clip": partial(_json, "audit.json", {"rules.clip": [1]}),
    "audit settings": partial(_json, "audit.json", {"settings": [1]}),
    "audit versions": partial(_json, "audit.json", {"versions": "1"}),
    "audit model": partial(_json, "audit.json", {"model": "\ud800\x1b]0;owned\x07", "what": {"a": 1}}),
    "audit deep": partial(_text, "audit.json", "[" * 100_000),
    "audit list": partial(_text, "audit.json", "[]"),
    "audit noise": partial(_text, "audit.json", b"\xff\xfe"),
}
"""Of an audit."""


def _plan(changes: dict[str, Any], folder: Path) -> None:
    """A comparison's plan, or its first run."""
    _json("compare.json", {key: value for key, value in changes.items() if key != "runs"}, folder)
    if "runs" in changes:
        content = json.loads((folder / "compare.json").read_text())
        content["runs"][0] |= changes["runs"]
        (folder / "compare.json").write_text(json.dumps(content))


_PLANS: list[dict[str, Any]] = [
    {"choose_seeds": [float("inf")]}, {"report_seeds": ["x"]}, {"version": "1"}, {"version": None}, {"sweep": [1]},
    {"sweep": {"learning_rate": 3}}, {"sweep": {"learning_rate": [HUGE, 1]}}, {"chosen": _DEEP}, {"chosen": {"troll": 3}},
    {"chosen": {"troll": {"learning_rate": "x"}}}, {"runs": {"folder": "a\0b"}}, {"runs": {"folder": "../../../etc"}},
    {"runs": {"folder": "x" * 5000}}, {"runs": {"seed": float("nan")}}, {"runs": {"seed": HUGE}}, {"runs": {"setting": [1]}},
    {"runs": {"setting": {"learning_rate": HUGE}}}, {"runs": {"setting": {"learning_rate": float("nan")}}},
    {"runs": {"setting": {"learning_rate": [1]}}}, {"runs": {"error": _DEEP, "state": "failed"}}, {"runs": {"stage": 3}},
    {"command": ["a"]}, {"train": [1]},
]  # fmt: skip

COMPARISONS: dict[str, Damage] = {f"plan {str(changes)[:60]}": partial(_plan, changes) for changes in _PLANS}
"""Of a comparison."""
