"""What one run of the studies on language models is: `corral train` with a recipe, an objective, a rate, a seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.lab.run.settings import read_recipe

START = "demo"
STARTS: dict[str, dict[str, Any]] = {
    START: {},
    "n_max29": {"task_config": {"n_max": 29}},
    "n_max9": {"task_config": {"n_max": 9}},
    "arithmetic": {"model": "runs/starts/arithmetic-1", "task": "arithmetic", "task_config": {"operations": "+-", "digits": 3}},
    **{f"start{seed}": {"model": f"runs/starts/llama-{seed}"} for seed in (1, 2, 3)},
    "gemma": {"model": "runs/starts/gemma-1"},
    "sums": {"model": "tiny-sums", "task": "arithmetic", "task_config": {"operations": "+"}},
    "script": {"per_device_train_batch_size": 32, "steps_per_generation": 4, "loss_type": "auto"},
}
"""Models and tasks other than the demo's: numbers that the embedded model has never seen, or few; sums and differences of
three digits; other warm starts and another family, all made by scripts/warm_start.py; `sums` is embedded, and
learns to carry; `script` has the demo's own model and task with the batches and the reduction of README's script."""

PRETRAINED, CODED = "evidence-b", "evidence-e"
"""Recipes of pretrained models and of programs, each seed of which has a start of its own."""
WORDS = read_recipe(PRETRAINED)
BASES: dict[str, dict[str, Any]] = {
    "smollm2": {"model": "runs/pretrained/smollm2"},
    "qwen": {
        "model": "runs/pretrained/qwen", "task_config": {"path": "runs/gsm8k"}, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4, "steps_per_generation": 32, "max_completion_length": 400, "use_vllm": True,
        "gradient_checkpointing": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.08, "eval_size": 128,
    },
}  # fmt: skip
"""Pretrained models and what they are asked: SmolLM2 as it comes, and Qwen2.5-Coder-0.5B-Instruct, which is asked GSM8K with
vLLM, 256 completions a batch. The folders hold the models as transformers saves them."""
COMPLETIONS = 512
"""Of a batch of rollouts, as the demo has it."""

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "top-K": {"objective_config": {"estimator": "topk"}},
    "unprojected": {"objective_config": {"gradient": "unprojected"}},
    **{f"ε={e:g}".replace("0.", "."): {"objective_config": {"clip_low": e, "clip_high": e}} for e in (0.05, 0.1, 0.3, 0.4)},
    "KL to the start": {"beta": 0.1},
}
"""What an arm changes in its objective and the trainer, by name."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `corral train`."""

    objective: str
    rate: float | str
    """`learning_rate`: a number, or "auto"."""
    seed: int
    bound: float | None = math.inf
    """`deployed_bound`: inf measures alone, None is .02."""
    passes: int = 1
    """`num_iterations`: how often each batch is used, in `updates` updates each time."""
    reuse: str | None = None
    """"auto" takes `passes` at most: fewer where a batch is out of hand."""
    steps: int = 15
    eval_every: int = 5
    eval_size: int = 512
    end_size: int = 0
    """Held-out problems on which the last network is measured once more, where points are compared; 0: it is not."""
    recipe: str = "demo"
    start: str = START
    """A name of STARTS."""
    schedule: str = "linear"
    device: str = "cpu"
    """Where it trains: the embedded model in float32 on either, a pretrained one in bf16 on a GPU."""
    variant: str = ""
    """A name of VARIANTS."""
    model: str = "tiny"
    """The embedded model, or a folder with another warm start."""
    lag: int = 0
    """`rollout_lag`: by how many batches the weights that sample are behind."""
    pass_at: int = 0
    """Answers to each of 512 held-out problems at the end, for the share that any of them solves; 0: it is not measured."""
    updates: int = 8
    """Of each pass over a batch; with 1 and one pass every objective is the same algorithm."""
    base: str = ""
    """The name in BASES of a pretrained model."""

    @property
    def arm(self) -> str:
        """Whether and how the deployed network is bounded."""
        return "off" if self.bound == math.inf else "on" if self.bound is None else f"on {self.bound:g}"

    @property
    def key(self) -> str:
        """A name that no other run has."""
        parts = [self.base, "shipped", "" if self.start == START else self.start]
        parts += [self.objective, self.arm.replace(" ", ""), str(self.rate), self.schedule, f"x{self.passes}{self.reuse or ''}"]
        parts += [str(self.steps), str(self.seed), self.variant, f"m{self.updates}" if self.updates != 8 else ""]
        parts += [f"lag{self.lag}" if self.lag else ""]
        return "-".join(filter(None, [*parts, "" if self.model == "tiny" else self.model.rstrip("/").rpartition("/")[2]]))

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        given = {"objective": self.objective, "learning_rate": self.rate, "seed": self.seed, "steps": self.steps}
        given |= {"num_iterations": self.passes, "lr_scheduler_type": self.schedule, "device": self.device}
        given |= {"eval_every": self.eval_every, "eval_size": self.eval_size, "checkpoint_every": self.steps}
        given |= {} if self.device == "cpu" else {"bf16": False}  # the same precision on all devices
        given["deployed_bound"] = 0.02 if self.bound is None else self.bound
        given |= {} if self.reuse is None else {"reuse": self.reuse}
        given |= {"rollout_lag": self.lag} if self.lag else {}
        if self.updates != 8:
            given |= {"steps_per_generation": self.updates, "per_device_train_batch_size": COMPLETIONS // self.updates}
        given |= STARTS[self.start] | VARIANTS[self.variant] | ({} if self.model == "tiny" else {"model": self.model})
        if self.base:  # nothing is resumed, so the optimizer's state, a gigabyte, is not written
            given = BASES[self.base] | given | {"model": self.model, "bf16": self.device == "cuda", "save_only_model": True}
        return given


def cost_group(run: Mapping[str, Any]) -> str:
    """Runs that cost about the same by step: the same model, as often used and measured, on one device."""
    words = [run["device"]] if run.get("device", "cpu") != "cpu" else []
    words += [run["start"]] if run.get("start", START) != START else []
    return " ".join([*words, f"x{run['passes']} {run['eval_size']}/{run['eval_every']} {run.get('end_size', 0)}"])
