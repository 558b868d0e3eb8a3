"""The learning rate of `learning_rate="auto"`, found on the first batch of rollouts before any of its updates is kept."""

import copy
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOTrainer

from corral.deployed import BatchKL, TokenKL, restore
from corral.deployed.state import preserve_state
from corral.llm.ledger import Ledger
from corral.llm.self_check import on_any_process
from corral.numerics import drop_gradients, gradient_state

if TYPE_CHECKING:
    from corral.llm.deployed_probe import DeployedProbe
    from corral.llm.trainer import CorralTrainer

logger = logging.getLogger(__name__)

TRIALS = 6
"""Trials at most."""
NEAR = 1.5
"""A trial whose KL is within this factor of the aim is near enough: its rate is off by less than a quarter."""
LOST = 1 / 30
"""The factor of the rate after a trial whose KL is no number."""
MOST = 100.0
"""The largest rate that is tried, in multiples of the first."""
EDGE = 0.1
"""An interpolated rate keeps this share of the logarithmic distance from the trials on either side of it."""


@dataclass(frozen=True)
class Trial:
    """One trial: the rate, in multiples of the first one, and the mean KL that the step moved the network by."""

    scale: float
    moved: float

    def is_near(self, aim: float) -> bool:
        """Whether the KL is near enough to the aim."""
        return aim / NEAR <= self.moved <= aim * NEAR


def next_scale(tried: list[Trial], aim: float) -> float | None:
    """The rate to try next, as if the KL were a power of the rate; None once the search is over.

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


class RateSearch:
    """Tries learning rates on a step's rollouts until the whole step moves the deployed network by the KL that is aimed at.

    A trial makes all updates of the step as the training loop does: the trainer's own loss, accumulation, clipped gradients,
    optimizer and schedule. It measures the network and takes everything back: weights, buffers, the optimizer's and the
    schedule's state, random state, counters and metrics. So the step that is then kept is the one that was measured. Rollouts
    are drawn once. Callbacks do not run. Every process tries the same rates, because every KL is of all processes.
    """

    def __init__(
        self, trainer: "CorralTrainer", probe: "DeployedProbe", old: dict[str, Tensor], *, updates: int, per_pass: int
    ) -> None:
        """`old` are the weights that the step begins with; the probe measures after every `per_pass` of its `updates`."""
        self.trainer, self.probe, self.old = trainer, probe, old
        self.updates, self.per_pass = updates, per_pass
        scheduler: Any = trainer.lr_scheduler
        self.scheduler: LambdaLR = getattr(scheduler, "scheduler", scheduler)  # accelerate puts its own around it
        self.tried: list[Trial] = []

    def find(self, bound: float, aim: float, goes_on: Callable[[BatchKL, float], bool]) -> Trial | None:
        """The trial to keep; None where the rollouts have no gradient, or no token to measure, and any rate would do.

        Args:
            bound: δ at the schedule's peak.
            aim: the mean KL that a step at the peak should have. A step in a warm-up has less, as its bound.
            goes_on: whether another pass over the batch follows a measurement, given the step's bound.
        """
        scale: float | None = 1.0
        while scale is not None:
            with self._undone():
                set_scale(self.scheduler, scale)
                trial = self._try(scale, bound, aim, goes_on)
            if trial is None:
                return None
            self.tried.append(trial)
            scale = next_scale(self.tried, aim)
        if self.tried[-1].is_near(aim):
            return self.tried[-1]
        numbers = [one for one in self.tried if math.isfinite(one.moved) and one.moved > 0]
        return min(numbers, key=lambda one: abs(math.log(one.moved / aim)), default=Trial(1.0, math.nan))

    def _try(self, scale: float, bound: float, aim: float, goes_on: Callable[[BatchKL, float], bool]) -> Trial | None:
        """One trial, whose KL is what it would be at the schedule's peak; None where nothing would move at any rate."""
        trainer, factors, learns = self.trainer, list[float](), False
        for update in range(1, self.updates + 1):
            base = self.scheduler.base_lrs[0]
            factors.append(self.scheduler.optimizer.param_groups[0]["lr"] / base)
            learns |= self._update()
            if update % self.per_pass:
                continue
            factor = sum(factors) / len(factors)
            if not learns or factor == 0:
                return None
            with preserve_state(trainer.model):
                if not self.probe.prepare(self.old):
                    return None
                found = self.probe.measure()
            moved = TokenKL.of(found).mean / factor**2  # near the old weights a KL grows as the square of the rate
            if update == self.updates:
                return Trial(scale, moved)
            if not goes_on(found, bound * factor**2):
                # A batch that is left because its ratios are spread is no reason for a larger rate.
                return Trial(scale, max(moved, aim))
        raise AssertionError("a step ends with a pass")

    def _update(self) -> bool:
        """One update as transformers' loop makes it; whether it had a gradient."""
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
        """Everything that updates change is as before, once the context is left."""
        trainer, accelerator, optimizer = self.trainer, self.trainer.accelerator, self.scheduler.optimizer
        buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
        moments = {weight: copy.deepcopy(state) for weight, state in optimizer.state.items()}
        groups = [{key: copy.deepcopy(x) for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
        schedule, sync = copy.deepcopy(self.scheduler.state_dict()), accelerator.sync_gradients
        scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
        attributes, rollouts = dict(vars(trainer)), [dict(inputs) for inputs in trainer._buffered_inputs]
        metrics = {mode: {name: [*values] for name, values in found.items()} for mode, found in trainer._metrics.items()}
        others = random.getstate(), np.random.get_state()
        trainer.ledger = Ledger()
        if trainer.token_observer is not None:
            trainer.token_observer = lambda *_: None  # and not None: with an observer the loss takes another path
        device = trainer.args.device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                yield
        finally:
            restore(trainer.model, self.old)
            with torch.no_grad():
                for buffer, was in buffers:
                    buffer.copy_(was)
            optimizer.state.clear()
            optimizer.state.update(moments)
            for group, was_group in zip(optimizer.param_groups, groups, strict=True):
                for key in group.keys() - was_group.keys() - {"params"}:
                    del group[key]
                group.update(was_group)
            self.scheduler.load_state_dict(schedule)
            accelerator.gradient_state._set_sync_gradients(sync)
            if scaler is not None:
                accelerator.scaler.load_state_dict(scaler)
            for name in vars(trainer).keys() - attributes.keys():
                delattr(trainer, name)
            vars(trainer).update(attributes)
            trainer._buffered_inputs[:] = rollouts
            for mode, found in metrics.items():
                trainer._metrics[mode].clear()
                trainer._metrics[mode].update(found)
            random.setstate(others[0])
            np.random.set_state(others[1])


def set_scale(scheduler: LambdaLR, scale: float) -> None:
    """Another peak rate under the same schedule: the one that its optimizer was made with, times `scale`."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [group["initial_lr"] * scale for group in groups]
    now = [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = now
    for group, rate in zip(groups, now, strict=True):
        group["lr"] = rate
