"""Advantages from rewards: relative to other completions of the same prompt, or step by step with a critic."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.numerics import at_least_float32, in_one_dtype, require_tensors
from corral.validate import number_in

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]

_STD_FLOOR = 1e-4
"""Constant that is added to the standard deviation of rewards before dividing by it."""


def group_advantages(
    rewards: Float[Tensor, " B"], group: Int[Tensor, " B"], how: Advantage, *, mask: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, " B"]:
    """Compute the advantage of each completion relative to its group, the completions of the same prompt.

        grpo           (R − mean_g) / (std_g + 1e-4), unbiased std; 0 in a group of one
        dr_grpo        R − mean_g
        rloo           R − mean of the others in the group
        reinforce++    R − mean_g, then whitened over the batch: (A − mean) / (std + 1e-4), unbiased std

    The mean and std of reinforce++ count every completion once. With a `mask` they count every unmasked token once, so that
    long completions weigh more: that is the paper's form, and verl's.

    Args:
        rewards: one per completion [B].
        group: which prompt each completion answers [B]; any integers, in any order.
        how: one of the four.
        mask: unmasked tokens [B T], for reinforce++ alone; None whitens over completions.
    Returns:
        Advantages [B].
    Ref:
        Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, arXiv:2503.20783; Ahmadian et al. 2024, arXiv:2402.14740;
        Hu et al. 2025, arXiv:2501.03262 (its baseline variant). Invariant: every group's advantages sum to 0; with a `mask`
        the advantages of all unmasked tokens do.
    """
    if how not in get_args(Advantage):
        raise ValueError(
            f"group_advantages: `how` is one of {', '.join(get_args(Advantage))}; got {how!r}. For a critic, see corral.gae."
        )
    require_tensors("group_advantages", rewards=rewards, group=group)
    if rewards.ndim != 1 or rewards.shape != group.shape or not rewards.numel():
        raise ValueError(
            f"group_advantages: rewards and group are both [B] with B ≥ 1; got {list(rewards.shape)} and {list(group.shape)}."
        )
    if mask is not None:
        require_tensors("group_advantages", mask=mask)
        if how != "reinforce++":
            raise ValueError(f"group_advantages: `mask` is what reinforce++ whitens over, and {how} reads none. Leave it out.")
        if mask.ndim != 2 or len(mask) != len(rewards) or mask.dtype != torch.bool:
            raise ValueError(
                f"group_advantages: `mask` is bool and [B T] with B = {len(rewards)}, True at the tokens that are trained on; "
                f"got {mask.dtype} {list(mask.shape)}."
            )
        if not bool(mask.any()):
            raise ValueError("group_advantages: `mask` has no unmasked token to whiten over. Skip this batch.")
    if not rewards.is_floating_point() or group.is_floating_point():
        raise ValueError(
            f"group_advantages: rewards are floating point and group ids integers; got {rewards.dtype} and {group.dtype}. "
            f"Convert them with .float() and .long()."
        )
    if not bool(rewards.isfinite().all()):
        bad = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"group_advantages: rewards must be finite; got {rewards[bad].item()} for completion {bad}.")
    rewards = at_least_float32(rewards)
    _, member, size = group.unique(return_inverse=True, return_counts=True)

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(size)).index_add(0, member, x)[member]

    count = size[member]
    centred = rewards - group_sum(rewards) / count
    centred = centred - group_sum(centred) / count  # the mean's rounding, which a tiny spread would blow up
    if how == "dr_grpo":
        return centred
    if how == "rloo":
        if bool((size == 1).any()):
            alone = int(group[count == 1][0])
            raise ValueError(f"group_advantages: rloo compares with the others of a group, and group {alone} has one member.")
        return centred * count / (count - 1)
    if how == "reinforce++":
        weight = torch.ones_like(centred) if mask is None else mask.sum(-1).to(centred)
        deviation = centred - (weight * centred).sum() / weight.sum()
        spread = ((weight * deviation**2).sum() / (weight.sum() - 1).clamp(min=1)).sqrt()
        return deviation / (spread + _STD_FLOOR)
    std = (group_sum(centred**2) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + _STD_FLOOR)


def gae(
    rewards: Float[Tensor, "B T"], values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], gamma: float, lam: float
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation (GAE) over the unmasked tokens. The last unmasked token ends an episode.

        δ_t = r_t + γ V_{t+1} − V_t          Â_t = δ_t + γ λ Â_{t+1}          returns_t = Â_t + V_t

    Masked-out tokens are skipped wherever they stand: t + 1 is the next unmasked token, and V = 0 after the last.

    Args:
        rewards: reward of each token [B T].
        values: the critic's value before each token [B T].
        mask: unmasked tokens [B T].
        gamma, lam: discount γ and trace λ, both in [0, 1].
    Returns:
        Advantages and returns [B T], 0 where masked out; neither carries a gradient.
    Ref:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16. Invariant: γ = λ = 1 gives reward-to-go minus value.
    """
    require_tensors("gae", rewards=rewards, values=values, mask=mask)
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2 or not rewards.numel():
        raise ValueError(
            f"gae: rewards, values and mask are all [B T]; got {list(rewards.shape)}, {list(values.shape)}, {list(mask.shape)}"
            f", where at least one token is needed."
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"gae: mask must be bool, True where a token is trained on; got {mask.dtype}. Use .bool().")
    for name, x in (("gamma", gamma), ("lam", lam)):
        if not number_in(x, 0, 1):
            raise ValueError(f"gae: `{name}` must lie in [0, 1]; got {x!r}.")
    rewards, values = (torch.where(mask, x.detach(), 0.0) for x in in_one_dtype(rewards, values))
    if not bool(rewards.isfinite().all() & values.isfinite().all()):
        raise ValueError(
            "gae: rewards and values must be finite at unmasked tokens. Look at the reward function and the critic."
        )
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = mask[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages, advantages + values
