"""compare.json, read here and nowhere else: which runs a comparison planned, what it chose, and on which seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.lab.report.groups import Chosen
from corral.lab.report.ranges import setting_text
from corral.lab.report.read import Run, read_json
from corral.lab.run.settings import guess

FILE = "compare.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SavedRun:
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
class SavedComparison:
    """A comparison, as far as its file tells."""

    path: Path
    command: str
    sweep: Mapping[str, Sequence[Any]]
    choose_seeds: Sequence[int]
    report_seeds: Sequence[int]
    chosen: Mapping[str, Mapping[str, Any]]
    runs: Sequence[SavedRun]
    kind: Any = None
    """What learns, "llm" or "robot"; this, `contestants` and `train` matter to whoever resumes it alone."""
    contestants: Sequence[str] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    """What all runs share."""

    def of_stage(self, stage: str) -> list[SavedRun]:
        """Runs that were planned for one purpose."""
        return [run for run in self.runs if run.stage == stage]


def read_comparisons(folders: Iterable[Path], runs: Sequence[Run]) -> tuple[list[SavedComparison], list[str]]:
    """Comparisons in these folders, and in those that hold the runs; and what is wrong with their files."""
    places = {path.resolve(): path for path in [*folders, *(run.path.parent for run in runs)] if (path / FILE).is_file()}
    found, notes = [], []
    for path in places.values():
        try:
            found.append(read_comparison(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            notes.append(
                f"{path / FILE} cannot be read ({type(error).__name__}: {error}); runs are shown as if it were not there."
            )
    return found, notes


def read_comparison(path: Path) -> SavedComparison:
    """One file; raises whatever is wrong with it."""
    content = read_json(path / FILE)
    if content["version"] != VERSION:
        raise ValueError(f"it is of version {content['version']}, and this corral reads version {VERSION}.")
    return SavedComparison(
        path=path,
        command=str(content["command"]),
        sweep={str(key): [guess(value) for value in values] for key, values in content["sweep"].items()},
        choose_seeds=[int(seed) for seed in content["choose_seeds"]],
        report_seeds=[int(seed) for seed in content["report_seeds"]],
        chosen={str(name): _setting(setting) for name, setting in content["chosen"].items()},
        runs=[
            SavedRun(
                path=_inner(path, str(run["folder"])),
                contestant=str(run["contestant"]),
                setting=_setting(run["setting"]),
                seed=int(run["seed"]),
                stage=str(run["stage"]),
                state=str(run["state"]),
                error=None if run.get("error") is None else str(run["error"]),
            )
            for run in content["runs"]
        ],
        kind=content.get("kind"),
        contestants=[str(name) for name in content.get("contestants", ())],
        train=dict(content.get("train", {})),
    )


def split_runs(runs: Sequence[Run], comparisons: Sequence[SavedComparison]) -> tuple[list[Run], list[Run], Chosen]:
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


def _inner(path: Path, name: str) -> Path:
    """A folder of the comparison's."""
    if "\0" in name:
        raise ValueError(f"{name!r} is no folder's name.")
    return path / name


def _setting(content: Any) -> dict[str, Any]:
    """A setting from compare.json; JSON has no infinity."""
    if not isinstance(content, Mapping):
        raise ValueError(f"a setting is a table of names and values; got {content!r}.")
    return {str(key): guess(value) for key, value in content.items()}
