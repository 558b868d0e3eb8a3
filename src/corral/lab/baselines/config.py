"""Settings of step-based baselines, which can be read without stable-baselines3."""

import math
from dataclasses import dataclass
from typing import Literal

from corral.validate import Checked, limited


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Checked):
    """Settings of a baseline; what is not here is stable-baselines3's default."""

    iterations: int = limited(125, at_least=1)
    """Batches of episodes."""
    episodes: int = limited(64, at_least=1)
    """Episodes in a batch, a multiple of the number of environments."""
    rate: float = limited(3e-4, above=0)
    """Learning rate."""
    gamma: float = limited(0.99, at_least=0, at_most=1)
    """Discount γ."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of every network's layers."""
    epochs: int = limited(10, at_least=1)
    """PPO and TRPL: passes over a batch."""
    minibatches: int = limited(16, at_least=1)
    """PPO and TRPL: updates per pass."""
    train_freq: int = limited(64, at_least=1)
    """SAC: number of steps of the environments between updates …"""
    gradient_steps: int = limited(8, at_least=1)
    """… and number of updates after each round of episodes. One for each step, its own default, is eight times slower."""
    device: Literal["cpu", "cuda"] = "cpu"
    """SAC: where its networks are; environments stay on the CPU. On a GPU the updates of a round are replays of one CUDA graph,
    which is what makes one for each step affordable; with gSDE they are launched one by one. A run from a GPU can be evaluated
    without one."""
    noise_colour: float = limited(1.0, finite=True)
    """sb3-…-pink: β of the noise's spectrum 1/f^β; 1 is pink, 0 white, 2 red. 0.5 was found to suit PPO best."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """TRPL: measure of the trust region of a step."""
    mean_bound: float = limited(0.03, above=0, note="inf switches it off")
    """TRPL: ε_μ, how far the mean may move per batch, in each state; this and the next two are what others' code has for KL."""
    cov_bound: float = limited(0.001, above=0, note="inf switches it off")
    """TRPL: ε_Σ, how far the covariance may move per batch."""
    regression: float = limited(8.0, at_least=0, finite=True)
    """TRPL: weight of KL(π_θ‖sg π̃), which draws the network into the region."""
    deployed_bound: float = limited(math.inf, above=0, what="a divergence", note="inf measures alone")
    """TRPL: mean KL per step of the network after a batch's updates from the network before them that is allowed; what goes
    further is retracted. inf measures alone."""
    controller_span: float | None = limited(None, above=0, finite=True)
    """Radians: an action is where the joints should be, so far around where they began, and the controller of plans leads them
    there. Without it, an action is the environment's own."""
