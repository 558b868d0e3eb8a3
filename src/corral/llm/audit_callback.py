"""Audit of a running GRPOTrainer: the KL of its updates, token by token. Training is unchanged, bit for bit."""

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from corral.audit.folder import AuditFolder
from corral.audit.measure import measure
from corral.audit.rules import CLIPPING, Rules
from corral.audit.summary import outside_ball, token_kinds
from corral.llm.audit_scoring import choose, logp_at, preserve_state
from corral.llm.models import base_model
from corral.llm.trainer import CorralTrainer
from corral.llm.trl_api import steps_per_batch
from corral.objective import make_objective
from corral.run.files import RunError

logger = logging.getLogger(__name__)

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of TRL's that clip; the others (cispo, sapo, vespo) weigh tokens instead."""


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
    """Have `trainer.train()` write down in the folder `out` how far its updates move the policy. `corral audit OUT` shows it.

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
        alert_above: per cent of a batch's audited tokens that clipping is wrong about (blocked inside the KL ball, or missed
            outside it) above which trackio is alerted; it wants `report_to="trackio"`.
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
    plugin = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise ValueError(
            "audit: the model is sharded (FSDP or ZeRO-3), and one process alone cannot look at it. Use DDP or ZeRO-2."
        )
    callback = AuditCallback(
        trainer, AuditFolder(Path(out)), rules_of(trainer, kl_bound, tv_bound), every, sequences, tokens, seed
    )
    callback.alert_above = alert_above
    if trainer.accelerator.is_main_process:
        may_resume = _has_checkpoint(cast(GRPOConfig, trainer.args)) if resume is None else resume
        callback.folder.check(callback.rules.as_dict(), done=int(may_resume))
        wrapped = callback.wrap_generate(trainer._generate_and_score_completions)
        trainer._generate_and_score_completions = wrapped  # type: ignore[method-assign]  # of this trainer alone
        trainer.add_callback(callback)
    return callback


def _has_checkpoint(args: GRPOConfig) -> bool:
    """Whether there is something that `train()` could resume."""
    folder = args.output_dir
    found = folder is not None and Path(folder).is_dir() and get_last_checkpoint(folder) is not None
    return bool(args.resume_from_checkpoint) or found


def _send_alert(title: str, text: str) -> None:
    """An alert in trackio's run of this process; a failure is a warning, for neither audit nor training depends on it."""
    try:
        trackio = importlib.import_module("trackio")  # optional, and untyped
        trackio.alert(title=title, text=text, level=trackio.AlertLevel.WARN)
    except Exception as error:  # a server, a webhook, a file: whatever it is, the audit goes on
        logger.warning("trackio could not be alerted that %s: %s", title, error)


def rules_of(trainer: GRPOTrainer, kl_bound: float, tv_bound: float) -> Rules:
    """The trainer's own clipping, or PPO's defaults if it does not clip."""
    bounds: dict[str, Any] = {"kl_bound": kl_bound, "tv_bound": tv_bound}
    if isinstance(trainer, CorralTrainer):
        own = trainer.objective.name in CLIPPING
        return Rules(clip=trainer.objective, own=True, **bounds) if own else Rules(**bounds)
    if trainer.loss_type not in _CLIPPED:
        return Rules(**bounds)
    clip: dict[str, Any] = {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high}
    delta = cast(GRPOConfig, trainer.args).delta
    if trainer.importance_sampling_level == "sequence":
        if delta is not None:
            raise ValueError(
                f"audit: delta={delta} together with importance_sampling_level='sequence' is no clipping that corral knows. "
                f"Audit a run with one of them."
            )
        return Rules(clip=make_objective("gspo", **clip), own=True, **bounds)
    return Rules(clip=make_objective("ppo_clip", **clip, dual_clip=delta), own=True, **bounds)


def _model_name(model: Any) -> str:
    """A name on the hub, the last part of a folder's, or the class of a model that came from nowhere."""
    base = base_model(model)
    name = base.config.name_or_path or type(base).__name__  # from_pretrained sets it
    return Path(name).name if Path(name).is_dir() else name


@dataclass(frozen=True, eq=False)
class _AuditedCompletion:
    """The old policy at the audited tokens of one completion."""

    ids: Tensor
    """Prompt and completion without padding, on the model's device."""
    start: int
    """Where the completion begins."""
    positions: Tensor
    """Of the audited tokens in `ids`."""
    old: Tensor
    """log π_old at them [N V], on the CPU."""
    advantages: Tensor
    logp_rollout: Tensor | None
    end: int
    """The trainer's micro-step after which its batch is done."""


