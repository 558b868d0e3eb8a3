"""What the head is compared with: bare matrix products, research code on full logits, and the fused heads of others.

A contender is a function of a Problem: an old pass returns (log-probs, SparseDist or None), an update (dH, dW).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from head_problem import Problem
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import corral

Contender = Callable[[Problem], Any]
PRODUCTS, OLD, CLIP, TROLL = "products", "old pass", "clip update", "troll update"
CHUNK = 2048


def one_product(p: Problem) -> Tensor:
    """h Wᵀ, the least that anyone can do."""
    return p.hidden_new @ p.weight.T


def three_products(p: Problem) -> tuple[Tensor, Tensor]:
    """h Wᵀ and two more of that size: the least for a dense gradient."""
    z = p.hidden_new @ p.weight.T
    return z @ p.weight, z.T @ p.hidden_new


@torch.no_grad()
def full_old_pass(p: Problem, upcast: bool = False) -> tuple[Tensor, corral.SparseDist]:
    """Full logits, log-softmax, `torch.topk`; `upcast` multiplies in float32, for logits as exact as ours."""
    hidden, weight = (p.hidden_old.float(), p.weight.float()) if upcast else (p.hidden_old, p.weight)
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    kept, ids = logp.topk(p.k)
    return logp.gather(-1, p.tokens[:, None]).squeeze(-1), corral.SparseDist(ids, kept, _one_minus(kept))


def corral_old_pass(p: Problem, impl: str) -> tuple[Tensor, corral.SparseDist | None]:
    """One pass with the support."""
    with torch.no_grad():
        head = corral.lm_head(p.hidden_old, p.weight, p.tokens, top_k=p.k, impl=impl)
    return head.logp, head.dist


def gradients(p: Problem, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """dH and dW of a loss of leaves with the problem's values."""
    hidden, weight = p.hidden_new.detach().requires_grad_(), p.weight.detach().requires_grad_()
    dh, dw = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    return dh, dw


def full_logp(hidden: Tensor, weight: Tensor, upcast: bool = False) -> Tensor:
    hidden, weight = (hidden.float(), weight.float()) if upcast else (hidden, weight)
    return F.linear(hidden, weight).float().log_softmax(-1)


def full_troll(p: Problem, upcast: bool = False) -> tuple[Tensor, Tensor]:
    """Log-softmax of full logits, gathered on the old support; the rest is 1 − Σ."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logp = full_logp(hidden, weight, upcast)
        assert p.old is not None
        kept = torch.where(p.old.ids < 0, -torch.inf, logp.gather(-1, p.old.ids.clamp(min=0)))
        return objective_loss(p, "troll", logp.gather(-1, p.tokens[:, None]).squeeze(-1), kept, _one_minus(kept))

    return gradients(p, loss)


def corral_fused(p: Problem, name: str, impl: str, exact: bool) -> tuple[Tensor, Tensor]:
    """Hidden states → loss in one function; what the tokens are weighted with is known beforehand, as in training."""
    objective, options = corral.make_objective(name), {"exact": exact, "impl": impl, "weights": p.weights}

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return corral.policy_loss_from_hidden(hidden[None], weight, p.tokens[None], p.batch, objective, **options).loss.sum()

    return gradients(p, loss)


def overshoot(p: Problem, impl: str) -> float:
    """How far the KL of projected tokens is from the bound, at most; 0 where none had to be projected."""
    objective = corral.make_objective("troll")
    with torch.no_grad():
        out = corral.policy_loss_from_hidden(p.hidden_new[None], p.weight, p.tokens[None], p.batch, objective, impl=impl)
    assert out.acted is not None
    assert out.kl_after is not None
    return (out.kl_after[out.acted] - objective.config.bound).abs().amax().item() if out.acted.any() else 0.0


def clip_with(p: Problem, logp_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss on whatever gives the sampled tokens' log-probs."""
    return gradients(p, lambda hidden, weight: objective_loss(p, "ppo_clip", logp_of(hidden, weight)))


