"""Contenders of the head's benchmark: bare GEMMs, research code on full logits, and the fused heads of others.

A contender is a function of a Problem: an old pass returns (log-probs, SparseDist), an update (dH, dW). Of corral it calls the
two public verbs alone, so that any two source trees with these verbs can be compared.
"""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from head_problem import Problem
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import corral

Contender = Callable[[Problem], Any]
Logp = Callable[[Tensor, Tensor], Tensor]
"""Hidden states and weight → the sampled tokens' log-probs."""
GEMM, OLD, TROLL, CLIP = "GEMM", "old pass", "troll update", "clip update"
OBJECTIVES = {TROLL: "troll", CLIP: "ppo_clip"}
CHUNK = 2048


def one_gemm(p: Problem) -> Tensor:
    """h Wᵀ, a lower bound for every head."""
    return p.hidden_new @ p.weight.T


def three_gemms(p: Problem) -> tuple[Tensor, Tensor]:
    """h Wᵀ and two more of that size: a lower bound for a dense gradient."""
    z = p.hidden_new @ p.weight.T
    return z @ p.weight, z.T @ p.hidden_new


def gradients(p: Problem, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """dH and dW of a loss of leaves with the problem's values."""
    hidden, weight = p.hidden_new.detach().requires_grad_(), p.weight.detach().requires_grad_()
    dh, dw = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    return dh, dw


def corral_old_pass(p: Problem) -> tuple[Tensor, corral.SparseDist | None]:
    """`lm_head` with the support."""
    with torch.no_grad():
        head = corral.lm_head(p.hidden_old, p.weight, p.tokens, top_k=p.k)
    return head.logp, head.dist


def corral_update(p: Problem, objective: str, exact: bool = False) -> tuple[Tensor, Tensor]:
    """`policy_loss_from_hidden`, hidden states → loss in one function."""
    return gradients(p, lambda hidden, weight: _policy_loss(p, hidden, weight, objective, exact).loss.sum())


def overshoot(p: Problem) -> float:
    """Largest distance of a projected token's KL from the bound; 0 if no token was projected."""
    with torch.no_grad():
        out = _policy_loss(p, p.hidden_new, p.weight, "troll")
    off = (out.kl_after[out.acted] - corral.make_objective("troll").config.bound).abs()
    return off.amax().item() if off.numel() else 0.0


def _policy_loss(p: Problem, hidden: Tensor, weight: Tensor, objective: str, exact: bool = False) -> Any:
    inputs = hidden[None], weight, p.tokens[None], p.batch, corral.make_objective(objective)
    return corral.policy_loss_from_hidden(*inputs, exact=exact, weights=p.weights)


@torch.no_grad()
def full_old_pass(p: Problem, upcast: bool = False) -> tuple[Tensor, corral.SparseDist]:
    """Full logits, log-softmax, `torch.topk`; `upcast` multiplies in float32, for logits as exact as ours."""
    logp = _full_logp(p.hidden_old, p.weight, upcast)
    support, ids = logp.topk(p.k)
    return logp.gather(-1, p.tokens[:, None]).squeeze(-1), corral.SparseDist(ids, support, _one_minus(support))


def full_troll(p: Problem, upcast: bool = False) -> tuple[Tensor, Tensor]:
    """Log-softmax of full logits, gathered on the old support; the rest is 1 − Σ."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logp = _full_logp(hidden, weight, upcast)
        support = torch.where(p.old.ids < 0, -torch.inf, logp.gather(-1, p.old.ids.clamp(min=0)))
        return p.loss("troll", logp.gather(-1, p.tokens[:, None]).squeeze(-1), support, _one_minus(support))

    return gradients(p, loss)


def chunked_clip(p: Problem, of_chunk: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Chunks of tokens under activation checkpointing."""

    def logp(hidden: Tensor, weight: Tensor) -> Tensor:
        chunks = zip(hidden.split(CHUNK), p.tokens.split(CHUNK), strict=True)
        return torch.cat([checkpoint(of_chunk, h, weight, t, use_reentrant=False) for h, t in chunks])

    return _clip(p, logp)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_sampled_logp, dynamic=False)


