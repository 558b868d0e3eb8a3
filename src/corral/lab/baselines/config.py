"""Settings of step-based baselines. Importing this module does not import stable-baselines3."""

import math
from dataclasses import dataclass
from typing import Literal

from corral.validate import Checked, limited


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Checked):
    """Settings of a step-based baseline. All other settings are stable-baselines3's defaults."""

    iterations: int = limited(125, at_least=1)
    """Number of batches of episodes."""
    episodes: int = limited(64, at_least=1)
    """Number of episodes in a batch, a multiple of the number of environments."""
    rate: float = limited(3e-4, above=0)
    """Learning rate."""
    gamma: float = limited(0.99, at_least=0, at_most=1)
    """Discount γ."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of every network's layers."""
    epochs: int = limited(10, at_least=1)
    """PPO and TRPL: number of passes over a batch."""
    minibatches: int = limited(16, at_least=1)
    """PPO and TRPL: number of updates per pass."""
    train_freq: int = limited(64, at_least=1)
    """SAC: number of steps of the environments between rounds of updates."""
    gradient_steps: int = limited(8, at_least=1)
    """SAC: number of updates in a round. An update for each step, which is SAC's usual setting, is eight times slower."""
    device: Literal["cpu", "cuda"] = "cpu"
    """SAC: device of the networks. Environments stay on the CPU. A run from a GPU can be evaluated without one."""
    noise_colour: float = limited(1.0, finite=True)
    """sb3-…-pink: exponent β of the noise's power spectrum 1/f^β. Pink noise has β = 1, white noise 0 and red noise 2. For PPO
    0.5 was best."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """TRPL: divergence or distance in which the trust region is measured."""
    mean_bound: float = limited(0.03, above=0, note="inf switches it off")
    """TRPL: bound ε_μ on the change of the mean per batch, in each state. The defaults of this setting and the next two are
    from published code for the KL."""
    cov_bound: float = limited(0.001, above=0, note="inf switches it off")
    """TRPL: bound ε_Σ on the change of the covariance per batch."""
    regression: float = limited(8.0, at_least=0, finite=True)
    """TRPL: weight of the regression loss KL(π_θ‖sg π̃), which draws the network towards the projected policy π̃."""
    deployed_bound: float = limited(math.inf, above=0, what="a divergence", note="inf measures alone")
    """TRPL: bound on the mean KL per step between the network after a batch's updates and the network before them. Larger moves
    are pulled back. inf only measures."""
    controller_span: float | None = limited(None, above=0, finite=True)
    """Range of an action in radians, around the joints' positions at the start. The controller of plans moves the joints to the
    action. None uses the environment's own actions."""
