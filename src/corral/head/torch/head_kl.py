"""The exact KL of two networks, token by token, from their hidden states: a few rows of logits at a time."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from corral.divergence.categorical import kl_elements
from corral.head.logits import LogitSpec, Scratch, operand, slices, working_dtype
from corral.head.torch.stream import COLUMNS, HELD, MOST_ROWS, ROWS, make_logits
from corral.numerics import require_tensors, without_autocast


@without_autocast
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
    spec = LogitSpec(scale, softcap, temperature)
    return _measure(hidden_new, weight_new, bias_new, hidden_old, weight_old, bias_old, spec, both=False)[0]


@without_autocast
@torch.no_grad()
def head_kl_both_ways(
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
) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """KL(new‖old) and KL(old‖new), as `head_kl` has each of them, from the same two GEMMs."""
    spec = LogitSpec(scale, softcap, temperature)
    there, back = _measure(hidden_new, weight_new, bias_new, hidden_old, weight_old, bias_old, spec, both=True)
    return there, back


def _measure(
    hidden_new: Tensor,
    weight_new: Tensor,
    bias_new: Tensor | None,
    hidden_old: Tensor,
    weight_old: Tensor,
    bias_old: Tensor | None,
    spec: LogitSpec,
    *,
    both: bool,
) -> list[Tensor]:
    """[KL(new‖old)], or with `both` [KL(new‖old), KL(old‖new)]."""
    _check(hidden_new, weight_new, bias_new, hidden_old, weight_old, bias_old)
    new, old = (
        (hidden_new.reshape(-1, hidden_new.shape[-1]), weight_new),
        (hidden_old.reshape(-1, hidden_old.shape[-1]), weight_old),
    )
    scratch = {"new": Scratch(hidden_new.device), "old": Scratch(hidden_new.device)}
    dtype, count = working_dtype(*new, *old), len(new[0])
    at_once = HELD.get(hidden_new.device.type, HELD["cpu"]) // 2 // max(len(weight_new), 1) // ROWS * ROWS
    found = [torch.empty(count, dtype=dtype, device=hidden_new.device) for _ in range(1 + both)]
    for part in slices(count, max(ROWS, min(at_once, MOST_ROWS))):
        p = _log_softmax(new[0][part], weight_new, bias_new, spec, dtype, scratch["new"])
        q = _log_softmax(old[0][part], weight_old, bias_old, spec, dtype, scratch["old"])
        for kl, (one, other) in zip(found, ((p, q), (q, p)), strict=False):
            total = torch.zeros(len(p), dtype=dtype, device=p.device)
            for block in slices(len(weight_new), COLUMNS):
                total += kl_elements(one[:, block], other[:, block], other[:, block] - one[:, block]).sum(-1)
            kl[part] = total[: part.stop - part.start]
    return [kl.reshape(hidden_new.shape[:-1]) for kl in found]


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, dtype: torch.dtype, scratch: Scratch
) -> Tensor:
    """Log-probs of some rows [n, V], n a multiple of `ROWS`, in memory that the next rows overwrite."""
    h = pad(operand(hidden, dtype), (0, 0, 0, -len(hidden) % ROWS))
    z = make_logits(h, weight, None if bias is None else bias.to(dtype), spec, dtype, scratch)
    # Relative to the largest first: a normaliser is as large as the logits are, and would cost their digits.
    z.sub_(z.amax(-1, keepdim=True))
    total = torch.zeros(len(z), dtype=dtype, device=z.device)
    for block in slices(len(weight), COLUMNS):
        total += z[:, block].exp().sum(-1)
    return z.sub_(total.log()[:, None])


def _check(
    hidden_new: Tensor,
    weight_new: Tensor,
    bias_new: Tensor | None,
    hidden_old: Tensor,
    weight_old: Tensor,
    bias_old: Tensor | None,
) -> None:
    sides = (("new", hidden_new, weight_new, bias_new), ("old", hidden_old, weight_old, bias_old))
    for name, hidden, weight, bias in sides:
        require_tensors("head_kl", **{f"hidden_{name}": hidden, f"weight_{name}": weight})
        if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[-1:]:
            raise ValueError(
                f"head_kl: hidden_{name} is [*, H] and weight_{name} [V, H]; got {list(hidden.shape)} and {list(weight.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"head_kl: bias_{name} is [V] with V = {len(weight)}; got {list(bias.shape)}.")
    if hidden_new.shape[:-1] != hidden_old.shape[:-1] or len(weight_new) != len(weight_old):
        raise ValueError(
            f"head_kl: both networks see the same tokens and have one vocabulary; got tokens {list(hidden_new.shape[:-1])} and "
            f"{list(hidden_old.shape[:-1])}, vocabularies {len(weight_new)} and {len(weight_old)}. Were both run on one batch?"
        )
