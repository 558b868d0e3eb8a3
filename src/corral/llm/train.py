"""The job: settings → model, task, trainer → a run folder that tells how it went and can be gone on with."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, set_seed

from corral.llm.banner import banner
from corral.llm.files import RunError, disk_sentence, is_disk_full
from corral.llm.guard import GuardCallback
from corral.llm.prepare import Parts, described, prepare
from corral.llm.problems import reward_by_name, verifier
from corral.llm.run import Checkpoint, RunFolder, Stopped, versions
from corral.llm.session import RunCallback, RunTrainer, Session
from corral.llm.settings import Settings, resolve
from corral.llm.view import View, count, make_view


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and where it is."""

    path: Path
    summary: dict[str, Any]


def train(settings: Settings, *, out: Path | None = None, quiet: bool = False) -> Outcome:
    """A new run, in `out` or in a new folder under runs/."""
    parts = prepare(settings)
    folder = None
    if is_main():
        folder = RunFolder.create(out, f"{settings.task}-{settings.objective}-{settings.seed}")
        folder.write_config(described(settings, parts))
    return _run(settings, parts, folder, None, [], make_view(quiet=quiet, silent=not is_main()))


def resume(path: Path, *, quiet: bool = False, guard: str | None = None, report_to: str | None = None) -> Outcome:
    """Go on with the run in `path` from its last whole checkpoint; what came after that happens again, the same."""
    folder = RunFolder.open(path, write=is_main())
    view = make_view(quiet=quiet, silent=not is_main())
    content = folder.read_config()
    changes = {key: value for key, value in (("guard", guard), ("report_to", report_to)) if value is not None}
    settings = resolve([content["settings"], changes])
    checkpoint, complaints = folder.last_whole_checkpoint()
    for sentence in complaints:
        view.warn(sentence)
    if checkpoint is not None and checkpoint.step >= settings.steps:
        return already_finished(settings, folder, view)
    if content.get("versions") != versions():
        view.warn("versions differ from those the run began with: it goes on, but perhaps not bit for bit the same.")
    if checkpoint is None:
        view.say(f"{path} has no whole checkpoint: the run starts from the beginning.")
    else:
        view.say(f"going on after step {checkpoint.step}, from {checkpoint.path}")
    parts = prepare(settings)
    lines: list[dict[str, Any]] = []
    if is_main():
        folder.drop_unfinished()
        lines = folder.cut_back(checkpoint.step if checkpoint is not None else -1)
    return _run(settings, parts, folder if is_main() else None, checkpoint, lines, view)


def _run(
    settings: Settings,
    parts: Parts,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    lines: list[dict[str, Any]],
    view: View,
) -> Outcome:
    """Train, and write down how it ended, however it ended."""
    shared = [str(folder.path) if folder else None, checkpoint, lines]
    where, checkpoint, lines = broadcast_object_list(shared)
    guard = GuardCallback(settings.guard, say=view.warn)
    guard.restore(lines)
    session = Session(
        settings=settings,
        problems=parts.problems,
        held_out=parts.held_out,
        success=verifier(parts.problems.task),
        folder=folder,
        guard=guard,
        view=view,
        lines=lines,
    )
    stopped: Stopped = "failed"
    error: BaseException | None = None
    try:
        with session.obeying_signals(), tensorboard_in(Path(where)):
            trainer = build_trainer(session, parts, Path(where))
            view.begin(banner(settings, trainer, Path(where)), settings.steps, checkpoint.step if checkpoint else 0)
            trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        done = session.lines[-1]["step"] == settings.steps
        stopped = "collapsed" if guard.collapsed else "finished" if done else "interrupted"
    except KeyboardInterrupt:
        stopped = "interrupted"
    except BaseException as failure:  # whatever it is, the run says so before it passes it on
        error = failure
        if is_disk_full(failure) and not isinstance(failure, RunError):
            error = RunError(disk_sentence(failure, Path(where)))
            error.__cause__ = failure
    finally:
        view.close()
    summary = summarise(settings, session.lines, stopped, guard.collapsed or (str(error) if error else None))
    if folder is not None:
        close(folder, summary, view)
    if error is not None:
        raise error
    view.end(last_words(summary, Path(where)))
    return Outcome(Path(where), summary)


