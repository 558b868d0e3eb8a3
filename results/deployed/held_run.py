"""One training run of the study of deployed networks: the demo's setting, one arm that holds the network, a record per step."""

import contextlib
import math
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from corral.deployed import RateController, restore, retract, snapshot
from corral.lab.jobs.llm.prepare import Parts, prepare
from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.settings import read_recipe, resolve
from corral.trl.trainer import CorralTrainer
from results.deployed.measure import FEW, ROWS, Measure, summarise
from results.deployed.spec import LEVEL, TAILS, Spec, WordSpec

REDO_BELOW, REDOS = 0.5, 2
PROBES = 5
"""One more than the default: arms are to be compared at one distance."""
DEAD = 4
"""Steps in a row without any reward after which nothing can be learned any more."""


class StudyTrainer(CorralTrainer):
    """CorralTrainer whose batches begin and end with the arm's own measures."""

    spec: Spec
    begun: "Begun | None" = None
    stopped = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        held, raw = self.spec.held, None
        if held.ema is not None and self.begun is not None:
            raw = snapshot(self.model)
            restore(self.model, self.begun.ema)
        output = super()._generate_and_score_completions(inputs)
        self.begun = Begun(self, output, raw)
        if raw is not None:
            restore(self.model, raw)
        if held.accept:
            output["advantages"] = output["advantages"].clone()
            output["advantages"][len(output["advantages"]) * 3 // 4 :] = 0
        self.stopped = False
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's; nothing where the batch is over: without gradients the optimizer moves nothing."""
        if self.stopped and self._step % self.args.steps_per_generation:
            self._step += 1
            return torch.zeros((), device=self.args.device)
        return super().training_step(*args, **kwargs)

    def again(self, factor: float) -> None:
        """The batch's updates once more, from where it began, at another rate."""
        assert self.begun is not None
        optimizer = self.optimizer.optimizer
        restore(self.model, self.begun.weights)
        optimizer.state = defaultdict(dict, {p: {k: v.clone() for k, v in s.items()} for p, s in self.begun.moments.items()})
        now = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self.begun.rates, strict=True):
            group["lr"] = rate * factor
        for inputs in self._buffered_inputs:
            with self.compute_loss_context_manager():
                loss = self._compute_loss(self.model, inputs)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate


