"""The end of a run, finished or not: its summary, its last files, its last message."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.run.files import disk_sentence, is_disk_full, write_json
from corral.run.folder import Checkpoint, RunFolder, Stopped
from corral.run.text import count
from corral.run.view import RunView
from corral.validate import RunError


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
    """The content of summary.json. What is `_final` was measured after the last step: None where that was not.

    Args:
        about: objective, task, model and seed.
        lines: metrics of every step.
        also: what was measured together with `success`; its first and final value are kept too.
    """
    measured = {line["step"]: line["success"] for line in lines if line.get("success") is not None}
    beside = {line["step"]: line[also] for line in lines if line.get(also) is not None}
    last, newest = lines[-1]["step"] if lines else 0, max(measured, default=None)
    return {
        **about,
        "steps": last,
        "success_start": next(iter(measured.values()), None),
        "success_best": max(measured.values(), default=None),
        "success_final": measured.get(last),
        "success_last": measured[newest] if newest is not None else None,
        "success_last_step": newest,
        f"{also}_start": next(iter(beside.values()), None),
        f"{also}_final": beside.get(last),
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


def extend(folder: RunFolder, content: Mapping[str, Any], end: Mapping[str, int], checkpoint: Checkpoint | None) -> None:
    """Give a run another length: `end` is {"steps": 80}, or a robot's {"iterations": 80}. Earlier ends stay in config.json.

    A RunError where it has gone further already.
    """
    ((key, value),) = end.items()
    done = checkpoint.step if checkpoint is not None else 0
    if value < done:
        folder.close()
        raise RunError(f"the run in {folder.path} has done {done} steps, more than --{key} {value}. Give a larger number.")
    record_change(folder, content, end, done, "extended")


def record_change(folder: RunFolder, content: Mapping[str, Any], change: Mapping[str, Any], after: int, under: str) -> None:
    """Give a setting another value in config.json after so many steps; `under` this name it keeps which ones came before."""
    ((key, value),) = change.items()
    before = content["settings"].get(key)  # older runs may not have it
    if value != before:
        changes = [*content.get(under, ()), {"from": before, "to": value, "after": after}]
        write_json(folder.config, {**content, "settings": {**content["settings"], **change}, under: changes})


def last_words(summary: Mapping[str, Any], where: Path) -> str:
    """How it ended, and the commands that resume the run, show it and measure it."""
    change = ""
    if summary["success_start"] is not None:
        last, step = summary["success_last"], summary["success_last_step"]
        when = "" if step == summary["steps"] else f" at step {step}, the last measured" if step else " before the first step"
        moved = f"{summary['success_start']:.1%} → {last:.1%}" if step else f"{last:.1%}"
        change = f"held-out success {moved}{when}, "
    took = f"{summary['seconds']:.0f} s. The run is in {where}"
    path = shlex.quote(str(where))
    resume = "" if summary["stopped"] == "finished" else f"\nResume with: corral train --resume {path}"
    further = f"\nNext: corral report {path}, or corral eval {path}" if summary["stopped"] in ("finished", "collapsed") else ""
    return f"{summary['stopped']} after {count(summary['steps'], 'step')}: {change}{took}{resume}{further}"
