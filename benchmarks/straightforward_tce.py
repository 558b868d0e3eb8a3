"""TCE's equations as they are written: one episode and one pair of points at a time, every matrix formed.

`corral.robot.segment` is tested against it (tests/robot), and was timed against it (docs/tce.md). It is no part of the package:
the tests put this folder on their path.
"""

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal


def pair_matrix(rows: Tensor, joints: int) -> Tensor:
    """I_D ⊗ R [D·S, D·M]: from the parameters of all joints to the points of one segment, joint by joint."""
    return torch.block_diag(*[rows] * joints)


def log_prob(rows: Tensor, params: Tensor, mean: Tensor, chol: Tensor, jitter: Tensor) -> Tensor:
    """log N((I ⊗ R_n) w; (I ⊗ R_n) μ, (I ⊗ R_n) Σ (I ⊗ R_n)ᵀ + r_n I) [B N], pair by pair."""
    joints = params.shape[-1] // rows.shape[-1]
    episodes = []
    for w, mu in zip(params, mean, strict=True):
        pairs = []
        for row, r in zip(rows, jitter, strict=True):
            matrix = pair_matrix(row, joints)
            cov = matrix @ (chol @ chol.T) @ matrix.T + r * torch.eye(len(matrix), dtype=row.dtype)
            pairs.append(MultivariateNormal(matrix @ mu, cov, validate_args=False).log_prob(matrix @ w))
        episodes.append(torch.stack(pairs))
    return torch.stack(episodes)


def advantages(
    rewards: Tensor, values: Tensor, pairs: Tensor, lengths: list[int], gamma: float, closing: bool
) -> list[list[float]]:
    """Credit of the segments that count, episode by episode, by the definition's sums."""
    episodes = []
    for r, v, length in zip(rewards.tolist(), values.tolist(), lengths, strict=True):
        value = [*v[:length], *[0.0] * (len(r) + 1 - length)]
        kept = [(a, b) for a, b in pairs.tolist() if (a < length if closing else b <= length)]
        credit = []
        for a, b in kept:
            end = length if closing and (a, b) == kept[-1] else b
            earned = sum(gamma ** (t - a) * r[t] for t in range(a, min(end, length)))
            credit.append(earned + gamma ** (end - a) * value[end] - value[a])
        episodes.append(credit)
    return episodes
