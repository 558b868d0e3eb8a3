"""Contenders for a region on the union of both supports, and a float64 reference of what each support sees.

`gathered` is the adversarial policy: the old one's mass lies nearly all in its tail, and the new one gathers it on one token.
What an older tree may lack is looked up when it is called, so that other sections can be compared with it.
"""

import importlib
from functools import cached_property, partial
from typing import Any

import torch
from head_contenders import GEMM, TROLL, Contender, corral_update, gradients, one_gemm
from head_problem import Problem, Reference
from torch import Tensor

import corral


def union_of(p: Problem) -> Any:
    """Union support: the new policy adds as many tokens as the old support has, scored by the old head."""
    return corral.UnionSupport.of_batch(p.hidden_old[None], p.weight, top_k=p.k)


def union_loss(p: Problem, hidden: Tensor, weight: Tensor, **how: Any) -> Any:
    inputs = hidden[None], weight, p.tokens[None], p.batch, corral.make_objective("troll")
    return corral.policy_loss_from_hidden(*inputs, weights=p.weights, union=union_of(p), **how)


def union_update(p: Problem, **how: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient together."""
    return gradients(p, lambda hidden, weight: union_loss(p, hidden, weight, **how).loss)


def union_in_steps(p: Problem) -> tuple[Tensor, Tensor]:
    """`lm_head`, then the old policy on the union, then the loss of both, then autograd: as a trainer with other terms does."""
    fused, logits, of_batch = (
        importlib.import_module(f"corral.head.{name}") for name in ("policy_loss", "logits", "batch_loss")
    )
    b, union = p.batch, union_of(p)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        how = {"ids": b.dist_old.ids, "top_k": p.k, "tolerance": fused.TOLERANCE}
        head = corral.lm_head(hidden[None], weight, p.tokens[None], **how)
        old = union.extend(b.dist_old, head.dist.ids, logits.LogitSpec())
        batch = corral.TokenBatch(head.logp, b.logp_old, b.advantages, b.mask, head.dist, old)
        return of_batch.batch_loss(corral.make_objective("troll"), batch).loss.sum()

    return gradients(p, loss)


UNIONS: dict[tuple[str, str], Contender] = {
    (GEMM, "one GEMM"): one_gemm,
    (TROLL, "corral, old support"): partial(corral_update, objective="troll"),
    (TROLL, "corral, union"): union_update,
    (TROLL, "corral, union, exact"): partial(union_update, exact=True),
    (TROLL, "corral, union in steps"): union_in_steps,
    (TROLL, "corral, union, torch path"): partial(union_update, impl="torch"),
}


class UnionReference(Reference):
    """Float64 on full logits: the gradient on the union, and how much of the true KL a support sees."""

    def of_union(self, dh: Tensor, _: Tensor) -> dict[str, float]:
        """‖dH − dH₆₄‖ / ‖dH₆₄‖ of TROLL on the union."""
        wanted = self._union_gradient
        return {"gradient_error": ((dh[: len(wanted)] - wanted).norm() / wanted.norm()).item()}

    def seen(self, ids: Tensor) -> dict[str, float]:
        """Share of the true KL(new‖old) that a support [N K] and its tail see, and rows beyond the bound that they miss."""
        some = ids[: len(self.p.tokens)]
        true = corral.categorical_kl(self._logp_new, self._logp_old)
        both = (corral.gather_support(logp, some).with_rest() for logp in (self._logp_new, self._logp_old))
        seen, bound = corral.categorical_kl(*both), corral.make_objective("troll").config.bound
        missed = ((true > bound) & (seen <= bound)).sum()
        return {"seen": (seen.sum() / true.sum()).item(), "beyond": int((true > bound).sum()), "missed": int(missed)}

    @cached_property
    def _logp_new(self) -> Tensor:
        return (self.p.hidden_new.double() @ self.p.weight.double().T).log_softmax(-1)

    @cached_property
    def _union_gradient(self) -> Tensor:
        hidden = self.p.hidden_new.double().requires_grad_()
        logp = (hidden @ self.p.weight.double().T).log_softmax(-1)[None]
        new = corral.top_k_support(logp, self.p.tokens[None], self.p.k, ids=self.p.old.ids[None])
        old, b = corral.gather_support(self._logp_old[None], new.ids), self.p.batch
        batch = corral.TokenBatch(new.logp[..., 0], old.logp[..., 0], b.advantages, b.mask, new, old)
        return torch.autograd.grad(corral.make_objective("troll")(batch).loss.sum(), hidden)[0]


def check_union(p: Problem, reference: UnionReference, key: tuple[str, str], output: Any) -> dict[str, float]:
    """Errors of a contender, and what its support sees."""
    task, name = key
    if task == GEMM:
        return {}
    if name == "corral, old support":
        return reference.of_update("troll", *output) | reference.seen(p.old.ids)
    with torch.no_grad():
        dist = union_loss(p, p.hidden_new, p.weight).dist
    assert dist is not None
    return reference.of_union(*output) | reference.seen(dist.ids[0])
