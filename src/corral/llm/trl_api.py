"""What corral knows of TRL: its releases, its loss types as reductions, and its settings with their types."""

import math

import trl
from packaging.version import Version
from trl import GRPOConfig

from corral.llm import TRL_RANGE
from corral.objective.reduction import Reduction

REDUCTIONS: dict[str, Reduction] = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",  # of a micro-batch
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""TRL's loss types that differ from PPO's clip in nothing but how they average. "auto" takes the first of its kind."""

FUSED = Version(trl.__version__) >= Version("1.15")
"""Whether TRL scores tokens with a fused head, and its loss begins with that pass."""

WRONG_BEFORE = {"dapo": "1.10", "luspo": "1.10"}
"""Reductions that TRL averaged over the wrong count, and the first release that has them right."""


def check_trl(version: str) -> None:
    """Refuse a TRL whose methods may not be the ones that corral overrides."""
    low, high = TRL_RANGE
    if not Version(low) <= Version(version) < Version(high):
        raise ImportError(
            f"corral.llm: tested with TRL {low} and newer, below {high}; found {version}, which may do something else in the "
            f"methods that corral builds on. Install a tested one: pip install 'trl>={low},<{high}'."
        )


check_trl(trl.__version__)


def steps_per_batch(config: GRPOConfig) -> int:
    """Micro-batches that are trained on between one batch of rollouts and the next."""
    assert config.steps_per_generation is not None  # TRL has filled it in
    return config.steps_per_generation * config.num_iterations


def updates_per_step(config: GRPOConfig) -> int:
    """Updates until a batch of rollouts and an update end together: no rollout is half used there."""
    every = config.gradient_accumulation_steps
    return math.lcm(every, steps_per_batch(config)) // every
