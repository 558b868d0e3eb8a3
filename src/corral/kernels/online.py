"""Running sums over blocks of the vocabulary: logsumexp, entropy, exact top-k and the exact mass of everything else."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from corral.kernels.candidates import RunningTopK
from corral.kernels.logits import Scratch
from corral.numerics import logsumexp
from corral.support import reached_before

Rows = TypeVar("Rows", bound=Any)
"""A dataclass of tensors [n …]."""

IMPOSSIBLE = -1e4
"""A gap to the largest logit at which eˣ and x eˣ are 0 in every dtype, and 0 · x is still 0: it stands for −inf."""


@dataclass(frozen=True)
class HeadRequest:
    """What to find out about each token's distribution."""

    top_k: int | None = None
    mass: float = 1.0
    entropy: bool = False


@dataclass(frozen=True, eq=False)
class HeadRows:
    """What the head knows of n tokens once the whole vocabulary has passed."""

    lse: Tensor
    """Log of the normaliser [n]."""
    logp: Tensor
    """Log-probability of the sampled token [n]."""
    ids: Tensor
    kept: Tensor
    """The support and its log-probabilities [n, K]."""
    rest: Tensor
    """Log mass of everything outside the support [n]."""
    entropy: Tensor
    """Nats [n]; zeros unless asked for."""


def join(parts: Sequence[Rows]) -> Rows:
    """Rows one behind the other."""
    if len(parts) == 1:
        return parts[0]
    fields = dataclasses.fields(parts[0])
    return type(parts[0])(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields))


