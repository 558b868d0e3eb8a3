"""Which runs belong together: one objective with one setting, on one task; its seeds are repetitions of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.report.read import Run

ASIDE = {
    "seed", "objective", "objective_config", "task", "task_config", "model", "guard", "report_to", "device",
    "eval_every", "eval_size", "eval_batch_size", "checkpoint_every", "keep_checkpoints", "keep_completions",
}  # fmt: skip
"""Settings that make no other method: where a run differs in these alone it is the same one, repeated."""


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

    @property
    def label(self) -> str:
        """Its name, short."""
        return f"{self.objective} {self.setting}".strip()


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by problem, setting and objective, in that order."""
    found: dict[tuple[str, str, str], list[Run]] = {}
    problems = {id(run): " with ".join(filter(None, (run.task, run.model))) for run in runs}
    for run in runs:
        peers = [peer for peer in runs if peer.objective == run.objective and problems[id(peer)] == problems[id(run)]]
        own = _varied(run, peers, lambda peer: flat(_inner(peer.settings, "objective_config")))
        other = _varied(run, peers, lambda peer: flat({key: peer.settings[key] for key in peer.settings if key not in ASIDE}))
        found.setdefault((problems[id(run)], other, f"{run.objective} {own}".strip()), []).append(run)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], _natural(item[0][1]), _natural(item[0][2])))
    return [
        Group(
            key=index,
            objective=objective,
            setting=setting,
            problem=problem,
            runs=sorted(members, key=lambda run: _natural(run.seed)),
        )
        for index, ((problem, setting, objective), members) in enumerate(ordered)
    ]


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Whom to compare: objectives under the same setting; if there is one objective alone, its settings."""
    found = []
    for index, ours in enumerate(groups):
        for theirs in groups[:index]:
            if ours.problem != theirs.problem:
                continue
            alone = len({group.objective for group in groups if group.problem == ours.problem}) == 1
            if ours.setting == theirs.setting or alone:
                found.append((ours, theirs))
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as `a.b.c` → text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found


def _varied(run: Run, peers: Iterable[Run], read: Any) -> str:
    """Those settings of a run in which its peers are not all the same, as `key=value …`."""
    mine, others = read(run), [read(peer) for peer in peers]
    keys = sorted({key for other in [mine, *others] for key in other})
    return " ".join(f"{key}={mine.get(key, 'default')}" for key in keys if len({other.get(key) for other in others}) > 1)


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