def build_trainer(session: Session, parts: Parts, where: Path) -> RunTrainer:
    """The trainer with its data, rewards and callbacks."""
    settings, config = session.settings, parts.config
    config.output_dir = str(where / "checkpoints")
    reward = reward_by_name(settings.reward) if settings.reward else session.success
    log = logging.getLogger("corral.llm.trainer")
    level = log.level
    log.setLevel(logging.ERROR)  # the banner says the same, in its place
    set_seed(settings.seed)  # the trainer does that too, but an adapter is drawn before
    try:
        trainer = RunTrainer(
            parts.model,
            reward,
            config,
            parts.dataset,
            processing_class=parts.problems.tokenizer,
            peft_config=parts.adapter,
        )
    except ValueError as error:  # what only TRL, peft and the model together can tell
        raise RunError(str(error)) from error
    finally:
        log.setLevel(level)
    trainer.session = session
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(session.guard)
    trainer.add_callback(RunCallback(trainer))
    return trainer


def already_finished(settings: Settings, folder: RunFolder, view: View) -> Outcome:
    """All steps are done; perhaps the process ended before it could say so."""
    lines = folder.lines()
    summary = summarise(settings, lines, "finished", None)
    if is_main():
        folder.write_summary(summary)
        folder.close()
    view.end(last_words(summary, folder.path))
    return Outcome(folder.path, summary)


def summarise(settings: Settings, lines: list[dict[str, Any]], stopped: Stopped, why: str | None) -> dict[str, Any]:
    """The content of summary.json."""
    measured = [line["success"] for line in lines if line.get("success") is not None]
    greedy = [line["greedy"] for line in lines if line.get("greedy") is not None]
    return {
        "objective": settings.objective,
        "task": settings.task,
        "model": settings.model,
        "seed": settings.seed,
        "steps": lines[-1]["step"] if lines else 0,
        "success_start": measured[0] if measured else None,
        "success_best": max(measured, default=None),
        "success_final": measured[-1] if measured else None,
        "greedy_start": greedy[0] if greedy else None,
        "greedy_final": greedy[-1] if greedy else None,
        "seconds": lines[-1]["seconds"] if lines else 0.0,
        "skipped": lines[-1].get("skipped", 0) if lines else 0,
        "stopped": stopped,
        "why": why,
    }


def close(folder: RunFolder, summary: dict[str, Any], view: View) -> None:
    """Write the last files. On a full disk even that can fail, and must not hide why the run ended."""
    folder.drop_unfinished()
    for write in (lambda: folder.write_summary(summary), folder.write_completions):
        try:
            write()
        except RunError as error:
            view.warn(str(error))
    folder.close()


def last_words(summary: dict[str, Any], where: Path) -> str:
    """How it ended, in a sentence or two."""
    change = ""
    if summary["success_start"] is not None:
        change = f"held-out success {summary['success_start']:.1%} → {summary['success_final']:.1%}, "
    took = f"{summary['seconds']:.0f} s. The run is in {where}"
    go_on = "" if summary["stopped"] == "finished" else f"\nGo on with: corral train --resume {where}"
    return f"{summary['stopped']} after {count(summary['steps'], 'step')}: {change}{took}{go_on}"


def is_main() -> bool:
    """Whether this process writes; launchers number their processes in RANK."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def tensorboard_in(where: Path) -> Iterator[None]:
    """TensorBoard's files beside the run's own; transformers takes the place from the environment."""
    key = "TENSORBOARD_LOGGING_DIR"
    given = os.environ.get(key)
    os.environ[key] = given or str(where / "tensorboard")
    try:
        yield
    finally:
        os.environ.pop(key) if given is None else os.environ.update({key: given})
