"""Rewards that are paid later than they are earned, moved to the event that earned them."""

import torch
from jaxtyping import Float
from torch import Tensor


def rewards_at_event(rewards: Float[Tensor, "B T"], event: Float[Tensor, "B"]) -> Float[Tensor, "B T"]:
    """Move the rewards paid from an event on to the event.

        r̃_e = Σ_{t ≥ e} r_t,   r̃_t = 0 for t > e,   r̃_t = r_t for t < e

    A jump is decided when the foot leaves the floor: height and landing follow from it, but are paid in the last step, hundreds
    of steps after the part of the plan that they tell about. Rewards that depend on the past and not on the state alone
    also become easier for a critic, which has nothing left to predict once the event is over.

    Args:
        rewards: of every step; 0 after an episode's end.
        event: a step's index per episode; NaN for an episode without the event, which stays as it is.
    Ref:
        Li et al. 2024, arXiv:2401.11437 (hopper jump, table tennis). Invariant: returns do not change.
    """
    known = ~event.isnan()
    at = torch.where(known, event, 0.0).long()[:, None]
    if bool(((at < 0) | (at >= rewards.shape[1])).any()):
        raise ValueError(
            f"rewards_at_event: an event is a step from 0 to {rewards.shape[1] - 1}, or NaN; got {event.tolist()}."
        )
    step = torch.arange(rewards.shape[1], device=rewards.device)
    moved = torch.where(step < at, rewards, 0.0).scatter(1, at, torch.where(step >= at, rewards, 0.0).sum(-1, keepdim=True))
    return torch.where(known[:, None], moved, rewards)
