"""`corral train`: settings → model, task, trainer → a resumable run folder."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, set_seed

from corral.lab.jobs.llm.banner import banner
from corral.lab.jobs.llm.prepare import Parts, config_content, pin_model, prepare
from corral.lab.jobs.llm.prepare import changed_data as find_changed_data
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.settings import Settings, resolve
from corral.lab.jobs.llm.trainer import GuardCallback, RunCallback, RunTrainer, Session, cannot_resume
from corral.lab.models.subject import named_code
from corral.lab.run.ending import Outcome, attempt, close, extend, last_words, summarise
from corral.lab.run.files import write_json
from corral.lab.run.folder import Checkpoint, RunFolder, Stopped
from corral.lab.run.view import RunView, make_view
from corral.provenance import versions
from corral.trl.processes import ALONE, LOST, is_alone_by_mistake, is_main, lost_process, run_together
from corral.validate import RunError


def train(
    settings: Settings | Mapping[str, Any], *, out: Path | str | None = None, quiet: bool = False, smoke: bool = False
) -> Outcome:
    """Start a run, in `out` or in a new folder under runs/; under smoke-runs/ where it is none to keep."""
    given = settings if isinstance(settings, Settings) else resolve([settings])

    def begin() -> tuple[Settings, Parts, RunFolder | None]:
        pinned, folder = pin_model(given), None
        parts = prepare(pinned)
        if is_main():
            folder = RunFolder.create(out, f"{given.task}-{given.objective}-{given.seed}", smoke=smoke)
            folder.write_config(config_content(pinned, parts))
        return pinned, parts, folder

    pinned, parts, folder = run_together(begin, cpu=_on_cpu(given))
    return _run(pinned, parts, folder, None, [], make_view(quiet=quiet, silent=not is_main()))


def resume(
    path: Path | str,
    *,
    quiet: bool = False,
    guard: str | None = None,
    report_to: str | None = None,
    reward: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
    steps: int | str | None = None,
    changed_data: bool = False,
) -> Outcome:
    """Resume the run in `path` from its last whole checkpoint; later steps are repeated, bit for bit.

    Args:
        changed_data: resume although the data are not those that the run began with.
        reward, tools, environment_factory: the run's own again where they cannot be imported, such as those of a notebook.
        steps: a new end, to extend the run or to end it earlier; the learning rate follows the schedule of that length.
    """
    folder = RunFolder.open(Path(path), write=is_main())
    view = make_view(quiet=quiet, silent=not is_main())
    content = folder.read_config()
    own = {"reward": reward, "tools": tools, "environment_factory": environment_factory}
    changes = {"guard": guard, "report_to": report_to, **own, "steps": steps}
    # What was chosen for the run stays: a longer one may have longer prompts.
    trainer = content.get("trainer")
    if not isinstance(trainer, Mapping) or "max_completion_length" not in trainer:
        raise RunError(f"{folder.config} is not what a run writes: `trainer` has no max_completion_length.")
    length = {"max_completion_length": trainer["max_completion_length"]}
    settings = resolve([length, content["settings"], {key: value for key, value in changes.items() if value is not None}])
    checkpoint, complaints = folder.last_whole_checkpoint()
    if steps is not None and is_main():
        extend(folder, content, {"steps": settings.steps}, checkpoint)
    for sentence in complaints:
        view.warn(sentence)
    if checkpoint is not None and checkpoint.step >= settings.steps:
        return _report_finished(settings, folder, view)
    if content.get("versions") != versions():
        view.warn("versions differ from those the run began with: it goes on, but perhaps not bit for bit the same.")
    if checkpoint is None:
        view.say(f"{path} has no whole checkpoint: the run starts from the beginning.")
    else:
        view.say(f"going on after step {checkpoint.step}, from {checkpoint.path}")
    code = [f"{flag} {path}" for flag, path in named_code(settings.flat())]
    code += ["--unsafe-code-execution"] if settings.task_config.get("unsafe_code_execution") else []
    if code:
        view.say(f"using what the run's own settings name: {', '.join(code)}")
    done = checkpoint.step if checkpoint is not None else 0

    def rebuild() -> tuple[Parts, dict[str, Any]]:
        parts = prepare(settings)
        return parts, _check_data(Path(path), content, settings, parts, done, regardless=changed_data)

    try:
        parts, data = run_together(rebuild, cpu=_on_cpu(settings))
        if "data" not in content:
            view.warn("config.json has no digest of the run's data: whether they have changed is unknown.")
        elif is_main():
            write_json(folder.config, folder.read_config() | data)
    except RunError:
        folder.close()  # else this process could not try again
        raise
    lines: list[dict[str, Any]] = []
    if is_main():
        folder.drop_unfinished()
        lines = folder.cut_back(checkpoint.step if checkpoint is not None else -1)
    return _run(settings, parts, folder if is_main() else None, checkpoint, lines, view)


def _check_data(
    path: Path, content: Mapping[str, Any], settings: Settings, parts: Parts, done: int, *, regardless: bool
) -> dict[str, Any]:
    """What config.json is to say of the data from here on; a RunError where they have changed, unless `regardless`."""
    if "data" not in content:  # a run of an earlier release
        return {}
    task, train = parts.problems.task, parts.dataset["problem"][:]
    changes, now = find_changed_data(content["data"], settings, task, train, parts.held_out)
    if changes and not regardless:
        raise RunError(
            f"the data of {path} are not those that it began with: {' and '.join(changes)} differ in their texts, answers or "
            f"order. Put the earlier data back, or resume with these: --changed-data."
        )
    earlier = [*content.get("earlier_data", ()), {**content["data"], "until": done}] if changes else None
    return {"data": now} if earlier is None else {"data": now, "earlier_data": earlier}


def _run(
    settings: Settings,
    parts: Parts,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    lines: list[dict[str, Any]],
    view: RunView,
) -> Outcome:
    """Train, and write summary.json however the run ended."""
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
        turns=parts.turns,
        problem_of={str(row["prompt"]): row["problem"] for row in parts.dataset} if parts.turns is not None else {},
    )
    if is_alone_by_mistake():
        view.warn(ALONE)
    stopped, error = attempt(lambda: _train(session, parts, Path(where), checkpoint), Path(where))
    if error is not None and lost_process(error):
        error = RunError(LOST)
    view.close()
    summary = _summary(settings, session.lines, stopped, guard.collapsed or (str(error) if error else None))
    if folder is not None:
        close(folder, (lambda: folder.write_summary(summary), folder.write_completions), view)
    if error is not None:
        # Before the first step all processes are refused alike, and one speaks.
        raise error if is_main() or session.patient or not isinstance(error, RunError) else SystemExit(1)
    view.end(last_words(summary, Path(where)))
    return Outcome(Path(where), summary)


def _train(session: Session, parts: Parts, where: Path, checkpoint: Checkpoint | None) -> Stopped:
    settings = session.settings
    with session.stop_on_signals(), _tensorboard_in(where):
        trainer = _build_trainer(session, parts, where)
        session.view.begin(banner(settings, trainer, where, parts.notes), settings.steps, checkpoint.step if checkpoint else 0)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        except Exception as error:  # pickle, torch, safetensors and transformers have one each for a damaged file
            if checkpoint is None or session.patient or isinstance(error, RunError | torch.OutOfMemoryError):
                raise
            raise cannot_resume(str(checkpoint.path), error) from error
    done = session.lines[-1]["step"] == settings.steps
    return "collapsed" if session.guard.collapsed else "finished" if done else "interrupted"


def _build_trainer(session: Session, parts: Parts, where: Path) -> RunTrainer:
    """The trainer with its dataset, rewards and callbacks."""
    settings, config = session.settings, parts.config
    config.output_dir = str(where / "checkpoints")
    log = logging.getLogger("corral.trl.trainer")
    level = log.level
    log.setLevel(logging.ERROR)  # the banner says the same, in its place
    set_seed(settings.seed)  # the trainer does that too, but an adapter is drawn before
    try:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # several turns are; tests run every release that is accepted
        trainer = RunTrainer(
            parts.model,
            parts.rewards,
            config,
            parts.dataset,
            processing_class=parts.problems.tokenizer,
            peft_config=parts.adapter,
            teacher=parts.teacher,
            **({} if parts.turns is None else parts.turns.trainer_arguments()),
        )
    except (ValueError, ImportError) as error:  # what only TRL, peft and the model together can tell, or a package for tools
        raise RunError(str(error)) from error
    finally:
        log.setLevel(level)
    trainer.session = session
    trainer.token_observer = trainer.sample_tokens
    check, guard = trainer.self_check, session.guard
    check.say = guard.tell
    earlier = [text for line in session.lines for text in line.get("warnings", ())]
    off = guard.mode == "off"
    check.drift_reported = off or any("before any update" in text for text in earlier)
    check.tail_reported = off or any("tr/hidden_kl_max" in text for text in earlier)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(session.guard)
    trainer.add_callback(RunCallback(trainer))
    return trainer


def _report_finished(settings: Settings, folder: RunFolder, view: RunView) -> Outcome:
    """All steps are done: write the summary again, which may be missing if the process was killed."""
    lines = folder.lines()
    summary = _summary(settings, lines, "finished", None)
    if is_main():
        folder.write_summary(summary)
        folder.close()
    view.end(last_words(summary, folder.path))
    return Outcome(folder.path, summary)


def _summary(settings: Settings, lines: list[dict[str, Any]], stopped: Stopped, why: str | None) -> dict[str, Any]:
    """The content of summary.json."""
    about = {"objective": settings.objective, "task": settings.task, "model": settings.model, "seed": settings.seed}
    return summarise(about, lines, stopped, why, also="greedy")


def _on_cpu(settings: Settings) -> bool:
    return settings.device == "cpu" or not torch.cuda.is_available()


@contextmanager
def _tensorboard_in(where: Path) -> Iterator[None]:
    """Let transformers write TensorBoard's files into the run folder, through its environment variable."""
    key = "TENSORBOARD_LOGGING_DIR"
    given = os.environ.get(key)
    os.environ[key] = given or str(where / "tensorboard")
    try:
        yield
    finally:
        os.environ.pop(key) if given is None else os.environ.update({key: given})
