"""Log-probabilities and advantages of trajectory segments, for a Gaussian policy over trajectory parameters."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.advantage import gae
from corral.numerics import at_least_float32, in_one_dtype, without_autocast
from corral.validate import number_in

_STD_FLOOR = 1e-8
"""Constant added to the standard deviation when advantages are normalised, as in the published TCE."""


def draw_pairs(steps: int, points: int = 25, *, generator: torch.Generator | None = None) -> Int[Tensor, "N 2"]:
    """Divide an episode into equally long segments that begin at a random step. Returns their first and last indices.

        indices = first, first + ⌊T/points⌋, … < T        first ~ U{0, …, ⌊T/points⌋ + T mod points − 1}

    A segment joins two neighbours: `points` − 1 of them where `points` divides T, else perhaps more. Index i is the action
    of step i, the desired position at time (i + 1) dt.

    Args:
        steps: T, of the longest episode.
        points: how many ends to draw, 2 ≤ points ≤ T.
        generator: on the CPU.
    Returns:
        First and last index of each segment [N 2], on the CPU.
    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: a segment begins where the one before it ends.
    """
    if not all(isinstance(x, int) for x in (steps, points)) or not 2 <= points <= steps:
        raise ValueError(f"draw_pairs: 2 ≤ points ≤ steps, whole numbers; got points {points!r} and steps {steps!r}.")
    interval, rest = divmod(steps, points)
    first = int(torch.randint(interval + rest, (), generator=generator, device="cpu"))
    index = torch.arange(first, steps, interval, device="cpu")
    return torch.stack([index[:-1], index[1:]], -1)


@without_autocast
def segment_covariance(rows: Float[Tensor, "*r N S M"], chol: Float[Tensor, "*c W W"]) -> Float[Tensor, "*b N DS DS"]:
    """Covariance of the desired positions at each segment's points, given the covariance of trajectory parameters.

        C_n = (I_D ⊗ R_n) L Lᵀ (I_D ⊗ R_n)ᵀ

    Args:
        rows: R_n, `design.position[..., pairs, :]` [*, N, S, M]; S points of a segment, 2 if it is a pair.
        chol: L, a factor of the parameters' covariance [*, W, W] with W = D M. Leading axes broadcast: where neither input
            has any, one covariance serves every episode, which is what makes updates fast.
    Returns:
        [*, N, D·S, D·S], joint by joint.
    """
    factor = _factor(rows, chol)
    return factor @ factor.mT


@without_autocast
def segment_jitter(
    rows: Float[Tensor, "*r N S M"], chol: Float[Tensor, "*c W W"], relative: float = 1e-4
) -> Float[Tensor, "*b N"]:
    """Compute the term added to each segment's variances so that the covariance of close points stays invertible.

        r_n = relative · max_i (C_n)_ii,   and 1 where nothing varies

    Take it from the old policy and use it for both, once per batch: then equal policies have ratio 1, and no episode's
    likelihood depends on another's. A segment before the delay has C = 0 under every policy, and ratio 1 with any r.

    Args:
        rows, chol: as for `segment_covariance`.
        relative: 1e-4 as published, where the maximum runs over all segments of the batch, and over each policy anew.
    Returns:
        r [*, N], without gradient.
    """
    if not number_in(relative, 0):
        raise ValueError(f"segment_jitter: `relative` must be ≥ 0; got {relative!r}.")
    with torch.no_grad():
        largest = _factor(rows, chol).square().sum(-1).amax(-1)
        return torch.where(largest > 0, relative * largest, 1.0)


@without_autocast
def segment_log_prob(
    rows: Float[Tensor, "*r N S M"],
    params: Float[Tensor, "*b W"],
    mean: Float[Tensor, "*b W"],
    chol: Float[Tensor, "*c W W"],
    jitter: Float[Tensor, "*j N"],
    mask: Bool[Tensor, "*b N"] | None = None,
) -> Float[Tensor, "*b N"]:
    """Joint log-density of the desired positions at each segment's points, under a Gaussian over trajectory parameters.

        log N(e_n; 0, C_n + r_n I)        e_n = (I_D ⊗ R_n)(w − μ)

    The start state moves plan and mean alike, so it cancels. Gradients flow to `params`, `mean` and `chol`.

    Args:
        rows: R_n, `design.position[..., pairs, :]` [*, N, S, M].
        params: w, what was drawn for each episode [*, W].
        mean: μ [*, W].
        chol: factor of Σ [W, W], or one per episode [*, W, W].
        jitter: r_n [N] or [*, N], from `segment_jitter` of the old policy; 0 where C_n alone is regular.
        mask: segments that count [*, N]; the others have log-density 0, without gradient.
    Returns:
        [*, N].
    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: as many points as parameters give log N(w; μ, Σ) − log|det R|
        per joint, so the ratio of two policies is that of their parameters' densities, BBRL's.
    """
    rows, params, mean, chol, jitter = in_one_dtype(rows, params, mean, chol, jitter)
    if not params.shape[-1:] == mean.shape[-1:] == chol.shape[-1:]:
        raise ValueError(
            f"segment_log_prob: `params` and `mean` have {chol.shape[-1]} entries on their last axis, as `chol` has; got "
            f"{list(params.shape)}, {list(mean.shape)} and {list(chol.shape)}."
        )
    cov = segment_covariance(rows, chol)
    cov = cov + torch.diag_embed(jitter[..., None].expand(*jitter.shape, cov.shape[-1]))
    lower, info = torch.linalg.cholesky_ex(cov)
    if bool(info.any()):
        raise ValueError(
            f"segment_log_prob: {int((info > 0).sum())} of {info.numel()} covariances are not positive definite. Points too "
            f"close for `jitter`, more points than parameters, or NaN in `chol`: see segment_jitter."
        )
    gap = params - mean
    if lower.ndim == 3:  # one factor for every episode: whiten rows instead of ends, and the rest is one GEMM
        eye = torch.eye(gap.shape[-1] // rows.shape[-1], dtype=rows.dtype, device=rows.device)
        ends = torch.einsum("de,nsm->ndsem", eye, rows).flatten(1, 2).flatten(2)
        whiten = torch.linalg.solve_triangular(lower, ends, upper=False).transpose(0, 1)  # L_n⁻¹ (I_D ⊗ R_n) [D·S N W]
        white = whiten.flatten(0, 1) @ gap.reshape(-1, gap.shape[-1]).mT
        square = white.unflatten(0, whiten.shape[:2]).square().sum(0).mT.reshape(*gap.shape[:-1], -1)
    else:
        e = torch.einsum("...nsm,...dm->...nds", rows, gap.unflatten(-1, (-1, rows.shape[-1]))).flatten(-2)
        square = torch.linalg.solve_triangular(lower, e[..., None], upper=False).square().sum((-2, -1))
    log_det = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    logp = -0.5 * square - log_det - 0.5 * lower.shape[-1] * math.log(2 * math.pi)
    return logp if mask is None else torch.where(mask, logp, 0.0)


@without_autocast
def segment_advantages(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    pairs: Int[Tensor, "N 2"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    gamma: float = 1.0,
    lam: float = 0.0,
    closing_segment: bool = True,
) -> tuple[Float[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """Advantage of each trajectory segment: its rewards plus the gain in value from its first state to its last.

        δ_n = Σ_{t=a}^{b−1} γ^{t−a} r_t + γ^{b−a} V(s_b) − V(s_a)        (a, b) = pairs_n
        closing:  the last segment runs to the end, Σ_{t=a}^{end} γ^{t−a} r_t − V(s_a)
        A_n = δ_n + λ γ^{b−a} A_{n+1}

    As published, no segment holds the last reward, which lies at or after every b: a policy paid at the end learns from its
    critic alone. Closing the last segment changes its advantage and not its likelihood.

    Args:
        rewards, values: r_t and V(s_t) [B T]; an episode ends with its last unmasked step, where V is 0.
        pairs: a < b ≤ T of each segment, in order of a [N 2].
        mask: unmasked steps [B T], from the first on; all of them without it.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1] of the generalised advantage over segments. 0 as published: what a segment changes later counts as
            far as V sees it. With 1 it has credit for all that is earned from its beginning on; segments must then join.
        closing_segment: False for the published rule.
    Returns:
        Advantages [B N], without gradient, and which count, [B N]: those that begin before their episode ends, or, by the
        published rule, end by then. Advantages are 0 where they do not.
    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: with γ = 1 consecutive segments sum to what was earned from the
        first a on, minus V(s_a): the values in between cancel; that is A_n of λ = 1.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2 or not rewards.numel():
        raise ValueError(
            f"segment_advantages: rewards, values and mask are all [B T] with at least one step; got {list(rewards.shape)}, "
            f"{list(values.shape)}, {list(mask.shape)}."
        )
    if mask.dtype != torch.bool or bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("segment_advantages: mask is bool, True from an episode's first step to its last and False after.")
    if pairs.ndim != 2 or pairs.shape[-1] != 2 or not len(pairs):
        raise ValueError(f"segment_advantages: pairs is [N 2] with N ≥ 1; got {list(pairs.shape)}.")
    first, last = pairs.to(rewards.device).unbind(-1)
    if not bool((first >= 0).all() & (first < last).all() & (last <= rewards.shape[1]).all() & (first.diff() > 0).all()):
        raise ValueError(
            f"segment_advantages: each pair has 0 ≤ a < b ≤ T = {rewards.shape[1]}, and a rises from pair to pair; got "
            f"{pairs.tolist()}."
        )
    if not (number_in(gamma, 0, 1) and number_in(lam, 0, 1)):
        raise ValueError(f"segment_advantages: `gamma` and `lam` must lie in [0, 1]; got {gamma!r} and {lam!r}.")
    if lam and not torch.equal(pairs[1:, 0], pairs[:-1, 1]):
        raise ValueError(
            f"segment_advantages: with `lam` > 0 each pair begins where the one before ends; got {pairs.tolist()}."
        )
    rewards = torch.where(mask, at_least_float32(rewards.detach()), 0.0)
    values = torch.where(mask, at_least_float32(values.detach()), 0.0)
    if not bool(rewards.isfinite().all() & values.isfinite().all()):
        raise ValueError("segment_advantages: rewards and values must be finite at unmasked steps. Look at both their sources.")
    step = torch.arange(rewards.shape[1], device=rewards.device)
    since = step - first[:, None]  # [N T]
    # A table of γ^(t−a) rather than differences of running sums, which would cancel once γ^t is small.
    discount = torch.where(since >= 0, rewards.new_tensor(gamma) ** since.clamp(min=0), 0.0)
    bootstrap = rewards.new_tensor(gamma) ** (last - first) * torch.nn.functional.pad(values, (0, 1))[:, last]
    credit = rewards @ (discount * (step < last[:, None])).mT + bootstrap
    length = mask.sum(-1, keepdim=True)
    if closing_segment:
        counted = first < length
        closes = counted & ~torch.nn.functional.pad(counted[:, 1:], (0, 1))
        credit = torch.where(closes, rewards @ discount.mT, credit)
    else:
        counted = last <= length
    advantages = list(torch.where(counted, credit - values[:, first], 0.0).unbind(-1))
    decay = (lam * rewards.new_tensor(gamma) ** (last - first)).tolist()
    for n in reversed(range(len(advantages) - 1)):
        advantages[n] = advantages[n] + decay[n] * advantages[n + 1]
    return torch.stack(advantages, -1), counted


