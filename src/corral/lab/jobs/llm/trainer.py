"""The trainer of `corral train`: CorralTrainer with a run folder, held-out success, a guard and sampled completions."""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.models.utils import unwrap_model_for_generation

from corral.lab.jobs.llm.problems import Problems, Sampling, generate
from corral.lab.jobs.llm.rewards import Reward
from corral.lab.jobs.llm.settings import Settings
from corral.lab.jobs.llm.turns import MultiTurn
from corral.lab.run.ending import Interruptible
from corral.lab.run.files import disk_sentence, is_disk_full
from corral.lab.run.folder import RunFolder
from corral.lab.run.guard import CollapseLimits, Guard
from corral.lab.run.settings import GuardMode
from corral.lab.run.view import RunView
from corral.lab.tasks import columns_of
from corral.lab.tasks.messages import transcript
from corral.numerics import drop_gradients, gradient_state
from corral.objective import Objective
from corral.objective.metrics import token_kl
from corral.objective.ratio import log_ratio
from corral.tensors import SparseDist, TokenBatch
from corral.trl.api import updates_per_step
from corral.trl.callbacks import on_any_process
from corral.trl.deployed import COMPLETIONS, TOKENS
from corral.trl.processes import base_model, is_sharded, one_autocast, root_weights
from corral.trl.trainer import CorralTrainer
from corral.validate import RewardError, RunError

_COMPLETIONS = 4
"""Completions kept of a step."""

_LONGEST = 1024
"""Tokens kept of a completion."""

_BUDGET = 200_000
"""Tokens kept of a run; beyond it every other step goes."""


@dataclass(frozen=True)
class CompletionSample:
    """The first completions of a batch, copied, so that no memory of the others is held."""

    batch: TokenBatch
    ids: Int[Tensor, "B T"]
    rewards: Float[Tensor, " B"] | None

    @classmethod
    def of(cls, batch: TokenBatch, ids: Tensor, rewards: Tensor | None, count: int = _COMPLETIONS) -> "CompletionSample":
        """Copies, without gradients."""

        def first(x: Any) -> Any:
            if isinstance(x, SparseDist):
                return x.map(first)
            return x if x is None else x[:count].detach().clone()

        fields = {name: first(value) for name, value in vars(batch).items()}
        return cls(TokenBatch(**fields), first(ids), first(rewards))


@torch.no_grad()
def token_rows(
    sample: CompletionSample, objective: Objective, tokenizer: PreTrainedTokenizerBase, **about: Any
) -> list[dict[str, Any]]:
    """Rows for tokens.parquet, one per completion that has unmasked tokens. `about` is the same in all of them.

    The objective is evaluated again on the batch that it had in training; one that returns no `acted` gives no rows.
    """
    batch = sample.batch
    out = objective(batch)
    if out.acted is None:
        return []
    columns = {"kl_before": token_kl(batch), "kl_after": out.kl_after, "log_ratio": log_ratio(batch)}
    advantages = batch.advantages if batch.advantages.ndim == 1 else _first_unmasked(batch.advantages, batch.mask)
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
    """Each token decoded by itself, with the leading blank that SentencePiece drops put back."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = tokenizer.batch_decode([[token] for token in ids])
    return [
        f" {text}" if str(name).startswith("▁") and not text.startswith(" ") else text
        for name, text in zip(names, texts, strict=True)
    ]


def thin_rows(rows: list[dict[str, Any]], more: list[dict[str, Any]], budget: int = _BUDGET) -> list[dict[str, Any]]:
    """`rows` and `more`, thinned to every 2nd, 4th, … step until they have at most `budget` tokens.

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


def _first_unmasked(x: Tensor, mask: Tensor) -> Tensor:
    """The value at the first unmasked token of each row."""
    return x.gather(1, mask.int().argmax(1, keepdim=True)).squeeze(1)


logger = logging.getLogger(__name__)


