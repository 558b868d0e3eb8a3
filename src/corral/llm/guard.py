"""Guards as transformers callbacks: skip non-finite updates, watch for a collapse, and self-checks of every CorralTrainer."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.llm.trl_api import steps_per_batch
from corral.run.guard import Guard, drop_gradients, gradient_state
from corral.run.settings import GuardMode
from corral.run.watch import CollapseLimits

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

logger = logging.getLogger(__name__)

_HIDDEN_KL = 0.05
"""KL at one token, certain to have happened outside the support, above which a warning is given: TROLL's bound."""


def on_any_process(flag: bool) -> bool:
    """All-reduce of a flag with `or`: every process must call it, and all get the same answer."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return flag
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    shared = torch.tensor([float(flag)], device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return bool(shared.item())


class GuardCallback(Guard, TrainerCallback):
    """Skips updates with a non-finite loss or gradient, and watches the metrics for a collapse. For any CorralTrainer."""

    def __init__(
        self,
        mode: GuardMode = "warn",
        limits: CollapseLimits | None = None,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        super().__init__(mode, limits, say)
        self.loss_is_finite = True
        """Whether every loss since the last update was finite; RunTrainer writes it."""
        self.zero_gradients = 0
        """Updates in a row, up to the last one, whose gradient was exactly 0."""

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Restore the state after these lines of metrics."""
        for line in lines:
            super().restore([line])
            self.zero_gradients = line.get("zero_gradients", 0)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gradients are clipped by now, which spreads a NaN to all of them. fp16 has a scaler that skips such steps itself."""
        if self.mode == "off" or args.fp16:
            return
        model: nn.Module = kwargs["model"]
        finite, zero = gradient_state(model.parameters())
        poisoned = on_any_process(not (self.loss_is_finite and finite))
        self.zero_gradients = 0 if on_any_process(not zero) else self.zero_gradients + 1
        loss_is_finite, self.loss_is_finite = self.loss_is_finite, True
        self.judge(f"update {state.global_step + 1}", poisoned=("gradient" if loss_is_finite else "loss") if poisoned else None)
        if poisoned:
            drop_gradients(model.parameters())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Watch a line of metrics; with mode="stop" a collapse ends the run with a checkpoint."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.mode == "off" or "loss" not in logs:
            return
        self.observe({**logs, "zero_gradients": self.zero_gradients})
        if self.collapsed is not None:
            control.should_save = control.should_training_stop = True


class SelfCheck(TrainerCallback):
    """What every CorralTrainer checks of itself: there is something to train, and the region is idle before any update."""

    def __init__(self, trainer: "CorralTrainer") -> None:
        self.trainer = trainer
        self.say: Callable[[str], object] = logger.warning
        self.drift_reported = False
        self.tail_reported = False
        """Each warning is given once."""
        self._before: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to train nothing."""
        model: nn.Module = kwargs["model"]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "CorralTrainer: no parameter of the model requires a gradient, so nothing would be learned. Load an adapter "
                "with PeftModel.from_pretrained(model, folder, is_trainable=True), or call model.requires_grad_()."
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the first update on new rollouts, when the new policy is still the old one."""
        # A teacher is outside the region before any update, and may be.
        fresh = self.trainer._step % steps_per_batch(self.trainer.args) == 0 and self.trainer.teacher is None
        self._before = len(self._active_fractions()) if fresh and not self.drift_reported else None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn if the region acted on-policy: sampler and trainer differ."""
        active = [] if self._before is None else self._active_fractions()[self._before :]
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
        """Warn if KL was hidden in the tail, which the union of both supports would have seen, and was not retracted."""
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

    def _active_fractions(self) -> list[float]:
        """tr/active_frac of the micro-batches since the last log line."""
        return list(self.trainer._metrics["train"].get("tr/active_frac", ()))
