"""Settings of step-based baselines. Importing this module does not import stable-baselines3."""

import math
from dataclasses import dataclass
from typing import Literal

from corral.validate import Checked, limited


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Checked):
    """Settings of a step-based baseline. Settings not listed here are stable-baselines3's defaults."""

    iterations: int = limited(125, at_least=1)
    """Number of training iterations, each on one batch of episodes."""
    episodes: int = limited(64, at_least=1)
    """Number of episodes in a training batch, a multiple of the number of environments."""
    rate: float = limited(3e-4, above=0)
    """Learning rate of the baseline's optimizers."""
    gamma: float = limited(0.99, at_least=0, at_most=1)
    """Discount factor γ of later rewards."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the policy and critic networks."""
    epochs: int = limited(10, at_least=1)
    """PPO and TRPL: number of passes over each batch of episodes."""
    minibatches: int = limited(16, at_least=1)
    """PPO and TRPL: number of updates per pass over a batch of episodes."""
    train_freq: int = limited(64, at_least=1)
    """SAC: number of environment steps between rounds of updates."""
    gradient_steps: int = limited(8, at_least=1)
    """SAC: number of updates in a round. One update per step, SAC's usual setting, is eight times slower."""
    device: Literal["cpu", "cuda"] = "cpu"
    """SAC: device of the networks. Environments stay on the CPU. A run from a GPU can be evaluated on a CPU."""
    noise_colour: float = limited(1.0, finite=True)
    """sb3-…-pink: exponent β of the exploration noise's power spectrum 1/f^β. For PPO 0.5 was best.
    Pink noise has β = 1, white noise 0 and red noise 2."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """TRPL: divergence or distance in which the trust region is measured."""
    mean_bound: float = limited(0.03, above=0, note="inf switches it off")
    """TRPL: bound ε_μ of the trust region on the change of the policy's mean per batch, in each state.
    The defaults of this setting and the next two are from published code for the KL."""
    cov_bound: float = limited(0.001, above=0, note="inf switches it off")
    """TRPL: bound ε_Σ of the trust region on the change of the policy's covariance per batch."""
    regression: float = limited(8.0, at_least=0, finite=True)
    """TRPL: weight of the regression loss KL(π_θ‖sg π̃), which pulls the policy network towards the projected policy π̃."""
    deployed_bound: float = limited(math.inf, above=0, what="a divergence", note="inf measures alone")
    """TRPL: bound on the mean KL per step between the policy network before and after a batch's updates.
    Larger moves are pulled back. inf only measures."""
    controller_span: float | None = limited(None, above=0, finite=True)
    """Range in radians of actions that are positions around the joints' start, to which the controller moves the joints.
    None uses the environment's own actions."""
