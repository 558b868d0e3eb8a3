"""What the head should have said, in float64 and from full logits, for some of the rows."""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from head_contenders import CLIP, OLD, objective_loss
from head_problem import Problem
from torch import Tensor

import corral


class Reference:
    """Of a problem's first rows: a token's loss and dH are its own affair, so that a run of all rows can be compared."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self._gradients: dict[str, Tensor] = {}

    def errors(self, task: str, output: tuple[Any, Any]) -> dict[str, float]:
        """The largest error of a log-prob, or the error of dH relative to its norm."""
        if task == OLD:
            return self._of_old_pass(*output)
        wanted = self.gradient(task)
        return {"gradient_error": ((output[0][: len(wanted)] - wanted).norm() / wanted.norm()).item()}

    def _of_old_pass(self, logp: Tensor, dist: corral.SparseDist | None) -> dict[str, float]:
        rows, exact = len(self.p.tokens), self.logp_old
        sampled = exact.gather(-1, self.p.tokens[:, None]).squeeze(-1)
        largest = {"logp_error": (logp[:rows] - sampled).abs().max().item()}
        if dist is not None:
            ids, kept = dist.ids[:rows], dist.logp[:rows]
            off = torch.where(ids < 0, 0.0, kept - exact.gather(-1, ids.clamp(min=0)))
            largest["support_error"] = off.abs().max().item()
            padding = exact.shape[-1]  # a column of its own: padding stands for no token
            marked = F.pad(exact, (0, 1)).scatter(-1, torch.where(ids < 0, padding, ids), -torch.inf)
            left_out = marked[:, :padding].amax(-1)
            least = torch.where(ids[:, 1:] < 0, torch.inf, kept[:, 1:]).amin(-1)
            largest["missed_by"] = (left_out - least).clamp(min=0).max().item()
        return largest

    @cached_property
    def logp_old(self) -> Tensor:
        """log π_old [rows V]."""
        return (self.p.hidden_old.double() @ self.p.weight.double().T).log_softmax(-1)

    def gradient(self, task: str) -> Tensor:
        """dH of the task's loss; rows within 1e-3 of a threshold are equal in all but rounding and stay in."""
        if task not in self._gradients:
            self._gradients[task] = self._gradient(task)
        return self._gradients[task]

    def _gradient(self, task: str) -> Tensor:
        p, hidden = self.p, self.p.hidden_new.double().requires_grad_()
        logp = (hidden @ p.weight.double().T).log_softmax(-1)
        sampled = logp.gather(-1, p.tokens[:, None]).squeeze(-1)
        if task == CLIP:
            loss = objective_loss(p, "ppo_clip", sampled)
        else:
            assert p.old is not None
            dist = corral.gather_support(logp, p.old.ids)
            loss = objective_loss(p, "troll", sampled, dist.logp, dist.rest)
        return torch.autograd.grad(loss, hidden)[0]
