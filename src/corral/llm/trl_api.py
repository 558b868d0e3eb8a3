"""What corral knows of TRL: its releases, its loss types as reductions, and its settings with their types."""

import logging
import math

import trl
from packaging.version import Version
from trl import GRPOConfig

from corral.llm import LAST_TESTED, TRL_RANGE, IncompatibleTRL, is_untested
from corral.llm.trl_contract import breaches
from corral.objective.reduction import Reduction

logger = logging.getLogger(__name__)

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

_SHOWN = 3
"""Changes of TRL that a refusal names."""


def check_trl(version: str) -> None:
    """Refuse a TRL that is too old, or newer than the tested ones with other methods; warn of one that is only newer."""
    low, high = TRL_RANGE
    tested = f"tested with TRL {low} to {LAST_TESTED}; found {version}"
    install = f"pip install 'trl>={low},<{high}'"
    if Version(version) < Version(low):
        raise IncompatibleTRL(
            f"corral.llm: {tested}, whose methods have other signatures than those that corral overrides. Install a tested "
            f"one: {install}."
        )
    if not is_untested(version):
        return
    found = breaches()
    if found:
        shown = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise IncompatibleTRL(
            f"corral.llm: {tested}, which changed what corral builds on: {shown}. Install a tested one, {install}, or a newer "
            f"corral."
        )
    logger.warning(
        "corral.llm: %s. The methods that corral builds on look unchanged, so it is tried; if it misbehaves: %s.",
        tested,
        install,
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
