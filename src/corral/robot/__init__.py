"""Reinforcement learning for robots: smooth trajectories, and credit for their segments.

Importing this needs torch alone; the learners in `corral.robot.tce` and `corral.robot.bbrl` also need `corral[robot]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.robot.prodmp import Design, ProDMP
    from corral.robot.segment import (
        critic_targets,
        draw_pairs,
        normalise_advantages,
        segment_advantages,
        segment_covariance,
        segment_jitter,
        segment_log_prob,
    )

__all__ = [
    "Design",
    "ProDMP",
    "critic_targets",
    "draw_pairs",
    "normalise_advantages",
    "segment_advantages",
    "segment_covariance",
    "segment_jitter",
    "segment_log_prob",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package needs no torch."""
    for module in ("prodmp", "segment") if name in __all__ else ():
        there = vars(import_module(f"{__name__}.{module}"))
        globals().update({public: there[public] for public in __all__ if public in there})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