def normalise_advantages(advantages: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Normalise advantages over the unmasked segments to (A − mean) / (std + 1e-8). Masked advantages become 0.

    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: shifting and scaling all advantages changes nothing.
    """
    count = mask.sum()
    centred = torch.where(mask, at_least_float32(advantages), 0.0)
    for _ in range(2):  # the second time takes away the rounding of the first, which a tiny spread would blow up
        centred = torch.where(mask, centred - centred.sum() / count.clamp(min=1), 0.0)
    std = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + _STD_FLOOR)


def critic_targets(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Float[Tensor, "B T"]:
    """Compute λ-returns as regression targets of the critic: generalised advantages (`corral.gae`) plus values.
    They are terminal at the episode's end.

    Ref:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16. Invariant: λ = 1 gives the reward-to-go.
    """
    return gae(rewards, values, torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask, gamma, lam)[1]


def draw_segments(steps: int, most: int, generator: torch.Generator | None = None) -> tuple[Int[Tensor, "K"], int]:
    """Cut T steps of an episode into segments of one random length. Returns the segments' first steps and the length.

        length L = ⌊T / k⌋,   k ~ U{1 … most},   starts 0, o, o + L, o + 2 L, … < T          o ~ U{0 … L − 1}

    The first two may overlap, and the last may reach beyond the end, so that every state begins some segment.

    Args:
        steps: T.
        most: largest number of segments that do not overlap, 1 ≤ most ≤ T.
        generator: on the CPU.
    """
    if not 1 <= most <= steps:
        raise ValueError(f"draw_segments: `most` is from 1 to the {steps} steps of an episode; got {most}.")
    length = steps // int(torch.randint(1, most + 1, (), generator=generator))
    first = int(torch.randint(length, (), generator=generator))
    return torch.cat([torch.tensor([0]), torch.arange(first, steps, length)]).unique(), length


def segment_returns(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B T"],
    rows: Int[Tensor, "K L"],
    gamma: float = 1.0,
) -> Float[Tensor, "B K L"]:
    """N-step returns of the first n = 1 … L actions of each segment: regression targets of the critic's Q values.

        G_n = Σ_{i<n} γ^i r_{t+i} + γ^n V(s_{t+n})          V = 0 once the episode is over

    Nothing is weighted by how likely the current policy is to act so: Q is of these very actions.

    Args:
        rewards, mask: of every step; mask is True while an episode runs.
        values: V of every state s_0 … s_T, so S = T + 1.
        rows: steps of each segment. One that reaches beyond the end repeats T − 1, and its returns there mean nothing.
    Ref:
        Li et al. 2025, arXiv:2410.09536, Sec. 4.3. Invariant: with V the rewards-to-go, all G_n are the reward-to-go from t.
    """
    length = rows.shape[1]
    discount = gamma ** torch.arange(length + 1, dtype=rewards.dtype, device=rewards.device)
    earned = (torch.where(mask, rewards, 0.0)[:, rows] * discount[:-1]).cumsum(-1)
    ahead = torch.where(torch.nn.functional.pad(mask, (0, 1))[:, 1:], values[:, 1:].to(rewards), 0.0)  # V(s_{t+1}) of each step
    return earned + discount[1:] * ahead[:, rows]


def _factor(rows: Tensor, chol: Tensor) -> Tensor:
    """Factor (I_D ⊗ R_n) L of each segment's covariance [*, N, D·S, W], computed without the Kronecker product."""
    rows, chol = in_one_dtype(rows, chol)
    width, columns = chol.shape[-1], rows.shape[-1]
    if width % columns:
        raise ValueError(
            f"segments: {width} parameters are not a whole number of joints with {columns} each; got rows {list(rows.shape)} "
            f"and chol {list(chol.shape)}. Rows are design.position[..., pairs, :]."
        )
    return torch.einsum("...nsm,...dmw->...ndsw", rows, chol.unflatten(-2, (-1, columns))).flatten(-3, -2)
