"""What one run of the study is: an arm that holds the network, or the trainer as it ships; a rate, a schedule, a seed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEVEL = {"mean": 1.0, "k3": 1.2, "p999": 115.0, "cvar": 58.0}
"""A statistic's bound in multiples of the mean's, so that arms move the network equally far on average."""
TAILS = ("p999", "cvar")
"""Those whose level is the embedded model's own: a pretrained one finds its own in the first step that the mean allows."""
START = "demo"
STARTS: dict[str, dict[str, Any]] = {
    START: {},
    "n_max29": {"task_config": {"n_max": 29}},
    "n_max9": {"task_config": {"n_max": 9}},
    "arithmetic": {"model": "runs/starts/arithmetic-1", "task": "arithmetic", "task_config": {"operations": "+-", "digits": 3}},
    **{f"start{seed}": {"model": f"runs/starts/llama-{seed}"} for seed in (1, 2, 3)},
    "gemma": {"model": "runs/starts/gemma-1"},
}
"""What is trained on what, on top of the demo: numbers that the embedded model has never seen, or few; sums and differences of
three digits, with a start of their own; three other warm starts and another family, all made on a GPU (docs/deployed.md has the
commands)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What holds the network that is deployed; with everything off, nothing does."""

    retract: str | None = None
    """Retraction by this statistic."""
    slack: float = 1.0
    """Its bound, in multiples of what the arm aims at."""
    control: str | None = None
    """A learning rate controlled by this statistic."""
    within: bool = False
    """A learning rate controlled after every update, as rsl_rl does it: by 1.5, outside half and twice the target of k3."""
    redo: bool = False
    """Updates again at a smaller rate, from the old weights and Adam's old state, where less than half would be kept."""
    first: bool = False
    """The same for the first batch alone: it finds the rate that `control` starts from."""
    accept: bool = False
    """A quarter of the batch is not trained on; nothing is kept where the surrogate on it does not improve."""
    stop: bool = False
    """No more updates on a batch once its sampled KL is at the target."""
    share: float | None = None
    """Lookahead: always this share of a batch's step."""
    ema: float | None = None
    """Rollouts and measurements by a running mean of the weights, this much of which stays at every batch."""
    calm: bool = False
    """Warm-up over a tenth of the updates, gradients clipped at norm .2."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    arm: str
    held: Arm
    rate: float
    schedule: str
    seed: int
    objective: str = "ppo_clip"
    steps: int = 20
    target: float = 0.01
    """Mean KL per token and batch at which arms aim; the linear schedule takes it down as (1 − k/K)²."""
    eval_every: int = 4
    eval_size: int = 512
    device: str = "cpu"
    """Where it trains, in float32 on either."""
    recipe: str = "demo"

    @property
    def key(self) -> str:
        """A name that no other run has."""
        return f"{self.objective}-{self.arm}-{self.rate:g}-{self.schedule}-{self.target:g}-{self.steps}-{self.seed}"

    def aim(self, step: int) -> float:
        """The mean KL that step 0, 1, … is meant to have."""
        return self.target * ((1 - step / self.steps) ** 2 if self.schedule == "linear" else 1.0)

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        given = {"objective": self.objective, "seed": self.seed, "steps": self.steps, "learning_rate": self.rate}
        given |= {"lr_scheduler_type": "linear" if self.schedule == "linear" else "constant_with_warmup"}
        given |= {"warmup_steps": self.steps * 8 // 10, "max_grad_norm": 0.2} if self.held.calm else {}
        return given | {**placed(self.device), "eval_size": self.eval_size}


@dataclass(frozen=True, kw_only=True)
class WordSpec(Spec):
    """One run of SmolLM2 on word problems with two numbers, in bf16 on a GPU."""

    recipe: str = "evidence-b"

    @property
    def key(self) -> str:
        """A name that no other run has."""
        return f"words-{super().key}"

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        return super().layer() | {"model": "runs/pretrained/smollm2", "bf16": self.device == "cuda"}


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """One run of `corral train --recipe demo`, as anybody would start it."""

    objective: str
    rate: float | str
    """`learning_rate`: a number, or "auto"."""
    seed: int
    bound: float | None = math.inf
    """`deployed_bound`: inf measures alone, None is .02."""
    passes: int = 1
    """`num_iterations`: how often each batch is used, in 8 updates each time."""
    reuse: str | None = None
    """"auto" takes `passes` at most: fewer where a batch is out of hand."""
    steps: int = 15
    eval_every: int = 5
    eval_size: int = 512
    end_size: int = 0
    """Held-out problems on which the last network is measured once more, where points are compared; 0: it is not."""
    recipe: str = "demo"
    start: str = START
    """One of `STARTS`."""
    schedule: str = "linear"
    device: str = "cpu"
    """Where it trains, in float32 on either; a start may say otherwise."""

    @property
    def arm(self) -> str:
        """Whether and how the network is held."""
        return "off" if self.bound == math.inf else "on" if self.bound is None else f"on {self.bound:g}"

    @property
    def key(self) -> str:
        """A name that no other run has."""
        arm = self.arm.replace(" ", "")
        passes = f"x{self.passes}{self.reuse or ''}"
        name = "shipped" if self.start == START else f"shipped-{self.start}"
        return f"{name}-{self.objective}-{arm}-{self.rate}-{self.schedule}-{passes}-{self.steps}-{self.seed}"

    def layer(self) -> dict[str, Any]:
        """Settings on top of the recipe."""
        given = {"objective": self.objective, "learning_rate": self.rate, "seed": self.seed, "steps": self.steps}
        given |= {"num_iterations": self.passes, "lr_scheduler_type": self.schedule, **placed(self.device)}
        given |= {"eval_every": self.eval_every, "eval_size": self.eval_size, "checkpoint_every": self.steps}
        given["deployed_bound"] = 0.02 if self.bound is None else self.bound
        given |= {} if self.reuse is None else {"reuse": self.reuse}
        return given | STARTS[self.start]


def placed(device: str) -> dict[str, Any]:
    """Settings of a device: the same precision on all of them."""
    return {"device": device} | ({} if device == "cpu" else {"bf16": False})


def cost_group(run: Mapping[str, Any]) -> str:
    """Runs that cost about the same by step: one arm, or the same model, as often used and measured; on one device."""
    words = [run["device"]] if run.get("device", "cpu") != "cpu" else []
    if "passes" not in run:
        words += [run["recipe"]] if run.get("recipe", "demo") != "demo" else []
        return " ".join([run["arm"], *words])
    words += [run["start"]] if run.get("start", START) != START else []
    return " ".join([*words, f"x{run['passes']} {run['eval_size']}/{run['eval_every']} {run.get('end_size', 0)}"])
