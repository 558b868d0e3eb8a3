"""The old policy of a batch of rollouts: its support in TRL's buffer, and the hidden states and head that a union needs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.kernels.gathered import gather_logp
from corral.kernels.union import UnionSupport
from corral.llm.scoring_pass import HeadInputs, ScoringPass
from corral.numerics import logsumexp
from corral.objective.troll import FILL
from corral.support import extend_support
from corral.types import SparseDist

_KEYS = ("corral_ids", "corral_logp", "corral_rest", "corral_rest_max")
"""How a support rides along in TRL's buffer of rollouts, which shuffles and slices any tensor by its first axis."""
_ROW = "corral_row"
"""With a union: where each token's hidden state is kept, [B T]; −1 where its support left less than 1 − `support_mass` out."""


@dataclass(eq=False)
class OldPolicy:
    """The old policy on its support in TRL's buffer and, for unions, the hidden states and the head behind it.

    A union needs the old log-probs of tokens that only the new policy thinks likely. They are exact: dot products of the old
    hidden states with the old head's rows. Both are kept for the tokens whose support was cut off at `support_size`: elsewhere
    the tail is below 1 − `support_mass` in all, and there is no union. `fill` is the published form: such tokens have
    probability 1e-12 under the old policy, and nothing is kept.
    """

    support_mass: float
    fill: bool
    head: HeadInputs | None = None
    hidden: Float[Tensor, "M H"] | None = None

    def store(self, output: dict[str, Any], scoring: ScoringPass) -> None:
        """Write the support that a pass reported into TRL's buffer `output`, and keep what a union needs besides."""
        dist = scoring.dist()
        assert dist is not None
        write_support(output, dist)
        self.head = self.hidden = None
        if (kept := scoring.hidden()) is None:
            return
        where = kept.places
        self.head = kept.head.freeze()
        cut_off = dist.rest.flatten()[where] > math.log1p(-self.support_mass) if self.support_mass < 1 else where >= 0
        self.hidden = kept.states[cut_off]
        row = torch.full((dist.rest.numel(),), -1, device=where.device)
        row[where[cut_off]] = torch.arange(len(self.hidden), device=where.device)
        output[_ROW] = row.view(dist.rest.shape)

    def forget(self, output: dict[str, Any]) -> None:
        """Drop what a union needs, from TRL's buffer `output` too: no other follows."""
        self.head = self.hidden = None
        output.pop(_ROW, None)

    @staticmethod
    def support(inputs: dict[str, Any]) -> SparseDist | None:
        """The old policy on its own support, if it was stored."""
        if _KEYS[0] not in inputs:
            return None
        ids, logp, rest = (inputs[key] for key in _KEYS[:3])
        return SparseDist(ids, logp, rest, inputs.get(_KEYS[3]))  # a sampler does not report the last

    def union_support(self, inputs: dict[str, Any], top_k: int, mass: float) -> UnionSupport | None:
        """What a head needs to take the loss on the union itself; None where the old head was not kept."""
        if self.head is None or self.hidden is None or _ROW not in inputs:
            return None
        head, place = self.head, inputs[_ROW]
        return UnionSupport(top_k=top_k, mass=mass, hidden=self.hidden, weight=head.weight, bias=head.bias, place=place)

    def union(self, inputs: dict[str, Any], new: SparseDist, mask: Bool[Tensor, "B T"]) -> tuple[SparseDist, SparseDist]:
        """Both policies on the union of their supports, where `new` has it; the old one's members come first.

        Where no hidden state was kept, members that only the new policy brings go back to its tail.
        """
        old = self.support(inputs)
        assert old is not None
        slots = max(1, int((torch.where(mask[..., None], new.ids, -1) >= 0).sum(-1).max()))
        slots = max(slots, old.ids.shape[-1])
        members = (old.ids >= 0).sum(-1)
        place = torch.arange(slots, device=new.ids.device)
        ids, logp, rest = new.ids[..., :slots].long(), new.logp[..., :slots], new.rest
        brought = (place >= members[..., None]) & (ids >= 0)
        if not self.fill:
            dropped = brought & (inputs[_ROW] < 0)[..., None]
            rest = logsumexp(torch.cat([rest[..., None], torch.where(dropped, logp, -torch.inf)], -1))
            ids, logp = torch.where(dropped, -1, ids), torch.where(dropped, -torch.inf, logp)
            brought = brought & ~dropped
        most = max(1, int(brought.sum(-1).max()))
        others = (members[..., None] + torch.arange(most, device=ids.device)).clamp(max=slots - 1)
        others = torch.where(torch.arange(most, device=ids.device) < brought.sum(-1, keepdim=True), ids.gather(-1, others), -1)
        added = torch.full(others.shape, math.log(FILL), device=ids.device) if self.fill else self._score(inputs, others)
        return SparseDist(ids, logp, rest, new.rest_max), extend_support(old, ids, added)

    def _score(self, inputs: dict[str, Any], ids: Int[Tensor, "B T M"]) -> Float[Tensor, "B T M"]:
        """The old policy's log-probs of some tokens [B T M]; −inf where there are none, or where no hidden state was kept."""
        assert self.head is not None
        assert self.hidden is not None
        row, out = inputs[_ROW], torch.full(ids.shape, -torch.inf, device=ids.device)
        wanted = (row >= 0) & (ids >= 0).any(-1)
        if bool(wanted.any()):
            tokens, logp = (inputs[key][..., 0][wanted] for key in _KEYS[:2])  # slot 0 is the sampled token
            head, hidden = self.head, self.hidden[row[wanted]]
            out[wanted] = gather_logp(hidden, head.weight, head.bias, head.spec, tokens, logp, ids[wanted]).float()
        return out


def write_support(output: dict[str, Any], dist: SparseDist) -> None:
    """Write the old policy's support [B T K] into TRL's buffer `output`."""
    slots = max(1, int((dist.ids >= 0).sum(-1).max()))  # the others are padding
    values = dist.ids[..., :slots].int(), dist.logp[..., :slots].contiguous(), dist.rest, dist.rest_max
    output.update((key, value) for key, value in zip(_KEYS, values, strict=True) if value is not None)