class Begun:
    """What is kept from the beginning of a batch until its end."""

    def __init__(self, trainer: StudyTrainer, batch: dict[str, Tensor], raw: dict[str, Tensor] | None) -> None:
        rows = len(batch["completion_ids"])
        self.deployed = snapshot(trainer.model)
        self.weights = self.deployed if raw is None else raw
        self.ema = self.deployed
        self.measure = Measure(trainer, batch, slice(0, min(ROWS, rows)))
        held = trainer.spec.held
        self.quarter = Measure(trainer, batch, slice(rows * 3 // 4, rows)) if held.accept else None
        self.quick = Measure(trainer, batch, slice(0, FEW)) if held.stop or held.within else None
        optimizer = trainer.optimizer.optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.moments: dict[Any, Any] = {}
        if held.redo:
            self.moments = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
        self.reward = float(trainer._rewards.mean())


class Hold(TrainerCallback):
    """Acts after a batch's updates: retracts, redoes, controls, measures, and writes a record."""

    def __init__(self, trainer: StudyTrainer, parts: Parts, deadline: float) -> None:
        self.trainer, self.parts, self.deadline = trainer, parts, deadline
        self.spec, self.controller, self.level = trainer.spec, RateController(), dict(LEVEL)
        self.steps: list[dict[str, Any]] = []
        self.success = verifier(parts.problems.task)
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every update."""
        step, within = divmod(state.global_step, args.steps_per_generation)
        trainer, held = self.trainer, self.spec.held
        if trainer.begun.quick is not None and not trainer.stopped:
            sampled = float(trainer.begun.quick.kl()["k3"].mean()) / LEVEL["k3"] / self.spec.aim(step - (not within))
            trainer.stopped = held.stop and bool(within) and sampled > 1
            if held.within and not 0.5 <= sampled <= 2:
                self._scale(1.5 if sampled < 0.5 else 1 / 1.5)
        if within:
            return
        self.steps.append(
            {"step": step, "reward": trainer.begun.reward, "rate": trainer.begun.rates[0], **self._hold(step - 1)}
        )
        last = step == self.spec.steps
        if last or step % self.spec.eval_every == 0:
            self.steps[-1]["success"] = self.evaluate(greedy=False)
        if last:
            self.steps[-1]["greedy"] = self.evaluate(greedy=True)
        self.steps[-1]["seconds"] = time.monotonic() - self.began
        dead = len(self.steps) >= DEAD and not any(line["reward"] for line in self.steps[-DEAD:])
        control.should_training_stop = control.should_training_stop or dead or time.monotonic() > self.deadline

    def _hold(self, step: int) -> dict[str, Any]:
        """Keep of a batch's updates what the arm keeps; how far the network went, and how far it goes."""
        trainer, held, begun, aim = self.trainer, self.spec.held, self.trainer.begun, self.spec.aim(step)
        measure, share, redone = begun.measure, 1.0, 1.0
        if held.ema is not None:
            raw = snapshot(trainer.model)
            begun.ema = {k: torch.lerp(x, begun.deployed[k], held.ema) for k, x in raw.items()}
            restore(trainer.model, begun.ema)
        before = after = summarise(measure.kl())
        by = held.retract or held.control or "mean"
        bound = aim * held.slack * self.level[by]
        for _ in range(REDOS if held.redo or (held.first and step == 0) else 0):
            needed = math.sqrt(bound / after[by]) if math.isfinite(after[by]) else 0.1
            if needed >= REDO_BELOW:
                break
            redone *= needed
            trainer.again(redone)
            after = summarise(measure.kl())
        moved = after
        if held.retract is not None:
            share = self._retract(held.retract, bound, aim * held.slack, first=step == 0)
        if held.share is not None:
            share = held.share
            new = snapshot(trainer.model)
            restore(trainer.model, {k: torch.lerp(begun.weights[k], x, share) for k, x in new.items()})
        gain = None if begun.quarter is None else begun.quarter.gain()
        if gain is not None and not gain > 0:
            share = 0.0
            restore(trainer.model, begun.weights)
        after = after if share == 1.0 else summarise(measure.kl())
        if held.ema is not None:
            restore(trainer.model, raw)
        if held.control is not None:
            self._scale(redone * self.controller.update(moved[held.control], aim * LEVEL[held.control]))
        return {
            "aim": aim,
            "level": self.level[by],
            "share": share,
            "redone": redone,
            "gain": gain,
            "probes": measure.taken,
            "before": before,
            "after": after,
        }

    def _retract(self, by: str, bound: float, mean: float, *, first: bool) -> float:
        """Back until the statistic fits; the share kept. A tail's level is found where the mean fits, in the first step."""
        model, begun = self.trainer.model, self.trainer.begun
        levels = first and by in TAILS and isinstance(self.spec, WordSpec)
        name, source = ("mean", by) if by == "k3" else ("mean" if levels else by, "exact")
        certificate = retract(
            model, begun.weights, lambda: begun.measure.kl()[source],
            bound=mean if levels else bound, statistic=name, max_probes=PROBES,
        )  # fmt: skip
        if levels and certificate.share:
            after = summarise(begun.measure.kl())
            self.level[by] = after[by] / after["mean"]
        return certificate.share

    def _scale(self, factor: float) -> None:
        """Another rate from now on, under the same schedule."""
        scheduler = self.trainer.lr_scheduler
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate may wrap it
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        for group in self.trainer.optimizer.optimizer.param_groups:
            group["lr"] *= factor

    def evaluate(self, *, greedy: bool) -> float:
        """Success of the deployed network on the held-out problems."""
        trainer, begun, problems, scores = self.trainer, self.trainer.begun, self.parts.problems, 0.0
        raw = None
        if self.spec.held.ema is not None:
            raw = snapshot(trainer.model)
            restore(trainer.model, begun.ema)
        with torch.random.fork_rng(devices=[] if self.spec.device == "cpu" else None):
            torch.manual_seed(self.spec.seed)
            for start in range(0, len(self.parts.held_out), 512):
                batch = self.parts.held_out[start : start + 512]
                ids = problems.tokens(batch)
                sampling = Sampling(max_tokens=trainer.max_completion_length, greedy=greedy)
                tokens = generate(trainer.model, problems.tokenizer, ids, sampling)
                texts = problems.tokenizer.batch_decode(tokens, skip_special_tokens=True)
                scores += sum(self.success(prompts=batch, completions=texts, problem=batch))
        if raw is not None:
            restore(trainer.model, raw)
        return scores / len(self.parts.held_out)


def run(spec: Spec, deadline: float) -> dict[str, Any]:
    """Train, and tell how it went; `finished` is False where the deadline came first."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    parts = prepare(resolve([read_recipe(spec.recipe), spec.layer()]))
    set_seed(spec.seed)
    began, cpu = time.monotonic(), time.process_time()
    trainer = StudyTrainer(parts.model, parts.rewards, parts.config, parts.dataset, processing_class=parts.problems.tokenizer)
    trainer.spec = spec
    trainer.remove_callback(PrinterCallback)
    hold = Hold(trainer, parts, deadline)
    trainer.add_callback(hold)
    with contextlib.redirect_stdout(None):
        trainer.train()
    dead = len(hold.steps) < spec.steps and not any(line["reward"] for line in hold.steps[-DEAD:])
    took = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    return {
        "key": spec.key,
        **asdict(spec),
        "finished": dead or len(hold.steps) == spec.steps,
        "dead": dead,
        **took,
        "lines": hold.steps,
    }
