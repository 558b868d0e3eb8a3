"""Trust region around the network itself: measure the network's KL after every step, bound the KL, and find a learning rate.

`DeployedCallback` follows a run step by step, `DeployedProbe` measures how far the network has moved, and `RateSearch` tries
learning rates on the first batch.
"""

import copy
import logging
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trl
from accelerate.utils import DistributedType
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from corral.deployed import BatchKL, RateController, TokenKL, restore, retract, snapshot
from corral.deployed.retract import FEW
from corral.deployed.state import preserve_state
from corral.head.torch.head_kl import HeadStates, head_kl_both_ways
from corral.numerics import drop_gradients, gradient_state
from corral.trl.api import FUSED, steps_per_batch, updates_per_step
from corral.trl.callbacks import check_saves, on_any_process
from corral.trl.ledger import Ledger
from corral.trl.scoring import HeadWeights, ScoringPass

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------- step after step

AIM = 0.5
"""Intended KL of a step, as a share of the KL bound. The learning rate is adapted to reach it."""
START = 2.0
"""Intended KL of the first step with `learning_rate="auto"`, in multiples of the KL bound.
Learning rates from a grid search move the network by one to four bounds in their first step. The step is then retracted to the
bound, and the learning rate falls over the next steps until a step moves by `AIM`."""
PER_COMPLETION = 2.0
"""Largest KL of a whole completion, in nats, that a default value of `deployed_bound` allows.
On GSM8K, where completions have 290 tokens, Qwen 0.5B learned in one run whose steps moved it by 2 nats a completion, and lost
reward in three runs of up to 9 nats."""
SPENT = 50.0
"""Largest KL of a step, in multiples of the KL bound, at which `reuse="auto"` makes another pass over the batch.
KL grows with the square of the step length, so that less than a seventh of a longer step could be kept."""
LEAST_ESS = 0.5
"""Smallest effective sample size, as a share of the tokens, at which `reuse="auto"` makes another pass over the batch."""
PROBES = 4
"""Largest number of KL measurements in one step. A step within its KL bound needs a single measurement."""
ROUNDING = 1e-3
"""Mean KL that half-precision kernels report between equal weights, because of rounding.
A bound that decays to 0 with the learning rate falls below this value."""
FAR, LEAST_SHARE = 25.0, 0.05
"""Thresholds for resetting the optimizer: a step's KL in multiples of the bound, and the share of the step that is kept.
The optimizer is reset if the step moved further than FAR bounds and less than LEAST_SHARE of it is kept."""
LEAST_FACTOR = 1 / 30
"""Smallest factor by which an optimizer reset multiplies the learning rate."""


@dataclass(eq=False)
class _Step:
    """Training step in progress: the weights at the start of the step, and the learning rates of the updates so far."""

    old: dict[str, Tensor]
    factors: list[float] = field(default_factory=list)
    """Learning rate of each update so far, as a share of the schedule's peak learning rate."""


