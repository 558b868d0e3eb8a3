"""Projections: replace a new policy outside the trust region by the nearest policy inside the trust region."""

from corral.projection.categorical_kl import CategoricalProjection, project_categorical_kl
from corral.projection.entropy import EntropyProjection, project_entropy_floor
from corral.projection.gaussian import (
    GaussianProjection,
    project_gaussian_frobenius,
    project_gaussian_kl,
    project_gaussian_wasserstein,
)

__all__ = [
    "CategoricalProjection", "EntropyProjection", "GaussianProjection", "project_categorical_kl", "project_entropy_floor",
    "project_gaussian_frobenius", "project_gaussian_kl", "project_gaussian_wasserstein",
]  # fmt: skip
