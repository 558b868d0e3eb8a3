"""The trainer's hold on the network it deploys: after a step's updates its distance is measured and, if asked for, kept.

A step is what ends with a batch of rollouts and an update together. Its tokens are those of all its rollouts, on all processes;
the old weights are those it began with. With `reuse="auto"` a step may be over before all passes over its batch are made.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

import trl
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.deployed import BatchKL, Certificate, RateController, retract, snapshot
from corral.llm.audit_scoring import preserve_state
from corral.llm.deployed_probe import DeployedProbe
from corral.llm.trl_api import FUSED, updates_per_step

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

logger = logging.getLogger(__name__)

AIM = 0.5
"""The share of the bound that the learning rate aims at: the other half is for steps that go further than most."""
SPENT = 0.8
"""The share of the bound from which on `reuse="auto"` makes no further pass: most of it would be undone."""
LEAST_ESS = 0.5
"""The effective sample size, as a share of the tokens, below which `reuse="auto"` makes no further pass."""
PROBES = 4
"""Measurements of a step at most; one where the step fits."""


class DeployedCallback(TrainerCallback):
    """Certifies every step of a CorralTrainer with `deployed_bound`, and holds it where that is finite.

        δ_k = bound · (rate_k / peak rate)²          mean KL(π_new ‖ π_old) ≤ δ_k

    The bound follows the schedule as the KL of a small step does. What goes further is retracted; the learning rate is scaled
    so that steps go half as far. Its scale lives in the scheduler's base rates, which checkpoints hold already.

    With `reuse="auto"` this is done after every pass over the batch, and another pass is made only while the bound is not used
    up and the effective sample size is at least ½. The rate still aims at half of the bound after all passes: where k of K were
    made, D is taken to be K / k times as large.
    """

    def __init__(self, trainer: "CorralTrainer") -> None:
        bound = trainer.args.deployed_bound
        assert bound is not None
        _check_surroundings(trainer)
        self.trainer, self.bound, self.holds = trainer, bound, bound < math.inf
        self.probe, self.controller = DeployedProbe(trainer), RateController()
        self.per_step = updates_per_step(trainer.args)
        self.per_pass = self.per_step // trainer.args.num_iterations if trainer.args.reuse == "auto" else self.per_step
        """Updates between measurements."""
        self._begin()

    def _begin(self) -> None:
        """A step."""
        self._old: dict[str, Tensor] | None = None
        self._factors: list[float] = []
        """Of the schedule, for every update of the step so far."""
        self._passes = 0
        self.spent = False
        """Whether the step is over, though passes over its batch remain: the trainer skips them."""
        self.probe.clear()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed run finds its scale in the scheduler."""
        self._begin()
        if not self.holds:
            return
        scheduler = self._scheduler()
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"CorralTrainer: `deployed_bound` scales the rates of a schedule that is a multiple of its peak, and "
                f"{type(scheduler).__name__} is none. Use one of transformers' (`lr_scheduler_type`), or deployed_bound=inf to "
                f"measure alone."
            )
        group = scheduler.optimizer.param_groups[0]
        self.controller.scale = scheduler.base_lrs[0] / group["initial_lr"] if group["initial_lr"] > 0 else 1.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before an update: at the beginning of a step its weights are kept."""
        if self.spent:
            return
        if self._old is None:
            self._old = snapshot(self.trainer.model)
        if self.holds:
            scheduler = self._scheduler()
            peak = scheduler.base_lrs[0]
            self._factors.append(scheduler.optimizer.param_groups[0]["lr"] / peak if peak > 0 else 0.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At the end of a step, and with `reuse="auto"` of a pass: measure, retract, scale the rate, and log what was done."""
        last = state.global_step % self.per_step == 0
        if state.global_step % self.per_pass == 0 and not self.spent:
            self._end_pass(last=last)
        if last:
            self._begin()

    def _end_pass(self, *, last: bool) -> None:
        """Certify the network as it is; then the step is over, or another pass is worth it."""
        self._passes += 1
        factor = sum(self._factors) / len(self._factors) if self._factors else 1.0
        # At a rate of 0 nothing moves, and there is nothing to hold.
        bound = self.bound * factor**2 if self.holds and factor > 0 else math.inf
        if (found := self._certify(bound)) is None:
            update = self.trainer.state.global_step
            logger.warning("Update %d: no completion has a token to measure; the step is not certified.", update)
            return
        certificate, ess = found
        moved, aim = certificate.before.mean, AIM * bound
        far = not moved < SPENT * bound  # or no number
        if not (last or far or ess < LEAST_ESS):
            return
        self.spent, self._old = not last, None
        if not last:  # nor does a batch whose ratios are spread ask for a larger rate
            moved = max(moved * self.per_step / (self._passes * self.per_pass), aim)
        if bound < math.inf:
            self._scale(self.controller.update(moved, aim))
        metrics = certificate.metrics()
        if self.per_pass < self.per_step:
            metrics["tr/passes"] = float(self._passes)
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _certify(self, bound: float) -> tuple[Certificate, float] | None:
        """Measure and retract; and the effective sample size of what was measured first. None where there is no token."""
        trainer, old = self.trainer, self._old
        assert old is not None
        measured: list[BatchKL] = []

        def probe() -> BatchKL:
            measured.append(self.probe.measure())
            return measured[-1]

        with preserve_state(trainer.model):
            if not self.probe.prepare(old):
                return None
            certificate = retract(trainer.model, old, probe, bound=bound, max_probes=PROBES)
        return certificate, measured[0].effective_sample_size() if measured else 0.0

    def _scheduler(self) -> Any:
        """The one that knows the base rates: accelerate puts its own around it."""
        scheduler: Any = self.trainer.lr_scheduler
        return getattr(scheduler, "scheduler", scheduler)

    def _scale(self, factor: float) -> None:
        """Another rate from now on, under the same schedule."""
        scheduler = self._scheduler()
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        scheduler._last_lr = [rate * factor for rate in scheduler._last_lr]
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= factor


def _check_surroundings(trainer: "CorralTrainer") -> None:
    """Refuse what keeps the weights elsewhere, where a retraction would be undone or would not be whole."""
    if not FUSED:
        raise ValueError(
            f"CorralTrainer: `deployed_bound` needs hidden states, which TRL {trl.__version__} does not hand over. Install TRL "
            f"1.15 or newer."
        )
    kind = trainer.accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        why = (
            "keeps its own master weights, which would undo it"
            if kind == DistributedType.DEEPSPEED
            else "is not tested with it"
        )
        raise ValueError(f"CorralTrainer: `deployed_bound` acts on the model's weights, and {kind.value} {why}. Use DDP.")
