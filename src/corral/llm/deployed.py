"""The trainer's hold on the network it deploys: after a step's updates its distance is measured and, if asked for, kept.

A step is what ends with a batch of rollouts and an update together. Its tokens are those of all its rollouts, on all processes;
the old weights are those it began with. With `reuse="auto"` a step may be over before all passes over its batch are made.
"""

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trl
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from corral.deployed import BatchKL, Certificate, RateController, TokenKL, restore, retract, snapshot
from corral.deployed.state import preserve_state
from corral.llm.deployed_probe import DeployedProbe
from corral.llm.find_rate import RateSearch, set_scale
from corral.llm.trl_api import FUSED, updates_per_step

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

logger = logging.getLogger(__name__)

AIM = 0.5
"""The share of the bound that the learning rate aims at: the other half is for steps that go further than most."""
START, PASSES_START = 2.0, 6.0
"""The KL of the first step that the search for `learning_rate="auto"` aims at, in multiples of the bound: with one pass over
each batch, and with several. The rates that grids chose move the network by one to five bounds in their first step. That step
is then retracted to the bound, and the rate comes down to `AIM` over the next ones."""
SPENT = 50.0
"""Times the bound, before anything is undone, from which on `reuse="auto"` makes no further pass: D grows as the square of what
is kept, and less than a seventh would be."""
LEAST_ESS = 0.5
"""The effective sample size, as a share of the tokens, below which `reuse="auto"` makes no further pass."""
PROBES = 4
"""Measurements of a step at most; one where the step fits."""
ROUNDING = 1e-3
"""Mean KL of unchanged weights that kernels in half precision explain: a bound that follows the schedule to 0 goes below it."""
FAR, LEAST_SHARE = 25.0, 0.05
"""The optimizer starts over after a step beyond FAR times the bound of which less than LEAST_SHARE is kept."""
LEAST_FACTOR = 1 / 30
"""The smallest factor of the learning rate when it does."""


