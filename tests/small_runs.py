"""Runs that take a second: a model of a few thousand weights, and a task that even noise can learn.

- `save_model(folder)`: a one-layer model over the embedded tokenizer, as `save_pretrained` writes it.
- `Digits`: the task "write digits"; the reward is the share of digits, so that groups differ from the first step on.
- `small(model, **changes)`: settings of a run on both, three steps of two updates.
- `python small_runs.py MODEL OUT`: the long run that a test kills.

Importing this registers the task.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

# Nothing here is to look for a network; the variables are read when transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from corral.lab.jobs.llm.settings import Settings, resolve
from corral.lab.models.tiny import tiny_tokenizer
from corral.lab.tasks import TASKS
from device import DEVICE


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Write digits."""

    name: ClassVar[str] = "digits"

    prompt_length: int = 3

    @property
    def max_completion_length(self) -> int:
        return 4

    def train_prompts(self, count: int, seed: int) -> list[str]:
        letters = "abcdefghijklmnop"
        return [(letters[(seed + index) % 16] * self.prompt_length) for index in range(count)]

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        return ["q" * self.prompt_length] * count

    def verify(self, prompt: str, completion: str) -> float:
        return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)


TASKS["digits"] = Digits


def save_model(folder: Path, hidden: int = 16) -> str:
    """A model whose first samples are noise."""
    tokenizer = tiny_tokenizer()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def small(model: str, **changes: Any) -> Settings:
    """Eight completions a step, two updates each."""
    base = {
        "model": model,
        "task": "digits",
        "steps": 3,
        "eval_every": 2,
        "eval_size": 8,
        "checkpoint_every": 1,
        "keep_checkpoints": 3,
        "learning_rate": 0.15,  # linearly down to 0, as is the default
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "num_generations": 4,
        "device": DEVICE,
    }
    return resolve([base, changes])


if __name__ == "__main__":
    from corral.lab.jobs.llm.train import train

    torch.set_num_threads(1)
    train(small(sys.argv[1], steps=6, checkpoint_every=2), out=Path(sys.argv[2]))