class DeployedCallback(TrainerCallback):
    """Callback that measures how far each step moved the network, and pulls the network back if it moved too far.

        δ_k = bound · (rate_k / peak rate)²          mean KL(π_new ‖ π_old) ≤ δ_k

    The bound follows the schedule as the KL of a small step does. What goes further is retracted; the learning rate is scaled
    so that steps go half as far. Its scale lives in the scheduler's base rates, which checkpoints hold already. After a step
    of which next to nothing could be kept the optimizer starts over: at the rate that √(δ/D) says, and with its moments
    cleared, which are of gradients that nobody will see again, or no numbers.

    With `reuse="auto"` the network is measured after every pass over the batch, and another one is made while it is nearer than
    fifty times the bound and the effective sample size is at least ½. A step beyond the bound goes on: many passes, retracted
    at their end, are worth more than the first of them alone.
    """

    def __init__(self, trainer: "CorralTrainer") -> None:
        bound, kind = trainer.args.deployed_bound, trainer.accelerator.distributed_type
        assert bound is not None
        if not FUSED:
            raise ValueError(
                f"CorralTrainer: `deployed_bound` needs hidden states, which TRL {trl.__version__} does not hand over. Install "
                f"TRL 1.15 or newer."
            )
        why = ""
        if kind == DistributedType.DEEPSPEED:
            why = "keeps its own master weights, which would undo it. Use DDP or FSDP2."
        elif kind == DistributedType.FSDP and not trainer.accelerator.is_fsdp2:
            why = "version 1 flattens them. Use FSDP2 (`fsdp_config={'version': 2}`)."
        if why:
            raise ValueError(f"CorralTrainer: `deployed_bound` acts on the model's weights, and {kind.value} {why}")
        self.trainer, self.bound, self.holds = trainer, bound, bound < math.inf
        self.probe, self.controller = DeployedProbe(trainer), RateController()
        self.per_step = updates_per_step(trainer.args)
        self.per_pass = self.per_step // trainer.args.num_iterations if trainer.args.reuse == "auto" else self.per_step
        """Number of optimizer updates between two KL measurements."""
        self.searches = False
        """True until the learning rate has been found, on the first batch with a gradient."""
        self._before: dict[str, Tensor] | None = None
        """Weights at the start of the last finished step. The copy is freed when the next step begins."""
        self._begin()

    def _begin(self) -> None:
        """Reset the callback's state for the next step."""
        self._step: _Step | None = None
        self.spent = False
        """True if the step ended before all passes over its batch, so that the trainer skips the remaining passes."""
        self.probe.clear()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the current factor on the learning rate from the scheduler when a run is resumed."""
        self.abandon()  # a step that transformers gave up for want of memory, to train with smaller batches
        self._begin()
        if not self.holds:
            return
        scheduler = schedule_of(self.trainer)
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"CorralTrainer: `deployed_bound` scales the rates of a schedule that is a multiple of its peak, and "
                f"{type(scheduler).__name__} is none. Use one of transformers' (`lr_scheduler_type`), or deployed_bound=inf to "
                f"measure alone."
            )
        group = scheduler.optimizer.param_groups[0]
        self.controller.scale = scheduler.base_lrs[0] / group["initial_lr"] if group["initial_lr"] > 0 else 1.0
        self.searches = self.trainer.args.finds_rate and self.controller.scale == 1.0
        check_saves(
            self.trainer, args, state, "with `deployed_bound` the network is bounded at the end of a step, and checkpoints are "
            "saved there"
        )  # fmt: skip

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Copy the weights at the start of a step. With `learning_rate="auto"`, the first step also finds the learning rate."""
        if self.spent:
            return
        if self._step is None:
            self._before = None  # its memory, first
            self._step = _Step(snapshot(self.trainer.model))
            if self.searches:
                self._find_rate(self._step.old)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the learning rate of an optimizer update, before the scheduler advances."""
        if self._step is not None:
            self._step.factors.append(schedule_factor(schedule_of(self.trainer)) if self.holds else 1.0)

    def _find_rate(self, old: dict[str, Tensor]) -> None:
        """Find the first learning rate with trial steps on the current batch. A batch without any gradient is skipped."""
        trainer, scheduler = self.trainer, schedule_of(self.trainer)
        trainer.draw_ahead()
        search = RateSearch(self, old)
        found = search.find()
        if found is None:
            logger.info(
                "Update %d: no completion of this batch has a gradient, so the next one gives the learning rate.",
                trainer.state.global_step + 1,
            )
            return
        self.searches, start = False, scheduler.optimizer.param_groups[0]["initial_lr"]
        self.controller.scale = found.scale
        set_scale(scheduler, found.scale)
        trainer._metrics["train"]["tr/rate_trials"].append(float(len(search.tried)))
        tried = ", ".join(f"{one.moved:.2g} at {one.scale * start:.2g}" for one in search.tried)
        if math.isfinite(found.moved):
            logger.info(
                "The learning rate starts at %.2g: before it is retracted, the first step moves the network by %.2g nats a "
                "token there. %d trials on its rollouts, each undone: %s.",
                found.scale * start, found.moved, len(search.tried), tried,
            )  # fmt: skip
        else:
            logger.warning(
                "The learning rate starts at %.2g, because the KL of the first step was no number in any of %d trials: %s.",
                start, len(search.tried), tried,
            )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At the end of a step: measure the network's KL, retract the weights, adapt the learning rate, and log.

        With `reuse="auto"` also at the end of a pass.
        """
        last = state.global_step % self.per_step == 0
        if state.global_step % self.per_pass == 0 and not self.spent:
            self._end_pass(last=last)
        if last:
            self._begin()
        elif state.global_step >= state.max_steps:
            self.finish()  # before another callback reads the network

    @property
    def is_inside_step(self) -> bool:
        """True if the network was updated in this step, but its KL has not been bounded yet."""
        return self._step is not None and bool(self._step.factors)

    def finish(self) -> None:
        """Measure and bound the network's KL at the end of a run, even in the middle of a step."""
        if self.is_inside_step:
            self._end_pass(last=True)
            self.trainer.model.train()  # after an evaluation TRL would log an evaluation's metrics, without the certificate
            self._begin()
            # An update may follow where a callback stops the run before one: without rollouts to measure on, it is undone.
            self._step = _Step(snapshot(self.trainer.model))  # as it is saved

    def before_save(self) -> None:
        """Bound the network's KL before the final checkpoint. Any other checkpoint inside a step is refused."""
        trainer = self.trainer
        if trainer.control.should_training_stop:
            self.finish()
        elif self.is_inside_step and self.holds:
            raise ValueError(
                f"CorralTrainer: a callback asks for a checkpoint after update {trainer.state.global_step}, inside a step of "
                f"{self.per_step} updates, where `deployed_bound` does not hold yet. Save after a multiple of {self.per_step}."
            )

    def abandon(self) -> None:
        """When an exception ends the run, bound the network's KL or undo the unfinished step.

        Measuring takes all processes. Several of them may have met different exceptions, or none, so each undoes the step.
        """
        if self._step is None:
            return
        if not self._step.factors:
            if self.holds:
                restore(self.trainer.model, self._step.old)  # an update may be half done
        elif self.trainer.accelerator.num_processes > 1:
            self._go_back(self._step.old, "an exception ended the run, and the other processes may be elsewhere")
        else:
            try:
                self.finish()
                self.trainer.log({})
            except Exception as error:  # the exception that ended the run is the one to raise
                logger.warning("The certificate of the last network is not logged (%s: %s).", type(error).__name__, error)
        self._begin()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Drop the copies of the weights at the end of a run, since the weights may change before the next run."""
        self._begin()

    def peak_bound(self) -> float:
        """Return the KL bound of this step at the peak learning rate. Requires an earlier call of `probe.prepare`.

        A default bound falls with the length of completions: δ = min(bound, 2 nats / mean completion length).
        """
        if not self.trainer.args.chooses_bound:
            return self.bound
        return min(self.bound, PER_COMPLETION / self.probe.mean_length)

    def _end_pass(self, *, last: bool) -> None:
        """Measure the network's KL after a pass over the batch. Then allow another pass, or bound the KL and end the step."""
        trainer, step, metrics = self.trainer, self._step, self.trainer._metrics["train"]
        assert step is not None
        factor = sum(step.factors) / len(step.factors) if step.factors else 1.0
        bound, certificate = math.inf, None
        try:
            with preserve_state(trainer.model):
                if self.probe.prepare(step.old):
                    if self.holds and factor > 0:  # at a rate of 0 nothing moves, and there is nothing to hold
                        bound = self.peak_bound() * factor**2
                    found = [self.probe.measure()]
                    if not last and _worth_another(found[0], bound):
                        return
                    certificate = retract(
                        trainer.model, step.old, lambda: found.pop() if found else self.probe.measure(), bound=bound,
                        max_probes=PROBES, rounding=ROUNDING,
                    )  # fmt: skip
        except BaseException as error:  # also a Ctrl-C: weights may be the old ones, or a part of the way back
            self._go_back(step.old, f"measuring the network failed ({type(error).__name__}: {error})")
            self._step = None
            raise
        self.spent, self._before, self._step = not last, step.old, None
        if certificate is None:
            self._go_back(step.old, "no completion of the step has a token that is trained on")
            if self.holds:
                metrics["tr/step_share"].append(0.0)
            return
        moved, aim = certificate.before.mean, AIM * bound
        if certificate.share < LEAST_SHARE and not moved <= FAR * bound:  # further, or no number
            self._start_over(moved, aim)
        elif bound < math.inf and not self.searches:
            # Neither a batch that is left because its ratios are spread nor a run that ends is a reason for a larger rate.
            whole = trainer.state.global_step % self.per_step == 0
            self._scale(self.controller.update(moved if whole else max(moved, aim), aim))
        for name, value in certificate.metrics().items():
            metrics[name].append(value)
        if bound < math.inf and self.peak_bound() < self.bound:
            metrics["tr/deployed_bound"].append(bound)
        if self.per_pass < self.per_step:
            metrics["tr/passes"].append(len(step.factors) / self.per_pass)

    def _go_back(self, old: dict[str, Tensor], why: str) -> None:
        """Restore the weights from before a step whose KL cannot be measured, and log why. Without a KL bound, only log."""
        then = "The step is not measured."
        if self.holds:
            restore(self.trainer.model, old)  # bit for bit
            then = "The weights from before the step are back."
        logger.warning("Update %d: %s. %s", self.trainer.state.global_step, why, then)

    def _start_over(self, moved: float, aim: float) -> None:
        """Lower the learning rate and reset the optimizer after a step whose KL was far beyond the bound.

        At the new learning rate the step would have moved the network about as far as intended.
        """
        factor = max(math.sqrt(aim / moved), LEAST_FACTOR) if math.isfinite(moved) else LEAST_FACTOR
        self.controller.scale *= factor
        self._scale(factor)
        optimizer = schedule_of(self.trainer).optimizer
        optimizer.state.clear()  # its moments are those of a step that was not kept
        update, rate = self.trainer.state.global_step, optimizer.param_groups[0]["lr"]
        logger.warning(
            "Update %d: the step moved the network by %.2g nats a token, where %.2g were meant. Next to nothing of it is kept; "
            "the optimizer starts over with a learning rate of %.1e.", update, moved, aim, rate,
        )  # fmt: skip

    def certify_held_out(self, drawn: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        """Measure the KL of the last step on held-out prompts, with completions just sampled from the network.

        These are completions of the new network, so that along one of them the sum of KL(new‖old) is an unbiased estimate of
        the KL between whole completions, where training samples at temperature 1 as a measurement does.
        """
        if self._before is None or not drawn:
            return {}
        with preserve_state(self.trainer.model):
            found = self.probe.measure_on(drawn, self._before)
        kl = TokenKL.of(replace(found, old_new=found.new_old))
        numbers = {"kl_mean": kl.mean, "kl_se": kl.se, "seq_kl_mean": kl.seq_mean}
        return {f"tr/deployed_heldout_{name}": value for name, value in numbers.items() if value is not None}

    def _scale(self, factor: float) -> None:
        """Multiply the learning rate by `factor`, under the same schedule."""
        scheduler = schedule_of(self.trainer)
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        scheduler._last_lr = [rate * factor for rate in scheduler._last_lr]
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= factor


def _worth_another(found: BatchKL, bound: float) -> bool:
    """True if the network's KL is small enough, and the effective sample size large enough, for another pass over the batch."""
    near = float(found.new_old.double().mean()) < SPENT * bound  # and a number
    return near and found.effective_sample_size() >= LEAST_ESS


def schedule_of(trainer: "CorralTrainer") -> Any:
    """Learning-rate scheduler of the trainer, without accelerate's wrapper."""
    scheduler: Any = trainer.lr_scheduler
    return getattr(scheduler, "scheduler", scheduler)


def schedule_factor(scheduler: LambdaLR) -> float:
    """Learning rate of the next update, as a share of the schedule's peak learning rate."""
    rate, peak = scheduler.optimizer.param_groups[0]["lr"], scheduler.base_lrs[0]
    return float(rate / peak) if peak > 0 else 0.0


# ---------------------------------------------------------------------------------------------------- measurements

TOKENS = 3072
"""Approximate number of tokens on which KL is measured per step, over all processes.
The tokens are those of whole completions, evenly spread over the rollouts."""
CHEAP = 0.01
"""Largest share of a step's cost that measuring the KL on `FEW` tokens may take.
`FEW` tokens are enough for a meaningful 99.9th percentile."""
COMPLETIONS = 8
"""Smallest number of completions on which KL is measured per step.
The tokens of one completion move together, so that a few long completions are a poor sample."""
GOLDEN = 0.618034
"""Golden ratio, for an even choice of completions: the fractional parts of its multiples are evenly spread."""


@dataclass(eq=False)
class _Rollouts:
    """Completions whose tokens are measured, in TRL's format for scoring."""

    ids: Int[Tensor, "b L"]
    """Token ids of prompt and completion."""
    seen: Int[Tensor, "b L"]
    """Attention mask of the token ids of prompt and completion."""
    live: Bool[Tensor, "b T"]
    """True at completion tokens that the network sampled. False at padding and at tokens from tools."""
    old: tuple[Float[Tensor, "N H"], Float[Tensor, " N"]] | None = None
    """Hidden states and log-probs of unmasked tokens, under the weights at the start of the step. None if not yet computed."""


class DeployedProbe:
    """Measures the per-token KL between the current network and the network at the start of the step, on some completions.

    The old network's hidden states come from the pass in which TRL scores fresh rollouts, where that was made with the step's
    first weights and without dropout. Elsewhere it takes a pass of its own.
    """

    def __init__(self, trainer: "CorralTrainer") -> None:
        self.trainer = trainer
        self._rollouts: list[_Rollouts] = []
        self.tool_mask: list[list[int]] | None = None
        """Tool mask of the newest rollouts, from TRL's `_generate`: 1 for a token of the network, 0 for a token from a tool.
        It is kept here because TRL's old-policy pass comes before the mask is in the batch."""
        self._head: HeadWeights | None = None
        """Language-model head of the network at the start of the step."""
        self.mean_length = 0.0
        """Mean number of tokens per completion on which KL is measured, over all processes, since the last `prepare`."""

    def clear(self) -> None:
        """Drop the stored rollouts and the old language-model head before a new step."""
        self._rollouts, self._head = [], None

    def watch(self, scoring: ScoringPass) -> None:
        """Request that TRL's old-policy pass stores hidden states, so that the KL measurement needs no pass of its own."""
        trainer = self.trainer
        first = trainer.state.global_step % updates_per_step(trainer.args) == 0
        if first and trainer.off_policy and not scoring.keep_hidden:  # on-policy, TRL's first pass may be the reference's
            scoring.keep_hidden, scoring.choose = True, self._choose_early

    def _choose_early(self, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, " B"]:
        """Choose the completions on which KL will be measured, from their masks, before TRL has built its batch."""
        if self.tool_mask is None:
            return self.choose(mask)
        rows = pad_sequence([torch.as_tensor(row, dtype=torch.bool) for row in self.tool_mask], batch_first=True)
        written = torch.zeros_like(mask)  # TRL may pad further, with tokens of no completion
        written[:, : rows.shape[1]] = rows
        return self.choose(mask & written)

    def choose(self, trained: Bool[Tensor, "B T"], passes: int = 1) -> Bool[Tensor, " B"]:
        """Choose the completions of a batch on which KL is measured. `trained` marks the tokens that are trained on.

        Only completions with such tokens are chosen, evenly spread, until there are enough tokens and enough completions on
        all processes together. A sharded network needs every process in every pass, so all choose equally many: a process that
        has too few fills up with completions that have no token to measure.

        `passes` is how many forward passes a measurement takes: of the new network, and of the old one if its states are not
        kept.
        """
        args, length = self.trainer.args, trained.sum(-1)
        live, empty = length.nonzero()[:, 0], (length == 0).nonzero()[:, 0]
        order = torch.cat([live[(torch.arange(len(live), device=live.device) * GOLDEN % 1).argsort()], empty])
        first = torch.stack([length[order], (length[order] > 0).long()]).cumsum(1)
        # Column k: tokens and completions of all processes, where each of them takes its first k + 1 rows.
        tokens, completions = self.trainer.accelerator.reduce(first, reduction="sum")
        batches = max(1, updates_per_step(args) * args.gradient_accumulation_steps // steps_per_batch(args))
        # `FEW` tokens, the larger number, if measuring them costs at most 1 % of the step. Both sides count forward passes of
        # one token: the step generates its tokens once, scores them with the old policy where several updates follow, and
        # makes its passes over the batch, forward, and backward at twice the cost.
        over_batch = 1 if args.reuse == "auto" else args.num_iterations  # it measures after each pass
        forward_passes = int(tokens[-1]) * batches * (1 + int(self.trainer.off_policy) + 3 * over_batch)
        wanted = (FEW if FEW * passes <= CHEAP * forward_passes else TOKENS) / batches
        enough = (tokens >= tokens[-1].clamp(max=wanted)) & (completions >= completions[-1].clamp(max=COMPLETIONS / batches))
        chosen = torch.zeros_like(length, dtype=torch.bool)
        chosen[order[: int(enough.long().argmax()) + 1]] = True
        return chosen

    def add(self, batch: dict[str, Any], scoring: ScoringPass) -> None:
        """Choose completions of new rollouts for the KL measurement, and store them with their hidden states if computed."""
        if "pixel_values" in batch:
            raise ValueError(
                "CorralTrainer: `deployed_bound` measures text alone, and these prompts have images. Leave it out."
            )
        mask = batch["completion_mask"].bool()
        live = mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
        kept = None if scoring.drew_random else scoring.hidden()
        chosen = self.choose(live, passes=2 if kept is None else 1) if scoring.chosen is None else scoring.chosen
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        some = _Rollouts(ids[chosen], seen[chosen], live[chosen])
        if kept is not None:
            wanted = (live & chosen[:, None]).flatten()
            self._head = self._head or kept.head.freeze()
            some.old = kept.states[wanted[kept.places]], batch["old_per_token_logps"].flatten()[wanted]
        self._rollouts.append(some)

    def prepare(self, old: dict[str, Tensor]) -> bool:
        """Compute the old network's hidden states if they are missing. Returns False if there is no token to measure."""
        missing = [some for some in self._rollouts if some.old is None]
        if missing:
            with _weights_of(self.trainer.model, old):
                for some in missing:
                    hidden, logp, head = self._score(some)
                    self._head = self._head or head.freeze()
                    some.old = hidden, logp
        sizes = [torch.stack([some.live.sum(), some.live.any(-1).sum()]) for some in self._rollouts]
        total = torch.stack(sizes).sum(0) if sizes else torch.zeros(2, dtype=torch.long, device=self.trainer.accelerator.device)
        tokens, completions = self.trainer.accelerator.reduce(total, reduction="sum").tolist()
        self.mean_length = tokens / max(completions, 1)
        return tokens > 0

    def count_held_out(self, available: int, longest: int) -> int:
        """Number of held-out completions per process that `measure_on` needs: about TOKENS tokens, at least COMPLETIONS."""
        processes = self.trainer.accelerator.num_processes
        return min(available // processes, max(math.ceil(COMPLETIONS / processes), TOKENS // (processes * longest)))

    def measure_on(self, rows: list[tuple[list[int], list[int]]], old: dict[str, Tensor]) -> BatchKL:
        """Measure the network's KL on given completions. Each entry of `rows` has token ids of a prompt and a completion."""
        # Prompts are padded on the left, completions on the right, as TRL has them. Padding is never looked at.
        before, after = max(len(prompt) for prompt, _ in rows), max(len(completion) for _, completion in rows)
        ids = [[0] * (before - len(a)) + a + b + [0] * (after - len(b)) for a, b in rows]
        seen = [[0] * (before - len(a)) + [1] * (len(a) + len(b)) + [0] * (after - len(b)) for a, b in rows]
        mask = torch.tensor(seen, device=self.trainer.accelerator.device)
        some = _Rollouts(torch.tensor(ids, device=mask.device), mask, mask[:, before:].bool())
        with _weights_of(self.trainer.model, old):
            hidden, logp, head = self._score(some)
            some.old, head = (hidden, logp), head.freeze()
        return self._kl([some], head)

    def measure(self) -> BatchKL:
        """Measure the network's KL on the chosen completions of the step."""
        assert self._head is not None
        return self._kl(self._rollouts, self._head)

    def _kl(self, rollouts: list[_Rollouts], old_head: HeadWeights) -> BatchKL:
        """Compute the KL in both directions between the current network and the old network, over all processes."""
        parts, sequences = [], 0
        for some in rollouts:
            assert some.old is not None
            (new_hidden, new_logp, head), (old_hidden, old_logp) = self._score(some), some.old
            new, old = HeadStates(new_hidden, head.weight, head.bias), HeadStates(old_hidden, old_head.weight, old_head.bias)
            kl = head_kl_both_ways(new, old, head.spec)
            sequence = some.live.nonzero()[:, 0] + sequences
            sequences += len(some.live)
            parts.append(torch.stack([x.double() for x in (*kl, sequence, new_logp - old_logp)], -1))
        found, accelerator = torch.cat(parts), self.trainer.accelerator
        if accelerator.num_processes > 1:  # the same tokens in the same order everywhere, so that all processes decide alike
            found[:, 2] += accelerator.process_index * 2**32  # sequences of this process alone; exact in float64
            found = accelerator.gather(accelerator.pad_across_processes(found, pad_index=-1))
            found = found[~(found[:, 0] < 0)]  # a KL is ≥ 0, or no number
        new_old, old_new, sequence, log_ratio = found.unbind(-1)
        return BatchKL(new_old=new_old, old_new=old_new, sequence=sequence.long(), log_ratio=log_ratio)

    def _score(self, some: _Rollouts) -> tuple[Float[Tensor, "N H"], Float[Tensor, " N"], HeadWeights]:
        """Compute hidden states, log-probs and head of the current network on the unmasked tokens, by TRL's scoring pass."""
        trainer, scoring = self.trainer, ScoringPass(keep_hidden=True)
        width, size = some.live.shape[1], trainer.args.per_device_train_batch_size
        with trainer.policy_head.expect(scoring):
            logp = trainer._get_per_token_logps_and_entropies(trainer.model, some.ids, some.seen, width, size)[0]
        if (kept := scoring.hidden()) is None:
            raise RuntimeError("CorralTrainer: TRL's scoring pass showed no hidden states. Has it changed? Please report it.")
        return kept.states[some.live.flatten()[kept.places]], logp[some.live], kept.head


@contextmanager
def _weights_of(model: nn.Module, old: dict[str, Tensor]) -> Iterator[None]:
    """Context in which the model has the given weights `old` instead of its own."""
    new = snapshot(model)
    restore(model, old)
    yield
    restore(model, new)


# ---------------------------------------------------------------------------------------------------- the first rate

TRIALS = 6
"""Largest number of trial steps in a search for the learning rate."""
NEAR = 1.5
"""The search for the learning rate ends when a trial step's KL is within this factor of the intended KL.
The learning rate is then off by less than a quarter."""
LOST = 1 / 30
"""Factor on the learning rate after a trial step whose KL was NaN or infinite."""
MOST = 100.0
"""Largest learning rate that the search tries, in multiples of the first learning rate."""
EDGE = 0.1
"""Smallest distance of an interpolated learning rate from the learning rates of the trials on either side.
It is a share of the logarithmic distance between these trials."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial step in a search for the learning rate: the rate in multiples of the first rate, and the mean KL."""

    scale: float
    moved: float

    def is_near(self, aim: float) -> bool:
        """True if the trial step's KL is close enough to the intended KL to end the search."""
        return aim / NEAR <= self.moved <= aim * NEAR


def next_scale(tried: list[Trial], aim: float) -> float | None:
    """Compute the next learning rate to try, by fitting KL as a power of the learning rate. Returns None if the search is over.

        scale ← one.scale · (aim / one.moved)^(1/p)      p = log(other.moved / one.moved) / log(other.scale / one.scale)

    `one` and `other` are the trials next to the aim, one on either side of it. Where all trials moved too far, or none far
    enough, they are the two nearest, with p in [½, 2]; p begins at 2, its value close to the old weights, and the second p
    is the mean of 2 and the slope, because far away a KL saturates.
    """
    if tried[-1].is_near(aim) or len(tried) == TRIALS:
        return None
    far = min((one for one in tried if not one.moved <= aim), key=lambda one: one.scale, default=None)
    below = [one for one in tried if one.moved <= aim and (far is None or one.scale < far.scale)]
    near = max(below, key=lambda one: one.scale, default=None)
    if near is not None and far is not None:
        share = 0.5
        if near.moved > 0 and math.isfinite(far.moved):
            share = math.log(aim / near.moved) / math.log(far.moved / near.moved)
        return near.scale * (far.scale / near.scale) ** min(max(share, EDGE), 1 - EDGE)
    nearest = near or far
    assert nearest is not None
    if not math.isfinite(nearest.moved):
        return nearest.scale * LOST
    if near is not None and near.scale >= MOST:
        return None
    if nearest.moved == 0:
        return MOST
    power, others = 2.0, [one for one in tried if one is not nearest and math.isfinite(one.moved) and one.moved > 0]
    if others:
        other = min(others, key=lambda one: abs(math.log(one.scale / nearest.scale)))
        slope = math.log(other.moved / nearest.moved) / math.log(other.scale / nearest.scale)
        power = min(max(slope, 0.5), 2.0)
        power = power if len(others) > 1 else (power + 2.0) / 2
    return min(nearest.scale * (aim / nearest.moved) ** (1 / power), MOST)


@dataclass(eq=False)
class RateSearch:
    """Search for the learning rate at which one training step on the current rollouts moves the network by the intended KL.

    A trial makes all updates of the step as the training loop does: the trainer's own loss, accumulation, clipped gradients,
    optimizer and schedule. It measures the network and takes everything back: weights, buffers, the optimizer's and the
    schedule's state, random state, counters and metrics. So the step that is then kept is the one that was measured. Rollouts
    are drawn once. Callbacks do not run. Every process tries the same rates, because every KL is of all processes.
    """

    deployed: DeployedCallback
    old: dict[str, Tensor]
    """Copy of the trained weights at the start of the step."""
    tried: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trainer, self.scheduler = self.deployed.trainer, schedule_of(self.deployed.trainer)

    @property
    def aim(self) -> float:
        """Intended mean KL of a step at the peak learning rate. During warm-up the intended KL is lower, like the bound."""
        return START * self.deployed.peak_bound()

    def find(self) -> Trial | None:
        """Run trial steps until the KL of a trial is close enough to the intended KL, and return the best trial.

        None if any rate would do, since the rollouts have no gradient or no token to measure.
        """
        scale: float | None = 1.0
        while scale is not None:
            with self._undone():
                set_scale(self.scheduler, scale)
                trial = self._try(scale)
            if trial is None:
                return None
            self.tried.append(trial)
            scale = next_scale(self.tried, self.aim)
        if self.tried[-1].is_near(self.aim):
            return self.tried[-1]
        numbers = [one for one in self.tried if math.isfinite(one.moved) and one.moved > 0]
        return min(numbers, key=lambda one: abs(math.log(one.moved / self.aim)), default=Trial(1.0, math.nan))

    def _try(self, scale: float) -> Trial | None:
        """Run one trial step, and scale its KL to the peak learning rate. Returns None if no rate moves the network."""
        deployed, factors, learns = self.deployed, list[float](), False
        for update in range(1, deployed.per_step + 1):
            factors.append(schedule_factor(self.scheduler))
            learns |= self._update()
            if update % deployed.per_pass:
                continue
            factor = sum(factors) / len(factors)
            if not learns or factor == 0:
                return None
            with preserve_state(self.trainer.model):
                if not deployed.probe.prepare(self.old):
                    return None
                found = deployed.probe.measure()
            moved = TokenKL.of(found).mean / factor**2  # near the old weights a KL grows as the square of the rate
            if update == deployed.per_step:
                return Trial(scale, moved)
            if not _worth_another(found, deployed.peak_bound() * factor**2):
                # A batch that is left because its ratios are spread is no reason for a larger rate.
                return Trial(scale, max(moved, self.aim))
        raise AssertionError("a step ends with a pass")

    def _update(self) -> bool:
        """Make one optimizer update as transformers' training loop does. Returns True if the gradient was not zero."""
        trainer, accelerator, model = self.trainer, self.trainer.accelerator, self.trainer.model_wrapped
        batch, count = trainer.next_batches
        steps, always = trainer.args.gradient_accumulation_steps, accelerator.gradient_state.plugin_kwargs
        for step in range(1, steps + 1):
            accelerator.gradient_state._set_sync_gradients(step == steps)
            together = step == steps or always.get("sync_each_batch", False)
            with nullcontext() if together else accelerator.no_sync(model):
                GRPOTrainer.training_step(trainer, model, batch[0], count)
        if trainer.args.max_grad_norm > 0:
            accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        finite, zero = gradient_state(model.parameters())
        if not trainer.args.fp16 and on_any_process(not finite):
            drop_gradients(model.parameters())  # as the guard of `corral train` does; fp16 has a scaler that does it
        learns = on_any_process(not zero)
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        assert optimizer is not None
        assert scheduler is not None
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
        model.zero_grad()
        return learns

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Context that undoes all changes of a trial step when it exits."""
        trainer, accelerator, optimizer = self.trainer, self.trainer.accelerator, self.scheduler.optimizer
        device = trainer.args.device
        with ExitStack() as undo:
            undo.callback(random.setstate, random.getstate())
            undo.callback(np.random.set_state, np.random.get_state())
            for found in trainer._metrics.values():
                undo.callback(_reset, found, {name: [*values] for name, values in found.items()})
            undo.callback(trainer._buffered_inputs.__setitem__, slice(None), [dict(x) for x in trainer._buffered_inputs])
            undo.callback(_reset, vars(trainer), dict(vars(trainer)))
            if accelerator.scaler is not None:
                undo.callback(accelerator.scaler.load_state_dict, accelerator.scaler.state_dict())
            undo.callback(accelerator.gradient_state._set_sync_gradients, accelerator.sync_gradients)
            undo.callback(self.scheduler.load_state_dict, copy.deepcopy(self.scheduler.state_dict()))
            undo.callback(optimizer.load_state_dict, copy.deepcopy(optimizer.state_dict()))
            for buffer in trainer.model.buffers():
                undo.callback(buffer.data.copy_, buffer.clone())
            undo.callback(restore, trainer.model, self.old)
            undo.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            trainer.ledger = Ledger()
            if trainer.token_observer is not None:
                trainer.token_observer = lambda *_: None  # and not None: with an observer the loss takes another path
            yield


def _reset(target: dict[Any, Any], was: dict[Any, Any]) -> None:
    """Restore the earlier content of a dictionary, in place."""
    target.clear()
    target.update(was)


def set_scale(scheduler: LambdaLR, scale: float) -> None:
    """Set the peak learning rate to `scale` times the optimizer's original rate, under the same schedule."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [group["initial_lr"] * scale for group in groups]
    now = [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = now
    for group, rate in zip(groups, now, strict=True):
        group["lr"] = rate