class DeployedCallback(TrainerCallback):
    """Certifies every step of a CorralTrainer with `deployed_bound`, and holds it where that is finite.

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
        bound = trainer.args.deployed_bound
        assert bound is not None
        _check_surroundings(trainer)
        self.trainer, self.bound, self.holds = trainer, bound, bound < math.inf
        self.probe, self.controller = DeployedProbe(trainer), RateController()
        self.per_step = updates_per_step(trainer.args)
        self.per_pass = self.per_step // trainer.args.num_iterations if trainer.args.reuse == "auto" else self.per_step
        """Updates between measurements."""
        self.searches = False
        """Whether the rate is still to be found: on the first batch with a gradient."""
        self._before: dict[str, Tensor] | None = None
        """What the step that has just ended began with; until the next one begins."""
        self._begin()

    def _begin(self) -> None:
        """A step."""
        self._old: dict[str, Tensor] | None = None
        self._factors: list[float] = []
        """Of the schedule, for every update of the step so far."""
        self._updates = 0
        """Updates of the step so far."""
        self.spent = False
        """Whether the step is over, though passes over its batch remain: the trainer skips them."""
        self.probe.clear()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A resumed run finds its scale in the scheduler."""
        self.abandon()  # a step that transformers gave up for want of memory, to train with smaller batches
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
        self.searches = self.trainer.args.finds_rate and self.controller.scale == 1.0
        self._check_saves(args, state)

    def _check_saves(self, args: TrainingArguments, state: TrainerState) -> None:
        """Refuse checkpoints inside a step, where bounding the network would change the run. The end of a run is bounded."""
        of_best = args.save_strategy == SaveStrategy.BEST
        strategy, name = (args.eval_strategy, "eval") if of_best else (args.save_strategy, "save")
        if strategy == "steps":
            every = int(state.eval_steps if of_best else state.save_steps)
            what, use = f"`{name}_steps` is {every}", ""
        elif strategy == "epoch":
            batches = self.trainer.callback_handler.train_dataloader
            assert batches is not None  # transformers has set it
            every = math.ceil(len(batches) / args.gradient_accumulation_steps)
            what, use = f"an epoch has {every} updates", f"{name}_strategy='steps' and "
        else:
            return
        if every < state.max_steps and every % self.per_step:
            raise ValueError(
                f"CorralTrainer: with `deployed_bound` the network is bounded at the end of a step, and checkpoints are saved "
                f"there. A step has {self.per_step} updates, and {what}, no multiple of {self.per_step}. Use {use}{name}_steps="
                f"{math.ceil(every / self.per_step) * self.per_step}."
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before an update: at the beginning of a step its weights are kept."""
        if self.spent:
            return
        if self._old is None:
            self._before = None  # its memory, first
            self._old = snapshot(self.trainer.model)
            if self.searches:
                self._find_rate(self._old)
        if self.holds:
            scheduler = self._scheduler()
            peak = scheduler.base_lrs[0]
            self._factors.append(scheduler.optimizer.param_groups[0]["lr"] / peak if peak > 0 else 0.0)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After an update."""
        if not self.spent:
            self._updates += 1

    def _find_rate(self, old: dict[str, Tensor]) -> None:
        """Start at the rate with which this step moves the network by several bounds; wait where the step has no gradient."""
        trainer, scheduler = self.trainer, self._scheduler()
        trainer.draw_ahead()
        search = RateSearch(trainer, self.probe, old, updates=self.per_step, per_pass=self.per_pass)
        several = START if trainer.args.num_iterations == 1 else PASSES_START
        found = search.find(self.bound, several * self.bound, _worth_another)
        if found is None:
            logger.info(
                "Update %d: no completion of this batch has a gradient, so the learning rate is looked for on the next batch.",
                trainer.state.global_step + 1,
            )  # fmt: skip
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
        """At the end of a step, and with `reuse="auto"` of a pass: measure, retract, scale the rate, and log what was done."""
        last = state.global_step % self.per_step == 0
        if state.global_step % self.per_pass == 0 and not self.spent:
            self._end_pass(last=last)
        if last:
            self._begin()
        elif state.global_step >= state.max_steps:
            self.finish()  # before another callback reads the network

    @property
    def is_inside_step(self) -> bool:
        """Whether updates of a step have moved the network, which is not bounded yet."""
        return self._old is not None and self._updates > 0

    def finish(self) -> None:
        """The run ends here: inside a step the network is measured and bounded as at the step's end."""
        if self.is_inside_step:
            self._end_pass(last=True)
            self.trainer.model.train()  # after an evaluation TRL would log an evaluation's metrics, without the certificate
            self._begin()
            # An update may follow where a callback stops the run before one: without rollouts to measure on, it is undone.
            self._old = snapshot(self.trainer.model)  # as it is saved

    def before_save(self) -> None:
        """Called before a checkpoint is written: it is of a network that is bounded."""
        trainer = self.trainer
        if trainer.control.should_training_stop:
            self.finish()
        elif self.is_inside_step and self.holds:
            raise ValueError(
                f"CorralTrainer: a callback asks for a checkpoint after update {trainer.state.global_step}, inside a step of "
                f"{self.per_step} updates, where `deployed_bound` does not hold yet. Save after a multiple of {self.per_step}."
            )

    def abandon(self) -> None:
        """An exception ends the run: inside a step the network is measured and bounded, or the step is undone.

        Measuring takes all processes. Several of them may have met different exceptions, or none, so each undoes the step.
        """
        if self._old is None:
            return
        if not self._updates:
            if self.holds:
                restore(self.trainer.model, self._old)  # an update may be half done
        elif self.trainer.accelerator.num_processes > 1:
            self._go_back("an exception ended the run, and the other processes may be elsewhere")
        else:
            try:
                self.finish()
                self.trainer.log({})
            except Exception as error:  # the exception that ended the run is the one to raise
                logger.warning("The certificate of the last network is not logged (%s: %s).", type(error).__name__, error)
        self._begin()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The weights may be changed after a run: the next one begins with what it finds."""
        self._begin()

    def _end_pass(self, *, last: bool) -> None:
        """Measure the network as it is; then make another pass, or certify it, and the step is over."""
        trainer, old = self.trainer, self._old
        assert old is not None
        factor = sum(self._factors) / len(self._factors) if self._factors else 1.0
        # At a rate of 0 nothing moves, and there is nothing to hold.
        bound = self.bound * factor**2 if self.holds and factor > 0 else math.inf
        certificate: Certificate | None = None
        try:
            with preserve_state(trainer.model):
                if self.probe.prepare(old):
                    found = [self.probe.measure()]
                    if not last and _worth_another(found[0], bound):
                        return
                    certificate = retract(
                        trainer.model, old, lambda: found.pop() if found else self.probe.measure(), bound=bound,
                        max_probes=PROBES, rounding=ROUNDING,
                    )  # fmt: skip
        except BaseException as error:  # also a Ctrl-C: weights may be the old ones, or a part of the way back
            self._go_back(f"measuring the network failed ({type(error).__name__}: {error})")
            self._old = None
            raise
        if certificate is None:
            self._go_back("no completion of the step has a token that is trained on")
            if self.holds:
                trainer._metrics["train"]["tr/step_share"].append(0.0)
        self.spent, self._before, self._old = not last, old, None
        if certificate is None:
            return
        moved, aim = certificate.before.mean, AIM * bound
        if certificate.share < LEAST_SHARE and not moved <= FAR * bound:  # further, or no number
            self._start_over(moved, aim)
        elif bound < math.inf and not self.searches:
            # Neither a batch that is left because its ratios are spread nor a run that ends is a reason for a larger rate.
            whole = trainer.state.global_step % self.per_step == 0
            self._scale(self.controller.update(moved if whole else max(moved, aim), aim))
        metrics = certificate.metrics()
        if self.per_pass < self.per_step:
            metrics["tr/passes"] = self._updates / self.per_pass
        for name, value in metrics.items():
            trainer._metrics["train"][name].append(value)

    def _go_back(self, why: str) -> None:
        """Put the weights from before the step back where a bound is set and the network cannot be measured, and say why."""
        assert self._old is not None
        then = "The step is not measured."
        if self.holds:
            restore(self.trainer.model, self._old)  # bit for bit
            then = "The weights from before the step are back."
        logger.warning("Update %d: %s. %s", self.trainer.state.global_step, why, then)

    def _start_over(self, moved: float, aim: float) -> None:
        """A rate that would have gone about as far as was meant, and an optimizer that has seen nothing."""
        factor = max(math.sqrt(aim / moved), LEAST_FACTOR) if math.isfinite(moved) else LEAST_FACTOR
        self.controller.scale *= factor
        self._scale(factor)
        optimizer = self._scheduler().optimizer
        optimizer.state.clear()
        update, rate = self.trainer.state.global_step, optimizer.param_groups[0]["lr"]
        logger.warning(
            "Update %d: the step moved the network by %.2g nats a token, where %.2g were meant. Next to nothing of it is kept; "
            "the optimizer starts over with a learning rate of %.1e.", update, moved, aim, rate,
        )  # fmt: skip

    def certify_held_out(self, drawn: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        """How far the last step went on held-out prompts, from prompts and completions that the network has just drawn.

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


def _worth_another(found: BatchKL, bound: float) -> bool:
    """Whether another pass over the batch would still be one on its tokens, and not be undone nearly whole."""
    near = float(found.new_old.double().mean()) < SPENT * bound  # and a number
    return near and found.effective_sample_size() >= LEAST_ESS


def _check_surroundings(trainer: "CorralTrainer") -> None:
    """Refuse what keeps the weights elsewhere, where a retraction would be undone or would not be whole."""
    if not FUSED:
        raise ValueError(
            f"CorralTrainer: `deployed_bound` needs hidden states, which TRL {trl.__version__} does not hand over. Install TRL "
            f"1.15 or newer."
        )
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        why, instead = "keeps its own master weights, which would undo it", "DDP or FSDP2"
    elif kind == DistributedType.FSDP and not trainer.accelerator.is_fsdp2:
        why, instead = "version 1 flattens them", "FSDP2 (`fsdp_config={'version': 2}`)"
    else:
        return
    raise ValueError(f"CorralTrainer: `deployed_bound` acts on the model's weights, and {kind.value} {why}. Use {instead}.")
