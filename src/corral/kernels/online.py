"""Running sums over blocks of the vocabulary: logsumexp, entropy, exact top-k and the exact mass of everything else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from corral.numerics import logsumexp
from corral.support import rank_top_k, reached_before


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


class OnlineHead:
    """Folds blocks of logits, lowest token ids first.

    Every logit ends in one of three places: the sampled token's, the support's, or the running log mass of all others.
    Nothing is ever subtracted from that mass, so it is exact however small it is.
    """

    def __init__(self, tokens: Tensor, ids: Tensor | None, top_k: int | None, entropy: bool, dtype: torch.dtype) -> None:
        n = len(tokens)
        slots = ids.shape[-1] if ids is not None else 0
        self.tokens, self.fixed, self.top_k = tokens, ids, top_k
        self.sampled, self.rest = (tokens.new_full((n,), -torch.inf, dtype=dtype) for _ in range(2))
        self.kept = tokens.new_full((n, slots), -torch.inf, dtype=dtype)
        self.ids = ids.long() if ids is not None else tokens.new_empty((n, 0))
        self.entropy = OnlineEntropy(self.rest) if entropy else None

    def fold(self, z: Tensor, start: int) -> None:
        """Take in the logits [n, v] of the tokens from id `start` on; `z` is used up."""
        if self.entropy is not None:
            self.entropy.fold(z)
        marks = torch.cat([self.tokens[:, None], self.ids], -1) if self.fixed is not None else self.tokens[:, None]
        local = marks - start
        here = (marks >= 0) & (local >= 0) & (local < z.shape[-1])
        value = z.gather(-1, torch.where(here, local, 0))
        self.sampled = torch.where(here[:, 0], value[:, 0], self.sampled)
        if self.fixed is not None:
            self.kept = torch.where(here[:, 1:], value[:, 1:], self.kept)
        # What is accounted for goes. Marks of other blocks fall on column 0, where a minimum with inf changes nothing.
        z.scatter_reduce_(-1, torch.where(here, local, 0), torch.where(here, -torch.inf, torch.inf).to(z.dtype), "amin")
        if self.top_k is not None:
            self._fold_candidates(z, start, self.top_k)
        self.rest = torch.logaddexp(self.rest, torch.logsumexp(z, -1))

    def _fold_candidates(self, z: Tensor, start: int, k: int) -> None:
        """Keep the k best of those kept so far and of this block; the losers join the rest."""
        best = rank_top_k(z, min(k, z.shape[-1]))
        ids, values = torch.cat([self.ids, best + start], -1), torch.cat([self.kept, z.gather(-1, best)], -1)
        # Earlier blocks hold lower ids, so a stable sort leaves ties in their order.
        values, order = values.sort(dim=-1, descending=True, stable=True)
        self.kept, self.ids = values[:, :k], ids.gather(-1, order)[:, :k]
        if values.shape[-1] > k:
            self.rest = torch.logaddexp(self.rest, torch.logsumexp(values[:, k:], -1))
        z.scatter_(-1, best, -torch.inf)

    def finish(self, mass: float) -> HeadRows:
        """Normalise, and settle the support."""
        lse = logsumexp(torch.cat([self.kept, self.rest[:, None]], -1))
        if self.fixed is None:
            lse = torch.logaddexp(lse, self.sampled)
            ids, kept, dropped = self._settle(lse, mass)
            rest = torch.logaddexp(self.rest - lse, dropped)
        else:
            elsewhere = ~(self.ids == self.tokens[:, None]).any(-1)
            outside = torch.where(elsewhere, torch.logaddexp(self.rest, self.sampled), self.rest)
            lse = torch.where(elsewhere, torch.logaddexp(lse, self.sampled), lse)
            ids, kept, rest = self.fixed, self.kept - lse[:, None], outside - lse
        nats = self.entropy.finish() if self.entropy is not None else torch.zeros_like(lse)
        return HeadRows(lse, self.sampled - lse, ids, kept, rest, nats)

    def _settle(self, lse: Tensor, mass: float) -> tuple[Tensor, Tensor, Tensor]:
        """Slot 0 the sampled token, then those of the k most likely that `mass` asks for, then padding; and the mass dropped.

        The candidates are the k most likely of the *other* tokens, so the sampled one first takes its place among them.
        """
        # Where k reaches V the sampled token, taken out as −inf, is among the others too; there it comes last.
        others = torch.where(self.ids == self.tokens[:, None], torch.iinfo(torch.int64).max, self.ids)
        ids = torch.cat([self.tokens[:, None], others], -1)
        logp = torch.cat([self.sampled[:, None], self.kept], -1) - lse[:, None]
        by_id = ids.argsort(-1)
        ranked = by_id.gather(-1, logp.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices)
        ids, logp = ids.gather(-1, ranked), logp.gather(-1, ranked)
        dropped = reached_before(logp, mass)
        dropped[:, self.top_k or 0 :] = True
        sampled = ids == self.tokens[:, None]
        dropped &= ~sampled
        order = torch.where(sampled, 0, torch.where(dropped, 2, 1)).argsort(dim=-1, stable=True)
        lost = logsumexp(torch.where(dropped, logp, -torch.inf))
        ids, logp = torch.where(dropped, -1, ids), torch.where(dropped, -torch.inf, logp)
        return ids.gather(-1, order), logp.gather(-1, order), lost


class OnlineEntropy:
    """H = log s − u/s with s = Σ e^(z − m) and u = Σ e^(z − m) (z − m), m the largest logit so far."""

    def __init__(self, like: Tensor) -> None:
        self.peak = torch.full_like(like, -torch.inf)
        self.total, self.weighted = torch.zeros_like(like), torch.zeros_like(like)

    def fold(self, z: Tensor) -> None:
        peak = torch.maximum(self.peak, z.amax(-1))
        # Before the first finite logit there is nothing to rescale.
        shift = torch.where(self.total > 0, self.peak - peak, 0.0)
        gap = torch.where(z > -torch.inf, z - peak[:, None], 0.0)
        weight = torch.where(z > -torch.inf, gap.exp(), 0.0)
        self.weighted = (self.weighted + self.total * shift) * shift.exp() + (weight * gap).sum(-1)
        self.total = self.total * shift.exp() + weight.sum(-1)
        self.peak = peak

    def finish(self) -> Tensor:
        return self.total.log() - self.weighted / self.total
