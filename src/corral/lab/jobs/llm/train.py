"""Training runs of language models: build model, task and trainer from settings, and train in a resumable run folder."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import trl
from accelerate.utils import broadcast_object_list, is_peft_model

import corral
from corral.lab.jobs.llm.prepare import Parts, changed_data, describe_data, pin_model, prepare
from corral.lab.jobs.llm.rewards import path_of
from corral.lab.jobs.llm.settings import Settings, named_code, resolve
from corral.lab.jobs.llm.trainer import GuardCallback, RunTrainer, cannot_resume
from corral.lab.run import life
from corral.lab.run.life import Job, Outcome, Recorder
from corral.lab.run.settings import changed_fields
from corral.lab.run.text import count
from corral.lab.run.view import RunView
from corral.lab.tasks import settings_of
from corral.provenance import plain
from corral.trl.api import FUSED, REDUCTIONS
from corral.trl.processes import ALONE, LOST, is_alone_by_mistake, is_main, lost_process, run_together
from corral.validate import RunError

_Result = TypeVar("_Result")


def train(
    settings: Settings | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    quiet: bool = False,
    smoke: bool = False,
    verbose: bool = False,
) -> Outcome:
    """Train a new run in the folder `out`, or in a new folder under runs/ (under smoke-runs/ with `smoke`)."""
    given = settings if isinstance(settings, Settings) else resolve([settings])
    label = f"{given.task}-{given.objective}-{given.seed}"
    return life.train(ModelRun(given, is_new=True), label, out=out, quiet=quiet, smoke=smoke, verbose=verbose)


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
    verbose: bool = False,
) -> Outcome:
    """Resume the run in `path` from its last intact checkpoint; steps after that checkpoint are repeated, bit for bit.

    Args:
        changed_data: resume although the data are not those that the run began with.
        reward, tools, environment_factory: the run's own again where they cannot be imported, such as those of a notebook.
        steps: a new end, to extend the run or to end it earlier; the learning rate follows the schedule of that length.
    """
    own = {"reward": reward, "tools": tools, "environment_factory": environment_factory}
    changes = {"guard": guard, "report_to": report_to, **own, "steps": steps}
    given = {key: value for key, value in changes.items() if value is not None}

    def make(content: dict[str, Any]) -> ModelRun:
        # What was chosen for the run stays: a longer one may have longer prompts.
        trainer = content.get("trainer")
        if not isinstance(trainer, Mapping) or "max_completion_length" not in trainer:
            where = Path(path) / "config.json"
            raise RunError(f"{where} is not what a run writes: `trainer` has no max_completion_length.")
        length = {"max_completion_length": trainer["max_completion_length"]}
        return ModelRun(resolve([length, content["settings"], given]), changed_data=changed_data)

    return life.resume(make, Path(path), quiet=quiet, extended=steps is not None, verbose=verbose, is_main=is_main())


class ModelRun(Job):
    """A training run of a language model, with TRL's training loop inside."""

    length, beside, pace, completions = "steps", "greedy", ("num_tokens", "tokens_per_second"), True
    settings: Settings
    parts: Parts
    guard: GuardCallback

    def __init__(self, settings: Settings, *, is_new: bool = False, changed_data: bool = False) -> None:
        self.settings, self.is_new, self.changed_data, self.is_main = settings, is_new, changed_data, is_main()
        self.about = {name: vars(settings)[name] for name in ("objective", "task", "model", "seed")}
        self.guard = GuardCallback(settings.guard)

    def prepare(self) -> None:
        if self.is_new:
            self.settings = pin_model(self.settings)
            self.about["model"] = self.settings.model
        self.parts = prepare(self.settings)

    def describe(self) -> dict[str, Any]:
        parts, task = self.parts, self.parts.problems.task
        return {
            "settings": self.settings.flat(),
            "objective": {"name": self.settings.objective, **vars(parts.config.make_objective().config)},
            "reduction": {"name": REDUCTIONS[parts.config.loss_type], "own": parts.config.other_reduction is None},
            "task": {"name": task.name, **settings_of(task)},
            "data": describe_data(task, parts.dataset["problem"][:], parts.held_out),
            "model": {"name": self.settings.model, "parameters": sum(p.numel() for p in parts.model.parameters())},
            "trainer": plain(parts.config.to_dict()),
            "command": sys.argv,
        }

    def notes(self) -> Iterator[str]:
        """Yield a note on the user code that the run's settings name and that will be imported."""
        code = [f"{flag} {path}" for flag, path in named_code(self.settings.flat())]
        code += ["--unsafe-code-execution"] if self.settings.task_config.get("unsafe_code_execution") else []
        if code:
            yield f"using what the run's own settings name: {', '.join(code)}"

    def check_changes(self, content: Mapping[str, Any], done: int, path: Path, view: RunView) -> dict[str, Any]:
        """Compare the run's data with the digests in config.json. Raises RunError if they have changed, unless allowed."""
        if "data" not in content:
            view.warn("config.json has no digest of the run's data: whether they have changed is unknown.")
            return {}
        changes, now = changed_data(content["data"], self.settings, self.parts)
        if changes and not self.changed_data:
            raise RunError(
                f"the data of {path} are not those that it began with: {' and '.join(changes)} differ in their texts, answers "
                f"or order. Put the earlier data back, or resume with these: --changed-data."
            )
        if not changes:
            return {"data": now}
        return {"data": now, "earlier_data": [*content.get("earlier_data", ()), {**content["data"], "until": done}]}

    def together(self, do: Callable[[], _Result]) -> _Result:
        return run_together(do, cpu=self.settings.device == "cpu" or not torch.cuda.is_available())

    def share(self, values: list[Any]) -> list[Any]:
        shared: list[Any] = broadcast_object_list(values)
        return shared

    def fit(self, record: Recorder) -> None:
        """Build the trainer, and train to the end of the run, starting from the checkpoint if there is one."""
        if is_alone_by_mistake():
            record.view.warn(ALONE)
        checkpoint = record.checkpoint
        with _tensorboard_in(record.path):
            trainer = RunTrainer(self.parts, record, self.guard)
            record.begin(banner(self.settings, trainer, record.path, self.parts.notes, record.view.verbose))
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint is not None else None)
            except Exception as error:  # pickle, torch, safetensors and transformers have one each for a damaged file
                if checkpoint is None or record.patient or isinstance(error, RunError | torch.OutOfMemoryError):
                    raise
                raise cannot_resume(str(checkpoint.path), error) from error

    def explain(self, error: BaseException) -> BaseException:
        return RunError(LOST) if lost_process(error) else error


