"""Objectives that have a kernel of their own."""

from typing import Any

from corral.kernels.triton.loss.token import TokenLoss
from corral.kernels.triton.loss.troll import TrollLoss

LossRule = TrollLoss | TokenLoss


def rule_of(objective: Any) -> LossRule | None:
    """The kernel that computes an objective's loss of a token, if there is one."""
    return TrollLoss.of(objective) or TokenLoss.of(objective)
