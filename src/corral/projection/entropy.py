"""Raise the entropy of a Gaussian policy to a floor, with or without a KL ball around the old policy."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence.gaussian import gaussian_entropy, kl_of_covariances
from corral.numerics import expm1_minus, in_one_dtype, require_tensors, without_autocast
from corral.projection.factor import RelativePrecision, relative_precision, tilted_factor
from corral.projection.gaussian import TOLERANCE, broadcast_rows, check_bound, check_factor, solve_tilt, whitening_error
from corral.projection.root import find_root
from corral.validate import number_in

_NAME = "project_entropy_floor"
_MAX_STEPS = 128
"""Largest number of solver steps. Newton's method needs few steps; bisection between distant policies needs more."""


@dataclass(frozen=True, eq=False)
class EntropyProjection:
    """Covariance whose entropy is at least the floor, with the solver's status for each row of the batch."""

    chol: Float[Tensor, "... D"]
    """Projected Cholesky factor L̃ [*, D, D], or standard deviations [*, D]. Gradients flow to the new policy's factor only."""
    active: Bool[Tensor, "*c"]
    """True where the projection changed the covariance."""
    entropy_before: Float[Tensor, "*c"]
    entropy_after: Float[Tensor, "*c"]
    converged: Bool[Tensor, "*c"]
    """False where no covariance reaches the entropy floor within the KL bound, or where an input was not a Gaussian.
    Also False where rounding keeps the result from the bound."""


@without_autocast
def project_entropy_floor(
    chol: Float[Tensor, "... D"],
    floor: float | Float[Tensor, "..."],
    *,
    old_chol: Float[Tensor, "... D"] | None = None,
    cov_bound: float | Float[Tensor, "..."] | None = None,
    diagonal: bool = False,
) -> EntropyProjection:
    """Raise a covariance to an entropy floor, inside a KL ball around the old covariance if one is given.

        Σ̃ = c Σ,                                     c = exp(2 max(0, β − H(Σ)) / D)          with the floor β alone
        Σ̃ = c ((1 − t) Σ_o⁻¹ + t Σ⁻¹)⁻¹             H(Σ̃) ≥ β,  KL(Σ̃‖Σ_o) ≤ ε               with `old_chol`, `cov_bound`

    Both minimise KL(Σ̃‖Σ) under their constraints. The first, after a KL projection, may leave the ball, as published; the
    second stays inside it. Give it the new factor before the projection, and it is the projection; or after, and it changes
    only what the floor asks for.

    Gradients flow to `chol` alone: where a constraint binds, none along what it holds. Rows that satisfy both are returned
    unchanged.

    Args:
        chol, old_chol: lower Cholesky factors [*, D, D]; with `diagonal`, standard deviations [*, D].
        floor: β in nats, one for all rows or one per row; −inf switches it off.
        cov_bound: ε ≥ 0 in nats; given with `old_chol` or not at all.
    Returns:
        EntropyProjection. Where no covariance in the ball reaches the floor, the one of most entropy, a multiple of the old
        one, with gradient 0 and converged = False: of the two, the bound is kept.
    Ref:
        Otto et al. 2021, arXiv:2101.09207, after Akrour et al. 2019. Invariant: H after = max(H before, β).
    """
    if (old_chol is None) != (cov_bound is None):
        raise ValueError(f"{_NAME}: `old_chol` and `cov_bound` keep the KL bound together; give both or neither.")
    olds = {} if old_chol is None else {"old_chol": old_chol}
    require_tensors(_NAME, chol=chol, **olds)
    for key, x in {"chol": chol, **olds}.items():
        check_factor(_NAME, key, x, chol.shape[-1] if chol.ndim else 0, diagonal)
    if not (bool((floor < math.inf).all()) if isinstance(floor, Tensor) else number_in(floor, -math.inf) and floor < math.inf):
        raise ValueError(f"{_NAME}: `floor` is an entropy in nats, below inf (−inf switches it off); got {floor}.")
    new, *old = in_one_dtype(chol, *(x.detach() for x in olds.values()))
    row_floor = torch.as_tensor(floor, dtype=new.dtype, device=new.device).detach()
    bound = new.new_zeros(()) if cov_bound is None else check_bound(_NAME, "cov_bound", cov_bound, new)
    axes = 1 if diagonal else 2
    factors = {key: x.shape[:-axes] for key, x in zip(("chol", "old_chol"), (new, *old), strict=False)}
    rows = broadcast_rows(_NAME, **factors, floor=row_floor.shape, cov_bound=bound.shape)
    new, *old = (x.expand(*rows, *x.shape[-axes:]) for x in (new, *old))
    if not old:
        return _scale(new, row_floor.expand(rows), diagonal)
    return _inside_ball(new, row_floor.expand(rows), old[0], bound.expand(rows), diagonal)


def _scale(chol: Tensor, floor: Tensor, diagonal: bool) -> EntropyProjection:
    entropy = gaussian_entropy(chol, diagonal=diagonal)
    active = entropy < floor
    missing = (floor - entropy) / chol.shape[-1]
    # A zero on the diagonal has entropy −inf, and no multiple of it has more; nor is there a multiple beyond all numbers.
    reachable = active & entropy.isfinite() & (missing < math.log(torch.finfo(chol.dtype).max))
    out = chol * torch.where(reachable, missing, 0.0).exp()[(..., None) if diagonal else (..., None, None)]
    before = entropy.detach()
    converged = before.isfinite() & (reachable | ~active)
    return EntropyProjection(out, active, before, torch.where(reachable, floor, before), converged)


