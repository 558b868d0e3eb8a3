"""Rows for the head benchmark: an old and a new policy over a large vocabulary, as peaked or as flat as asked for."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import corral

POLICIES = {"peaked": (27.0, 16.0), "medium": (18.0, 8.0), "flat": (9.0, 6.0)}
"""Largest logit of the few tokens that stand out, and how far below it the others of them may lie; the bulk is around 0.

With 150k tokens the bulk weighs about e^12.5: e^27 leaves it a mass of 1e-6, e^18 some thousandths, e^9 nearly all.
"""
JITTER = 0.35
"""How far the new policy's logits lie from the old one's: a few percent of the rows leave a KL ball of 0.05."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One batch: hidden states under both policies, the head's weight, and what was sampled."""

    hidden_old: Tensor
    hidden_new: Tensor
    weight: Tensor
    tokens: Tensor
    advantages: Tensor
    k: int
    old: corral.SparseDist | None = None
    """The old policy on its own support, which an update reads."""

    @cached_property
    def weights(self) -> Tensor:
        """Every token counts alike [1 N]."""
        return torch.ones_like(self.advantages)[None]

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, V and H."""
        return len(self.tokens), *self.weight.shape

    def first(self, rows: int) -> "Problem":
        """The same with fewer tokens."""
        old = self.old
        if old is not None:
            old = corral.SparseDist(old.ids[:rows], old.logp[:rows], old.rest[:rows])
        some = {name: getattr(self, name)[:rows] for name in ("hidden_old", "hidden_new", "tokens", "advantages")}
        return replace(self, **some, old=old)

    def with_support(self) -> "Problem":
        """The same with the old policy's support, as an old pass would report it."""
        with torch.no_grad():
            head = corral.lm_head(self.hidden_old, self.weight, self.tokens, top_k=self.k, impl="torch")
        return replace(self, old=head.dist)

    @cached_property
    def batch(self) -> corral.TokenBatch:
        """What an objective reads, as one sequence [1 N], with the new policy left blank."""
        assert self.old is not None
        old = corral.SparseDist(self.old.ids[None], self.old.logp[None], self.old.rest[None])
        logp_old = old.logp[..., 0].contiguous()
        mask = torch.ones_like(logp_old, dtype=torch.bool)
        return corral.TokenBatch(logp_old, logp_old, self.advantages[None], mask, None, old)

    def batch_with(self, head: corral.HeadOutput) -> corral.TokenBatch:
        """The same with the new policy."""
        old, new = self.batch.dist_old, None
        if old is not None and head.dist is not None:
            new = corral.SparseDist(old.ids, head.dist.logp[None], head.dist.rest[None])
        return replace(self.batch, logp_new=head.logp[None], dist_new=new)


def make_problem(tokens: int, vocabulary: int, width: int, k: int, policy: str, device: str, dtype: torch.dtype) -> Problem:
    """A few designated tokens a row stand out by construction: their weights, scaled, are added up to the hidden state."""
    draw = torch.Generator(device).manual_seed(0)
    top, span = POLICIES[policy]
    few = 12 if width > 1000 else 6
    weight = (torch.randn(vocabulary, width, generator=draw, device=device) / width**0.5).to(dtype)
    ids = torch.randint(vocabulary, (tokens, few), generator=draw, device=device)
    level = top - span * torch.rand(tokens, few, generator=draw, device=device)
    level[:, 0] = top
    bulk = torch.randn(tokens, width, generator=draw, device=device)

    def hidden(level: Tensor) -> Tensor:
        parts = (level[:, j : j + 1] * weight[ids[:, j]].float() for j in range(few))
        return sum(parts, bulk).to(dtype)

    moved = level + JITTER * torch.randn(level.shape, generator=draw, device=device)
    place = torch.multinomial(level.softmax(-1), 1, generator=draw)
    return Problem(
        hidden_old=hidden(level), hidden_new=hidden(moved), weight=weight, tokens=ids.gather(-1, place).squeeze(-1),
        advantages=torch.randn(tokens, generator=draw, device=device), k=k,
    )  # fmt: skip