class GuardCallback(Guard, TrainerCallback):
    """Skips updates with a non-finite loss or gradient, and watches the metrics for a collapse. For any CorralTrainer."""

    def __init__(
        self,
        mode: GuardMode = "warn",
        limits: CollapseLimits | None = None,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        super().__init__(mode, limits, say)
        self.loss_is_finite = True
        """Whether every loss since the last update was finite; RunTrainer writes it."""
        self.zero_gradients = 0
        """Updates in a row, up to the last one, whose gradient was exactly 0."""

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Restore the state after these lines of metrics."""
        for line in lines:
            super().restore([line])
            self.zero_gradients = line.get("zero_gradients", 0)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gradients are clipped by now, which spreads a NaN to all of them. fp16 has a scaler that skips such steps itself."""
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
        """Watch a line of metrics; with mode="stop" a collapse ends the run with a checkpoint."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.mode == "off" or "loss" not in logs:
            return
        self.observe({**logs, "zero_gradients": self.zero_gradients})
        if self.collapsed is not None:
            control.should_save = control.should_training_stop = True


@dataclass(kw_only=True)
class Session(Interruptible):
    """State that the trainer, the callback and `train` share during a run. Only the main process has a folder."""

    settings: Settings
    problems: Problems
    held_out: list[str]
    success: Reward
    """The task's verifier, which decides success on them."""
    folder: RunFolder | None
    guard: GuardCallback
    view: RunView
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl so far."""
    turns: MultiTurn | None = None
    """Who answers the model within a completion."""
    problem_of: dict[str, str] = field(default_factory=dict)
    """With a tool: the problem behind each prompt, as text."""

    def __post_init__(self) -> None:
        self.started = time.monotonic() - (self.lines[-1]["seconds"] if self.lines else 0.0)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line of metrics, to the folder and to the view."""
        self.lines.append(line)
        if self.folder is not None:
            self.folder.append(line)
        self.view.line(line)


def cannot_resume(checkpoint: str, error: Exception) -> RunError:
    """What to say of a checkpoint whose files cannot be loaded, as somebody has changed them and the manifest."""
    reason = (str(error).splitlines() or [""])[0]
    return RunError(
        f"{checkpoint} cannot be resumed from, though it matches its manifest: {type(error).__name__}: {reason} Remove that "
        f"checkpoint, and the run resumes from the one before."
    )


class RunTrainer(CorralTrainer):
    """CorralTrainer that measures held-out success and whose checkpoints appear in a run folder whole or not at all."""

    processing_class: PreTrainedTokenizerBase
    max_completion_length: int
    session: Session
    _sample: tuple[CompletionSample, Objective] | None = None
    """For tokens.parquet: completions of the last update of a step, until its line is written."""
    _drawn: list[tuple[list[int], list[int]]]
    """Prompt and completion of some held-out samples, while success is measured."""

    @property
    def updates_per_step(self) -> int:
        """Updates until a batch of rollouts and an update end together: no rollout is half used there."""
        return updates_per_step(self.args)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.session.guard.loss_is_finite &= bool(loss.isfinite())
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rewards ride along in TRL's buffer of rollouts, for the rows of tokens.parquet."""
        if self.session.settings.environment_factory:  # its `reset` reads the task's columns too
            columns = columns_of(self.session.problems.task, [row["problem"] for row in inputs])
            inputs = [{**{name: column[i] for name, column in columns.items()}, **row} for i, row in enumerate(inputs)]
        output = super()._generate_and_score_completions(inputs)
        assert self._rewards is not None
        rewards, mine = self._rewards, len(output["completion_ids"])
        summed = (rewards * self.reward_weights.to(rewards.device)).nansum(-1)
        output["corral_reward"] = summed[self.accelerator.process_index * mine :][:mine]
        return output

    def sample_tokens(self, inputs: dict[str, Any], batch: TokenBatch, objective: Objective) -> None:
        """Token observer: keep a few completions of the last update of a step, when the policy has moved furthest."""
        left = self.updates_per_step - self.state.global_step % self.updates_per_step
        last = left == 1 or self.args.reuse == "auto"  # any update may turn out to be the last
        if last and self.model.training and self.session.folder is not None:
            self._sample = CompletionSample.of(batch, inputs["completion_ids"], inputs["corral_reward"]), objective

    def newest_tokens(self) -> list[dict[str, Any]]:
        """Rows of tokens.parquet for the step that just ended."""
        sample, self._sample = self._sample, None
        update = self.state.global_step
        about: dict[str, Any] = {"step": update // self.updates_per_step, "update": update}
        return [] if sample is None else token_rows(*sample, self.processing_class, **about)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No model card: config.json has it all, and TRL's card is not written atomically."""

    def _get_output_dir(self, trial: Any) -> str:
        assert self.args.output_dir is not None  # build_trainer has set it
        return os.path.join(self.args.output_dir, ".writing")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random states are loaded when training has begun already."""
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:  # pickle, torch, NumPy and Python have one each for a damaged file
            raise cannot_resume(str(checkpoint), error) from error

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder, update = self.session.folder, self.state.global_step
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if folder is not None:
                # TRL's copy of an adapter, its reference, is made anew on resume; transformers would load nothing but that.
                shutil.rmtree(Path(self._get_output_dir(trial), f"checkpoint-{update}", "ref"), ignore_errors=True)
                folder.write_completions()
                step = update // self.updates_per_step
                folder.publish(f"checkpoint-{update}", step, self.session.settings.keep_checkpoints)
            self.accelerator.wait_for_everyone()
        except Exception as error:  # torch, safetensors and Python have one each for a full disk
            if folder is not None:
                folder.drop_unfinished()
            if isinstance(error, OSError) or is_disk_full(error):
                place = Path(self._get_output_dir(trial)).parent / f"checkpoint-{update}"
                raise RunError(disk_sentence(error, place)) from error
            raise

    def measure(self) -> dict[str, float]:
        """Success on the held-out problems, sampled at temperature 1 and greedy; the random state is left as it was."""
        session, process = self.session, self.accelerator
        mine = session.held_out[process.process_index :: process.num_processes]
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
                    torch.manual_seed(session.settings.seed + process.process_index)  # the same draws at every measurement
                    scores.append(sum(self._scores(model, mine, greedy)))
        finally:
            self.model.train(training)
        total = process.reduce(torch.tensor(scores, device=process.device, dtype=torch.float64), reduction="sum") / len(
            session.held_out
        )
        found = dict(zip(("success", "greedy"), total.tolist(), strict=True))
        drawn, self._drawn = self._drawn[: self._draws_to_certify], []
        return found if self.deployed is None else found | self.deployed.certify_held_out(drawn)

    @property
    def _draws_to_certify(self) -> int:
        """Held-out completions of each process on which the last step's KL is measured: about as many tokens as of its own,
        and as many completions at least."""
        processes = self.accelerator.num_processes
        wanted = max(math.ceil(COMPLETIONS / processes), TOKENS // (processes * self.max_completion_length))
        return min(len(self.session.held_out) // processes, wanted)

    def _scores(self, model: Any, problems: list[str], greedy: bool) -> Iterator[float]:
        """Rewards of one completion per problem. All processes generate equally often: a sharded model needs all of them."""
        session, size = self.session, self.session.settings.eval_batch_size
        most = math.ceil(len(session.held_out) / self.accelerator.num_processes) if is_sharded(self) else len(problems)
        for start in range(0, most, size):
            batch = problems[start : start + size]
            asked = batch or session.held_out[:1]
            texts, paid = self._answers(model, asked, greedy)
            if not batch:
                continue
            scores = paid or session.success(prompts=batch, completions=texts, problem=batch)
            for text, score in zip(texts, scores, strict=True):
                if score is None:
                    name = session.problems.task.name
                    raise RewardError(f"{name}.verify gave None for {text!r}. Success on held-out problems needs a number.")
                yield score

    def _answers(self, model: Any, asked: list[str], greedy: bool) -> tuple[list[str], list[float]]:
        """One completion per problem, in several turns where somebody answers; and what an environment paid for each."""
        turns, problems, longest = self.session.turns, self.session.problems, self.max_completion_length
        if turns is None:
            ids = problems.tokens(asked)
            tokens = generate(model, self.processing_class, ids, longest, greedy=greedy)
            if self.deployed is not None and not greedy and len(self._drawn) < self._draws_to_certify:
                self._drawn += zip(ids, tokens, strict=True)
            return self.processing_class.batch_decode(tokens, skip_special_tokens=True), []
        if is_sharded(self):
            raise RunError("a tool is asked as often as a process needs it, and a sharded model generates in step. Use DDP.")
        found = turns.play(model, problems, asked, Sampling(max_tokens=longest), greedy=greedy)
        return [one.answer for one in found], [one.reward for one in found if one.reward is not None]

    def newest_completions(self, count: int) -> list[dict[str, Any]]:
        """The first completions of the newest rollouts, those of one prompt together."""
        logs, update = self._logs, self.state.global_step
        weights = self.reward_weights.tolist()
        rewards = (_weighted_sum(each, weights) for each in zip(*logs["rewards"].values(), strict=True))
        columns = zip(logs["prompt"], logs["completion"], rewards, logs["advantages"], strict=False)
        return [
            {
                "step": update // self.updates_per_step,
                "update": update,
                "prompt": transcript(prompt),
                "completion": transcript(completion),
                "reward": reward,
                "advantage": advantage,
            }
            for (prompt, completion, reward, advantage), _ in zip(columns, range(count), strict=False)
        ]


def _weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> float:
    """A completion's reward over all functions; NaN where each of them gave none."""
    judged = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if not math.isnan(reward)]
    return sum(judged) if judged else math.nan


_NOT_MEASURED = {"success": None, "greedy": None, "reward": None}
"""Columns that every line has, measured or not."""


class RunCallback(TrainerCallback):
    """Measures, saves and stops at the ends of steps, where no rollout is half used."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer, self.session = trainer, trainer.session

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure success before any update."""
        session = self.session
        if not session.lines:
            measured = self.trainer.measure()
            session.add({"step": 0, "update": 0, "seconds": self._seconds(), **_NOT_MEASURED, **measured})
            session.guard.restore(session.lines)  # a run that only falls has its best success here
        session.patient = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """TRL calls every update a step; a step of ours is over after `updates_per_step` of them."""
        step, within = divmod(state.global_step, self.trainer.updates_per_step)
        if within:
            return
        settings = self.session.settings
        if step % settings.eval_every == 0 or step == settings.steps:
            for name, value in self.trainer.measure().items():
                self.trainer._metrics["train"][name].append(value)
        if step % settings.checkpoint_every == 0 or step == settings.steps:
            control.should_save = True
        if on_any_process(self.session.interrupted):
            self.session.interrupted = control.should_save = control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write a line of metrics per step, which the guard has read by now, and sample completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "loss" not in logs:
            return
        session, seconds = self.session, self._seconds()
        step, last = state.global_step // self.trainer.updates_per_step, session.lines[-1]
        tokens = logs.get("num_tokens", 0) - (last.get("num_tokens") or 0)
        line = {
            "step": step,
            "update": state.global_step,
            "seconds": seconds,
            **_NOT_MEASURED,
            **logs,
        }
        line |= {"tokens_per_second": tokens / max(seconds - last["seconds"], 1e-9), "skipped": session.guard.skipped}
        if session.guard.zero_gradients:
            line["zero_gradients"] = session.guard.zero_gradients
        if session.guard.news:
            line["warnings"], session.guard.news = session.guard.news, []
        session.add(line)
        rows = self.trainer.newest_completions(session.settings.keep_completions)
        if session.folder is not None:
            session.folder.add_completions(rows)
            if session.settings.keep_completions:
                session.folder.tokens_kept = thin_rows(session.folder.tokens_kept, self.trainer.newest_tokens())
        if line["success"] is not None:
            session.view.completions(rows[:3], verified=not session.settings.reward)

    def _seconds(self) -> float:
        return time.monotonic() - self.session.started
