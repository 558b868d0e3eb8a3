"""Exploration noise correlated over time, with power 1/f^β, and stable-baselines3 policies that sample with the noise."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from stable_baselines3.common.distributions import DiagGaussianDistribution, SquashedDiagGaussianDistribution
from torch import Tensor

from corral.validate import number_in


def coloured_noise(count: int, steps: int, size: int, beta: float) -> Float[Tensor, "E T D"]:
    """Draw sequences of Gaussian noise with the power spectrum 1/f^β. Every entry has mean 0 and variance 1.

        ε = irfft(z_k f_k^{−β/2}) / std          f_k = max(k, 1)/T,   z_k complex normal, real at k = 0 and k = T/2

    β = 0 is white, 1 pink, 2 red. Each entry alone is standard normal, so a policy's density at one step is what it was.
    Sequences are periodic in T, one episode.

    Args:
        count, steps, size: E sequences of T steps, for D independent numbers each.
        beta: β.
    Ref:
        Timmer and König 1995; Eberhard et al. 2023 (pink noise for SAC); Hollenstein et al. 2024, arXiv:2312.11091 (PPO, where
        β = ½ did best). Invariant: with β = 0 entries are independent.
    """
    if count < 1 or steps < 1 or size < 1 or not number_in(beta, -math.inf) or not math.isfinite(beta):
        raise ValueError(
            f"coloured_noise: `beta` is a finite number, sizes are at least 1; got {count}, {steps}, {size} and {beta!r}."
        )
    draws = torch.randn(count, size, 2, steps // 2 + 1)
    return _colour(draws, steps, beta).mT.contiguous()


def _colour(draws: Tensor, steps: int, beta: float) -> Tensor:
    """Map standard normal Fourier coefficients [*, 2, T//2 + 1] linearly to noise sequences [*, T]."""
    index = torch.arange(steps // 2 + 1, dtype=torch.float64)
    scale = (index.clamp(min=1) / steps) ** (-beta / 2)
    # k = 0, and k = T/2 of an even T, are their own mirror images: real, with the power of both.
    alone = (index == 0) | (2 * index == steps)
    parts = torch.where(alone, torch.tensor([[math.sqrt(2)], [0.0]], dtype=torch.float64), 1.0) * scale
    variance = (parts.square() * torch.where(alone, 1.0, 2.0)).sum()  # of T times an entry: 2 Re z e^{iθ} has twice z's
    spectrum = torch.complex(*(draws * parts.to(draws)).unbind(-2))
    return torch.fft.irfft(spectrum, n=steps) * (steps / variance.sqrt().item())


class EpisodeNoise:
    """Coloured exploration noise for running episodes, with one noise sequence per episode."""

    def __init__(self, beta: float, steps: int, size: int) -> None:
        self.beta, self.steps, self.size = beta, steps, size

    def begin(self, count: int) -> None:
        """Draw noise sequences for `count` new episodes."""
        self._sequences = coloured_noise(count, self.steps, self.size, self.beta)
        self._elapsed = np.zeros(count, int)

    def advance(self, over: NDArray[np.bool_]) -> None:
        """Advance the noise by one step. Each environment whose episode ended gets a new noise sequence."""
        self._elapsed = np.where(over, 0, self._elapsed + 1)
        if over.any():
            rows = torch.from_numpy(np.flatnonzero(over))
            self._sequences[rows] = coloured_noise(len(rows), self.steps, self.size, self.beta)

    def now(self) -> Float[Tensor, "E D"]:
        """Return the exploration noise of the current step, in units of the policy's standard deviation."""
        return self._sequences[torch.arange(len(self._elapsed)), torch.from_numpy(self._elapsed)]


class ColouredGaussian(DiagGaussianDistribution):
    """Action distribution of PPO, sampled with coloured noise. Density and entropy are those of a single step."""

    def __init__(self, noise: EpisodeNoise) -> None:
        super().__init__(noise.size)
        self.noise = noise

    def sample(self) -> Tensor:
        return self.distribution.mean + self.distribution.stddev * self.noise.now()


class ColouredSquashedGaussian(SquashedDiagGaussianDistribution):
    """Action distribution of SAC, sampled with coloured noise in episodes and with white noise in updates."""

    def __init__(self, noise: EpisodeNoise) -> None:
        super().__init__(noise.size)
        self.noise, self._learning = noise, False

    def sample(self) -> Tensor:
        if self._learning:
            return super().sample()
        mean = self.distribution.mean
        self.gaussian_actions = mean + self.distribution.stddev * self.noise.now().to(mean)  # drawn on the CPU
        return torch.tanh(self.gaussian_actions)

    def log_prob_from_params(self, mean_actions: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
        self._learning = True
        try:
            return super().log_prob_from_params(mean_actions, log_std)
        finally:
            self._learning = False


def colour_actions(model: Any, noise: EpisodeNoise) -> None:
    """Make a PPO or SAC model of stable-baselines3 draw its actions with the coloured noise `noise`."""
    if hasattr(model, "actor"):  # SAC
        model.actor.action_dist = ColouredSquashedGaussian(noise)
    else:
        model.policy.action_dist = ColouredGaussian(noise)