def objective_loss(p: Problem, name: str, logp: Tensor, kept: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
    assert p.old is not None
    dist = None if kept is None or rest is None else corral.SparseDist(p.old.ids, kept, rest)
    return corral.make_objective(name)(p.batch_with(corral.HeadOutput(logp, None, dist))).loss.sum()


def sampled_logp(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return full_logp(hidden, weight).gather(-1, tokens[:, None]).squeeze(-1)


def chunked_logp(p: Problem, of_chunk: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Chunks of tokens under activation checkpointing."""

    def logp(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(
            [checkpoint(of_chunk, h, weight, t, use_reentrant=False)
             for h, t in zip(hidden.split(CHUNK), p.tokens.split(CHUNK), strict=True)]
        )  # fmt: skip

    return logp


def _one_minus(kept: Tensor) -> Tensor:
    return torch.log1p(-kept.exp().sum(-1).clamp(max=1 - 1e-7))


# The fused heads of others: how each is called for the sampled tokens' log-probs, or for a cross-entropy.


def trl_clip(p: Problem) -> tuple[Tensor, Tensor]:
    """Its trainers' head, in chunks as wide as theirs."""
    utils = importlib.import_module("trl.trainer.utils")
    function, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return clip_with(p, lambda h, w: function.apply(h, w, None, p.tokens, 1.0, chunk, None, 1.0, ())[0])


def verl_clip(p: Problem) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return clip_with(p, lambda h, w: function(h, w, p.tokens, 1.0, "none")[0])


def torch_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    function = F.linear_cross_entropy  # since torch 2.13
    return gradients(p, lambda h, w: function(h, w, p.tokens, reduction="sum"))


def liger_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    head = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return gradients(p, lambda h, w: head(w, h, p.tokens))


def liger_clip(p: Problem) -> tuple[Tensor, Tensor]:
    """Its loss has one advantage per sequence: rows of 1024 tokens share the first one's. Only its time is compared."""
    kind = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    head, rows = kind(beta=0.0, use_ref_model=False, loss_type="bnpo"), (-1, min(1024, len(p.tokens)))
    assert p.old is not None
    tokens, old, advantages = p.tokens.view(rows), p.old.logp[:, 0].contiguous().view(rows), p.advantages.view(rows)[:, 0]
    mask = torch.ones_like(tokens)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return head(hidden.view(*tokens.shape, -1), weight, tokens, mask, advantages, old_per_token_logps=old)[0]

    return gradients(p, loss)


def cce_clip(p: Problem) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return clip_with(p, lambda h, w: -function(h, w, p.tokens, reduction="none"))


def quack_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return gradients(p, lambda h, w: function(h, w, p.tokens, reduction="sum"))


BRIEF = {"one product", "three products", "full logits", "corral, triton", "corral, triton, exact"}
"""Contenders that run at every shape; the others at the usual ones."""
STEADY = {
    (PRODUCTS, "one product"), (PRODUCTS, "three products"), (OLD, "corral, triton"), (TROLL, "corral, triton"),
    (TROLL, "corral, triton, exact"),
}  # fmt: skip
"""Those of them whose sustained times are taken at every shape."""
ALIKE = {"checkpointed chunks", "checkpointed chunks, compiled", "Liger, fused GRPO", "torch F.linear_cross_entropy"}
"""Contenders that take the same time for every policy, and are not the fastest: they run on the peaked one alone."""

OTHERS: dict[str, tuple[str, Contender]] = {
    "TRL, chunked log-probs, clip": ("trl", trl_clip),
    "verl, fused kernel, clip": ("verl", verl_clip),
    "torch F.linear_cross_entropy": ("torch", torch_cross_entropy),
    "Liger, fused cross-entropy": ("liger_kernel", liger_cross_entropy),
    "Liger, fused GRPO": ("liger_kernel", liger_clip),
    "CCE, clip": ("cut_cross_entropy", cce_clip),
    "Quack, fused cross-entropy": ("quack", quack_cross_entropy),
}
"""Name → the package it needs, and the contender."""


def contenders(device: str, dtype: torch.dtype, policy: str = "peaked") -> dict[tuple[str, str], Contender]:
    """(task, name) → contender, in the order of the tables. What is not installed is found out when it is called."""
    found: dict[tuple[str, str], Contender] = {
        (PRODUCTS, "one product"): one_product,
        (PRODUCTS, "three products"): three_products,
        (OLD, "full logits"): full_old_pass,
        (TROLL, "full logits"): full_troll,
        (CLIP, "full logits"): lambda p: clip_with(p, lambda h, w: sampled_logp(h, w, p.tokens)),
    }
    return found | (_on_cpu(dtype) if device == "cpu" else _on_gpu(policy))


def _on_cpu(dtype: torch.dtype) -> dict[tuple[str, str], Contender]:
    part = functools.partial
    found: dict[tuple[str, str], Contender] = {
        (OLD, "corral, torch"): part(corral_old_pass, impl="torch"),
        (TROLL, "corral, torch"): part(corral_fused, name="troll", impl="torch", exact=True),
        (CLIP, "corral, torch"): part(corral_fused, name="ppo_clip", impl="torch", exact=True),
    }
    if dtype != torch.float32:
        found[OLD, "full logits in float32"] = part(full_old_pass, upcast=True)
        found[TROLL, "full logits in float32"] = part(full_troll, upcast=True)
    return found


def _on_gpu(policy: str) -> dict[tuple[str, str], Contender]:
    part, compiled = functools.partial, torch.compile(sampled_logp, dynamic=False)
    found: dict[tuple[str, str], Contender] = {
        (OLD, "corral, triton"): part(corral_old_pass, impl="triton"),
        (TROLL, "corral, triton"): part(corral_fused, name="troll", impl="triton", exact=False),
        (TROLL, "corral, triton, exact"): part(corral_fused, name="troll", impl="triton", exact=True),
        (CLIP, "corral, triton"): part(corral_fused, name="ppo_clip", impl="triton", exact=False),
        (CLIP, "corral, triton, exact"): part(corral_fused, name="ppo_clip", impl="triton", exact=True),
        (CLIP, "checkpointed chunks"): lambda p: clip_with(p, chunked_logp(p, sampled_logp)),
        (CLIP, "checkpointed chunks, compiled"): lambda p: clip_with(p, chunked_logp(p, compiled)),
        **{(CLIP, name): contender for name, (_, contender) in OTHERS.items()},
    }
    return {key: contender for key, contender in found.items() if policy == "peaked" or key[1] not in ALIKE}
