"""How far a network is from where a batch began, on the batch's own tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from corral import head_kl
from corral.deployed import STATISTICS
from corral.divergence import kl_k3
from corral.kernels import lm_head

ROWS, FEW = 256, 64
"""Completions of a batch on which the network is measured after its updates, and between them."""


class Measure:
    """The network's distance from where a batch began, on some of the batch's own completions."""

    def __init__(self, model: Any, batch: dict[str, Tensor], rows: slice) -> None:
        self.model = model
        self.ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[rows]
        self.seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)[rows]
        self.mask, self.tokens = batch["completion_mask"][rows].bool(), batch["completion_ids"][rows]
        self.advantages = batch["advantages"][rows]
        self.old, self.head = self._hidden(), model.lm_head.weight.detach().clone()
        self.old_logp = lm_head(self.old, self.head, self.tokens[self.mask]).logp
        self.taken = 0

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        width = self.tokens.shape[1]
        states = self.model.model(input_ids=self.ids, attention_mask=self.seen).last_hidden_state
        return states[:, -width - 1 : -1][self.mask]

    @torch.no_grad()
    def kl(self) -> dict[str, Tensor]:
        """Per-token KLs: exact, and sampled."""
        self.taken += 1
        hidden, weight = self._hidden(), self.model.lm_head.weight
        exact = head_kl(hidden, weight, self.old, self.head)
        return {"exact": exact, "k3": kl_k3(self.old_logp, lm_head(hidden, weight, self.tokens[self.mask]).logp)}

    @torch.no_grad()
    def gain(self) -> float:
        """What the surrogate has improved by, per token: the mean of (ratio − 1) Â."""
        logp = lm_head(self._hidden(), self.model.lm_head.weight, self.tokens[self.mask]).logp
        credit = self.advantages[:, None].expand(self.mask.shape)[self.mask]
        return float(((logp - self.old_logp).clamp(max=20).expm1() * credit).mean())


def summarise(kl: dict[str, Tensor]) -> dict[str, float]:
    """Every statistic of one measurement."""
    finite = bool(kl["exact"].isfinite().all())
    found = {name: float(of(kl["exact"].double())) if finite else math.inf for name, of in STATISTICS.items()}
    return found | {"k3": float(kl["k3"].double().mean())}
