"""Settings shared by TCE and BBRL, with validation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from corral.projection import (
    GaussianProjection,
    project_gaussian_frobenius,
    project_gaussian_kl,
    project_gaussian_wasserstein,
)
from corral.robot.planner import PlanStart
from corral.robot.policy import ACTIVATIONS
from corral.validate import Checked, limited, number_in, owner_name

PROJECTIONS: dict[str, Callable[..., GaussianProjection]] = {
    "kl": project_gaussian_kl,
    "wasserstein": project_gaussian_wasserstein,
    "frobenius": project_gaussian_frobenius,
}

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def check_device(owner: str, device: str) -> None:
    """Raise a ValueError if the device is a GPU that is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{owner}: device='cuda', but torch finds no GPU. Leave it at 'cpu'.")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """Settings of an episodic learner; the names are those of docs/tce.md."""

    iterations: int = limited(125, at_least=1)
    """Batches of episodes."""
    episodes: int = limited(64, at_least=1)
    """Episodes in a batch."""
    plans_per_context: int = limited(1, at_least=1)
    """Plans drawn for each context of a batch. From 2 on an advantage is a plan's credit less the mean of the others' for the
    same context, exactly, and no critic is fitted; contexts are as many times fewer."""
    mirrored: bool = False
    """Plans of a context come in pairs μ ± L ε: what both earn alike then drops out of the mean's gradient. Needs at least two
    pairs, since what widens or narrows exploration shows only between pairs."""
    policy_epochs: int = limited(25, at_least=1)
    """Updates of the policy per batch, each on the whole batch."""
    critic_epochs: int = limited(10, at_least=1)
    """Updates of the critic per batch."""
    policy_rate: float = limited(1e-3, above=0, finite=True)
    """Learning rate of the policy's Adam."""
    critic_rate: float = limited(1e-3, above=0, finite=True)
    """Learning rate of the critic's Adam."""
    decay_over: float | None = limited(None, above=0, what="a number of batches", note="inf keeps the rates constant")
    """Batches over which both learning rates fall linearly to a hundredth: the run's without it, 10,000 as published for TCE,
    whatever the run's length. inf keeps them constant, as published for BBRL."""
    weight_decay: float = limited(0.0, at_least=0, finite=True)
    """L2 penalty on the weights of both networks."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """Measure of the trust region."""
    mean_bound: float = limited(0.05, above=0, note="inf switches it off")
    """ε_μ: how far the mean may move per batch."""
    cov_bound: float = limited(0.005, above=0, note="inf switches it off")
    """ε_Σ: how far the covariance may move per batch."""
    regression: float = limited(1.0, at_least=0, finite=True)
    """Weight of KL(π_θ‖sg π̃), which draws the network into the region."""
    entropy_floor: float | None = limited(None, finite=True)
    """Entropy per parameter that the policy may fall to by the last batch, linearly from its first; none without it."""
    entropy_equal: bool = False
    """The floor is a ceiling too: exploration narrows on schedule, also in directions that no reward depends on."""
    floor_in_region: bool = True
    """With projection "kl", the floor never pushes the covariance past `cov_bound`; False as published, where it may."""
    set_covariance: bool = False
    """After a batch, write the projected covariance into the network instead of trusting the regression with it."""
    contextual_covariance: bool = False
    """The covariance depends on the context, as the mean does: one projection and one factor for each plan, which is slower."""
    normalise_contexts: bool = False
    """The policy sees contexts less their mean and divided by their standard deviation, both of 256 resets before the first
    batch and fixed from then on, so that goals a few centimetres apart differ by as much as its other inputs."""
    replan_every: int | None = limited(None, at_least=1)
    """Steps after which the policy looks again and plans anew, a divisor of the episode's; one plan per episode without it."""
    replan_from: PlanStart = "desired"
    """Start of a new plan: "desired" is the desired position and velocity of the plan before it, so that the controller follows
    a smooth curve; "state" is that of the joints."""
    deployed_bound: float = limited(math.inf, above=0, what="a divergence", note="inf measures alone")
    """Mean KL per plan of the network after a batch's updates from the network before them that is allowed; what goes further
    is retracted. inf measures alone."""
    hidden: tuple[int, ...] = limited((64, 64), each=True, at_least=1, integer=True)
    """Widths of the policy's layers."""
    critic_hidden: tuple[int, ...] = limited((64, 64), each=True, at_least=1, integer=True)
    """Widths of the critic's layers."""
    normalise_critic: bool = True
    """The critic's inputs are normalised by their running mean and standard deviation; False as published for BBRL."""
    critic_dtype: Literal["float64", "float32"] | None = None
    """Precision of the critic's network; the run's precision by default. The critic's updates are most of TCE's arithmetic, and
    a baseline needs no sixteen digits: float32 takes less than half the time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the networks; environments stay on the CPU, and random numbers are drawn there. A run from a GPU can be
    evaluated without one."""
    activation: str = limited("tanh", one_of=tuple(ACTIVATIONS))
    """Activation function of both networks."""
    std: float = 1.0
    """First standard deviation of every parameter."""
    min_std: float = 1e-4
    """Least entry on the diagonal of the Cholesky factor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plans, every = self.plans_per_context, self.replan_every
        if self.episodes % plans:
            self._refuse(
                f"`episodes` is a whole number of contexts with `plans_per_context` plans each; got {self.episodes} and "
                f"{plans}."
            )
        if plans > 1 and every is not None:
            self._refuse(
                f"with `plans_per_context` > 1 plans of one context are compared, and those made on the way begin in contexts "
                f"of their own; got {plans} and replan_every={every}. Leave one of them out."
            )
        if self.normalise_contexts and every is not None:
            self._refuse(
                f"`normalise_contexts` knows how episodes begin, and with `replan_every` the policy looks at states on the way "
                f"too; got replan_every={every}. Leave one of them out."
            )
        if self.mirrored and (plans % 2 or plans < 4):
            self._refuse(f"`mirrored` needs `plans_per_context` to be even and at least 4; got {plans}.")
        if self.entropy_equal and self.entropy_floor is None:
            self._refuse("`entropy_equal` needs an `entropy_floor` to end at; got None.")
        if self.set_covariance and self.contextual_covariance:
            self._refuse(
                "`set_covariance` writes one matrix, and with `contextual_covariance` there is one for each context. Choose "
                "one of the two."
            )
        if not (number_in(self.std, 0) and number_in(self.min_std, 0) and 0 < self.min_std < self.std < math.inf):
            self._refuse(f"0 < `min_std` < `std`, both finite; got {self.min_std!r} and {self.std!r}.")

    def _refuse(self, why: str) -> None:
        raise ValueError(f"{owner_name(self)}: {why}")
