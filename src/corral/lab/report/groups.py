"""Groups of runs: one objective with one setting on one task, repeated over seeds."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.lab.report.html import shorten
from corral.lab.report.ranges import setting_text
from corral.lab.report.read import Run

_IGNORED = {
    "seed", "objective", "objective_config", "task", "task_config", "model", "guard", "report_to", "device", "workers",
    "algorithm", "environment", "environment_config",
    "eval_every", "eval_size", "eval_batch_size", "checkpoint_every", "keep_checkpoints", "keep_completions",
}  # fmt: skip
"""Settings that make no other method: those of the problem, and those in which a repetition may differ."""

SECRET = re.compile(r"token$|secret|password|passwd|api.?key|credential", re.IGNORECASE)
"""Settings that are secret: a page is for sending."""

Chosen = Mapping[Path, tuple[str, str]]
"""Runs whose setting a comparison chose: the contestant, and its setting in words."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seeds alone."""

    key: int
    """Its place in the report, and so its colour."""
    objective: str
    """With those of its own settings in which it was varied: `troll bound=0.1`."""
    setting: str
    """All other settings that were varied: `learning_rate=0.001`; mostly nothing."""
    problem: str
    """Task and model; groups are compared on the same one only."""
    runs: Sequence[Run]
    chosen: bool = False
    """Whether the setting was chosen for it, as it was for the others: then they are compared though settings differ."""

    @property
    def label(self) -> str:
        """Its name, short: where each contestant has one chosen setting, the contestant says it all."""
        return shorten(self.objective if self.chosen else f"{self.objective} {self.setting}".strip(), 300)


def group_runs(runs: Sequence[Run], chosen: Chosen | None = None) -> list[Group]:
    """Runs by problem, setting and objective, in that order; those of a comparison by contestant."""
    chosen = {} if chosen is None else chosen
    found: dict[tuple[str, str, str], list[Run]] = {}
    problems = problems_of(runs)
    own, shared = read_once(own_settings, runs), read_once(shared_settings, runs)
    for run in runs:
        peers = [peer for peer in runs if peer.objective == run.objective and problems[id(peer)] == problems[id(run)]]
        objective, setting = chosen.get(run.path) or (
            f"{run.objective} {setting_text(varying_settings(run, peers, own))}".strip(),
            setting_text(varying_settings(run, peers, shared)),
        )
        found.setdefault((problems[id(run)], setting, objective), []).append(run)

    def order(item: tuple[tuple[str, str, str], list[Run]]) -> tuple[Any, ...]:
        (where, setting, objective), members = item
        # A page opens on its first problem, which is no smoke test.
        smoke = all(run.is_smoke for run in runs if problems[id(run)] == where)
        return smoke, where, () if members[0].path in chosen else _natural(setting), _natural(objective)

    ordered = sorted(found.items(), key=order)
    names = Counter((where, objective) for where, _, objective in found)
    return [
        Group(
            key=index,
            # A contestant says it all only where it has one chosen setting: two comparisons may choose otherwise.
            objective=f"{objective} {setting}" if members[0].path in chosen and names[where, objective] > 1 else objective,
            setting=setting,
            problem=where,
            runs=sorted(members, key=lambda run: _natural(run.seed)),
            chosen=members[0].path in chosen,
        )
        for index, ((where, setting, objective), members) in enumerate(ordered)
    ]


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Whom to compare: objectives under the same setting, or each with the one chosen for it; of one alone, its settings."""
    found = []
    for index, ours in enumerate(groups):
        for theirs in groups[:index]:
            if ours.problem != theirs.problem:
                continue
            alone = len({group.objective for group in groups if group.problem == ours.problem}) == 1
            if ours.setting == theirs.setting or alone or (ours.chosen and theirs.chosen):
                found.append((ours, theirs))
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as `a.b.c` → text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found


def problems_of(runs: Sequence[Run]) -> dict[int, str]:
    """What each run is about: its task, with the settings in which that was varied, and the model, where one is trained.

    By the `id` of the run.
    """
    read, found = read_once(_task_settings, runs), {}
    for run in runs:
        same = [peer for peer in runs if peer.task == run.task]
        task = f"{run.task} {setting_text(varying_settings(run, same, read))}".strip()
        found[id(run)] = task if run.is_robot else " with ".join(filter(None, (task, run.model)))
    return found


def read_once(read: Callable[[Run], dict[str, str]], runs: Iterable[Run]) -> Callable[[Run], dict[str, str]]:
    """`read`, computed once per run, since each is compared with all its peers."""
    known = {id(run): read(run) for run in runs}
    return lambda run: known[id(run)]


def own_settings(run: Run) -> dict[str, str]:
    """Those of the objective itself."""
    return flatten(_inner(run.settings, "objective_config"))


def shared_settings(run: Run) -> dict[str, str]:
    """Those that any objective has."""
    return flatten({key: value for key, value in run.settings.items() if key not in _IGNORED})


def _task_settings(run: Run) -> dict[str, str]:
    """Those of the task, or of a robot's environment."""
    return flatten(_inner(run.settings, "task_config")) | flatten(_inner(run.settings, "environment_config"))


def varying_settings(run: Run, peers: Iterable[Run], read: Callable[[Run], dict[str, str]]) -> dict[str, str]:
    """Those settings of a run in which its peers are not all the same, but for secrets, which make no other method."""
    mine, others = read(run), [read(peer) for peer in peers]
    keys = sorted({key for other in [mine, *others] for key in other if not SECRET.search(key)})
    return {key: mine.get(key, "default") for key in keys if len({other.get(key) for other in others}) > 1}


def _inner(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, Mapping) else {}


def _natural(text: str) -> tuple[Any, ...]:
    """Sorts 2 before 10, and 1e-4 before 0.001."""
    words = []
    for word in text.replace("=", " ").split():
        try:
            words.append((0, float(word), ""))
        except ValueError:
            words.append((1, 0.0, word))
    return tuple(words)
