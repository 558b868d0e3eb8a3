"""Union of the old and the new policy's top-k tokens, on which both policies are evaluated."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.head.dispatch import choose
from corral.head.logits import LogitSpec, slices
from corral.numerics import at_least_float32, common_dtype
from corral.support import extend_support
from corral.tensors import SparseDist, Tensors
from corral.validate import number_in

AT_ONCE = 2**24
"""Largest number of gathered elements of the LM head's weight in memory at once."""


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
    """Compute log-probs of the tokens `ids` from one token with a known log-prob at each position; −inf at padding (−1).

        log p(v) = log p(a) + z_v − z_a

    The normaliser is in log p(a) already, so nothing is summed over the vocabulary.
    """
    if choose("gather_logp", impl, hidden, weight) == "triton":
        from corral.head.triton.gathered import gather_logp as gather_triton  # Triton is an optional dependency

        with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
            return gather_triton(hidden, weight, bias, spec, tokens, logp, ids)
    wanted, dtype, found = torch.cat([tokens.long()[:, None], ids.long()], -1), common_dtype(hidden, weight), []
    # A few rows at a time: the gathered weights [n, M, H] are H times as large as the result.
    for part in slices(len(hidden), max(1, AT_ONCE // max(wanted.shape[-1] * weight.shape[-1], 1))):
        some = wanted[part].clamp(min=0)
        z = torch.einsum("nh,nmh->nm", hidden[part].to(dtype), weight[some].to(dtype))
        z = spec.finish_(z if bias is None else z.add_(bias[some]))
        found.append(logp[part, None] + (z[:, 1:] - z[:, :1]))
    return torch.where(ids < 0, -torch.inf, torch.cat(found) if found else logp.new_empty(ids.shape))


@dataclass(frozen=True, eq=False, kw_only=True)
class UnionSupport(Tensors):
    """Request to evaluate both policies on the union of the old policy's and the new policy's top-k tokens.

    Old log-probs of the tokens that join are exact: dot products of old hidden states with rows of the old head. Where the head
    is trained, `weight` is a copy made before the first update.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("hidden", "weight", "bias")

    top_k: int
    mass: float = 1.0
    """Probability mass that the new policy's most likely tokens should reach, with at most `top_k` tokens; as in `lm_head`."""
    hidden: Float[Tensor, "M H"]
    """Last hidden states of the old policy [M, H], one row for each of the M tokens stored."""
    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    """Bias of the old policy's LM head, or None; `weight` is the weight of the same head."""
    place: Int[Tensor, "B T"]
    """Row index in `hidden` of each token; −1 if no row is stored.
    A token without a row keeps the old policy's top-k tokens."""

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 1:
            raise ValueError(f"UnionSupport: `top_k` is a number of tokens, 1 or more; got {self.top_k!r}.")
        if not (number_in(self.mass, 0, 1) and self.mass > 0):
            raise ValueError(f"UnionSupport: `mass` is a probability in (0, 1], 1.0 for no threshold; got {self.mass!r}.")
        if self.hidden.ndim != 2 or self.weight.ndim != 2 or self.hidden.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"UnionSupport: hidden is [M H] and weight [V H]; got {list(self.hidden.shape)} and {list(self.weight.shape)}. "
                f"Of hidden states [B T H] of a whole batch, UnionSupport.of_batch makes one."
            )
        if self.place.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"UnionSupport: `place` counts through `hidden`, int64 or int32; got {self.place.dtype}.")

    @classmethod
    def of_batch(
        cls,
        hidden: Float[Tensor, "B T H"],
        weight: Float[Tensor, "V H"],
        *,
        top_k: int,
        mass: float = 1.0,
        bias: Float[Tensor, " V"] | None = None,
    ) -> "UnionSupport":
        """Build a union request from the old policy's hidden states of all tokens in a batch."""
        rows = hidden.detach().flatten(0, 1)
        place = torch.arange(len(rows), device=rows.device).view(hidden.shape[:2])
        bias = None if bias is None else bias.detach()
        return cls(top_k=top_k, mass=mass, hidden=rows, weight=weight.detach(), bias=bias, place=place)

    def extend(self, old: SparseDist, ids: Int[Tensor, "B T K"], spec: LogitSpec) -> SparseDist:
        """Compute the old policy's log-probs on a union `ids`: its own top-k tokens, followed by the new policy's.

        The latter are those that the old policy's top-k tokens lack.

        The reference of `triton.gathered.extend_rows`.
        """
        place, members = self.place, (old.ids >= 0).sum(-1, keepdim=True)
        added = ((ids >= 0).sum(-1, keepdim=True) - members).clamp(min=0)
        step = torch.arange(max(1, int(added.max())) if added.numel() else 1, device=ids.device)
        others = torch.where(step < added, ids.gather(-1, (members + step).clamp(max=ids.shape[-1] - 1)), -1)
        wanted = (others[..., 0] >= 0) & (place >= 0)
        if bool((place[wanted] >= len(self.hidden)).any()):
            raise ValueError(
                f"UnionSupport: `place` counts through {len(self.hidden)} hidden states; got {int(place[wanted].max())}."
            )
        logp = at_least_float32(old.logp).new_full(others.shape, -torch.inf)
        logp[wanted] = gather_logp(
            self.hidden[place[wanted]], self.weight, self.bias, spec, old.ids[..., 0][wanted], old.logp[..., 0][wanted],
            others[wanted],
        ).to(logp.dtype)  # fmt: skip
        return extend_support(old, ids, logp)
