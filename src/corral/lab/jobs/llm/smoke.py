"""Settings for `--smoke`: run any recipe in seconds, with a random byte-level model, two steps, and no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.lab.tasks import text_of

_DATA = Path(__file__).parents[2] / "recipes" / "llm" / "smoke"


TASK_CONFIG: dict[str, dict[str, Any]] = {
    "gsm8k": {"path": str(_DATA / "gsm8k")},
    "words": {"path": str(_DATA / "words")},
    "dapo_math": {"path": str(_DATA / "dapo_math.jsonl"), "held_out": 0.3},
}
"""Settings of tasks for `--smoke`: packaged problems in the format of the data sets that would be downloaded."""


_TRAINING: dict[str, Any] = {
    "model": "smoke",
    "device": "cpu",
    "steps": 2,
    "eval_every": 1,
    "eval_size": 2,
    "eval_batch_size": 2,
    "checkpoint_every": 1,
    "max_completion_length": 8,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,  # two updates per batch of rollouts, so that the trust region can act
    "bf16": False,
    "use_vllm": False,
    "gradient_checkpointing": False,
    # A random model is never right, and groups without differences give no gradient. Success is still the task's own verdict.
    "reward": "corral.lab.jobs.llm.smoke:letters",
}
"""Settings that `--smoke` changes in a recipe; objective, reduction, instruction and verifier stay the same."""


EVALUATION: dict[str, Any] = {
    "model": "smoke",
    "device": "cpu",
    "backend": "transformers",
    "problems": 2,
    "samples": 2,
    "batch_size": 2,
    "max_tokens": 8,
}
"""Settings that `--smoke` changes in `corral eval`."""


def smoke_layers(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that `--smoke` adds to a recipe and a settings file: few short steps, and packaged problems."""
    task = next((layer["task"] for layer in reversed(layers) if "task" in layer), "countdown")
    return [_TRAINING, {"task": task, "task_config": TASK_CONFIG.get(str(task), {})}]


def letters(completions: list[Any], **_: Any) -> list[float]:
    """Reward function that gives the share of letters in a completion, so that a random model gets some reward."""
    texts = [text_of(completion) for completion in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]
