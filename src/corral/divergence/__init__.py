"""Divergences between two policies: categorical, two-way (the sampled token or any other), Gaussian, or sample estimates."""

from corral.divergence.binary import binary_kl, binary_tv
from corral.divergence.categorical import categorical_kl, categorical_tv
from corral.divergence.estimate import kl_k1, kl_k2, kl_k3
from corral.divergence.gaussian import GaussianDistance, gaussian_entropy, gaussian_frobenius, gaussian_kl, gaussian_wasserstein

__all__ = [
    "GaussianDistance", "binary_kl", "binary_tv", "categorical_kl", "categorical_tv", "gaussian_entropy", "gaussian_frobenius",
    "gaussian_kl", "gaussian_wasserstein", "kl_k1", "kl_k2", "kl_k3",
]  # fmt: skip
