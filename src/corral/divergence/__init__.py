"""How far is one policy from another? Exact over categories, on one token against the rest, or estimated from samples."""

from corral.divergence.binary import binary_kl, binary_tv
from corral.divergence.categorical import categorical_kl, categorical_tv
from corral.divergence.estimate import kl_k1, kl_k2, kl_k3

__all__ = ["binary_kl", "binary_tv", "categorical_kl", "categorical_tv", "kl_k1", "kl_k2", "kl_k3"]
