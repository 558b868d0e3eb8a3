"""Choose between the PyTorch and the Triton implementation of the fused LM head."""

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "torch", "triton"]
Chosen = Literal["torch", "triton"]

MAX_TOP_K = 1024
"""Largest `top_k` of the Triton kernels: more tokens per position do not fit in the registers of one Triton program."""
MAX_GIVEN = MAX_TOP_K + 1
"""Largest number of token ids per position that a caller may pass to the Triton kernels: MAX_TOP_K and the sampled token."""
OWN_SUPPORT = 64
"""Number of most likely tokens in a sparse logit gradient, if the caller gives no token ids for it."""

_log = logging.getLogger(__name__)


def choose(where: str, impl: str, hidden: Tensor, weight: Tensor, top_k: int | None = None, given: int = 0) -> Chosen:
    """Choose "torch" or "triton" as the LM head's implementation, and log the choice once.

    "auto" means Triton on a GPU that supports it, and PyTorch elsewhere.

    Args:
        where: the public function that calls, for messages.
        impl: "auto", "torch" or "triton".
        hidden, weight: hidden states [*, H] and the head's weight [V, H].
        top_k: size of the policy's own support, if one is wanted.
        given: size of another policy's support, if one is given.
    Returns:
        "torch" or "triton"; raises a ValueError with the reason if "triton" cannot run.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"{where}: `impl` is 'auto', 'torch' or 'triton'; got {impl!r}.")
    if impl == "torch":
        return "torch"
    reason = obstacle(hidden, weight, top_k, given, interpret=impl == "triton")
    if impl == "triton":
        if reason is not None:
            raise ValueError(f"{where}: impl='triton' cannot run here, because {reason}. Use impl='auto' or 'torch'.")
        return "triton"
    _log_choice(where, reason, hidden.device.type)
    return "torch" if reason is not None else "triton"


def obstacle(hidden: Tensor, weight: Tensor, top_k: int | None, given: int = 0, *, interpret: bool = False) -> str | None:
    """Return the reason why the Triton kernels cannot run on these tensors, or None if they can.

    With `interpret`, Triton's interpreter is accepted in place of a GPU.
    """
    if not has_triton():
        return "Triton is not installed"
    import triton

    if not hidden.is_cuda and not (interpret and triton.knobs.runtime.interpret):
        return f"Triton kernels run on a GPU and the hidden states are on {hidden.device.type!r}"
    if weight.device != hidden.device:
        return f"the weight is on {str(weight.device)!r} and the hidden states are on {str(hidden.device)!r}"
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return f"the weight is a {type(weight).__name__}, and kernels read plain tensors"
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or newer"
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return (
            f"hidden states and weight must share a dtype of at most 32 bits; they are "
            f"{str(hidden.dtype).removeprefix('torch.')} and {str(weight.dtype).removeprefix('torch.')}"
        )
    # Tensor descriptors address rows in multiples of 16 bytes.
    if not weight.is_contiguous() or weight.data_ptr() % 16 or weight.shape[-1] * weight.element_size() % 16:
        return "rows of the weight must lie one behind the other, on multiples of 16 bytes"
    if hidden.is_contiguous() and hidden.data_ptr() % 16:  # any other is copied
        return "hidden states must begin on a multiple of 16 bytes"
    if given > MAX_GIVEN:
        return f"a support of {given} tokens was given, and one of more than {MAX_GIVEN} does not fit"
    if top_k is not None and given + top_k > MAX_GIVEN:
        return f"the union of {given} tokens given and top_k = {top_k} may be more than {MAX_GIVEN} tokens, and does not fit"
    # The lower bound on the K-th largest logit is made of the tiles' largest logits: it takes K tiles at least.
    if top_k is not None and own_top_k(hidden, len(weight), top_k) < top_k:
        width = tile_of(hidden).columns
        return f"top_k = {top_k} is more than a vocabulary of {len(weight)} has tiles of {width}, or than {MAX_TOP_K}"
    return None


def own_top_k(hidden: Tensor, vocabulary: int, top_k: int = OWN_SUPPORT) -> int:
    """Limit `top_k` to the number of GEMM tiles across the vocabulary: the Triton kernels need one tile per top-k token."""
    return min(top_k, MAX_TOP_K, -(-vocabulary // tile_of(hidden).columns))


@dataclass(frozen=True)
class Tile:
    """Shape of one GEMM tile (tokens × vocabulary × hidden size), with its number of warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


TILES = {
    torch.bfloat16: Tile(128, 256, 64, stages=4),
    torch.float16: Tile(128, 256, 64, stages=4),
    torch.float32: Tile(64, 128, 32, warps=4),
}
"""Fastest GEMM tile shapes on an H200 GPU, for each dtype.
A tile has at most 256 columns, so that a column index fits in a byte."""

SMALL_TILES = {
    torch.bfloat16: Tile(64, 128, 64, warps=4, stages=2),
    torch.float16: Tile(64, 128, 64, warps=4, stages=2),
    torch.float32: Tile(32, 64, 32, warps=4, stages=2),
}
"""GEMM tile shapes for GPUs with less than 160 KiB of shared memory per thread block, for each dtype."""


def tile_of(x: Tensor) -> Tile:
    """Return the GEMM tile shape for a tensor's dtype and device."""
    properties: Any = torch.cuda.get_device_properties(x.device) if x.is_cuda else None  # its stub lacks the field below
    return (SMALL_TILES if x.is_cuda and properties.shared_memory_per_block_optin < 160 * 1024 else TILES)[x.dtype]


@functools.cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache  # every choice is logged once
def _log_choice(where: str, reason: str | None, device: str) -> None:
    slower = reason is not None and device == "cuda"
    path = "Triton kernels" if reason is None else f"the {'slower ' * slower}torch path, because {reason}"
    _log.log(logging.WARNING if slower else logging.INFO, "%s runs on %s.", where, path)
