"""One block of logits at a time: the only place that multiplies hidden states by the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = {"cpu": (128, 65536), "cuda": (4096, 16384)}
"""Tokens × vocabulary of one block: on a CPU what its cache holds, on a GPU what keeps the matrix units busy."""


@dataclass(frozen=True)
class LogitSpec:
    """z = softcap(scale · (h Wᵀ + b)) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"lm_head: `temperature` must be > 0; got {self.temperature}. Greedy decoding has no policy gradient."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"lm_head: `softcap` must be > 0, or None; got {self.softcap}.")

    def block(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "n v"]:
        """Logits of some tokens over some of the vocabulary, in float32 or better.

        Half-precision inputs are multiplied with float32 results: logits rounded to bfloat16 put an error of several percent
        on the gradient.
        """
        z = _matmul(hidden, weight)
        if bias is not None:
            z = z + bias.to(z.dtype)
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature if self.temperature != 1.0 else z

    def slope(self, z: Float[Tensor, "n v"]) -> Tensor | float:
        """dz / d(h Wᵀ + b) at a block of logits: with u = z T / cap, the soft cap's slope is 1 − u²."""
        flat = self.scale / self.temperature
        if self.softcap is None:
            return flat
        return flat * (1 - (z * (self.temperature / self.softcap)) ** 2)


def _matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    half = hidden.dtype in (torch.float16, torch.bfloat16)
    if half and hidden.is_cuda and hidden.dtype == weight.dtype:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    return hidden.to(dtype) @ weight.to(dtype).T


def slices(total: int, size: int) -> Iterator[slice]:
    """0 … total in pieces of at most `size`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def block_size(device: torch.device) -> tuple[int, int]:
    """Tokens and vocabulary entries of one block on this device."""
    return BLOCK.get(device.type, BLOCK["cpu"])
