"""Settings shared by the robot learners TCE, BBRL and TOP-ERL, with checks of their values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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

AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "tce": {"closing_segment": False, "common_jitter": True, "floor_in_region": False},
    "bbrl": {"floor_in_region": False},
}
"""Settings as in the papers of TCE and BBRL, for those settings in which corral's defaults differ (see docs/tce.md)."""


def check_device(owner: str, device: str) -> None:
    """Raise a ValueError if `device` is "cuda" and this machine has no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{owner}: device='cuda', but torch finds no GPU. Leave it at 'cpu'.")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """Settings shared by the robot learners TCE, BBRL and TOP-ERL, with names as in docs/tce.md."""

    iterations: int = limited(125, at_least=1)
    """Number of training iterations, each on one new batch of episodes."""
    episodes: int = limited(64, at_least=1)
    """Number of episodes in a training batch."""
    plans_per_context: int = limited(1, at_least=1)
    """Number of plans drawn for each context of a batch, where a context is an episode's first observation.
    From 2 on, a plan's advantage is its credit minus the mean credit of the other plans for the same context, and no
    critic is fitted. A batch has as many times fewer contexts."""
    mirrored: bool = False
    """True to draw the plans of a context in mirrored pairs: policy mean plus noise, and mean minus the same noise.
    Credit that both plans of a pair earn then drops out of the mean's gradient. Needs at least two pairs, because the
    gradient of the covariance comes from differences between pairs."""
    policy_epochs: int = limited(25, at_least=1)
    """Number of policy updates per batch of episodes, each on the whole batch."""
    critic_epochs: int = limited(10, at_least=1)
    """Number of critic updates per batch of episodes."""
    policy_rate: float = limited(1e-3, above=0, finite=True)
    """Learning rate of the Adam optimizer of the policy."""
    critic_rate: float = limited(1e-3, above=0, finite=True)
    """Learning rate of the Adam optimizer of the critic."""
    decay_over: float | None = limited(None, above=0, what="a number of batches", note="inf keeps the rates constant")
    """Number of batches over which the learning rates of policy and critic fall linearly to a hundredth.
    The default is the length of the run. TCE was published with 10,000, whatever the run's length. BBRL was published
    with inf, which keeps rates constant."""
    weight_decay: float = limited(0.0, at_least=0, finite=True)
    """L2 penalty on the weights of the policy network and the critic network."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """Divergence or distance in which the trust region around the old policy is measured."""
    mean_bound: float = limited(0.05, above=0, note="inf switches it off")
    """Bound ε_μ of the trust region on the change of the policy's mean per batch."""
    cov_bound: float = limited(0.005, above=0, note="inf switches it off")
    """Bound ε_Σ of the trust region on the change of the policy's covariance per batch."""
    regression: float = limited(1.0, at_least=0, finite=True)
    """Weight of the regression loss KL(π_θ‖sg π̃), which pulls the policy network towards the projected policy π̃."""
    entropy_floor: float | None = limited(None, finite=True)
    """Lower bound on the policy's entropy per parameter at the last batch. None sets no bound.
    The bound falls to it linearly from the policy's first entropy."""
    floor_over: float | None = limited(None, above=0, what="a number of batches", finite=True)
    """Number of batches over which the lower bound on the policy's entropy falls. The default is the length of the run.
    On box pushing 7,500 was published, whatever the run's length."""
    entropy_equal: bool = False
    """True to hold the policy's entropy at the lower bound `entropy_floor`, as an upper bound too.
    Exploration then narrows on schedule, also in directions that no reward depends on."""
    floor_in_region: bool = True
    """True if raising the entropy to `entropy_floor` never moves the covariance past `cov_bound`, with projection "kl".
    It is False as published."""
    set_covariance: bool = False
    """True to write the projected covariance into the policy network after a batch.
    Otherwise only the regression loss moves the network's covariance there."""
    contextual_covariance: bool = False
    """True if the policy's covariance depends on the context, as its mean does.
    Each plan then needs its own projection, which is slower."""
    normalise_contexts: bool = False
    """True to normalise contexts by their mean and standard deviation before they enter the networks.
    Both come from 256 resets before the first batch and stay fixed. Goals a few centimetres apart then differ by as much
    as the policy's other inputs."""
    replan_every: int | None = limited(None, at_least=1)
    """Number of steps after which the policy makes a new plan during an episode. None makes one plan per episode.
    It must divide the episode's steps."""
    replan_from: PlanStart = "desired"
    """Joint state in which a new plan during an episode starts: "desired" or "state".
    "desired" is the desired position and velocity of the previous plan, so that the controller follows a smooth curve.
    "state" is the measured position and velocity of the joints."""
    deployed_bound: float = limited(math.inf, above=0, what="a divergence", note="inf measures alone")
    """Bound on the mean KL per plan between the policy network before and after a batch's updates. inf only measures.
    Larger moves are pulled back."""
    hidden: tuple[int, ...] = limited((64, 64), each=True, at_least=1, integer=True)
    """Widths of the hidden layers of the policy network."""
    critic_hidden: tuple[int, ...] = limited((64, 64), each=True, at_least=1, integer=True)
    """Widths of the hidden layers of the critic network."""
    normalise_critic: bool = True
    """True to normalise the critic's inputs by their running mean and standard deviation. BBRL was published with False."""
    critic_dtype: Literal["float64", "float32"] | None = None
    """Floating-point precision of the critic network. The default is the precision of the run.
    The critic's updates are most of TCE's arithmetic, and float32 takes less than half the time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the policy and critic networks. Environments and random numbers stay on the CPU.
    A run from a GPU can be evaluated without one."""
    activation: str = limited("tanh", one_of=tuple(ACTIVATIONS))
    """Activation function of the policy network and the critic network."""
    std: float = 1.0
    """Initial standard deviation of the policy for every trajectory parameter."""
    min_std: float = 1e-4
    """Lower bound on the diagonal entries of the Cholesky factor of the policy's covariance."""

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
