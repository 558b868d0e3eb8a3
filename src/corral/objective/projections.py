"""Objectives that project a policy onto a KL ball, and train the network towards the projected policy."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence import categorical_kl
from corral.numerics import at_least_float32
from corral.objective.config import DistillConfig, TROLLConfig
from corral.objective.metrics import masked_mean, projection_metrics, region_metrics
from corral.objective.ratio import capped_ratio, credit, log_ratio, sequence_log_ratio, zero_padding
from corral.projection.categorical_kl import RULED_OUT, project_categorical_kl
from corral.tensors import ObjectiveOutput, SparseDist, TokenBatch


def troll(batch: TokenBatch, config: TROLLConfig) -> ObjectiveOutput:
    """Policy gradient of the projected policy, with a regression of the network onto the projected policy (TROLL).

        π̃ = argmin_r KL(r‖π)  s.t.  KL(r‖π_c) ≤ ε            at every token, on the support and its tail
        L_t = − (π̃(a_t) / π_old(a_t)) Â_t + α KL(π_t‖sg[π̃_t])

    π_c is π_old, or with centre="reference" a frozen policy. The first term's gradient passes through the projection and has no
    component out of the ball; the second is zero inside it and purely radial outside. Everything comes from `dist_*`, the tail
    included; `logp_*` are only checked against it. With project="outward" a token outside whose own step,
    z ← z + s Â (e_a − π), leads back has the loss of one inside.

    Args:
        batch: advantages and mask [B T], both policies on one support [B T K], and the reference if it is the centre.
        config: bound, regression weight, tail, ratio level, gradient.
    Returns:
        Unreduced loss [B T], the regression's part of it, and metrics.
    Ref:
        Becker et al. 2025, arXiv:2510.03817. Invariant: TROLL = REINFORCE as ε → ∞, and at π = π_old.
    """
    assert batch.dist_new is not None
    assert batch.dist_old is not None
    middle = batch.dist_teacher if config.centre == "reference" else batch.dist_old
    assert middle is not None
    dists = (batch.dist_new, batch.dist_old, middle)
    new, old, centre = (zero_padding(_whole(dist, batch.mask, config), batch.mask) for dist in dists)
    # Both are normalised once, here and within the projection: twice would move the ratio of equal policies by a digit.
    bound: float | Tensor = config.bound
    if config.project == "outward":
        bound = torch.where(_leads_back(new, centre, batch), torch.inf, new.new_tensor(config.bound))
    projection = project_categorical_kl(
        new, centre.detach(), bound, gradient="constant_dual" if config.gradient == "constant_dual" else "exact"
    )
    plain = (new[..., 0] - old[..., 0]).detach()
    new, old = new.log_softmax(-1), old.detach().log_softmax(-1)
    used = new if config.gradient == "unprojected" else projection.logp
    log_rho = used[..., 0] - old[..., 0]
    if config.tail == "bucket":  # inside the region, the log-probs' own difference: equal policies have a ratio of exactly 1
        moved = projection.active & (config.gradient != "unprojected")
        log_rho = log_rho + torch.where(moved, 0.0, plain - log_rho.detach())
    if config.level == "sequence":
        log_rho = sequence_log_ratio(log_rho, batch.mask)
    policy = torch.where(batch.mask, -capped_ratio(log_rho, config.ratio_cap) * credit(batch), 0.0)
    pull = None
    if config.regresses:
        allowed = torch.where(new > RULED_OUT, new, -torch.inf)  # or what a finite logit mask rules out would be infinitely far
        # KL(π‖sg[π̃]) where the projection changed π, and exactly 0 elsewhere, without rounding.
        distance = torch.where(projection.active, categorical_kl(allowed, projection.logp.detach()), 0.0)
        if not torch.compiler.is_compiling() and bool((infinite := batch.mask & distance.isinf()).any()):
            raise ValueError(
                f"troll: the old policy rules out tokens that the new one allows, at {int(infinite.sum())} unmasked positions, "
                f"so no regression can reach the projection. Use the same logit masks for both, or floor both tails at log "
                f"1e-8 where they are computed as 1 − Σ p."
            )
        pull = torch.where(batch.mask, config.regression * distance, 0.0)
    metrics = region_metrics(batch, log_rho, projection.active, projection.kl_before)
    metrics |= projection_metrics(projection, batch.mask)
    acted, loss = projection.active & batch.mask, policy if pull is None else policy + pull
    return ObjectiveOutput(loss, metrics, acted, projection.kl_after, pull)


def _whole(dist: SparseDist, mask: Tensor, config: TROLLConfig) -> Float[Tensor, "B T K1"]:
    """Join support and tail into one distribution of K + 1 categories, not necessarily normalised."""
    if config.filled_tail is None:
        return dist.with_rest()
    assert config.vocab_size is not None
    kept = torch.where(mask, (dist.ids >= 0).sum(-1), 0)
    if not torch.compiler.is_compiling() and int(kept.max()) > config.vocab_size:
        raise ValueError(
            f"troll: `vocab_size` counts every token, and a support has {int(kept.max())} of them; got {config.vocab_size}."
        )
    rest = (config.vocab_size - kept).to(at_least_float32(dist.rest).dtype).mul(config.filled_tail).log()
    return SparseDist(dist.ids, dist.logp, rest).with_rest()


@torch.no_grad()
def _leads_back(new: Tensor, centre: Tensor, batch: TokenBatch) -> Bool[Tensor, "B T"]:
    """True for tokens whose own gradient step, z ← z + s Â (e_a − π), lowers the KL to the centre of the ball.

    ∂KL/∂z_j = π_j (d_j − KL) with d = log π − log π_c, so that dKL/ds = Â (π_a (d_a − KL) − Σ_j π_j² (d_j − KL)). Never where
    the centre rules out what the new policy allows: there the KL is infinite.
    """
    new, centre = new.log_softmax(-1), centre.log_softmax(-1)
    common = (new > RULED_OUT) & (centre > RULED_OUT)
    p = new.exp()
    kl = categorical_kl(new, centre)
    force = torch.where(common, p * (torch.where(common, new - centre, 0.0) - kl.nan_to_num(posinf=0.0)[..., None]), 0.0)
    rise = force[..., 0] - (p * force).sum(-1)
    return kl.isfinite() & (rise * credit(batch) < 0)


def distill(batch: TokenBatch, config: DistillConfig) -> ObjectiveOutput:
    """Distillation within a trust region: regression onto the policy nearest to the teacher in a KL ball around the old policy.

        π* = argmin_r KL(r‖teacher)  s.t.  KL(r‖π_old) ≤ ε  ∝ π_old^(1−t) teacher^t          t ∈ (0, 1]
        L_t = KL(π_t‖π*_t), or KL(π*_t‖π_t) with direction="forward"

    The target is a constant; no advantage is read. All three policies stand on one support with its exact tail, so that the
    loss is a KL: at least 0, and 0 where new and target agree on it.

    Args:
        batch: mask [B T], three policies on one support [B T K].
        config: the bound ε, and the direction of the regression.
    Returns:
        Unreduced loss [B T], all of it `regression`, and metrics. `acted` is where the teacher lay outside the ball.
    Ref:
        Projection: Becker et al. 2025, arXiv:2510.03817. Learning from a teacher on one's own samples: Agarwal et al. 2023,
        arXiv:2306.13649. Invariant: at π = π_old the gradient of KL(π‖π*) is t times that of KL(π‖teacher).
    """
    assert batch.dist_new is not None
    assert batch.dist_old is not None
    assert batch.dist_teacher is not None
    dists = (batch.dist_new, batch.dist_old, batch.dist_teacher)
    new, old, teacher = (zero_padding(dist.with_rest(), batch.mask) for dist in dists)
    projection = project_categorical_kl(teacher.detach(), old, config.bound)
    target, new = projection.logp.detach(), new.log_softmax(-1)
    distance = categorical_kl(new, target) if config.direction == "reverse" else categorical_kl(target, new)
    if not torch.compiler.is_compiling() and bool((infinite := batch.mask & distance.isinf()).any()):
        raise ValueError(
            f"distill: one policy rules out tokens that the other allows, at {int(infinite.sum())} unmasked positions, so no "
            f"regression can reach the target. Use the same logit masks for student and teacher."
        )
    loss = torch.where(batch.mask, distance, 0.0)
    metrics = region_metrics(batch, log_ratio(batch).detach(), projection.active) | projection_metrics(projection, batch.mask)
    metrics["tr/teacher_kl"] = masked_mean(projection.kl_before, batch.mask)
    return ObjectiveOutput(loss, metrics, projection.active & batch.mask, projection.kl_after, loss)
