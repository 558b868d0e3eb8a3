"""The nearest policy inside the trust region."""

from corral.projection.categorical_kl import CategoricalProjection, project_categorical_kl
from corral.projection.entropy import EntropyProjection, project_entropy_floor
from corral.projection.gaussian import GaussianProjection
from corral.projection.gaussian_frobenius import project_gaussian_frobenius
from corral.projection.gaussian_kl import project_gaussian_kl
from corral.projection.gaussian_wasserstein import project_gaussian_wasserstein

__all__ = [
    "CategoricalProjection",
    "EntropyProjection",
    "GaussianProjection",
    "project_categorical_kl",
    "project_entropy_floor",
    "project_gaussian_frobenius",
    "project_gaussian_kl",
    "project_gaussian_wasserstein",
]
