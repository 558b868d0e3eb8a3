"""Rows for the head's benchmark: an old and a new policy over a large vocabulary, and what float64 says of them."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

import corral

POLICIES = {"peaked": (27.0, 16.0), "medium": (18.0, 8.0), "flat": (9.0, 6.0), "gathered": (9.0, 6.0)}
"""Largest logit of the few tokens that stand out, and how far below it the others of them may lie; the bulk is around 0.

With 150k tokens the bulk weighs about e^12.5: e^27 leaves it a mass of 1e-6, e^18 some thousandths, e^9 nearly all. The new
policy of `gathered` has one more token that stands out, by GATHERED, which in the old one was like any other.
"""
GATHERED = 13.0
JITTER = 0.35
"""How far the new policy's logits lie from the old one's: a few percent of the rows leave a KL ball of 0.05."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Batch of the benchmark: hidden states under both policies, the head's weight, sampled tokens, the old support."""

    hidden_old: Tensor
    hidden_new: Tensor
    weight: Tensor
    tokens: Tensor
    advantages: Tensor
    k: int

    @cached_property
    def old(self) -> corral.SparseDist:
        """The old policy on its own support, as an old pass reports it."""
        with torch.no_grad():
            dist = corral.lm_head(self.hidden_old, self.weight, self.tokens, top_k=self.k, impl="torch").dist
        assert dist is not None
        return dist

    @cached_property
    def weights(self) -> Tensor:
        """Every token counts alike [1 N]."""
        return torch.ones_like(self.advantages)[None]

    def first(self, rows: int) -> "Problem":
        """Return the problem's first tokens as a problem."""
        some = {name: getattr(self, name)[:rows] for name in ("hidden_old", "hidden_new", "tokens", "advantages")}
        return replace(self, **some)

    @cached_property
    def batch(self) -> corral.TokenBatch:
        """Token batch of one sequence [1 N], without the new policy."""
        old = corral.SparseDist(self.old.ids[None], self.old.logp[None], self.old.rest[None])
        logp_old = old.logp[..., 0].contiguous()
        return corral.TokenBatch(logp_old, logp_old, self.advantages[None], torch.ones_like(logp_old) > 0, None, old)

    def loss(self, objective: str, logp: Tensor, support: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
        """An objective's summed loss at the sampled tokens' log-probs [N], and the new policy on the old support [N K]."""
        dist = None
        if support is not None and rest is not None:
            dist = corral.SparseDist(self.old.ids[None], support[None], rest[None])
        return corral.make_objective(objective)(replace(self.batch, logp_new=logp[None], dist_new=dist)).loss.sum()


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
    another = (
        GATHERED * weight[torch.randint(vocabulary, (tokens,), generator=draw, device=device)] if policy == "gathered" else 0
    )
    place = torch.multinomial(level.softmax(-1), 1, generator=draw)
    return Problem(
        hidden_old=hidden(level), hidden_new=hidden(moved) + another, weight=weight, tokens=ids.gather(-1, place).squeeze(-1),
        advantages=torch.randn(tokens, generator=draw, device=device), k=k,
    )  # fmt: skip


class Reference:
    """Float64 on full logits, for a problem's first rows: a token's loss and dH are its own affair."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self._gradients: dict[str, Tensor] = {}

    def of_old_pass(self, logp: Tensor, dist: corral.SparseDist) -> dict[str, float]:
        """Largest errors of a log-prob and of a member, and by how much a token left out is likelier than one kept."""
        rows, exact = len(self.p.tokens), self._logp_old
        ids, kept = dist.ids[:rows], dist.logp[:rows]
        off = torch.where(ids < 0, 0.0, kept - exact.gather(-1, ids.clamp(min=0)))
        padding = exact.shape[-1]  # a column of its own: padding stands for no token
        marked = F.pad(exact, (0, 1)).scatter(-1, torch.where(ids < 0, padding, ids), -torch.inf)
        least = torch.where(ids[:, 1:] < 0, torch.inf, kept[:, 1:]).amin(-1)
        return {
            "logp_error": (logp[:rows] - exact.gather(-1, self.p.tokens[:, None]).squeeze(-1)).abs().max().item(),
            "support_error": off.abs().max().item(),
            "missed_by": (marked[:, :padding].amax(-1) - least).clamp(min=0).max().item(),
        }

    def of_update(self, objective: str, dh: Tensor, _: Tensor) -> dict[str, float]:
        """‖dH − dH₆₄‖ / ‖dH₆₄‖."""
        if objective not in self._gradients:
            self._gradients[objective] = self._gradient(objective)
        wanted = self._gradients[objective]
        return {"gradient_error": ((dh[: len(wanted)] - wanted).norm() / wanted.norm()).item()}

    @cached_property
    def _logp_old(self) -> Tensor:
        return (self.p.hidden_old.double() @ self.p.weight.double().T).log_softmax(-1)

    def _gradient(self, objective: str) -> Tensor:
        hidden = self.p.hidden_new.double().requires_grad_()
        logp = (hidden @ self.p.weight.double().T).log_softmax(-1)
        dist = corral.gather_support(logp, self.p.old.ids)
        sampled = logp.gather(-1, self.p.tokens[:, None]).squeeze(-1)
        return torch.autograd.grad(self.p.loss(objective, sampled, dist.logp, dist.rest), hidden)[0]
