"""compare.json, as far as a report needs it: which runs a comparison planned, what it chose, and on which seeds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.report.groups import Chosen
from corral.report.read import Run
from corral.report.sweep import value_text

FILE = "compare.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run that was planned."""

    path: Path
    contestant: str
    setting: Mapping[str, Any]
    seed: int
    stage: str
    """Whether it serves the choice of a setting, "sweep", or is reported, "report"."""
    state: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison, as far as its file tells."""

    path: Path
    command: str
    sweep: Mapping[str, Sequence[Any]]
    choose_seeds: Sequence[int]
    report_seeds: Sequence[int]
    chosen: Mapping[str, Mapping[str, Any]]
    entries: Sequence[Entry]

    def of_stage(self, stage: str) -> list[Entry]:
        """Runs that were planned for one purpose."""
        return [entry for entry in self.entries if entry.stage == stage]


def read_comparisons(folders: Iterable[Path], runs: Sequence[Run]) -> tuple[list[Comparison], list[str]]:
    """Comparisons in these folders, and in those that hold the runs; and what is wrong with their files."""
    places = {path.resolve(): path for path in [*folders, *(run.path.parent for run in runs)] if (path / FILE).is_file()}
    found, notes = [], []
    for path in places.values():
        try:
            found.append(read_comparison(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(
                f"{path / FILE} cannot be read ({type(error).__name__}: {error}); runs are shown as if it were not there."
            )
    return found, notes


def read_comparison(path: Path) -> Comparison:
    """One file; raises whatever is wrong with it."""
    content = json.loads((path / FILE).read_bytes())
    if content["version"] != VERSION:
        raise ValueError(f"its version is {content['version']}, and this corral reads version {VERSION}")
    entries = [
        Entry(
            path=path / str(run["folder"]),
            contestant=str(run["contestant"]),
            setting=dict(run["setting"]),
            seed=int(run["seed"]),
            stage=str(run["stage"]),
            state=str(run["state"]),
            error=None if run.get("error") is None else str(run["error"]),
        )
        for run in content["runs"]
    ]
    return Comparison(
        path=path,
        command=str(content["command"]),
        sweep={str(key): list(values) for key, values in content["sweep"].items()},
        choose_seeds=[int(seed) for seed in content["choose_seeds"]],
        report_seeds=[int(seed) for seed in content["report_seeds"]],
        chosen={str(name): dict(setting) for name, setting in content["chosen"].items()},
        entries=entries,
    )


def split_runs(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> tuple[list[Run], list[Run], Chosen]:
    """Runs to report, runs of sweeps that are over, and what was chosen for those that are reported.

    As long as a comparison has no reported run, those of its sweep are all there is to look at, and stay.
    """
    places = {run.path.resolve(): run for run in runs}
    swept: set[int] = set()
    chosen: dict[Path, tuple[str, str]] = {}
    for comparison in comparisons:
        reported = [
            (entry, places[entry.path.resolve()]) for entry in comparison.of_stage("report") if entry.path.resolve() in places
        ]
        if not comparison.sweep or not reported:
            continue
        chosen |= {run.path: (entry.contestant, setting_text(entry.setting)) for entry, run in reported}
        keep = {id(run) for _, run in reported}
        swept |= {id(places[path]) for entry in comparison.of_stage("sweep") if (path := entry.path.resolve()) in places} - keep
    return [run for run in runs if id(run) not in swept], [run for run in runs if id(run) in swept], chosen


def setting_text(setting: Mapping[str, Any]) -> str:
    """`learning_rate=1e-4 num_iterations=4`."""
    return " ".join(f"{key}={value_text(value)}" for key, value in setting.items())
