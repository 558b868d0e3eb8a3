"""The nearest policy inside the trust region."""

from corral.projection.categorical_kl import CategoricalProjection, project_categorical_kl

__all__ = ["CategoricalProjection", "project_categorical_kl"]
