"""Reinforcement learning of robot motions: policies draw smooth trajectories, and learn from whole returns or from segments.

Importing this needs torch alone; the learners in the modules `tce`, `bbrl` and `top_erl` also need `corral[robot]`.
"""

from corral.robot.prodmp import Design, ProDMP
from corral.robot.segment import (
    critic_targets,
    draw_pairs,
    draw_segments,
    normalise_advantages,
    segment_advantages,
    segment_covariance,
    segment_jitter,
    segment_log_prob,
    segment_returns,
)

__all__ = [
    "Design",
    "ProDMP",
    "critic_targets",
    "draw_pairs",
    "draw_segments",
    "normalise_advantages",
    "segment_advantages",
    "segment_covariance",
    "segment_jitter",
    "segment_log_prob",
    "segment_returns",
]