class Marks:
    """Token ids [n, M] wanted row by row, sorted by block once, so that each block looks at its own alone."""

    def __init__(self, ids: Tensor, blocks: Sequence[slice], first: int = 0) -> None:
        """The blocks cut up the vocabulary from token `first` on; ids elsewhere, and −1, are in none."""
        self.wanted, self.slot = ids.flatten().sort()
        self.row = self.slot // max(ids.shape[-1], 1)
        self.starts = [first + block.start for block in blocks]
        end = first + blocks[-1].stop if blocks else first  # a process may hold no part of the vocabulary
        edges = torch.tensor([*self.starts, end], device=ids.device)
        self.edges = torch.searchsorted(self.wanted, edges).tolist()

    def __getitem__(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slot in the flattened ids, row, and column of the block, of each one that lies in it."""
        here = slice(self.edges[block], self.edges[block + 1])
        return self.slot[here], self.row[here], self.wanted[here] - self.starts[block]


class LogMass:
    """Σ eᶻ of the logits that were folded in, and of their entropy Σ eᶻ z, both relative to the largest, m, so far.

    total = Σ e^(z − m)          weighted = Σ e^(z − m) (z − m)
    """

    def __init__(self, like: Tensor, entropy: bool) -> None:
        self.peak, self.total = torch.full_like(like, -torch.inf), torch.zeros_like(like)
        self.weighted = torch.zeros_like(like) if entropy else None

    def fold(self, z: Tensor, spare: Tensor | None = None) -> Tensor:
        """Take in logits [n, v]; `z` is used up. Returns e^(z − m), in its place, or for entropy in that of `spare`."""
        if not z.shape[-1]:
            return z
        self.move_to(torch.maximum(self.peak, z.amax(-1)))
        gap = z.sub_(torch.where(self.peak > -torch.inf, self.peak, 0.0)[:, None])
        if self.weighted is None:
            weight = gap.exp_()
            self.total += weight.sum(-1)
        else:
            weight = torch.exp(gap.clamp_(min=IMPOSSIBLE), out=spare)
            self.total += weight.sum(-1)
            self.weighted += gap.mul_(weight).sum(-1)
        return weight

    def move_to(self, peak: Tensor) -> None:
        """Measure from another m, no smaller than the last."""
        # Before the first finite logit there is nothing to rescale.
        shift = torch.where(self.peak > -torch.inf, self.peak - peak, 0.0)
        if self.weighted is not None:
            self.weighted = (self.weighted + self.total * shift) * shift.exp()
        self.total = self.total * shift.exp()
        self.peak = peak

    def log(self) -> Tensor:
        """log Σ eᶻ, −inf where nothing was folded in."""
        return self.peak + self.total.log()

    def surprise(self, lse: Tensor) -> Tensor:
        """−Σ p log p over these logits, p = e^(z − lse). Both terms have one sign: nothing cancels."""
        assert self.weighted is not None
        gap = torch.where(self.peak > -torch.inf, self.peak - lse, 0.0)
        return -gap.exp() * (self.weighted + self.total * gap)


class OnlineHead:
    """Folds blocks of logits, lowest token ids first.

    Every logit ends in one of three places: the sampled token's, the support's, or the running mass of all others. Nothing is
    ever subtracted from that mass, so it is exact however small it is. The blocks cut up the vocabulary from token `first` on.
    """

    def __init__(
        self,
        tokens: Tensor,
        ids: Tensor | None,
        request: HeadRequest,
        blocks: Sequence[slice],
        dtype: torch.dtype,
        first: int = 0,
    ) -> None:
        self.tokens, self.fixed, self.request = tokens, ids, request
        self.marks = Marks(tokens[:, None] if ids is None else torch.cat([tokens[:, None], ids], -1), blocks, first)
        slots = 1 if ids is None else 1 + ids.shape[-1]
        self.marked = tokens.new_full((len(tokens), slots), -torch.inf, dtype=dtype)
        """Logits of the sampled tokens, and of given ids."""
        self.rest = LogMass(self.marked[:, 0], request.entropy)
        self.best = None if request.top_k is None else RunningTopK(len(tokens), request.top_k, self.marked)
        self.scratch = Scratch(tokens.device)

    def fold(self, z: Tensor, block: int, spare: Tensor | None = None) -> Tensor:
        """Take in the logits [n, v] of one block; `z` is used up. Returns what it adds to the rest, as `LogMass.fold` does."""
        slot, row, column = self.marks[block]
        self.marked.view(-1)[slot] = z[row, column]
        z[row, column] = -torch.inf
        if self.best is not None:
            self.rest.fold(self.best.fold(z, self.marks.starts[block]))
        if self.request.entropy and spare is None:
            spare = self.scratch("weights", z.shape, z.dtype)
        return self.rest.fold(z, spare)

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Ids and logits of the support: those given, or the k largest beside the sampled token."""
        if self.best is None:
            return (self.tokens.new_empty((len(self.tokens), 0)) if self.fixed is None else self.fixed), self.marked[:, 1:]
        self.rest.fold(self.best.sort())
        return self.best.best()

    def finish(self) -> HeadRows:
        """Normalise, and settle the support."""
        return settle(self.tokens, self.marked[:, 0], *self.candidates(), self.rest, self.request, self.fixed is not None)


def settle(
    tokens: Tensor, sampled: Tensor, ids: Tensor, kept: Tensor, rest: LogMass, request: HeadRequest, given: bool
) -> HeadRows:
    """Everything once all logits are in their place: the sampled ones [n], those of the support [n, K], and the rest."""
    if given:  # the sampled token is one of those given, or one of the rest
        rest.fold(torch.where((ids == tokens[:, None]).any(-1), -torch.inf, sampled)[:, None])
        support, outside = kept, rest.log()
    else:
        support, outside = torch.cat([sampled[:, None], kept], -1), rest.log()
    lse = logsumexp(torch.cat([support, outside[:, None]], -1))
    support = support - lse[:, None]
    nats = torch.zeros_like(lse)
    if request.entropy:
        nats = rest.surprise(lse) - torch.where(support > -torch.inf, support.exp() * support, 0.0).sum(-1)
    if given:
        return HeadRows(lse, sampled - lse, ids, support, outside - lse, nats)
    ids, support, dropped = choose_support(tokens, ids, support, request)
    return HeadRows(lse, sampled - lse, ids, support, torch.logaddexp(outside - lse, dropped), nats)


def choose_support(tokens: Tensor, ids: Tensor, logp: Tensor, request: HeadRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Slot 0 the sampled token, then those of the k most likely that `mass` asks for, then padding; and the mass dropped.

    The candidates are the k most likely of the *other* tokens, so the sampled one, in front, first takes its place among them.
    """
    # Where k reaches V the sampled token, taken out as −inf, is among the others too; there it comes last.
    others = torch.where(ids == tokens[:, None], torch.iinfo(torch.int64).max, ids)
    ids = torch.cat([tokens[:, None], others], -1)
    by_id = ids.argsort(-1)
    ranked = by_id.gather(-1, logp.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices)
    ids, logp = ids.gather(-1, ranked), logp.gather(-1, ranked)
    dropped = reached_before(logp, request.mass)
    dropped[:, request.top_k or 0 :] = True
    sampled = ids == tokens[:, None]
    dropped &= ~sampled
    order = torch.where(sampled, 0, torch.where(dropped, 2, 1)).argsort(dim=-1, stable=True)
    lost = logsumexp(torch.where(dropped, logp, -torch.inf))
    ids, logp = torch.where(dropped, -1, ids), torch.where(dropped, -torch.inf, logp)
    return ids.gather(-1, order), logp.gather(-1, order), lost
