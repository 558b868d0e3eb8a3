"""Exact per-token KL between two networks from their hidden states, computed for a few tokens at a time."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from corral.divergence.categorical import kl_elements
from corral.head.logits import LogitSpec, Scratch, operand, slices
from corral.head.torch.stream import COLUMNS, ROWS, make_logits, rows_at_once, sum_exp
from corral.numerics import common_dtype, require_tensors, without_autocast


@torch.no_grad()
def head_kl(
    hidden_new: Float[Tensor, "*b H"],
    weight_new: Float[Tensor, "V H"],
    hidden_old: Float[Tensor, "*b G"],
    weight_old: Float[Tensor, "V G"],
    *,
    bias_new: Float[Tensor, " V"] | None = None,
    bias_old: Float[Tensor, " V"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "*b"]:
    """KL(new‖old) of the next-token distributions of two networks, over the whole vocabulary.

        z = softcap(scale · (h Wᵀ + b)) / temperature          KL = Σ_v p_v (eˣ − 1 − x),  x = log q_v − log p_v

    p is the new policy, q the old. Two GEMMs; the logits of some rows at a time are made, read and dropped. Every term is ≥ 0
    and keeps its digits as q → p. A measurement: no gradient is made, and none flows. Swap the networks for KL(old‖new).

    Args:
        hidden_new, hidden_old: last hidden states [*, H] and [*, G] of the same tokens.
        weight_new, weight_old: the heads' [V, H] and [V, G]; tied or shared weights are passed as they are.
        bias_new, bias_old: theirs [V], if any.
        scale, softcap, temperature: how both turn products into logits, as in `lm_head`.
    Returns:
        KL in nats [*], float32 or better, ≥ 0; 0 where hidden state and head are equal.
    Ref:
        Schulman 2020, "Approximating KL divergence" (the term is its k3). Invariant: equal to categorical_kl of both
        log-softmaxes.
    """
    new, old = HeadStates(hidden_new, weight_new, bias_new), HeadStates(hidden_old, weight_old, bias_old)
    return _measure(new, old, LogitSpec(scale, softcap, temperature), both=False)[0]


class HeadStates(NamedTuple):
    """Last hidden states [*, H] of a network, with weight and bias of its LM head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


@torch.no_grad()
def head_kl_both_ways(new: HeadStates, old: HeadStates, spec: LogitSpec) -> list[Tensor]:
    """Compute KL(new‖old) and KL(old‖new) together, with only the two GEMMs of one `head_kl` call.

    The results equal those of `head_kl`.
    """
    return _measure(new, old, spec, both=True)


def _measure(new: HeadStates, old: HeadStates, spec: LogitSpec, *, both: bool) -> list[Tensor]:
    """Compute per-token KL(new‖old), and with `both` also KL(old‖new), as a list of tensors."""
    for name, (hidden, weight, bias) in (("new", new), ("old", old)):
        require_tensors("head_kl", **{f"hidden_{name}": hidden, f"weight_{name}": weight})
        if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[-1:]:
            raise ValueError(
                f"head_kl: hidden_{name} is [*, H] and weight_{name} [V, H]; got {list(hidden.shape)} and {list(weight.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"head_kl: bias_{name} is [V] with V = {len(weight)}; got {list(bias.shape)}.")
    shape, vocabulary, device = new.hidden.shape[:-1], len(new.weight), new.hidden.device
    if shape != old.hidden.shape[:-1] or vocabulary != len(old.weight):
        raise ValueError(
            f"head_kl: both networks see the same tokens and have one vocabulary; got tokens {list(shape)} and "
            f"{list(old.hidden.shape[:-1])}, vocabularies {vocabulary} and {len(old.weight)}. Were both run on one batch?"
        )
    dtype = common_dtype(new.hidden, new.weight, old.hidden, old.weight)
    found = [torch.empty(shape.numel(), dtype=dtype, device=device) for _ in range(1 + both)]
    scratch = Scratch(device), Scratch(device)  # both networks' logits are read together
    for part in slices(shape.numel(), rows_at_once(new.weight, share=2)):
        p, q = (_log_softmax(*side, part, spec, dtype, memory) for side, memory in zip((new, old), scratch, strict=True))
        for kl, (one, other) in zip(found, ((p, q), (q, p)), strict=False):
            total = torch.zeros(len(p), dtype=dtype, device=device)
            for block in slices(vocabulary, COLUMNS):
                total += kl_elements(one[:, block], other[:, block], other[:, block] - one[:, block]).sum(-1)
            kl[part] = total[: part.stop - part.start]
    return [kl.reshape(shape) for kl in found]


@without_autocast
def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, spec: LogitSpec, dtype: torch.dtype, scratch: Scratch
) -> Tensor:
    """Compute log-probs over the vocabulary for some tokens [n, V], in memory that the next call overwrites.

    n is padded to a multiple of `ROWS`.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])[part]
    h = pad(operand(hidden, dtype), (0, 0, 0, -len(hidden) % ROWS))
    z = make_logits(h, weight, None if bias is None else bias.to(dtype), spec, dtype, scratch)
    # Relative to the largest first: a normaliser is as large as the logits are, and would cost their digits.
    peak = z.amax(-1)
    log_total = sum_exp(z, peak, scratch).log()
    return z.sub_(peak[:, None]).sub_(log_total[:, None])