@contextmanager
def _tensorboard_in(where: Path) -> Iterator[None]:
    """Direct TensorBoard's files into the run folder, through the environment variable that transformers reads."""
    key = "TENSORBOARD_LOGGING_DIR"
    given = os.environ.get(key)
    os.environ[key] = given or str(where / "tensorboard")
    try:
        yield
    finally:
        os.environ.pop(key) if given is None else os.environ.update({key: given})


def banner(
    settings: Settings, trainer: RunTrainer, where: Path, chosen: Iterable[str] = (), verbose: bool = False
) -> list[tuple[str, str]]:
    """Build the heading that a run prints, as pairs (name, sentence). Settings at defaults are shown only with `verbose`.

    Args:
        chosen: sentences about settings that were chosen automatically.
    """
    args, config, teacher = trainer.args, trainer.objective.config, trainer.teacher
    parameters = f"{_short(p.numel() for p in trainer.model.parameters())} parameters"
    if is_peft_model(trainer.model):
        trained = _short(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        parameters += f", {trained} of them trained (LoRA)"
    updates = ("at most " if args.reuse == "auto" else "") + count(trainer.updates_per_step, "update")
    chosen_too = {key: vars(config)[key] for key in settings.objective_config}
    shown = vars(config) if verbose else changed_fields(config) | chosen_too
    objective_settings = ", ".join(f"{name}={value}" for name, value in shown.items())
    given = ("anchor", "support") if verbose else tuple(settings.trainer)
    anchor = "rollout: here the sampler is the trainer's own model, so this is the recomputed old policy"
    if trainer.anchor == "old":
        anchor = "old: the policy before the updates, recomputed by the trainer"
    elif args.use_vllm:
        anchor = "rollout: the log-probs that vLLM reports"
    elif trainer.behaviour is not None:
        anchor = "rollout: the log-probs that completions were drawn with"
    lines = [
        ("corral", f"{corral.__version__}: {settings.task} with {settings.model}, {parameters}"),
        ("objective", f"{settings.objective}" + (f" ({objective_settings})" if objective_settings else "")),
    ]
    if verbose or REDUCTIONS[args.loss_type] != config.reductions[0]:
        lines.append(("reduction", f"{REDUCTIONS[args.loss_type]} (loss_type {args.loss_type})"))
    lines += [("anchor", anchor)] if "anchor" in given else []
    lines += [("support", _support(trainer))] if any(key.startswith("support") for key in given) else []
    if args.rollout_lag:
        lines.append(("lag", f"rollouts are drawn with the weights of {count(args.rollout_lag, 'step')} before"))
    if teacher is not None:
        own = "the model itself, as it was before training" + ("" if teacher.is_reference else ", shown more than the problem")
        lines.append(("reference" if teacher.is_reference else "teacher", settings.teacher or own))
    place, processes = trainer.accelerator.device, trainer.accelerator.num_processes
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else count(torch.get_num_threads(), "thread")
    device = f"{place.type} ({name}{f', {processes} processes' if processes > 1 else ''})"
    if verbose:
        # corral's says itself what it takes on a GPU. In updates it is TRL's only where that chooses tokens by their entropy.
        own_head = FUSED and (trainer.needs_support or trainer.top_entropy_quantile == 1.0)
        head = "TRL's head" if not own_head else "corral's head (torch)" if place.type == "cpu" else "corral's head"
        device += f"; {head}; TRL {trl.__version__}, transformers {transformers.__version__}"
    called = [path_of(one) for one in (*settings.tools, settings.environment_factory) if one]
    if settings.tool:
        lines.append(("tool", f"{settings.tool} answers within completions, and is not trained on"))
    elif called:
        lines.append(("tools", f"{', '.join(called)}: called by the model, and not trained on"))
    lines += [
        ("step", f"{count(args.prompts_per_batch, 'prompt')} × {args.num_generations} completions, then {updates}"),
        ("device", device),
        ("run", str(where)),
    ]
    why = why_inactive(trainer)
    notes = [*chosen, args.other_reduction, f"tr/active_frac will be 0: {why}" if why else None]
    return [*lines, *(("note", sentence) for sentence in notes if sentence)]


def _support(trainer: RunTrainer) -> str:
    """Describe the tokens on which the objective compares distributions, such as the top-k tokens."""
    if not trainer.needs_support:
        return "none: this objective looks at the sampled token alone"
    if trainer.own_support.top_k == sys.maxsize:
        return "every token"
    args = trainer.args
    if trainer.rollout_support is not None:
        return f"the sampler's {args.support_size} likeliest tokens, and the mass of all others"
    if trainer.teacher is not None:
        other = "reference" if trainer.teacher.is_reference else "teacher"
        return f"the {args.support_size} likeliest tokens of student and {other}, and the mass of all others"
    return f"the {args.support_size} likeliest tokens until they hold {args.support_mass:g}, and the mass of all others"


def why_inactive(trainer: RunTrainer) -> str | None:
    """Return the reason why the trust region can never be active with these settings, or None."""
    config = trainer.objective.config
    if not config.has_region:
        return f"{trainer.objective.name} has no trust region."
    if config.bounds is not None and min(config.bounds) == float("inf"):
        return "the bound is infinite."
    if trainer.on_policy:
        return (
            "with one update per batch of rollouts the new policy is the old one. Raise steps_per_generation or "
            "num_iterations to make the trust region matter."
        )
    return None


def _short(counts: Iterable[int]) -> str:
    """Format the sum of counts with a unit, such as 928 k or 1.5 B."""
    count = sum(counts)
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
