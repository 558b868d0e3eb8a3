"""Guards as transformers callbacks: skip non-finite updates, watch for a collapse, and self-checks of every CorralTrainer."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.llm.self_check import on_any_process
from corral.numerics import drop_gradients, gradient_state
from corral.run.guard import Guard
from corral.run.settings import GuardMode
from corral.run.watch import CollapseLimits

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


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
