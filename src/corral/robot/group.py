"""Several plans for one context: each is judged by the others, so that no critic is needed."""

import torch
from jaxtyping import Float
from torch import Tensor


def mirror(noise: Float[Tensor, "E *w"]) -> Float[Tensor, "E *w"]:
    """Every second row the negative of the one before it, so that plans come in pairs μ ± L ε.

    Each is drawn from the policy, though not independently: what a pair earns alike says nothing of where the mean should go,
    and drops out exactly. Where the reward is nearly linear in a plan, half as many directions are the price.
    """
    return torch.stack([noise[::2], -noise[::2]], 1).flatten(0, 1)


def leave_one_out(credit: Float[Tensor, "E N"], plans: int, *, mirrored: bool = False) -> Float[Tensor, "E N"]:
    """What each plan earned less the mean of the other plans for its context, segment by segment.

        A_i = R_i − mean_{j∉i} R_j          j ∉ i: other plans; with mirrored pairs, plans of other pairs

    Those others are independent of what plan i drew, so the baseline biases no gradient. A fitted V is only as exact as its
    fit: once exploration has narrowed, plans of a context differ by less than V's error.

    Args:
        credit: of E episodes, the P plans of a context one after the other, mirrored ones in pairs [E N].
        plans: P ≥ 2; where mirrored, even and ≥ 4.
    Returns:
        [E N].
    Ref:
        Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!". Invariant: a context's advantages sum to 0.
    """
    unit = 2 if mirrored else 1
    if plans < 2 * unit or plans % unit or len(credit) % plans:
        raise ValueError(
            f"leave_one_out: episodes are contexts × `plans`, of which there are at least 2, or two pairs; got {len(credit)} "
            f"episodes, {plans} plans a context{' in pairs' if mirrored else ''}."
        )
    units = credit.unflatten(0, (-1, plans // unit, unit))
    own = units.sum(2, keepdim=True)
    others = (own.sum(1, keepdim=True) - own) / (plans - unit)
    return (units - others).flatten(0, 2)
