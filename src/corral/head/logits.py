"""Logits of the LM head in blocks of tokens × vocabulary, and the GEMMs of the head's forward and backward passes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from corral.numerics import common_dtype

BLOCK = {"cpu": (512, 2048), "cuda": (4096, 16384)}
"""Size of a block of logits (tokens, vocabulary entries) for each device type: it fits a CPU's cache, or keeps a GPU busy."""


@dataclass(frozen=True)
class LogitSpec:
    """Transformation of the LM head's GEMM result to logits: z = softcap(scale · (h Wᵀ + b)) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"lm_head: `temperature` must be > 0; got {self.temperature}. Greedy decoding has no policy gradient."
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"lm_head: `softcap` must be > 0 and finite, or None; got {self.softcap}.")
        if not math.isfinite(self.scale):
            raise ValueError(f"lm_head: `scale` must be a finite number; got {self.scale}.")

    def block(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Float[Tensor, "n v"]:
        """Compute the logits of a block of tokens and vocabulary entries, in float32 or higher precision.

        `operand` has prepared both factors.
        """
        if _stays_half(hidden) and hidden.dtype == weight.dtype:  # matrix units read half precision and add up in float32
            z = torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
        else:
            dtype = common_dtype(hidden, weight)  # logits rounded to bfloat16 put several percent of error on the gradient
            z = torch.mm(hidden.to(dtype), weight.to(dtype).T, out=out)
        return self.finish_(z if bias is None else z.add_(bias))

    def finish_(self, z: Tensor) -> Tensor:
        """Convert dot products plus bias, h Wᵀ + b, to logits in place, with scale, soft cap and temperature."""
        if self.softcap is not None:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return z.mul_(self.slope) if self.slope != 1.0 else z

    @property
    def slope(self) -> float:
        """Derivative of a logit z with respect to h Wᵀ + b, without a soft cap or far below the cap."""
        return self.scale / self.temperature

    @property
    def curve(self) -> float | None:
        """Ratio u / z of the tanh u inside the soft cap to the logit z; None without a soft cap.

        The derivative of the soft cap is 1 − u².
        """
        return None if self.softcap is None else self.temperature / self.softcap

    def flatten(self, dz: Float[Tensor, "n v"], z: Float[Tensor, "n v"]) -> None:
        """Multiply the logit gradient `dz` by the derivative of the soft cap, in place; the logits `z` are overwritten."""
        if self.curve is not None:
            dz.mul_(z.mul_(self.curve).square_().neg_().add_(1))


def operand(x: Tensor, dtype: torch.dtype, scratch: "Scratch | None" = None) -> Tensor:
    """Convert a GEMM operand to `dtype`; half precision on a GPU stays as it is, since GPU GEMMs accumulate in float32."""
    if x.dtype == dtype or _stays_half(x):
        return x
    return x.to(dtype) if scratch is None else scratch("operand", x.shape, dtype).copy_(x)


def accumulate(into: Tensor, left: Tensor, right: Tensor, *, fresh: bool = False) -> None:
    """Compute `into += left @ right` for a gradient `left`; with `fresh`, overwrite `into` instead of adding to it.

    The gradient is in the working dtype. If the right factor is bfloat16, the gradient is rounded to it before the GEMM on a
    GPU. Float16 would lose its small parts.
    """
    # With a float32 factor a GEMM would run without the fast matrix units. bfloat16 has float32's range, and what it rounds is
    # an error of the size of bfloat16 gradients themselves.
    if _stays_half(right) and right.dtype == torch.bfloat16:
        found = torch.mm(left.to(right.dtype), right, out_dtype=into.dtype)
        into.copy_(found) if fresh else into.add_(found)
    elif fresh:
        torch.mm(left, right.to(into.dtype), out=into)
    else:
        into.addmm_(left, right.to(into.dtype))


def _stays_half(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


class Scratch:
    """Reusable memory for blocks of logits: on a CPU, newly allocated pages take more time than the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory of the given shape; calls with the same name reuse the same memory."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size or memory.dtype != dtype:
            memory = self._memory[name] = torch.empty(size, dtype=dtype, device=self.device)
        return memory[:size].view(*shape)


def slices(total: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` elements that cover range(total)."""
    for start in range(0, total, max(size, 1)):
        yield slice(start, min(start + size, total))


def block_size(device: torch.device, tokens: int) -> tuple[int, int]:
    """Return the size of a block of logits (tokens, vocabulary entries) on a device.

    If there are few tokens, blocks are up to four times wider.
    """
    rows, columns = BLOCK.get(device.type, BLOCK["cpu"])
    return rows, columns * max(1, min(4, rows // max(tokens, 1)))
