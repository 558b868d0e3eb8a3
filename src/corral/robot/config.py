"""Settings that TCE and BBRL share, validated."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from corral.projection.gaussian import GaussianProjection
from corral.projection.gaussian_frobenius import project_gaussian_frobenius
from corral.projection.gaussian_kl import project_gaussian_kl
from corral.projection.gaussian_wasserstein import project_gaussian_wasserstein
from corral.robot.policy import ACTIVATIONS
from corral.validate import number_in

FINITE = sys.float_info.max

PROJECTIONS: dict[str, Callable[..., GaussianProjection]] = {
    "kl": project_gaussian_kl,
    "wasserstein": project_gaussian_wasserstein,
    "frobenius": project_gaussian_frobenius,
}


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Settings of an episodic learner; the names are those of docs/tce.md."""

    iterations: int = 125
    """Batches of episodes."""
    episodes: int = 64
    """Episodes in a batch."""
    policy_epochs: int = 25
    """Updates of the policy per batch, each on the whole batch."""
    critic_epochs: int = 10
    """Updates of the critic per batch."""
    policy_rate: float = 1e-3
    """Learning rate of the policy's Adam."""
    critic_rate: float = 1e-3
    """Learning rate of the critic's Adam."""
    weight_decay: float = 0.0
    """L2 penalty of both."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """Measure of the trust region."""
    mean_bound: float = 0.05
    """ε_μ: how far the mean may move per batch."""
    cov_bound: float = 0.005
    """ε_Σ: how far the covariance may move per batch."""
    regression: float = 1.0
    """Weight of KL(π_θ‖sg π̃), which draws the network into the region."""
    entropy_floor: float | None = None
    """Entropy per parameter that the policy may fall to by the last batch, linearly from its first; none without it."""
    floor_in_region: bool = True
    """With projection "kl", the floor never pushes the covariance past `cov_bound`; False as published, where it may."""
    set_covariance: bool = False
    """After a batch, write the projected covariance into the network instead of trusting the regression with it."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the policy's layers."""
    critic_hidden: tuple[int, ...] = (64, 64)
    """Widths of the critic's."""
    activation: str = "tanh"
    """Of both networks."""
    std: float = 1.0
    """First standard deviation of every parameter."""
    min_std: float = 1e-4
    """Least entry on the diagonal of the Cholesky factor."""

    def __post_init__(self) -> None:
        for name in ("iterations", "episodes", "policy_epochs", "critic_epochs"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{self._name()}: `{name}` is a whole number ≥ 1; got {value!r}.")
        for name in ("mean_bound", "cov_bound"):
            value = getattr(self, name)
            if not (number_in(value, 0) and value > 0):
                raise ValueError(f"{self._name()}: `{name}` must be > 0 (inf switches it off); got {value!r}.")
        for name in ("policy_rate", "critic_rate"):
            value = getattr(self, name)
            if not (number_in(value, 0, FINITE) and value > 0):
                raise ValueError(f"{self._name()}: `{name}` must be finite and > 0; got {value!r}.")
        for name in ("regression", "weight_decay"):
            if not number_in(getattr(self, name), 0, FINITE):
                raise ValueError(f"{self._name()}: `{name}` must be finite and ≥ 0; got {getattr(self, name)!r}.")
        if self.entropy_floor is not None and not number_in(self.entropy_floor, -FINITE, FINITE):
            raise ValueError(f"{self._name()}: `entropy_floor` is a finite number, or None; got {self.entropy_floor!r}.")
        for name in ("hidden", "critic_hidden"):
            if not getattr(self, name) or any(type(width) is not int or width < 1 for width in getattr(self, name)):
                raise ValueError(f"{self._name()}: `{name}` holds at least one whole number ≥ 1; got {getattr(self, name)!r}.")
        if not (number_in(self.std, 0, FINITE) and number_in(self.min_std, 0) and 0 < self.min_std < self.std):
            raise ValueError(f"{self._name()}: 0 < `min_std` < `std`, both finite; got {self.min_std!r} and {self.std!r}.")
        for name, known in (("projection", PROJECTIONS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{self._name()}: `{name}` is one of {', '.join(known)}; got {getattr(self, name)!r}.")

    def _name(self) -> str:
        return type(self).__name__.removesuffix("Config").lower()
