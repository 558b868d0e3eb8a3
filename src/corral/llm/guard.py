"""The guard as a callback of transformers: for any CorralTrainer, and for runs."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.run.guard import Guard, drop_gradients, finite_gradients
from corral.run.settings import GuardMode
from corral.run.watch import Limits

logger = logging.getLogger(__name__)


def on_any_process(flag: bool) -> bool:
    """Whether it is so on any process; all of them must ask, and all get the same answer."""
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
        limits: Limits | None = None,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        super().__init__(mode, limits, say)
        self.loss_is_finite = True
        """Of the losses since the last update; a trainer that can tell says so here."""
        self._mismatch_said = False

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Be where a run was after these lines."""
        lines = list(lines)
        super().restore(lines)
        self._mismatch_said |= any("before any update" in text for line in lines for text in line.get("warnings", ()))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """Gradients are clipped by now, which spreads a NaN to all of them. fp16 has a scaler that skips such steps itself."""
        if self.mode == "off" or args.fp16:
            return
        poisoned = on_any_process(not (self.loss_is_finite and finite_gradients(model.parameters())))
        loss_is_finite, self.loss_is_finite = self.loss_is_finite, True
        self.judge(f"update {state.global_step + 1}", poisoned=("gradient" if loss_is_finite else "loss") if poisoned else None)
        if poisoned:
            drop_gradients(model.parameters())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """A line of metrics; a collapse ends the run with a checkpoint if that was asked for."""
        if self.mode == "off" or "loss" not in logs:
            return
        self.observe(logs)
        if self.collapsed is not None:
            control.should_save = control.should_training_stop = True

    def check_first_update(self, active: Iterable[float]) -> None:
        """Tokens acted on while the new policy was still the old one: somebody else did the sampling."""
        active = list(active)
        share = sum(active) / len(active) if active else 0.0
        if self.mode == "off" or self._mismatch_said or not share > 0:
            return
        self._mismatch_said = True
        self.tell(
            f"the trust region acted on {share:.2%} of the tokens before any update, when the new policy should equal its "
            f"anchor: the sampler, or dropout, differs from the trainer. Use anchor='old', a correction, or no dropout."
        )
