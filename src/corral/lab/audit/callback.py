"""Audit of a running GRPOTrainer: the true KL of updates at sampled tokens. Training stays the same, bit for bit."""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from corral.deployed.state import preserve_state
from corral.lab.audit.folder import AuditFolder, MicroBatch
from corral.lab.audit.rules import CLIPPING, Rules
from corral.lab.audit.scoring import AuditedCompletion, choose_completions, logp_at
from corral.lab.audit.tokens import kinds
from corral.objective import Objective, make_objective
from corral.tensors import TokenBatch
from corral.trl.api import steps_per_batch
from corral.trl.processes import base_model
from corral.trl.trainer import CorralTrainer
from corral.validate import RunError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Values of TRL's `loss_type` whose loss clips probability ratios. TRL's losses cispo, sapo and vespo weigh tokens instead."""

_CLIP_RATIO = "clip_ratio/region_mean"
"""Name of TRL's metric for the share of tokens, or of completions, that are clipped in an update."""


def audit(
    trainer: GRPOTrainer,
    out: Path | str = "audit",
    *,
    every: int | None = None,
    sequences: int = 8,
    tokens: int = 512,
    kl_bound: float = 0.05,
    tv_bound: float = 0.2,
    seed: int = 0,
    resume: bool | None = None,
    alert_above: float | None = None,
) -> "AuditCallback":
    """Record in folder `out` how far updates of `trainer.train()` move the policy. `corral audit OUT` shows the result.

    Args:
        trainer: a GRPOTrainer, stock or corral's, before `train()`.
        out: a folder; it must not hold another audit, unless training is resumed.
        every: updates between audited batches of rollouts; None: `logging_steps`.
        sequences, tokens: completions of an audited batch, and tokens of them all together, that are looked at. A token
            costs 4 bytes per word of the vocabulary on the CPU until its batch is done, the batch two passes per completion.
        kl_bound, tv_bound: radii of the balls that tokens are held against.
        seed: random seed of the choice of completions and tokens.
        resume: whether `out` may hold the audit of the run that training resumes; None: if there is a checkpoint to resume
            from, in `output_dir` or as `resume_from_checkpoint`.
        alert_above: per cent of a batch's audited tokens that clipping would be wrong about on one more update (blocked inside
            the KL ball, or missed outside it) above which trackio is alerted; it wants `report_to="trackio"`.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise ValueError(f"audit: takes a GRPOTrainer; got {type(trainer).__name__}.")
    for name, value in (("every", 1 if every is None else every), ("sequences", sequences), ("tokens", tokens)):
        if type(value) is not int or value < 1:
            raise ValueError(f"audit: `{name}` is a number, 1 or more; got {value!r}.")
    if alert_above is not None and (not 0 <= alert_above <= 100 or "trackio" not in (trainer.args.report_to or ())):
        raise ValueError(
            f"audit: `alert_above` is a percentage from 0 to 100, of a run with report_to='trackio'; got {alert_above!r} and "
            f"report_to={trainer.args.report_to!r}."
        )
    callback = AuditCallback(
        trainer=trainer, folder=AuditFolder(Path(out)), rules=rules_of(trainer, kl_bound, tv_bound), every=every,
        sequences=sequences, tokens=tokens, seed=seed, alert_above=alert_above, sharded=_is_sharded(trainer),
    )  # fmt: skip
    if callback.is_main:
        if resume is None:  # if there is a checkpoint to resume from
            args, saved = callback.args, callback.args.output_dir
            found = saved is not None and Path(saved).is_dir() and get_last_checkpoint(saved) is not None
            resume = bool(args.resume_from_checkpoint) or found
        callback.folder.check(callback.rules.as_dict(), done=int(resume))
    if callback.is_main or callback.sharded:
        callback.watch_batches()
        if callback.rules.own and callback.is_main:
            callback.watch_updates()
        trainer.add_callback(callback)
    return callback


def _is_sharded(trainer: GRPOTrainer) -> bool:
    """Return True if FSDP2 shards the model, so that all processes join forward passes. Other sharding raises ValueError."""
    state = trainer.accelerator.state
    zero3 = state.deepspeed_plugin is not None and state.deepspeed_plugin.zero_stage == 3
    if zero3 or (trainer.is_fsdp_enabled and state.fsdp_plugin.fsdp_version != 2):
        raise ValueError(
            f"audit: a model sharded by {'ZeRO-3' if zero3 else 'FSDP 1'} is not audited, as that was never tested. Use FSDP2 "
            f"(fsdp_version: 2), DDP or ZeRO-2."
        )
    return trainer.is_fsdp_enabled


def _send_alert(title: str, text: str) -> None:
    """Send an alert to the experiment tracker trackio. A failure only logs a warning."""
    try:
        trackio = importlib.import_module("trackio")  # optional, and untyped
        trackio.alert(title=title, text=text, level=trackio.AlertLevel.WARN)
    except Exception as error:  # a server, a webhook, a file: whatever it is, the audit goes on
        logger.warning("trackio could not be alerted that %s: %s", title, error)


def rules_of(trainer: GRPOTrainer, kl_bound: float, tv_bound: float) -> Rules:
    """Return the rules to audit a trainer by: its own clipping, or PPO's default clip range if the trainer does not clip."""
    own: Objective | None = None
    # TRL takes any epsilon; a ratio is never below 0, so from 1 on they all clip nothing from below.
    clip: dict[str, Any] = {"clip_low": min(trainer.epsilon_low, 1.0), "clip_high": trainer.epsilon_high}
    delta = cast(GRPOConfig, trainer.args).delta
    if isinstance(trainer, CorralTrainer):
        own = trainer.objective if trainer.objective.name in CLIPPING else None
    elif trainer.loss_type in _CLIPPED and trainer.importance_sampling_level == "sequence":
        if delta is not None:
            raise ValueError(
                f"audit: delta={delta} together with importance_sampling_level='sequence' is no clipping that corral knows. "
                f"Audit a run with one of them."
            )
        own = make_objective("gspo", **clip)
    elif trainer.loss_type in _CLIPPED:
        own = make_objective("ppo_clip", **clip, dual_clip=delta)
    return Rules(clip=own or make_objective("ppo_clip"), own=own is not None, kl_bound=kl_bound, tv_bound=tv_bound)


