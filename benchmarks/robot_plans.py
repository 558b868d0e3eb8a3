"""Which robots' runs belong to which study: settings, seeds and steps. `robot_study.py` runs them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TUNED_ON = (100, 101)
"""Seeds that settings are chosen on; none of them is in a table of results."""
SEEDS = range(5)


@dataclass(frozen=True)
class Job:
    """One run: a recipe, what differs from it, and a seed."""

    setting: str
    """Name of the row, for tables and folders."""
    recipe: str
    changes: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """The run's folder."""
        return f"{self.setting}-{self.seed}"

    def arguments(self) -> list[str]:
        """Of `corral train`."""
        flags = [part for key, value in self.changes for part in ("--set", f"{key}={value}")]
        return ["--recipe", self.recipe, "--seed", str(self.seed), *flags]


def jobs(setting: str, recipe: str, seeds: Sequence[int], **changes: Any) -> Iterator[Job]:
    """One for each seed; `learner__std=0.1` is the setting `learner.std`."""
    given = tuple((key.replace("__", "."), str(value)) for key, value in changes.items())
    yield from (Job(setting, recipe, given, seed) for seed in seeds)


ARM: Mapping[str, Any] = {
    "dtype": "float32", "iterations": 500, "eval_every": 20, "checkpoint_every": 100, "keep_checkpoints": 1,
    "learner__episodes": 256, "learner__hidden": "[128,128]", "learner__policy_rate": 1e-3, "learner__policy_epochs": 15,
    "learner__mean_bound": 0.1,
}  # fmt: skip
TCE_ARM: Mapping[str, Any] = {**ARM, "learner__critic_epochs": 4, "learner__critic_rate": 3e-3}
HELD: Mapping[str, Any] = {"learner__deployed_bound": 0.2}
"""Once or twice in a hundred batches the network leaves its region by tens of nats, and what it had learned is gone."""
CONTEXT: Mapping[str, Any] = {"learner__critic_inputs": "context"}
NARROW: Mapping[str, Any] = {"learner__entropy_equal": "true", "learner__entropy_floor": -2.0}
"""Exploration narrows from its first standard deviation to e^(−2 − 1.42) = 0.033."""
FEW: Mapping[str, Any] = {"learner__episodes": 64, "iterations": 1000}
TCE_TRIED: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "held": HELD,
    "held-context": HELD | CONTEXT,
    "held-narrow": HELD | NARROW,
    "held-narrow-context": HELD | NARROW | CONTEXT,
    "held-far": {"learner__mean_bound": 0.3, "learner__deployed_bound": 0.5},
    "held-far-fast": {"learner__mean_bound": 0.3, "learner__deployed_bound": 0.5, "learner__policy_rate": 2e-3},
    "held-near": {"learner__mean_bound": 0.03, "learner__deployed_bound": 0.07},
    "held-slow": HELD | {"learner__policy_rate": 3e-4},
    "held-few": HELD | FEW,
    "held-large": HELD | {"learner__episodes": 1024, "iterations": 200, "learner__critic_epochs": 2},
    "held-leaky": HELD | {"learner__activation": "leaky_relu"},
    "held-wide": HELD | {"learner__hidden": "[256,256]"},
    "held-basis3": HELD | {"prodmp__basis": 3},
    "held-basis8": HELD | {"prodmp__basis": 8},
    "held-spread": HELD | {"learner__cov_bound": 0.05},
}


def arm_explore() -> Iterator[Job]:
    """Sixteen settings of TCE on the sparse arm, 12.8 million steps each (large: 20)."""
    for name, changes in TCE_TRIED.items():
        yield from jobs(f"explore-{name}", "via_point_sparse", TUNED_ON, **{**TCE_ARM, **changes})


LONG: Mapping[str, Any] = {"eval_every": 25, "checkpoint_every": 25, "keep_checkpoints": 1, "workers": 1}
"""A checkpoint a minute or so, since a piece may end at any time."""


def hopper_long() -> Iterator[Job]:
    """Hopper jump at 10 million steps with five seeds, then TCE and BBRL once at the published 48 million."""
    ten, whole = LONG | {"iterations": 625}, LONG | {"iterations": 3000, "eval_every": 60}
    for iterations, seeds in ((ten, SEEDS), (whole, SEEDS[:1])):
        size = f"{iterations['iterations'] * 0.016:.0f}M"
        yield from jobs(f"hopper-{size}-tce", "hopper_jump", seeds, **iterations)
        yield from jobs(f"hopper-{size}-tce-takeoff", "hopper_jump", seeds, **iterations, learner__move_to_event="true")
        yield from jobs(f"hopper-{size}-tce-published", "hopper_jump_published", seeds, **iterations)
        yield from jobs(f"hopper-{size}-bbrl", "hopper_jump", seeds, **iterations, algorithm="bbrl")
    five = LONG | {"iterations": 320, "algorithm": "sb3-ppo"}
    yield from jobs("hopper-5M-ppo", "hopper_jump", SEEDS, **five)
    yield from jobs("hopper-5M-ppo-controller", "hopper_jump", SEEDS, **five, learner__controller_span=1.0)


def box_long() -> Iterator[Job]:
    """Box pushing, dense, at 10 million steps with five seeds and once at 40; both sparse rewards with three."""
    ten = LONG | {"iterations": 1316, "eval_every": 50}
    for row in ("tce", "bbrl"):
        yield from jobs(f"box-10M-{row}", "box_pushing", SEEDS, **ten, algorithm=row)
    for reward in ("temporal_sparse", "temporal_spatial_sparse"):
        for row in ("tce", "bbrl"):
            changes = ten | {"algorithm": row, "environment_config__reward": reward}
            yield from jobs(f"box-10M-{reward}-{row}", "box_pushing", SEEDS[:3], **changes)
    yield from jobs("box-40M-tce", "box_pushing", SEEDS[:1], **ten | {"iterations": 5264, "eval_every": 100})


PLANS = {"arm-explore": arm_explore, "hopper-long": hopper_long, "box-long": box_long}
