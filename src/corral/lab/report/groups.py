"""Groups of runs: one objective with one setting on one task, repeated over seeds."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from corral.lab.report.html import shorten
from corral.lab.report.read import Run, SavedComparison, setting_text

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
        """The group's name: the contestant alone where its setting was chosen, else with the setting."""
        return shorten(self.objective if self.chosen else f"{self.objective} {self.setting}".strip(), 300)


def group_runs(runs: Sequence[Run], chosen: Chosen | None = None) -> list[Group]:
    """Runs by problem, setting and objective, in that order; those of a comparison by contestant."""
    chosen = {} if chosen is None else chosen
    found: dict[tuple[str, str, str], list[Run]] = {}
    problems = problems_of(runs)
    for run in runs:
        peers = [peer for peer in runs if peer.objective == run.objective and problems[id(peer)] == problems[id(run)]]
        objective, setting = chosen.get(run.path) or (
            f"{run.objective} {setting_text(varying_settings(run, peers, 'own_settings'))}".strip(),
            setting_text(varying_settings(run, peers, "shared_settings")),
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


def split_runs(runs: Sequence[Run], comparisons: Sequence[SavedComparison]) -> tuple[list[Run], list[Run], Chosen]:
    """Runs to report, runs of sweeps that are over, and what was chosen for those that are reported.

    As long as a comparison has no reported run, those of its sweep are all there is to look at, and stay.
    """
    places = {run.path.resolve(): run for run in runs}
    swept: set[int] = set()
    chosen: dict[Path, tuple[str, str]] = {}
    for comparison in comparisons:
        reported = {path: run for path, run in comparison.places("report") if path in places}
        if comparison.sweep and reported:
            chosen |= {places[path].path: (run.contestant, setting_text(run.setting)) for path, run in reported.items()}
            swept |= {id(places[path]) for path, _ in comparison.places("sweep") if path in places and path not in reported}
    return [run for run in runs if id(run) not in swept], [run for run in runs if id(run) in swept], chosen


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Pairs of groups to compare: objectives with equal or chosen settings, or the settings of a single objective."""
    found = []
    for index, ours in enumerate(groups):
        for theirs in groups[:index]:
            if ours.problem != theirs.problem:
                continue
            alone = len({group.objective for group in groups if group.problem == ours.problem}) == 1
            if ours.setting == theirs.setting or alone or (ours.chosen and theirs.chosen):
                found.append((ours, theirs))
    return found


def problems_of(runs: Sequence[Run]) -> dict[int, str]:
    """The problem of each run, by its `id`: the task with the settings in which it was varied, and the model, if one learns."""
    found = {}
    for run in runs:
        same = [peer for peer in runs if peer.task == run.task]
        task = f"{run.task} {setting_text(varying_settings(run, same, 'task_settings'))}".strip()
        found[id(run)] = task if run.is_robot else " with ".join(filter(None, (task, run.model)))
    return found


def varying_settings(run: Run, peers: Iterable[Run], which: str) -> dict[str, str]:
    """Settings of a run in which its peers are not all the same, but for secrets, which make no other method.

    Args:
        which: "own_settings", "shared_settings" or "task_settings" of a run.
    """
    read: Callable[[Run], dict[str, str]] = attrgetter(which)
    mine, others = read(run), [read(peer) for peer in peers]
    keys = sorted({key for other in [mine, *others] for key in other if not SECRET.search(key)})
    return {key: mine.get(key, "default") for key in keys if len({other.get(key) for other in others}) > 1}


def _natural(text: str) -> tuple[Any, ...]:
    """Sorts 2 before 10, and 1e-4 before 0.001."""
    words = []
    for word in text.replace("=", " ").split():
        try:
            words.append((0, float(word), ""))
        except ValueError:
            words.append((1, 0.0, word))
    return tuple(words)
