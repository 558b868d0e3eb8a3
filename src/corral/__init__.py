"""corral keeps a policy inside its trust region while reinforcement learning improves it."""

__version__ = "0.1.0"

from corral.divergence import binary_kl, binary_tv, categorical_kl, categorical_tv
from corral.projection import CategoricalProjection, project_categorical_kl
from corral.support import gather_support, top_k_support
from corral.types import ObjectiveOutput, SparseDist, TokenBatch