class AuditCallback(TrainerCallback):
    """Keeps the old policy at a few completions of a batch, and compares the new one after the batch's last update.

    What is touched: `_generate_and_score_completions` of this one trainer is wrapped, and what it returns is read, never
    changed. The model is called in evaluation mode without gradients; every module's mode and the random state are put back.
    An audit that fails stops itself with a warning, and training goes on.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        folder: AuditFolder,
        rules: Rules,
        every: int | None,
        sequences: int,
        tokens: int,
        seed: int,
    ) -> None:
        self.trainer, self.folder, self.rules = trainer, folder, rules
        self.args = cast(GRPOConfig, trainer.args)  # transformers types them as its own
        self.every, self.sequences, self.tokens, self.seed = every, sequences, tokens, seed
        self.pending: list[_AuditedCompletion] = []
        self.due = 0
        self.alert_above: float | None = None
        self.failed: str | None = None
        """Why the audit stopped before training did."""

    @property
    def model(self) -> nn.Module:
        """What is trained; transformers types it as perhaps None."""
        return cast(nn.Module, self.trainer.model)

    def wrap_generate(self, generate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """TRL's method, whose output is read on the way: every `every` updates the old policy is stored."""

        def generate_and_score(inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output = generate(inputs)
            update = self.trainer.state.global_step
            if self.model.training and self.failed is None and update >= self.due:
                self.due = update + (self.every or max(1, int(self.trainer.state.logging_steps)))
                self._run_safely(lambda: self.pending.extend(self._keep(output)))
            return output

        return generate_and_score

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse a folder that holds something else, before anything is sampled."""
        self.pending, self.due, self.failed = [], state.global_step, None
        self.folder.begin(self._describe(), done=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an update: compare the policies on every batch that is done."""
        done = [kept for kept in self.pending if self.trainer._step >= kept.end]
        self.pending = [kept for kept in self.pending if self.trainer._step < kept.end]
        if done and self.failed is None:
            self._run_safely(lambda: self._record(state.global_step, self._compare(done)))

    def _record(self, update: int, completions: list[dict[str, Any]]) -> None:
        """Write down what was measured, and alert trackio if clipping is wrong about more of it than was allowed."""
        self.folder.add(update, completions)
        if self.alert_above is None:
            return
        columns = {
            name: np.concatenate([one[name].numpy() for one in completions])
            for name in ("clipped", "kl", "logp_new", "logp_old", "advantage")
        }
        kinds = token_kinds(columns, columns["clipped"], outside_ball(columns, self.rules.as_dict(), "kl"))
        share = 100 * float(np.isin(kinds, ("false", "missed")).mean())
        if share > self.alert_above:
            _send_alert(
                f"clipping is wrong about {share:.2g} % of the audited tokens",
                f"After update {update}, {(kinds == 'false').sum()} of {len(kinds)} were blocked inside the KL ball of "
                f"{self.rules.kl_bound:g}, and {(kinds == 'missed').sum()} missed outside it. corral audit {self.folder.path}",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What is still pending never had its last update."""
        self.pending = []
        self.folder.close()

    def _run_safely(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # whatever goes wrong in here must not take the training run with it
            self.failed, self.pending = f"{type(error).__name__}: {error}", []
            logger.warning("The audit in %s stops here, training goes on. %s", self.folder.path, self.failed)

    def _describe(self) -> dict[str, Any]:
        trainer, args = self.trainer, self.args
        return {
            "kind": "trainer",
            "what": "compared with the old policy after the updates on their batch",
            "model": _model_name(self.model),
            "trainer": type(trainer).__name__,
            "loss": trainer.objective.name if isinstance(trainer, CorralTrainer) else trainer.loss_type,
            "rules": self.rules.as_dict(),
            "settings": {
                "every": self.every, "sequences": self.sequences, "tokens": self.tokens, "seed": self.seed,
                "temperature": trainer.temperature, "num_iterations": trainer.num_iterations,
                "steps_per_generation": args.steps_per_generation,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
                "learning_rate": args.learning_rate,
            },
            "command": sys.argv,
        }  # fmt: skip

    def _keep(self, output: dict[str, Any]) -> list[_AuditedCompletion]:
        """The old policy at a few tokens of a few completions of this batch."""
        if "pixel_values" in output:
            raise RunError("completions about images are not audited: the pictures are no tokens.")
        trainer = self.trainer
        prompt, completion = output["prompt_mask"].bool(), output["completion_mask"].bool()
        live = completion & output["tool_mask"].bool() if "tool_mask" in output else completion
        generator = torch.Generator().manual_seed(self.seed + trainer.state.global_step)
        chosen = choose(live.sum(-1).cpu(), self.sequences, self.tokens, generator, whole=self.rules.whole_sequences)
        batch = steps_per_batch(self.args)
        kept = []
        with preserve_state(self.model), trainer.accelerator.autocast():
            for row, ranks in chosen:
                places = live[row].nonzero()[:, 0][ranks.to(live.device)]
                start = int(prompt[row].sum())
                ids = torch.cat([output["prompt_ids"][row][prompt[row]], output["completion_ids"][row][completion[row]]])
                positions = places + start  # completions are padded on the right, so places are those in the sequence
                advantages, rollout = output["advantages"][row], output.get("sampling_per_token_logps")
                kept.append(
                    _AuditedCompletion(
                        ids,
                        start,
                        positions,
                        logp_at(self.model, ids, positions, trainer.temperature).cpu(),
                        (advantages.expand(len(live[row])) if advantages.ndim == 0 else advantages)[places].cpu(),
                        None if rollout is None else rollout[row][places].cpu(),
                        (trainer._step // batch + 1) * batch,
                    )
                )
        return kept

    def _compare(self, done: list[_AuditedCompletion]) -> list[dict[str, Any]]:
        trainer, rows = self.trainer, []
        processor: Any = trainer.processing_class
        tokenizer: Any = processor if isinstance(processor, PreTrainedTokenizerBase) else processor.tokenizer
        with preserve_state(self.model), trainer.accelerator.autocast():
            for kept in done:
                new = logp_at(self.model, kept.ids, kept.positions, trainer.temperature)
                tokens = kept.ids[kept.positions]
                columns = measure(tokens, kept.old, new, kept.advantages, self.rules, kept.logp_rollout)
                rows.append(
                    {
                        **columns,
                        "token": tokens.cpu(),
                        "text": [tokenizer.decode([token]) for token in tokens.tolist()],
                        "position": kept.positions.cpu() - kept.start,
                        "advantage": kept.advantages.float(),
                    }
                )
        return rows
