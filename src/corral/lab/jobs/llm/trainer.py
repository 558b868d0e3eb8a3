"""Trainer of `corral train`: CorralTrainer with a run folder, measured success, a guard and sampled completions."""

import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl.models.utils import unwrap_model_for_generation

from corral.lab.jobs.llm.prepare import Parts
from corral.lab.jobs.llm.problems import OneTurn, Sampling
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.run.guard import Guard
from corral.lab.run.life import Recorder
from corral.lab.tasks import columns_of
from corral.lab.tasks.messages import transcript
from corral.numerics import drop_gradients, gradient_state
from corral.objective import Objective
from corral.objective.metrics import token_kl
from corral.objective.ratio import log_ratio
from corral.tensors import Tensors, TokenBatch
from corral.trl.api import updates_per_step
from corral.trl.callbacks import on_any_process
from corral.trl.processes import base_model, is_sharded, one_autocast, root_weights
from corral.trl.trainer import CorralTrainer
from corral.validate import RewardError, RunError, run_errors

_COMPLETIONS = 4
"""Number of completions stored per step in tokens.parquet."""

_LONGEST = 1024
"""Largest number of tokens stored per completion in tokens.parquet."""

_BUDGET = 200_000
"""Largest number of tokens stored per run in tokens.parquet. Beyond this number, every second step is dropped."""


@dataclass(frozen=True, eq=False)
class CompletionSample(Tensors):
    """The first completions of a batch, with their rewards, for tokens.parquet."""

    batch: TokenBatch
    ids: Int[Tensor, "B T"]
    rewards: Float[Tensor, " B"] | None

    @classmethod
    def of(cls, batch: TokenBatch, ids: Tensor, rewards: Tensor | None, count: int = _COMPLETIONS) -> "CompletionSample":
        """Copy the first `count` completions without gradients, so that the memory of the other completions is freed."""
        return cls(batch, ids, rewards).map(lambda x: x[:count].detach().clone())


@torch.no_grad()
def token_rows(
    sample: CompletionSample, objective: Objective, tokenizer: PreTrainedTokenizerBase, **about: Any
) -> list[dict[str, Any]]:
    """Build the rows of tokens.parquet, one per completion with unmasked tokens. `about` holds columns equal in all rows.

    The objective is evaluated again on the batch that it had in training; one that returns no `acted` gives no rows.
    """
    batch = sample.batch
    out = objective(batch)
    if out.acted is None:
        return []
    columns = {"kl_before": token_kl(batch), "kl_after": out.kl_after, "log_ratio": log_ratio(batch)}
    first = batch.mask.int().argmax(1, keepdim=True)  # the first unmasked token of each row
    advantages = batch.advantages if batch.advantages.ndim == 1 else batch.advantages.gather(1, first).squeeze(1)
    rows = []
    for index, mask in enumerate(batch.mask):
        if not bool(mask.any()):
            continue
        advantage = float(advantages[index])
        bounds = objective.config.bounds
        row = {
            **about,
            "reward": None if sample.rewards is None else float(sample.rewards[index]),
            "advantage": advantage,
            "bound": None if bounds is None else bounds[advantage > 0],
            "token": token_texts(tokenizer, sample.ids[index][mask][:_LONGEST].tolist()),
            "action": [objective.config.action if acted else "" for acted in out.acted[index][mask][:_LONGEST].tolist()],
        }
        row |= {name: None if x is None else x[index][mask][:_LONGEST].float().tolist() for name, x in columns.items()}
        rows.append(row)
    return rows


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode each token alone, and restore the leading space that SentencePiece drops."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = tokenizer.batch_decode([[token] for token in ids])
    return [
        f" {text}" if str(name).startswith("▁") and not text.startswith(" ") else text
        for name, text in zip(names, texts, strict=True)
    ]


def thin_rows(rows: list[dict[str, Any]], more: list[dict[str, Any]], budget: int = _BUDGET) -> list[dict[str, Any]]:
    """Join `rows` and `more`, and keep only every 2nd, 4th, … step until at most `budget` tokens remain.

    How far `rows` were thinned shows in their steps, so a resumed run keeps what it would have kept without the break.
    """
    every = 1
    steps = {row["step"] for row in rows}
    while len(steps) > 1 and all(step % (2 * every) == 0 for step in steps):
        every *= 2
    kept = [*rows, *more]
    while True:
        kept = [row for row in kept if row["step"] % every == 0]
        if sum(len(row["token"]) for row in kept) <= budget or len({row["step"] for row in kept}) < 2:
            return kept
        every *= 2


logger = logging.getLogger(__name__)


