"""The heading of a run: objective, reduction, anchor, support, device, and why a trust region may never act."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
import trl
from accelerate.utils import is_peft_model

import corral
from corral.lab.jobs.llm.rewards import path_of
from corral.lab.jobs.llm.settings import Settings
from corral.lab.jobs.llm.trainer import RunTrainer
from corral.lab.run.text import count
from corral.trl.api import FUSED, REDUCTIONS
from corral.trl.teacher import Teacher


def banner(settings: Settings, trainer: RunTrainer, where: Path, chosen: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(name, sentence) of every line, in order; `chosen` says what was decided for the user."""
    args, config = trainer.args, trainer.objective.config
    parameters = f"{_short(p.numel() for p in trainer.model.parameters())} parameters"
    if is_peft_model(trainer.model):
        trained = _short(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        parameters += f", {trained} of them trained (LoRA)"
    updates = ("at most " if args.reuse == "auto" else "") + count(trainer.updates_per_step, "update")
    objective_settings = ", ".join(f"{name}={value}" for name, value in vars(config).items())
    lines = [
        ("corral", f"{corral.__version__}: {settings.task} with {settings.model}, {parameters}"),
        ("objective", f"{settings.objective}" + (f" ({objective_settings})" if objective_settings else "")),
        ("reduction", f"{REDUCTIONS[args.loss_type]} (loss_type {args.loss_type})"),
        ("anchor", _anchor(trainer)),
        ("support", _support(trainer)),
        *([] if trainer.teacher is None else [_third_policy(trainer.teacher, settings)]),
        *_turns(settings),
        ("step", f"{count(args.prompts_per_batch, 'prompt')} × {args.num_generations} completions, then {updates}"),
        ("device", _device(trainer)),
        ("run", str(where)),
    ]
    why = why_inactive(trainer)
    notes = [*chosen, args.other_reduction, f"tr/active_frac will be 0: {why}" if why else None]
    return [*lines, *(("note", sentence) for sentence in notes if sentence)]


def _turns(settings: Settings) -> list[tuple[str, str]]:
    """Who answers the model within completions, if anybody does."""
    own = [path_of(one) for one in (*settings.tools, settings.environment_factory) if one]
    if settings.tool:
        return [("tool", f"{settings.tool} answers within completions, and is not trained on")]
    return [("tools", f"{', '.join(own)}: called by the model, and not trained on")] if own else []


def _anchor(trainer: RunTrainer) -> str:
    """Which policy is the centre of the region, and where it comes from."""
    if trainer.anchor == "old":
        return "old: the policy before the updates, recomputed by the trainer"
    if trainer.args.use_vllm:
        return "rollout: the log-probs that vLLM reports"
    return "rollout: here the sampler is the trainer's own model, so this is the recomputed old policy"


def _third_policy(teacher: Teacher, settings: Settings) -> tuple[str, str]:
    """Whom the model learns from, or stays near."""
    own = "the model itself, as it was before training"
    if teacher.is_reference:
        return "reference", settings.teacher or own
    return "teacher", settings.teacher or f"{own}, shown more than the problem"


def _support(trainer: RunTrainer) -> str:
    """Which tokens of a distribution the objective reads."""
    if not trainer.needs_support:
        return "none: this objective looks at the sampled token alone"
    if trainer.own_support().top_k == sys.maxsize:
        return "every token"
    args = trainer.args
    if trainer.rollout_support is not None:
        return f"the sampler's {args.support_size} likeliest tokens, and the mass of all others"
    if trainer.teacher is not None:
        other = "reference" if trainer.teacher.is_reference else "teacher"
        return f"the {args.support_size} likeliest tokens of student and {other}, and the mass of all others"
    return f"the {args.support_size} likeliest tokens until they hold {args.support_mass:g}, and the mass of all others"


def _device(trainer: RunTrainer) -> str:
    """The device, the head, and the versions behind it."""
    kind = trainer.accelerator.device
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else count(torch.get_num_threads(), "thread")
    processes = f", {trainer.accelerator.num_processes} processes" if trainer.accelerator.num_processes > 1 else ""
    # corral's says itself what it takes on a GPU. In updates it is TRL's only where that chooses tokens by their entropy.
    own = FUSED and (trainer.needs_support or trainer.top_entropy_quantile == 1.0)
    head = "TRL's head" if not own else "corral's head (torch)" if kind.type == "cpu" else "corral's head"
    return f"{kind.type} ({name}{processes}); {head}; TRL {trl.__version__}, transformers {transformers.__version__}"


def why_inactive(trainer: RunTrainer) -> str | None:
    """Why the trust region can never act; None if it can."""
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
    """A sum of counts with its unit: 928 k, 1.5 B."""
    count = sum(counts)
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
