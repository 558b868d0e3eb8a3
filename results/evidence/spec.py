"""One run of the evidence: the demo's setting with one arm, a model to start from, and a number of updates per batch.

A plain run has the key that the study of deployed networks gives to the same run, so that it counts for both.
"""

from dataclasses import dataclass
from typing import Any

from corral.lab.jobs.llm.settings import read_recipe
from corral.objective import ObjectiveFunction
from corral.objective.config import ObjectiveConfig
from results.deployed.spec import Shipped
from results.evidence.rare_clip import RareClipConfig, rare_clip

OWN_OBJECTIVES: dict[str, tuple[ObjectiveFunction, type[ObjectiveConfig]]] = {"rare_clip": (rare_clip, RareClipConfig)}
"""Objectives that corral does not have; results/study.py registers them in every process that trains."""

PRETRAINED = read_recipe("evidence-b")
"""Settings of a pretrained model's runs."""
BASES: dict[str, dict[str, Any]] = {
    "smollm2": {"model": "runs/pretrained/smollm2"},
    "gemma": {"model": "runs/pretrained/gemma-{start}", "instruction": "{problem}\nAnswer:"},
    "books": {
        "model": "runs/pretrained/books-{start}",
        "task": "words",
        "task_config": {"path": "runs/words", "part": "rl"},
        "eval_size": 1000,
    },
    "gsm8k": {
        "model": "runs/pretrained/smollm2",
        "task": "gsm8k",
        "task_config": {"path": "runs/gsm8k"},
        "instruction": "{problem}\nThink in one short line, and put the final number into \\boxed{}.",
        "max_completion_length": 96,
        "eval_size": 128,
    },
    "qwen": {
        "model": "runs/pretrained/qwen", "task_config": {"path": "runs/gsm8k"}, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 2, "steps_per_generation": 16, "max_completion_length": 400, "use_vllm": True,
        "gradient_checkpointing": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25, "eval_size": 128,
    },
}  # fmt: skip
"""Pretrained models and what they are asked: SmolLM2 as it comes, Gemma from a supervised warm-up of each seed's own, SmolLM2
on word problems from books (runs/words has asdiv, mawps and svamp), warmed up on the other half of them, and, as it comes, on
GSM8K. starts.py makes the folders. Qwen2.5-Coder-0.5B-Instruct is asked GSM8K with vLLM."""


def problems_of(base: str) -> int:
    """Held-out problems at a measurement, where a plan does not say otherwise."""
    return int(BASES[base].get("eval_size", PRETRAINED["eval_size"]))


CODE = {**read_recipe("evidence-e"), "task_config": {"path": "runs/code-starts/problems", "workers": 1}}
"""Settings of runs that write programs; starts.py makes the problems and the starts."""
COMPLETIONS = 512
"""Of a batch of rollouts, as the demo has it."""

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "top-K": {"objective_config": {"estimator": "topk"}},
    "unprojected": {"objective_config": {"gradient": "unprojected"}},
    "constant dual": {"objective_config": {"gradient": "constant_dual"}},
    "no regression": {"objective_config": {"regression": 0.0}},
    "ε=.01": {"objective_config": {"bound": 0.01}},
    "ε=.2": {"objective_config": {"bound": 0.2}},
    "α=.1": {"objective_config": {"regression": 0.1}},
    "α=.3": {"objective_config": {"regression": 0.3}},
    "α=3": {"objective_config": {"regression": 3.0}},
    "α=10": {"objective_config": {"regression": 10.0}},
    "δ=.1": {"objective_config": {"bound": 0.1}},
    "δ=.15": {"objective_config": {"bound": 0.15}},
    "below .1": {"objective_config": {"rare": 0.1}},
    "below .01": {"objective_config": {"rare": 0.01}},
    "rloo": {"advantage": "rloo"},
    "no std": {"advantage": "dr_grpo"},
    "reinforce++": {"advantage": "reinforce++"},
    "union": {"support": "union"},
    "fill": {"objective_config": {"tail": "fill", "vocab_size": 100}},
    "published": {"objective_config": {"tail": "fill", "vocab_size": 100}, "support": "union", "loss_type": "dapo"},
    "K=4": {"support_size": 4, "support_mass": 1.0},
    "K=16": {"support_size": 16, "support_mass": 1.0},
    "mass .9": {"support_mass": 0.9},
    "K=4, mass .9": {"support_size": 4, "support_mass": 0.9},
    "token mean": {"loss_type": "dapo"},
    "token sum, no std": {"loss_type": "luspo", "advantage": "dr_grpo"},
}
"""What an arm changes in its objective and the trainer, by name."""


@dataclass(frozen=True, kw_only=True)
class Run(Shipped):
    """A run of `corral train --recipe demo` with an arm's settings."""

    variant: str = ""
    """A name of VARIANTS."""
    model: str = "tiny"
    """The embedded model, or a folder with another warm start."""
    updates: int = 8
    """Of each pass over a batch; with 1 and one pass every objective is the same algorithm."""
    sampler: str = ""
    """Precision of the sampler's weights: float32, bf16 or fp8, with log-probs of its own; "" is the trainer itself."""
    anchor: str = "auto"
    """`rollout` (what the sampler reported) or `old` (what the trainer recomputes)."""
    eval_size: int = 1024

    @property
    def key(self) -> str:
        """A name that no other run has; the study's own for a plain run."""
        start = "" if self.model == "tiny" else f"-{self.model.rstrip('/').rpartition('/')[2]}"
        parts = [f"-{self.variant}" if self.variant else "", f"-m{self.updates}" if self.updates != 8 else "", start]
        parts += [f"-{self.sampler}-{self.anchor}" if self.sampler else ""]
        return super().key + "".join(parts)

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        given = super().layer() | VARIANTS[self.variant]
        given |= {} if self.model == "tiny" else {"model": self.model}
        given |= {"anchor": self.anchor} if self.sampler else {}
        if self.updates != 8:
            given |= {"steps_per_generation": self.updates, "per_device_train_batch_size": COMPLETIONS // self.updates}
        return given


@dataclass(frozen=True, kw_only=True)
class Pretrained(Run):
    """A run of a pretrained model in bf16 on a GPU, which several share."""

    base: str = "smollm2"
    """One of BASES."""
    recipe: str = "evidence-b"
    steps: int = int(PRETRAINED["steps"])
    eval_every: int = int(PRETRAINED["eval_every"])
    eval_size: int = int(PRETRAINED["eval_size"])

    @property
    def key(self) -> str:
        """A name that no other run has."""
        return f"{self.base}-{super().key}"

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe; the optimizer's state, a gigabyte, is not written, as nothing is resumed."""
        own = {"model": self.model, "bf16": self.device == "cuda", "save_only_model": True}
        return BASES[self.base] | super().layer() | own


@dataclass(frozen=True, kw_only=True)
class Coded(Run):
    """A run of the embedded model that writes one-line functions, from a start of starts.py."""

    recipe: str = "evidence-e"
    steps: int = int(CODE["steps"])
    eval_every: int = int(CODE["eval_every"])
    eval_size: int = int(CODE["eval_size"])

    @property
    def key(self) -> str:
        """A name that no other run has."""
        return f"code-{super().key}"

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        return super().layer() | {"task_config": CODE["task_config"]}
