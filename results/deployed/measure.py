"""How far a network is from where a batch began, on the batch's own tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from corral import head_kl
from corral.deployed import STATISTICS
from corral.divergence import kl_k3
from corral.head import lm_head

ROWS, FEW = 256, 64
"""Completions of a batch on which the network is measured after its updates, and between them."""


class Measure:
    """The network's distance from where a batch began, on some of the batch's own completions."""

    def __init__(self, trainer: Any, batch: dict[str, Tensor], rows: slice) -> None:
        self.model, self.autocast = trainer.model, trainer.accelerator.autocast
        self.ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[rows]
        self.seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)[rows]
        self.mask, self.tokens = batch["completion_mask"][rows].bool(), batch["completion_ids"][rows]
        self.advantages = batch["advantages"][rows]
        self.old, head = self._network()
        self.head = head.clone()
        self.old_logp = lm_head(self.old, self.head, self.tokens[self.mask]).logp
        self.taken = 0

    @torch.no_grad()
    def _network(self) -> tuple[Tensor, Tensor]:
        """Hidden states of the completions' tokens, and the head: the network as it samples, in the training's precision."""
        width, weight = self.tokens.shape[1], self.model.lm_head.weight.detach()
        with self.autocast():  # entered anew for every measurement, so that no copy of older weights is left in it
            states = self.model.model(input_ids=self.ids, attention_mask=self.seen, use_cache=False).last_hidden_state
            half = torch.is_autocast_enabled(states.device.type)
            dtype = torch.get_autocast_dtype(states.device.type) if half else states.dtype
        return states[:, -width - 1 : -1][self.mask].to(dtype), weight.to(dtype)

    @torch.no_grad()
    def kl(self) -> dict[str, Tensor]:
        """Per-token KLs: exact, and sampled."""
        self.taken += 1
        hidden, weight = self._network()
        exact = head_kl(hidden, weight, self.old, self.head)
        return {"exact": exact, "k3": kl_k3(self.old_logp, lm_head(hidden, weight, self.tokens[self.mask]).logp)}

    @torch.no_grad()
    def gain(self) -> float:
        """What the surrogate has improved by, per token: the mean of (ratio − 1) Â."""
        logp = lm_head(*self._network(), self.tokens[self.mask]).logp
        credit = self.advantages[:, None].expand(self.mask.shape)[self.mask]
        return float(((logp - self.old_logp).clamp(max=20).expm1() * credit).mean())


def summarise(kl: dict[str, Tensor]) -> dict[str, float]:
    """Every statistic of one measurement."""
    finite = bool(kl["exact"].isfinite().all())
    found = {name: float(of(kl["exact"].double())) if finite else math.inf for name, of in STATISTICS.items()}
    return found | {"k3": float(kl["k3"].double().mean())}
