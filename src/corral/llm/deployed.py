"""The trainer's hold on the network it deploys: after a step's updates its distance is measured and, if asked for, kept.

A step is what ends with a batch of rollouts and an update together. Its tokens are those of all its rollouts, on all processes;
the old weights are those it began with.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.deployed import RateController, restore, retract, snapshot
from corral.kernels import head_kl
from corral.llm.audit_scoring import preserve_state
from corral.llm.scoring_pass import HeadInputs, ScoringPass
from corral.llm.trl_api import FUSED, steps_per_batch

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

logger = logging.getLogger(__name__)

AIM = 0.5
"""The share of the bound that the learning rate aims at: the other half is for steps that go further than most."""
TOKENS = 4096
"""Tokens of a step that are measured at most, over all processes: whole completions, evenly spread over the rollouts."""
PROBES = 4
"""Measurements of a step at most; one where the step fits."""


@dataclass(frozen=True, eq=False)
class _Rollouts:
    """Some completions of a batch, as TRL scores them."""

    ids: Tensor
    """Prompt and completion [b L]."""
    seen: Tensor
    """Attention mask [b L]."""
    live: Tensor
    """Tokens of the completion that the network wrote [b T]."""


class DeployedCallback(TrainerCallback):
    """Certifies every step of a CorralTrainer with `deployed_bound`, and holds it where that is finite.

        δ_k = bound · (rate_k / peak rate)²          mean KL(π_new ‖ π_old) ≤ δ_k

    The bound follows the schedule as the KL of a small step does. What goes further is retracted; the learning rate is scaled
    so that steps go half as far. Its scale lives in the scheduler's base rates, which checkpoints hold already.
    """

    def __init__(self, trainer: "CorralTrainer") -> None:
        bound = trainer.args.deployed_bound
        assert bound is not None
        _check_surroundings(trainer)
        self.trainer, self.bound, self.holds = trainer, bound, bound < math.inf
        self.controller = RateController()
        self._old: dict[str, Tensor] | None = None
        self._rollouts: list[_Rollouts] = []
        self._factors: list[float] = []
        """Of the schedule, for every update of the step so far."""
        trainer._generate_and_score_completions = self._wrap(trainer._generate_and_score_completions)  # type: ignore[method-assign]  # of this trainer alone

    @property
    def updates_per_step(self) -> int:
        """Updates until a batch of rollouts and an update end together."""
        every = self.trainer.args.gradient_accumulation_steps
        return math.lcm(every, steps_per_batch(self.trainer.args)) // every

    def _wrap(self, generate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """TRL's rollouts, of which some are remembered; nothing in them is changed."""

        def generate_and_score(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output = generate(inputs)
            if self.trainer.model.training:
                self._rollouts.append(self._choose(output))
            return output

        return generate_and_score

    def _choose(self, batch: dict[str, Any]) -> _Rollouts:
        """Every n-th completion, so that about `TOKENS` are measured in a step."""
        if "pixel_values" in batch:
            raise ValueError(
                "CorralTrainer: `deployed_bound` measures text alone, and these prompts have images. Leave it out."
            )
        args = self.trainer.args
        batches = self.updates_per_step * args.gradient_accumulation_steps // steps_per_batch(args)
        live = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            live = live & batch["tool_mask"].bool()
        every = math.ceil(int(live.sum()) * batches * self.trainer.accelerator.num_processes / TOKENS)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        return _Rollouts(*(x[:: max(every, 1)] for x in (ids, seen, live)))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed run finds its scale in the scheduler."""
        self._old, self._rollouts, self._factors = None, [], []
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
        if self._old is None:
            self._old = snapshot(self.trainer.model)
        if self.holds:
            scheduler = self._scheduler()
            peak = scheduler.base_lrs[0]
            self._factors.append(scheduler.optimizer.param_groups[0]["lr"] / peak if peak > 0 else 0.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At the end of a step: measure, retract, scale the rate, and log what was done."""
        if state.global_step % self.updates_per_step:
            return
        old, self._old = self._old, None
        rollouts, self._rollouts = self._rollouts, []
        factors, self._factors = self._factors, []
        assert old is not None
        factor = sum(factors) / len(factors) if factors else 1.0
        # At a rate of 0 nothing moves, and there is nothing to hold.
        bound = self.bound * factor**2 if self.holds and factor > 0 else math.inf
        trainer = self.trainer
        with preserve_state(trainer.model), trainer.accelerator.autocast():
            probe = self._probe_from(old, rollouts)
            if probe is None:
                logger.warning("Update %d: no completion has a token to measure; the step is not certified.", state.global_step)
                return
            certificate = retract(trainer.model, old, probe, bound=bound, max_probes=PROBES)
        if bound < math.inf:
            self._scale(self.controller.update(certificate.before.mean, AIM * bound))
        for name, value in certificate.metrics().items():
            trainer._metrics["train"][name].append(value)

    def _probe_from(self, old: dict[str, Tensor], rollouts: list[_Rollouts]) -> Callable[[], Tensor] | None:
        """Measures KL(now‖old) of the step's tokens on all processes [N]; None where there are none."""
        model = self.trainer.model
        new = snapshot(model)
        restore(model, old)
        was = [(hidden, head.freeze()) for hidden, head in map(self._states, rollouts)]
        restore(model, new)
        del new  # while probing there are two copies of the weights, not three

        def probe() -> Tensor:
            found = [self._kl(some, *before) for some, before in zip(rollouts, was, strict=True)]
            return self._of_all_processes(torch.cat(found))

        count = sum(len(hidden) for hidden, _ in was)
        total = self.trainer.accelerator.reduce(torch.tensor(float(count), device=self.trainer.accelerator.device))
        return probe if total > 0 else None

    def _states(self, some: _Rollouts) -> tuple[Tensor, HeadInputs]:
        """Hidden states of the live tokens [n H] and the head, from a scoring pass as every other one."""
        trainer, scoring = self.trainer, ScoringPass(keep_hidden=True)
        width, size = some.live.shape[1], trainer.args.per_device_train_batch_size
        with trainer.policy_head.expect(scoring):
            trainer._get_per_token_logps_and_entropies(trainer.model, some.ids, some.seen, width, size)
        if (kept := scoring.hidden()) is None:
            raise RuntimeError("CorralTrainer: TRL's scoring pass showed no hidden states. Has it changed? Please report it.")
        hidden, places, head = kept
        return hidden[some.live.flatten()[places]], head

    def _kl(self, some: _Rollouts, hidden_old: Tensor, old: HeadInputs) -> Tensor:
        hidden, head = self._states(some)
        return head_kl(
            hidden, head.weight, hidden_old, old.weight, bias_new=head.bias, bias_old=old.bias, **vars(head.spec)
        )  # fmt: skip

    def _of_all_processes(self, kl: Tensor) -> Tensor:
        """The same tokens in the same order everywhere, so that all processes decide alike."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return kl
        everyone = accelerator.gather(accelerator.pad_across_processes(kl, pad_index=-1))
        return everyone[~(everyone < 0)]  # a KL is ≥ 0, or no number

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
