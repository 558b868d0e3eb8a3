"""The end of a run, finished or not: its summary, its last files, its last message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.run.files import RunError, disk_sentence, is_disk_full
from corral.run.folder import RunFolder, Stopped
from corral.run.text import count
from corral.run.view import RunView


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and where it is."""

    path: Path
    summary: dict[str, Any]


def attempt(job: Callable[[], Stopped], where: Path) -> tuple[Stopped, BaseException | None]:
    """Run `job`: how it stopped, and the exception if there was one. A full disk becomes a RunError."""
    try:
        return job(), None
    except KeyboardInterrupt:
        return "interrupted", None
    except BaseException as failure:  # whatever it is, the run says so before it passes it on
        if is_disk_full(failure) and not isinstance(failure, RunError):
            error = RunError(disk_sentence(failure, where))
            error.__cause__ = failure
            return "failed", error
        return "failed", failure


def summarise(
    about: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    stopped: Stopped,
    why: str | None,
    *,
    also: str,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        about: objective, task, model and seed.
        lines: metrics of every step.
        also: what was measured together with `success`; its first and last value are kept too.
    """
    measured = [line["success"] for line in lines if line.get("success") is not None]
    beside = [line[also] for line in lines if line.get(also) is not None]
    return {
        **about,
        "steps": lines[-1]["step"] if lines else 0,
        "success_start": measured[0] if measured else None,
        "success_best": max(measured, default=None),
        "success_final": measured[-1] if measured else None,
        f"{also}_start": beside[0] if beside else None,
        f"{also}_final": beside[-1] if beside else None,
        "seconds": lines[-1]["seconds"] if lines else 0.0,
        "skipped": lines[-1].get("skipped", 0) if lines else 0,
        "stopped": stopped,
        "why": why,
    }


def close(folder: RunFolder, writes: Sequence[Callable[[], None]], view: RunView) -> None:
    """Write the last files. On a full disk even that can fail, and must not hide why the run ended."""
    folder.drop_unfinished()
    for write in writes:
        try:
            write()
        except RunError as error:
            view.warn(str(error))
    folder.close()


def last_words(summary: Mapping[str, Any], where: Path) -> str:
    """How it ended, in a sentence or two."""
    change = ""
    if summary["success_start"] is not None:
        change = f"held-out success {summary['success_start']:.1%} → {summary['success_final']:.1%}, "
    took = f"{summary['seconds']:.0f} s. The run is in {where}"
    resume = "" if summary["stopped"] == "finished" else f"\nResume with: corral train --resume {where}"
    return f"{summary['stopped']} after {count(summary['steps'], 'step')}: {change}{took}{resume}"