def _inside_ball(chol: Tensor, floor: Tensor, old: Tensor, bound: Tensor, diagonal: bool) -> EntropyProjection:
    """Apply the entropy floor inside the KL ball. Rows that the floor alone leaves in the ball need no precision matrix."""
    with torch.no_grad():
        known = ~(gaussian_entropy(chol, diagonal=diagonal).isnan() | kl_of_covariances(chol, old, diagonal).isnan())
        lifted = _scale(chol, floor, diagonal)
        outside = known & ~(lifted.converged & (kl_of_covariances(lifted.chol, old, diagonal) <= bound))
    alone = _scale(chol, torch.where(known & ~outside, floor, -torch.inf), diagonal)
    if not bool(outside.any()):
        return replace(alone, converged=alone.converged & known & _inside(alone.chol, old, bound, diagonal))
    out, after, converged = alone.chol.clone(), alone.entropy_after.clone(), alone.converged & known
    rows = chol[outside], old[outside]
    with torch.no_grad():
        precision = relative_precision(*rows, diagonal)
        old_entropy = gaussian_entropy(rows[1], diagonal=diagonal)
        need = 2 * (floor[outside] - old_entropy) / chol.shape[-1]
        t, log_scale, converged[outside] = _solve_both(precision, need, bound[outside])
    out[outside] = tilted_factor(*rows, precision, t, log_scale, diagonal)
    with torch.no_grad():
        after[outside] = gaussian_entropy(out[outside], diagonal=diagonal)
    kept = converged & _inside(out, old, bound, diagonal)
    return EntropyProjection(out, alone.active | outside, alone.entropy_before, after, kept)


@torch.no_grad()
def _inside(chol: Tensor, old: Tensor, bound: Tensor, diagonal: bool) -> Tensor:
    """True for covariances that certainly lie in the KL ball, with the same test as `project_gaussian_kl`."""
    return kl_of_covariances(chol, old, diagonal) * (1 + whitening_error(old, diagonal)) <= (1 + TOLERANCE) * bound


def _solve_both(precision: RelativePrecision, need: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve for t and log c in rows where the new covariance, raised to the entropy floor, is outside the KL ball.
    Returns t, log c and convergence.

    Along the path of solutions KL(Σ̃‖Σ_o) rises with t whether the floor binds or not.

    With r_i = 1 + t q_i, the floor asks for log c = max(0, need + mean log r), need = 2 (β − H(Σ_o))/D, and the eigenvalues
    of L_o⁻¹ Σ̃ L_o⁻ᵀ are e^{g_i}, g_i = log c − log r_i:

        K(t) = ½ Σ (e^g − 1 − g)          K′(t) = ½ Σ (e^g − 1) g′          g_i′ = (log c)′ − q_i / r_i

    At t = 0 that is the old covariance times c: if it lies outside the ball, no other does better.
    """
    eps = torch.finfo(need.dtype).eps
    q = precision.values.clamp(min=eps - 1)

    def path(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = 1 + t[..., None] * q
        log_r = torch.log1p(t[..., None] * q)
        log_scale = (need + log_r.mean(-1)).clamp(min=0)
        g = log_scale[..., None] - log_r
        rise = torch.where(log_scale > 0, (q / r).mean(-1), 0.0)[..., None] - q / r
        return log_scale, 0.5 * expm1_minus(g).sum(-1), 0.5 * (torch.expm1(g) * rise).sum(-1)

    room = precision.finite & (path(torch.zeros_like(need))[1] <= bound)
    binding = room & (bound > 0)
    target = (2 * torch.where(binding, bound, 1.0)).sqrt()

    def excess(t: Tensor) -> tuple[Tensor, Tensor]:
        _, kl, slope = path(t)
        root = (2 * kl).sqrt()
        return torch.where(binding, root - target, 0.0), slope / root

    start = torch.where(binding, solve_tilt(precision, torch.where(binding, bound, 1.0))[0], 1.0)
    found = find_root(excess, start, scale=target, max_steps=_MAX_STEPS)
    t = torch.where(binding, found.x, 0.0)
    log_scale = torch.where(room, path(t)[0], _widest(need.clamp(min=0), bound, q.shape[-1]))
    return t, log_scale, found.converged & room


def _widest(need: Tensor, bound: Tensor, dimension: int) -> Tensor:
    """Compute the largest log c ≤ `need` such that c times the old covariance lies in the KL ball.

    The ball's boundary is D/2 (c − 1 − log c) = ε.

    c − 1 − log c ≥ (√c − 1)², since x − 1 ≥ log x for x = √c. So log c ≤ 2 log(1 + √(2ε/D)), however much is needed.
    """
    outside = (need > 0) & (bound > 0) & (0.5 * dimension * expm1_minus(need) > bound)
    target = (2 * torch.where(outside, bound, 1.0) / dimension).sqrt()
    top = torch.where(outside, torch.minimum(need, 2 * target.log1p()), 1.0)

    def excess(x: Tensor) -> tuple[Tensor, Tensor]:
        root = expm1_minus(x * top).sqrt()
        return torch.where(outside, root - target, 0.0), 0.5 * top * torch.expm1(x * top) / root

    found = find_root(excess, torch.ones_like(top), scale=target, max_steps=_MAX_STEPS)
    return torch.where(outside, found.x * top, torch.where(bound > 0, need, 0.0))
