"""What `corral train` does between updates: measure success, log a line of metrics, save a checkpoint, stop on a signal."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from corral.llm.run_trainer import RunTrainer
from corral.llm.self_check import on_any_process
from corral.llm.tokens import thin_rows

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
