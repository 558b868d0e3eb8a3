"""Trust-region distillation: follow a teacher as far as the student's own KL ball allows."""

import torch
from torch import Tensor

from corral.divergence import categorical_kl
from corral.objective.config import DistillConfig
from corral.objective.metrics import masked_mean, projection_metrics, region_metrics
from corral.objective.ratio import log_ratio, zero_padding
from corral.projection import project_categorical_kl
from corral.tensors import ObjectiveOutput, TokenBatch


def distill(batch: TokenBatch, config: DistillConfig) -> ObjectiveOutput:
    """Regression onto the policy nearest to the teacher inside the old policy's KL ball.

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
    _check_finite(distance, batch.mask)
    loss = torch.where(batch.mask, distance, 0.0)
    metrics = region_metrics(batch, log_ratio(batch).detach(), projection.active) | projection_metrics(projection, batch.mask)
    metrics["tr/teacher_kl"] = masked_mean(projection.kl_before, batch.mask)
    return ObjectiveOutput(loss, metrics, projection.active & batch.mask, projection.kl_after, loss)


def _check_finite(distance: Tensor, mask: Tensor) -> None:
    if not torch.compiler.is_compiling() and bool((mask & distance.isinf()).any()):
        raise ValueError(
            f"distill: one policy rules out tokens that the other allows, at {int((mask & distance.isinf()).sum())} unmasked "
            f"positions, so no regression can reach the target. Use the same logit masks for student and teacher."
        )
