"""Log-probs of a few more tokens of a policy whose hidden states are at hand: gathered dot products, no GEMM."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.kernels.dispatch import choose
from corral.kernels.logits import LogitSpec
from corral.kernels.torch.gathered import gather_logp as gather_torch


@torch.no_grad()
def gather_logp(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    spec: LogitSpec,
    tokens: Int[Tensor, " N"],
    logp: Float[Tensor, " N"],
    ids: Int[Tensor, "N M"],
    *,
    impl: str = "auto",
) -> Float[Tensor, "N M"]:
    """Log-probabilities of `ids`, given those of one token of each row; −inf at padding (−1).

        log p(v) = log p(a) + z_v − z_a

    The normaliser is in log p(a) already, so nothing is summed over the vocabulary.
    """
    if choose("gather_logp", impl, hidden, weight) == "torch":
        return gather_torch(hidden, weight, bias, spec, tokens, logp, ids)
    from corral.kernels.triton.gathered import gather_logp as gather_triton  # Triton is there by now

    with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
        return gather_triton(hidden, weight, bias, spec, tokens, logp, ids)