def _clip(p: Problem, logp_of: Logp) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss on whatever gives the sampled tokens' log-probs."""
    return gradients(p, lambda hidden, weight: p.loss("ppo_clip", logp_of(hidden, weight)))


def _full_logp(hidden: Tensor, weight: Tensor, upcast: bool = False) -> Tensor:
    hidden, weight = (hidden.float(), weight.float()) if upcast else (hidden, weight)
    return F.linear(hidden, weight).float().log_softmax(-1)


def _sampled_logp(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return _full_logp(hidden, weight).gather(-1, tokens[:, None]).squeeze(-1)


def _one_minus(support: Tensor) -> Tensor:
    return torch.log1p(-support.exp().sum(-1).clamp(max=1 - 1e-7))


# The fused heads of others: how each is called for the sampled tokens' log-probs, or for a cross-entropy.


def trl_clip(p: Problem) -> tuple[Tensor, Tensor]:
    """Clip update with TRL's chunked head, in TRL's chunk size."""
    utils = importlib.import_module("trl.trainer.utils")
    function, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return _clip(p, lambda h, w: function.apply(h, w, None, p.tokens, 1.0, chunk, None, 1.0, ())[0])


def verl_clip(p: Problem) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return _clip(p, lambda h, w: function(h, w, p.tokens, 1.0, "none")[0])


def cce_clip(p: Problem) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return _clip(p, lambda h, w: -function(h, w, p.tokens, reduction="none"))


def liger_clip(p: Problem) -> tuple[Tensor, Tensor]:
    """Clip update with Liger's GRPO loss, for its time alone: sequences of 1024 tokens share the first token's advantage."""
    kind = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    head, rows = kind(beta=0.0, use_ref_model=False, loss_type="bnpo"), (-1, min(1024, len(p.tokens)))
    tokens, old, advantages = p.tokens.view(rows), p.old.logp[:, 0].contiguous().view(rows), p.advantages.view(rows)[:, 0]
    mask = torch.ones_like(tokens)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return head(hidden.view(*tokens.shape, -1), weight, tokens, mask, advantages, old_per_token_logps=old)[0]

    return gradients(p, loss)


def torch_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    function = F.linear_cross_entropy  # since torch 2.13
    return gradients(p, lambda h, w: function(h, w, p.tokens, reduction="sum"))


def liger_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    head = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return gradients(p, lambda h, w: head(w, h, p.tokens))


OURS: dict[tuple[str, str], Contender] = {
    (GEMM, "one GEMM"): one_gemm,
    (GEMM, "three GEMMs"): three_gemms,
    (OLD, "full logits"): full_old_pass,
    (OLD, "corral"): corral_old_pass,
    (TROLL, "full logits"): full_troll,
    (TROLL, "corral"): partial(corral_update, objective="troll"),
    (TROLL, "corral, exact"): partial(corral_update, objective="troll", exact=True),
    (CLIP, "full logits"): lambda p: _clip(p, lambda h, w: _sampled_logp(h, w, p.tokens)),
    (CLIP, "corral"): partial(corral_update, objective="ppo_clip"),
    (CLIP, "corral, exact"): partial(corral_update, objective="ppo_clip", exact=True),
}
"""(task, name) → contender, in the order of the tables."""
UPCAST: dict[tuple[str, str], Contender] = {
    (OLD, "full logits in float32"): partial(full_old_pass, upcast=True),
    (TROLL, "full logits in float32"): partial(full_troll, upcast=True),
}
HEADS: dict[tuple[str, str], Contender] = {
    (CLIP, "checkpointed chunks"): partial(chunked_clip, of_chunk=_sampled_logp),
    (CLIP, "checkpointed chunks, compiled"): lambda p: chunked_clip(p, _compiled()),
    (CLIP, "TRL, chunked log-probs, clip"): trl_clip,
    (CLIP, "verl, fused kernel, clip"): verl_clip,
    (CLIP, "torch F.linear_cross_entropy"): torch_cross_entropy,
    (CLIP, "Liger, fused cross-entropy"): liger_cross_entropy,
    (CLIP, "Liger, fused GRPO"): liger_clip,
    (CLIP, "CCE, clip"): cce_clip,
}
"""Those of others; what is not installed is found out when it is called."""