def _token_batch(inputs: dict[str, Any], logp: Tensor) -> TokenBatch:
    """Build a TokenBatch from TRL's micro-batch and new log-probs. The new log-probs count as old ones if TRL stored none."""
    mask = inputs["completion_mask"].bool()
    mask = mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
    old = inputs.get("old_per_token_logps", logp)
    return TokenBatch(logp.float(), old.float(), inputs["advantages"].float(), mask)


@dataclass(eq=False, kw_only=True)
class AuditCallback(TrainerCallback):
    """Callback that stores the old policy's distributions at some tokens of a batch, and compares the policy after the updates.

    In between it counts, at every update and on all of its tokens, what the run's own clipping does.

    What is touched: `_generate_and_score_completions` of this one trainer is wrapped, and where the run clips so are its loss
    and its scoring pass, or a CorralTrainer's `token_observer`; what they return is read, never changed. The model is called in
    evaluation mode without gradients; every module's mode and the random state are put back. An audit
    that fails stops itself with a warning, and training goes on.
    """

    trainer: GRPOTrainer
    folder: AuditFolder
    rules: Rules
    every: int | None
    sequences: int
    tokens: int
    seed: int
    alert_above: float | None
    sharded: bool
    """True if FSDP2 shards the model. Then all processes join each forward pass, but only the main process measures."""
    pending: list[tuple[AuditedCompletion, Tensor]] = field(default_factory=list)
    """Audited completions of batches still in training, with the old policy's log-probs [N V] at N tokens, on the CPU."""
    made: list[MicroBatch] = field(default_factory=list)
    """Counts of trained and clipped tokens of each micro-batch that are not yet written to a file."""
    due: int = 0
    """Smallest number of an update at which a new batch of rollouts is audited."""
    failed: str | None = None
    """Message of the error that stopped the audit while training went on; None if there was no error."""
    ended: bool = False
    """True once the audit has stopped in every process, after an error."""

    @property
    def args(self) -> GRPOConfig:
        """The trainer's arguments as a GRPOConfig, because transformers types them as their base class."""
        return cast(GRPOConfig, self.trainer.args)

    @property
    def is_main(self) -> bool:
        """True in the main process, which measures and writes the audit."""
        return self.trainer.accelerator.is_main_process

    @property
    def model(self) -> nn.Module:
        """The trained model as an nn.Module, because transformers types it as optional."""
        return cast(nn.Module, self.trainer.model)

    def watch_batches(self) -> None:
        """Wrap TRL's generation, so that every `every` updates the old policy's distributions at some new tokens are stored."""
        generate = self.trainer._generate_and_score_completions

        def generate_and_score(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output = generate(inputs)
            update = self.trainer.state.global_step
            if self.model.training and update >= self.due and not self.ended:
                self.due = update + (self.every or max(1, int(self.trainer.state.logging_steps)))
                self._begin_batch(output)
            return output

        self.trainer._generate_and_score_completions = generate_and_score  # type: ignore[method-assign]  # of this one alone

    def watch_updates(self) -> None:
        """Hook into the trainer's loss to count the clipped tokens of every micro-batch.

        The log-probs are TRL's own, or those in the input of a CorralTrainer's objective.
        """
        trainer = self.trainer
        if isinstance(trainer, CorralTrainer):
            before = trainer.token_observer

            def observe(inputs: dict[str, Any], batch: TokenBatch, objective: Objective) -> None:
                if before is not None:
                    before(inputs, batch, objective)
                if self.model.training:
                    self._run_safely(lambda: self._count(batch, None))

            trainer.token_observer = observe
            return
        compute, score = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
        scored: list[Tensor] | None = None

        def score_and_keep(*args: Any, **kwargs: Any) -> Any:
            result = score(*args, **kwargs)
            if scored is not None:
                scored.append(result[0].detach())
            return result

        def compute_and_count(model: Any, inputs: dict[str, Any]) -> Tensor:
            nonlocal scored
            logged, scored = trainer._metrics["train"], []
            before = len(logged.get(_CLIP_RATIO, []))
            try:
                loss = compute(model, inputs)
                if self.model.training and scored:
                    logp, theirs = scored[0], logged.get(_CLIP_RATIO, [])
                    own = theirs[-1] if len(theirs) > before else None
                    self._run_safely(lambda: self._count(_token_batch(inputs, logp), own))
            finally:
                scored = None
            return loss

        trainer._get_per_token_logps_and_entropies = score_and_keep  # type: ignore[method-assign]  # of this trainer alone
        trainer._compute_loss = compute_and_count  # type: ignore[method-assign]  # likewise

    @torch.no_grad()
    def _count(self, batch: TokenBatch, trl: float | None) -> None:
        """Count the tokens of a micro-batch whose gradient the run's clipping sets to zero, before the optimizer's update."""
        if self.failed is not None:
            return
        tokens, clipped = int(batch.mask.sum()), 0
        if tokens:
            acted = self.rules.clip(batch).acted
            assert acted is not None, "every clipping objective says where it acted"
            clipped = int(acted.sum())
        self.made.append(MicroBatch(self.trainer.state.global_step + 1, tokens, clipped, trl))

    def _write_made(self, update: int) -> None:
        """Write the counts of clipped tokens of all micro-batches up to update number `update`."""
        if self.made and self.failed is None:
            self.folder.add_updates(update, self.made)
            self.made = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the audit's folder before rollouts are sampled. Raises RunError if the folder has other content."""
        self.pending, self.made, self.due, self.failed, self.ended = [], [], state.global_step, None, False
        if self.is_main:
            self.folder.begin(self._describe(), done=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare old and new policy on the audited tokens of each batch of rollouts that has had its last update."""
        done = [one for one in self.pending if self.trainer._step >= one[0].end]
        self.pending = [one for one in self.pending if self.trainer._step < one[0].end]
        if not done:
            return
        if (rows := self._run_safely(lambda: self._compare(done))) and self.failed is None:
            self._run_safely(lambda: self._record(state.global_step, rows))

    def _record(self, update: int, completions: list[pd.DataFrame]) -> None:
        """Write the audited tokens, and alert trackio if clipping would be wrong about more than `alert_above` % of tokens."""
        self._write_made(update)
        self.folder.add(update, completions)
        if self.alert_above is None:
            return
        rows = pd.concat(completions)
        rows["outward"] = (rows["logp_new"] - rows["logp_old"]) * rows["advantage"] > 0
        found = kinds(rows, "kl", self.rules.kl_bound)
        false, missed = (int((found == kind).sum()) for kind in ("false", "missed"))
        share = 100 * (false + missed) / len(rows)
        if share > self.alert_above:
            _send_alert(
                f"clipping would be wrong about {share:.2g} % of the audited tokens",
                f"On one more update after update {update}, {false} of {len(rows)} would be blocked inside the KL ball of "
                f"{self.rules.kl_bound:g}, and {missed} missed outside it. corral audit {self.folder.path}",
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the counts of clipped tokens when a checkpoint is saved, so that a resumed run does not count updates twice."""
        self._run_safely(lambda: self._write_made(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the remaining counts of clipped tokens, drop completions of unfinished batches, and close the folder."""
        self.pending = []
        self._run_safely(lambda: self._write_made(state.global_step))
        if self.is_main:
            self.folder.close()

    def _run_safely(self, work: Callable[[], T]) -> T | None:
        """Call `work` and return its result. An exception stops the audit but not training, and None is returned."""
        try:
            return work()
        except Exception as error:  # whatever goes wrong in here must not take the training run with it
            self.failed, self.ended = f"{type(error).__name__}: {error}", not self.sharded
            if not self.sharded:
                self.pending = []  # else other processes still wait for this one's share of their passes
            logger.warning("The audit in %s stops here, training goes on. %s", self.folder.path, self.failed)
            return None

    def _describe(self) -> dict[str, Any]:
        trainer, args, base = self.trainer, self.args, base_model(self.model)
        name = base.config.name_or_path or type(base).__name__  # from_pretrained sets it
        # With one update per batch each loss is computed under the sampling policy: all ratios are 1, and no clip acts.
        one_update = args.gradient_accumulation_steps % steps_per_batch(args) == 0
        return {
            "kind": "trainer",
            "what": "compared with the old policy after the updates on their batch",
            "model": Path(name).name if Path(name).is_dir() else name,
            "trainer": type(trainer).__name__,
            "loss": trainer.objective.name if isinstance(trainer, CorralTrainer) else trainer.loss_type,
            "rules": self.rules.as_dict(),
            "one_update_per_batch": trainer.on_policy if isinstance(trainer, CorralTrainer) else one_update,
            "settings": {
                "every": self.every, "sequences": self.sequences, "tokens": self.tokens, "seed": self.seed,
                "temperature": trainer.temperature, "num_iterations": trainer.num_iterations,
                "steps_per_generation": args.steps_per_generation,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
                "learning_rate": args.learning_rate,
            },
        }  # fmt: skip

    def _begin_batch(self, output: dict[str, Any]) -> None:
        """Store the old policy's distributions at some tokens of a new batch. With sharded weights, all processes take part."""
        chosen = self._run_safely(lambda: self._choose(output)) if self.is_main and self.failed is None else None
        if self.sharded:
            (chosen,) = broadcast_object_list([chosen])
            if chosen is None:
                self.failed, self.ended = self.failed or "the main process has stopped it", True
        if chosen is not None:
            self.pending += self._run_safely(partial(self._keep, chosen)) or []

    def _choose(self, output: dict[str, Any]) -> list[AuditedCompletion]:
        """Draw up to `tokens` tokens of up to `sequences` completions from this process's share of a batch of rollouts."""
        if "pixel_values" in output:
            raise RunError("completions about images are not audited: the pictures are no tokens.")
        generator = torch.Generator().manual_seed(self.seed + self.trainer.state.global_step)
        batch = steps_per_batch(self.args)
        end = (self.trainer._step // batch + 1) * batch
        return choose_completions(output, self.sequences, self.tokens, generator, end, whole=self.rules.whole_sequences)

    def _keep(self, chosen: list[AuditedCompletion]) -> list[tuple[AuditedCompletion, Tensor]]:
        """Compute the current policy's log-probs at the audited tokens. Only the main process stores these log-probs."""
        with self._scoring():
            return [(kept, self._logp(kept)[: None if self.is_main else 0].cpu()) for kept in chosen]

    def _compare(self, done: list[tuple[AuditedCompletion, Tensor]]) -> list[pd.DataFrame]:
        """Compare the current policy with the stored old policy in the main process. Other processes join forward passes."""
        rows: list[pd.DataFrame] = []
        processor: Any = self.trainer.processing_class
        tokenizer = processor if isinstance(processor, PreTrainedTokenizerBase) else processor.tokenizer
        with self._scoring():
            for kept, old in done:
                new = self._logp(kept)
                if self.is_main and self.failed is None:
                    row = self._run_safely(partial(kept.measure, old, new, self.rules, tokenizer))
                    rows += [] if row is None else [row]
        return rows

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Context for forward passes that restores the model's state afterwards, and releases weights gathered by FSDP2."""
        with preserve_state(self.model), self.trainer.accelerator.autocast():
            yield
        if self.sharded:
            for part in self.model.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _logp(self, kept: AuditedCompletion) -> Tensor:
        """Compute the current policy's log-probs [N V] over the vocabulary at the N audited tokens of a completion."""
        device = self.trainer.accelerator.device
        return logp_at(self.model, kept.ids.to(device), kept.positions.to(device), self.trainer.temperature)
