"""Reinforcement learning for robots: smooth trajectories, and credit for their segments.

Importing this needs torch alone; the learners in `corral.robot.tce` and `corral.robot.bbrl` also need `corral[robot]`.
"""

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