class GuardCallback(Guard, TrainerCallback):
    """Callback for any CorralTrainer that skips non-finite updates and watches the metrics for a collapse."""

    loss_is_finite = True
    """True if every loss since the last update was finite. RunTrainer writes this field."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skip an update whose loss or gradient is not finite.

        Gradient clipping has spread any NaN by now; fp16's scaler skips such updates by itself.
        """
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
        """Check a line of metrics for a collapse. With mode="stop", a collapse ends the run with a checkpoint."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.mode == "off" or "loss" not in logs:
            return
        self.observe({**logs, "zero_gradients": self.zero_gradients})
        if self.collapsed is not None:
            control.should_save = control.should_training_stop = True


def cannot_resume(checkpoint: str, error: Exception) -> RunError:
    """Make the error for a checkpoint that matches its manifest but cannot be loaded, because both were changed."""
    reason = (str(error).splitlines() or [""])[0]
    return RunError(
        f"{checkpoint} cannot be resumed from, though it matches its manifest: {type(error).__name__}: {reason} Remove that "
        f"checkpoint, and the run resumes from the one before."
    )


_NOT_MEASURED = {"success": None, "greedy": None, "reward": None}
"""Columns present in every line of metrics, even without a measurement of success."""


class RunTrainer(CorralTrainer, TrainerCallback):
    """CorralTrainer that measures success on held-out problems and writes checkpoints into a run folder atomically."""

    processing_class: PreTrainedTokenizerBase
    max_completion_length: int

    def __init__(self, parts: Parts, record: Recorder, guard: GuardCallback) -> None:
        self.parts, self.record, self.guard = parts, record, guard
        self.updates_per_step = updates_per_step(parts.config)
        """Number of updates per corral step, the smallest after which a batch of rollouts and an update end together."""
        self._sample: tuple[CompletionSample, Objective] | None = None
        """Completions of a step's last update, kept until the step's metrics and its rows of tokens.parquet are written."""
        self._drawn: list[tuple[list[int], list[int]]] = []
        """Prompts and completions of a few held-out samples, collected while success is measured."""
        parts.config.output_dir = str(record.path / "checkpoints")
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of several turns; tests run every release
        set_seed(parts.settings.seed)  # TRL does that too, but an adapter is drawn before
        log = logging.getLogger("corral.trl.trainer")
        level = log.level
        log.setLevel(logging.ERROR)  # the banner says the same, in its place
        try:
            with run_errors((ValueError, ImportError)):  # what only TRL, peft and the model together show
                super().__init__(
                    parts.model,
                    parts.rewards,
                    parts.config,
                    parts.dataset,
                    processing_class=parts.problems.tokenizer,
                    peft_config=parts.adapter,
                    teacher=parts.teacher,
                    **parts.turns.trainer_arguments(),
                )
        finally:
            log.setLevel(level)
        self.token_observer, check = self.sample_tokens, self.self_check
        check.say = guard.tell
        earlier = [text for line in record.lines for text in line.get("warnings", ())]
        off = guard.mode == "off"
        check.drift_reported = off or any("before any update" in text for text in earlier)
        check.tail_reported = off or any("tr/hidden_kl_max" in text for text in earlier)
        self.remove_callback(PrinterCallback)
        self.add_callback(guard)
        self.add_callback(self)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.guard.loss_is_finite &= bool(loss.isfinite())
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate completions, and store their rewards in TRL's rollout buffer for tokens.parquet."""
        if self.parts.settings.environment_factory:  # its `reset` reads the task's columns too
            columns = columns_of(self.parts.problems.task, [row["problem"] for row in inputs])
            inputs = [{**{name: column[i] for name, column in columns.items()}, **row} for i, row in enumerate(inputs)]
        output = super()._generate_and_score_completions(inputs)
        assert self._rewards is not None
        rewards, mine = self._rewards, len(output["completion_ids"])
        summed = (rewards * self.reward_weights.to(rewards.device)).nansum(-1)
        output["corral_reward"] = summed[self.accelerator.process_index * mine :][:mine]
        return output

    def sample_tokens(self, inputs: dict[str, Any], batch: TokenBatch, objective: Objective) -> None:
        """Store a few completions of a step's last update, when the policy has moved furthest. The trainer calls it."""
        left = self.updates_per_step - self.state.global_step % self.updates_per_step
        last = left == 1 or self.args.reuse == "auto"  # any update may turn out to be the last
        if last and self.model.training and self.record.folder is not None:
            self._sample = CompletionSample.of(batch, inputs["completion_ids"], inputs["corral_reward"]), objective

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: config.json has this information, and TRL's file would not be written atomically."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.record.path / "checkpoints" / ".writing")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load a checkpoint's random states, or raise RunError. TRL calls this method only after training has begun."""
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:  # pickle, torch, NumPy and Python have one each for a damaged file
            raise cannot_resume(str(checkpoint), error) from error

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder, update = self.record.folder, self.state.global_step
        with self.record.saving(self.record.path / "checkpoints" / f"checkpoint-{update}"):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if folder is not None:
                # TRL's copy of an adapter, its reference, is made anew on resume; transformers would load nothing but that.
                shutil.rmtree(Path(self._get_output_dir(trial), f"checkpoint-{update}", "ref"), ignore_errors=True)
                folder.write_completions()
                step = update // self.updates_per_step
                folder.publish(f"checkpoint-{update}", step, self.parts.settings.keep_checkpoints)
            self.accelerator.wait_for_everyone()

    def measure(self) -> dict[str, float]:
        """Measure success on held-out problems, with samples at temperature 1 and with greedy decoding.

        The random state is restored afterwards.
        """
        parts, process = self.parts, self.accelerator
        mine = parts.held_out[process.process_index :: process.num_processes]
        devices = [process.device] if process.device.type == "cuda" else []
        training, scores, self._drawn = self.model.training, [], []
        self.model.eval()
        try:
            with (
                torch.random.fork_rng(devices=devices),
                unwrap_model_for_generation(self.model_wrapped, process) as unwrapped,
                root_weights(self.model_wrapped),
                one_autocast(self),
            ):
                model = base_model(unwrapped)  # an adapter sits inside the layers of its base
                for greedy in (False, True):
                    torch.manual_seed(parts.settings.seed + process.process_index)  # the same draws at every measurement
                    scores.append(sum(self._scores(model, mine, greedy)))
        finally:
            self.model.train(training)
        total = process.reduce(torch.tensor(scores, device=process.device, dtype=torch.float64), reduction="sum")
        found = dict(zip(("success", "greedy"), (total / len(parts.held_out)).tolist(), strict=True))
        drawn, self._drawn = self._drawn, []
        if self.deployed is None:
            return found
        count = self.deployed.probe.count_held_out(len(parts.held_out), self.max_completion_length)
        return found | self.deployed.certify_held_out(drawn[:count])

    def _scores(self, model: Any, problems: list[str], greedy: bool) -> Iterator[float]:
        """Rewards of one completion per problem. All processes generate equally often, since a sharded model requires it."""
        parts, size, verify = self.parts, self.parts.settings.eval_batch_size, verifier(self.parts.problems.task)
        if is_sharded(self) and type(parts.turns) is not OneTurn:
            raise RunError("a tool is asked as often as a process needs it, and a sharded model generates in step. Use DDP.")
        sampling = Sampling(max_tokens=self.max_completion_length, greedy=greedy)
        most = math.ceil(len(parts.held_out) / self.accelerator.num_processes) if is_sharded(self) else len(problems)
        for start in range(0, most, size):
            batch = problems[start : start + size]
            found = parts.turns.play(model, parts.problems, batch or parts.held_out[:1], sampling)
            if self.deployed is not None and type(parts.turns) is OneTurn and not greedy:
                self._drawn += [(one.prompt, one.tokens) for one in found]
            if not batch:
                continue
            texts, paid = [one.answer for one in found], [one.reward for one in found if one.reward is not None]
            scores = paid or verify(prompts=batch, completions=texts, problem=batch)
            for text, score in zip(texts, scores, strict=True):
                if score is None:
                    name = parts.problems.task.name
                    raise RewardError(f"{name}.verify gave None for {text!r}. Success on held-out problems needs a number.")
                yield score

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure success on held-out problems before the first update."""
        if not self.record.lines:
            self.record.add({"step": 0, "update": 0, **_NOT_MEASURED, **self.measure()})
            self.guard.restore(self.record.lines)  # a run that only falls has its best success here
        self.record.patient = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure success and save a checkpoint, if due, at the end of a corral step, which has `updates_per_step` updates.

        TRL calls every update a step.
        """
        step, within = divmod(state.global_step, self.updates_per_step)
        if within:
            return
        if self.record.is_due(step, self.parts.settings.eval_every):
            for name, value in self.measure().items():
                self._metrics["train"][name].append(value)
        if self.record.is_due(step, self.parts.settings.checkpoint_every):
            control.should_save = True
        if on_any_process(self.record.interrupted):
            self.record.interrupted = control.should_save = control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write one line of metrics per step, after the guard has checked the metrics, and store some completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "loss" not in logs:
            return
        zero, keep, drawn = self.guard.zero_gradients, self.parts.settings.keep_completions, self._logs
        now: dict[str, Any] = {"step": state.global_step // self.updates_per_step, "update": state.global_step}
        line = {**now, **_NOT_MEASURED, **logs}
        self.record.add(line | ({"zero_gradients": zero} if zero else {}))
        rows, weights = list[dict[str, Any]](), self.reward_weights.tolist()
        every = zip(*drawn["rewards"].values(), strict=True)
        newest = zip(drawn["prompt"], drawn["completion"], every, drawn["advantages"], strict=False)
        for prompt, completion, rewards, advantage in islice(newest, keep):  # the newest rollouts, grouped by prompt
            judged = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if not math.isnan(reward)]
            reward = sum(judged) if judged else math.nan  # each function gave none
            texts = {"prompt": transcript(prompt), "completion": transcript(completion)}
            rows.append({**now, **texts, "reward": reward, "advantage": advantage})
        folder = self.record.folder
        if folder is not None:
            folder.completions_kept += rows
            if keep:
                sample, self._sample = self._sample, None
                more = [] if sample is None else token_rows(*sample, self.processing_class, **now)
                folder.tokens_kept = thin_rows(folder.tokens_kept, more)
        if line["success"] is not None:
            self.record.view.completions(rows[:3], verified=not self.parts.settings.reward)
