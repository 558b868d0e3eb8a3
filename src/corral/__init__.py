"""corral keeps a policy inside a trust region while reinforcement learning improves the policy."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from corral import _moved

if TYPE_CHECKING:
    from corral.advantage import gae, group_advantages
    from corral.deployed import Certificate, RateController, TokenKL, retract, snapshot
    from corral.divergence import (
        GaussianDistance,
        binary_kl,
        binary_tv,
        categorical_kl,
        categorical_tv,
        gaussian_entropy,
        gaussian_frobenius,
        gaussian_kl,
        gaussian_wasserstein,
        kl_k1,
        kl_k2,
        kl_k3,
    )
    from corral.head import HeadOutput, PolicyLoss, UnionSupport, head_kl, lm_head, policy_loss_from_hidden
    from corral.objective import make_objective, objective_names, register_objective
    from corral.objective.config import ObjectiveConfig
    from corral.objective.correction import make_correction
    from corral.objective.improvement import ImprovementBound, improvement_bound
    from corral.objective.reduction import reduce_loss, reduction_weights
    from corral.projection import (
        CategoricalProjection,
        EntropyProjection,
        GaussianProjection,
        project_categorical_kl,
        project_entropy_floor,
        project_gaussian_frobenius,
        project_gaussian_kl,
        project_gaussian_wasserstein,
    )
    from corral.support import condition_on_support, gather_support, top_k_support
    from corral.tensors import ObjectiveOutput, PackedSparseDist, SparseDist, TokenBatch

__version__ = "0.1.0"

_moved.install(__path__)

__all__ = [
    "CategoricalProjection", "Certificate", "EntropyProjection", "GaussianDistance", "GaussianProjection", "HeadOutput",
    "ImprovementBound", "ObjectiveConfig", "ObjectiveOutput", "PackedSparseDist", "PolicyLoss", "RateController", "SparseDist",
    "TokenBatch", "TokenKL", "UnionSupport", "binary_kl", "binary_tv", "categorical_kl", "categorical_tv",
    "condition_on_support", "gae", "gather_support", "gaussian_entropy", "gaussian_frobenius", "gaussian_kl",
    "gaussian_wasserstein", "group_advantages", "head_kl", "improvement_bound", "kl_k1", "kl_k2", "kl_k3", "lm_head",
    "make_correction", "make_objective", "objective_names", "policy_loss_from_hidden", "project_categorical_kl",
    "project_entropy_floor", "project_gaussian_frobenius", "project_gaussian_kl", "project_gaussian_wasserstein", "reduce_loss",
    "reduction_weights", "register_objective", "retract", "snapshot", "top_k_support",
]  # fmt: skip

_MODULES = (
    *("advantage", "deployed", "divergence", "head", "objective", "objective.config", "objective.correction"),
    *("objective.improvement", "objective.reduction", "projection", "support", "tensors"),
)
"""Modules that define the public names of corral."""


def __getattr__(name: str) -> Any:
    """Import torch and the public names of corral on first use, because `corral --version` needs none of them."""
    if name in ("llm", "robot", "task"):
        return import_module(f"{__name__}.{name}")  # `import corral` is enough for `corral.llm.audit(trainer)`
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _MODULES:
        found = vars(import_module(f"{__name__}.{module}")).items()
        # corral.projection.categorical_kl is a module, corral.categorical_kl a function.
        globals().update({public: value for public, value in found if public in __all__ and not isinstance(value, ModuleType)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
