"""Callbacks of every CorralTrainer: self-checks, and a record of the settings in checkpoints."""

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from corral.provenance import plain, versions
from corral.trl.api import REDUCTIONS, steps_per_batch, updates_per_step
from corral.trl.processes import base_model

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

logger = logging.getLogger(__name__)


_HIDDEN_KL = 0.05
"""KL at one position, caused by tokens outside the top k, above which a warning is logged. The value is TROLL's KL bound."""


def on_any_process(flag: bool) -> bool:
    """True on every process if `flag` is true on at least one process. Every process must call this function."""
    return any(gather_object([flag]))


def check_saves(trainer: "CorralTrainer", args: TrainingArguments, state: TrainerState, why: str) -> None:
    """Refuse a save interval with checkpoints inside a step, because such checkpoints cannot be resumed exactly.

    The checkpoint at the end of a run may lie inside a step.
    """
    of_best = args.save_strategy == SaveStrategy.BEST
    strategy, name = (args.eval_strategy, "eval") if of_best else (args.save_strategy, "save")
    if strategy == "steps":
        every = int(state.eval_steps if of_best else state.save_steps)
        what, use = f"`{name}_steps` is {every}", ""
    elif strategy == "epoch":
        batches = trainer.callback_handler.train_dataloader
        assert batches is not None  # transformers has set it
        every = math.ceil(len(batches) / args.gradient_accumulation_steps)
        what, use = f"an epoch has {every} updates", f"{name}_strategy='steps' and "
    else:
        return
    size = updates_per_step(trainer.args)
    if every < state.max_steps and every % size:
        raise ValueError(
            f"CorralTrainer: {why}. A step has {size} updates, and {what}, no multiple of {size}. Use {use}{name}_steps="
            f"{math.ceil(every / size) * size}."
        )


@dataclass(eq=False)
class SelfCheck(TrainerCallback):
    """Callback that checks every run: some parameter is trainable, and the trust region is inactive before the first update."""

    trainer: "CorralTrainer"
    say: Callable[[str], object] = logger.warning
    drift_reported: bool = False
    tail_reported: bool = False
    """True once the warning about KL outside the top-k tokens has been logged. Each warning is logged once."""
    _before: int | None = None
    """Number of values of tr/active_frac that were logged before the update, one per micro-batch. None if the check is off."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to train if no parameter is trainable, or if `rollout_lag` is used with checkpoints inside a batch."""
        model: nn.Module = kwargs["model"]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "CorralTrainer: no parameter of the model requires a gradient, so nothing would be learned. Load an adapter "
                "with PeftModel.from_pretrained(model, folder, is_trainable=True), or call model.requires_grad_()."
            )
        if self.trainer.past is not None:
            check_saves(self.trainer, args, state, "with `rollout_lag` checkpoints are saved at the end of a batch of rollouts")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the on-policy check before the first update on new rollouts, when the new policy still equals the old one."""
        fresh = self.trainer._step % steps_per_batch(self.trainer.args) == 0
        # A teacher is outside the region before any update, and so may an earlier policy be.
        apart = self.trainer.teacher is not None or (self.trainer.past is not None and self.trainer.anchor == "rollout")
        checks = fresh and not apart and not self.drift_reported
        self._before = len(self.trainer._metrics["train"].get("tr/active_frac", ())) if checks else None

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Warn if the trust region was active before any update: the sampler and the trainer then disagree."""
        active = [] if self._before is None else self.trainer._metrics["train"].get("tr/active_frac", [])[self._before :]
        share = sum(active) / len(active) if active else 0.0
        if not share > 0:
            return
        self.drift_reported = True
        if state.is_world_process_zero:
            self.say(
                f"the trust region acted on {share:.2%} of the tokens before any update, when the new policy should equal its "
                f"anchor: the sampler, or dropout, differs from the trainer. Use anchor='old', a correction, or no dropout."
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Warn if much of the KL lies outside the top-k tokens, where the trust region is not measured token by token."""
        kept = kwargs["logs"].get("tr/step_share", 1.0)
        hidden = kwargs["logs"].get("tr/hidden_kl_max", 0.0) * kept**2  # near the old weights a KL grows as the square
        if self.tail_reported or not hidden > _HIDDEN_KL or self.trainer.union:
            return
        self.tail_reported = True
        if state.is_world_process_zero:
            self.say(
                f"tr/hidden_kl_max is {hidden:.3g}: at some token at least so many nats of KL happened outside the support, "
                f"where the region sees the tail's mass alone. Use support='union', or a larger support_size."
            )


_OF_TRL = (
    "seed", "learning_rate", "num_iterations", "loss_type", "beta", "temperature", "deployed_bound", "advantage", "rollout_lag",
)  # fmt: skip
"""Settings of CorralConfig that the run's record in a checkpoint contains."""


@dataclass(eq=False)
class RunRecord(TrainerCallback, ExportableState):
    """Callback that stores the settings of a run in every checkpoint.

    transformers stores the state of this callback in every checkpoint, under the class's name.
    """

    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: "CorralTrainer") -> "RunRecord":
        """Build the record of a run's settings from a new trainer."""
        args, objective = trainer.args, trainer.objective
        settings = {
            "task": ", ".join(trainer.reward_func_names) or "unknown",
            "model": str(base_model(trainer.model).config._name_or_path or type(base_model(trainer.model)).__name__),
            "objective": objective.name,
            "objective_config": vars(objective.config),
            **{name: vars(args)[name] for name in _OF_TRL},
            **({"learning_rate": "auto"} if args.finds_rate else {}),  # the config holds the first rate to try
        }
        reduction = {"name": REDUCTIONS[args.loss_type], "own": args.other_reduction is None}
        return cls(
            plain({"settings": settings, "reduction": reduction, "script": Path(sys.argv[0]).name, "versions": versions()})
        )

    def state(self) -> dict[str, Any]:
        """Return the record of a run's settings in the format that transformers' `from_state` reads."""
        return {"args": {"about": self.about}, "attributes": {}}
