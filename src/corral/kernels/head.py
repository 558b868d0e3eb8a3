"""The language-model head: hidden states → log-probs, entropy and a sparse support, one block of logits at a time."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.logits import LogitSpec, block_size, slices
from corral.kernels.online import HeadRows, OnlineHead
from corral.support import check_ids
from corral.types import SparseDist


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """What the head knows of each position's next-token distribution."""

    logp: Float[Tensor, "*b"]
    """Log-probability of the sampled token."""
    entropy: Float[Tensor, "*b"] | None
    """Entropy in nats, where asked for."""
    dist: SparseDist | None
    """The policy on a sparse support, where `top_k` or `ids` was given."""


def lm_head(
    hidden: Float[Tensor, "*b H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "*b"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    mass: float = 1.0,
    ids: Int[Tensor, "*b K"] | None = None,
    entropy: bool = False,
    impl: str = "auto",
) -> HeadOutput:
    """Log-probs, entropy and support of the next-token distribution, without ever holding [N V] logits.

        z = softcap(scale · (h Wᵀ + b)) / temperature          log p = z − logsumexp z

    Blocks of logits are made, folded into running sums and dropped; the backward pass makes them again. With `top_k` the
    support is this policy's own, as `top_k_support` has it; with `ids` it is another's, as `gather_support` has it.

    Args:
        hidden: last hidden states [*, H].
        weight, bias: the head's, [V, H] and [V].
        tokens: sampled tokens [*].
        scale, softcap, temperature: how the model and the sampler turn products into logits.
        top_k, mass: keep at most k of the most likely tokens, until they hold `mass`; slot 0 is the sampled token.
        ids: a support to evaluate on [*, K], −1 at padding. Excludes `top_k`.
        entropy: compute it too.
        impl: "torch", or "auto" for the best there is.
    Returns:
        HeadOutput, float32 or better, differentiable in `hidden`, `weight` and `bias`.
    Ref:
        Milakov & Gimelshein 2018, arXiv:1805.02867 (online normaliser). Invariant: equal to top_k_support and gather_support
        on the full log-softmax.
    """
    spec = LogitSpec(scale, softcap, temperature)
    _check(hidden, weight, tokens, bias, top_k, mass, ids, impl)
    shape = tokens.shape
    flat_ids = None if ids is None else ids.reshape(-1, ids.shape[-1])
    logp, nats, kept, rest, support = _Head.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, tokens.reshape(-1).long(), flat_ids, (spec, top_k, mass, entropy)
    )
    dist = None
    if ids is not None or top_k is not None:
        support = ids if ids is not None else support.reshape(*shape, -1)
        dist = SparseDist(support, kept.reshape(support.shape), rest.reshape(shape))
    return HeadOutput(logp.reshape(shape), nats.reshape(shape) if entropy else None, dist)


class _Head(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, support and rest; logits are made block by block, in both directions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, how: Any
    ) -> tuple[Tensor, ...]:
        ctx.spec, top_k, mass, ctx.entropy = how
        rows, columns = block_size(hidden.device)
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        parts: list[HeadRows] = []
        for row in slices(len(hidden), rows):
            online = OnlineHead(tokens[row], None if ids is None else ids[row], top_k, ctx.entropy, dtype)
            for column in slices(len(weight), columns):
                z = ctx.spec.block(hidden[row], weight[column], None if bias is None else bias[column])
                online.fold(z, column.start)
            parts.append(online.finish(mass))
        lse, logp, support, kept, rest, nats = (
            torch.cat([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(HeadRows)
        )
        ctx.mark_non_differentiable(support)
        ctx.save_for_backward(hidden, weight, bias, tokens, support, lse, rest, nats)
        return logp, nats, kept, rest, support

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_nats: Tensor, g_kept: Tensor, g_rest: Tensor, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, support, lse, rest, nats = ctx.saved_tensors
        live = (g_logp != 0) | (g_nats != 0) | (g_rest != 0) | (g_kept != 0).any(-1)
        picked = live.nonzero().squeeze(-1)  # masked and blocked tokens cost nothing
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if needed else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        rows, columns = block_size(hidden.device)
        for part in slices(len(picked), rows):
            row = picked[part]
            h = hidden[row]
            gradient = LogitGradient(tokens[row], support[row], g_logp[row], g_kept[row], g_rest[row], rest[row])
            for column in slices(len(weight), columns):
                w = weight[column]
                z = ctx.spec.block(h, w, None if bias is None else bias[column])
                dz = gradient.block(z - lse[row, None], column.start)
                if ctx.entropy:
                    dz = dz - g_nats[row, None] * entropy_gradient(z - lse[row, None], nats[row, None])
                dz = dz * ctx.spec.slope(z)
                if grad_hidden is not None:
                    grad_hidden[row] += dz @ w.to(dz.dtype)
                if grad_weight is not None:
                    grad_weight[column] += dz.T @ h.to(dz.dtype)
                if grad_bias is not None:
                    grad_bias[column] += dz.sum(0)
        grads = (
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip((grad_hidden, grad_weight, grad_bias), (hidden, weight, bias), strict=True)
        )
        return (*grads, None, None, None)


class LogitGradient:
    """Gradient of log-probs, support and rest with respect to the logits, block by block.

        dz_v = p_v (g_rest/p_rest [v ∉ S] − G) + Σ_k g_k [v = k] + g_a [v = a]          G = g_a + Σ_k g_k + g_rest

    S is the support, a the sampled token. All tokens off the support share one factor per row.
    """

    def __init__(self, tokens: Tensor, ids: Tensor, g_logp: Tensor, g_kept: Tensor, g_rest: Tensor, rest: Tensor) -> None:
        padding = ids < 0
        g_kept = torch.where(padding, 0.0, g_kept)
        empty = rest == -torch.inf
        g_rest = torch.where(empty, 0.0, g_rest)
        share = g_rest / torch.where(empty, 0.0, rest).exp()
        self.off_support = share - (g_logp + g_kept.sum(-1) + g_rest)
        self.ids = torch.cat([ids, tokens[:, None]], -1)
        self.value = torch.cat([g_kept, g_logp[:, None]], -1)
        self.share = torch.cat([share[:, None].expand_as(ids), torch.zeros_like(share)[:, None]], -1)

    def block(self, logp: Tensor, start: int) -> Tensor:
        """dz of the tokens from id `start` on, given their log-probabilities [n, v]."""
        p = logp.exp()
        local = self.ids - start
        here = (self.ids >= 0) & (local >= 0) & (local < p.shape[-1])
        local = torch.where(here, local, 0)
        single = torch.where(here, self.value - self.share * p.gather(-1, local), 0.0)
        return (p * self.off_support[:, None]).scatter_add(-1, local, single)


def entropy_gradient(logp: Tensor, nats: Tensor) -> Tensor:
    """−dH/dz_v = p_v (log p_v + H), 0 where p is."""
    return torch.where(logp > -torch.inf, logp.exp() * (logp + nats), 0.0)


def _check(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None,
    top_k: int | None,
    mass: float,
    ids: Tensor | None,
    impl: str,
) -> None:
    vocabulary = weight.shape[0]
    if impl not in ("auto", "torch"):
        raise ValueError(f"lm_head: `impl` is 'auto' or 'torch'; got {impl!r}.")
    if top_k is not None and ids is not None:
        raise ValueError("lm_head: `top_k` makes a support and `ids` gives one. Pass one of them.")
    if hidden.shape[-1] != weight.shape[-1] or tokens.shape != hidden.shape[:-1]:
        raise ValueError(
            f"lm_head: hidden is [*, H], weight [V, H], tokens [*]; got {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(tokens.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lm_head: bias is [V] with V = {vocabulary}; got {list(bias.shape)}.")
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise ValueError(f"lm_head: `top_k` must lie in 1 … V = {vocabulary}; got {top_k}.")
    if not 0 < mass <= 1:
        raise ValueError(f"lm_head: `mass` is a probability in (0, 1], 1.0 for no threshold; got {mass}.")
    if ids is not None and ids.shape[:-1] != tokens.shape:
        raise ValueError(f"lm_head: ids is {list(tokens.shape)} + [K]; got {list(ids.shape)}.")
    check_ids("lm_head", "tokens", tokens, lowest=0, vocabulary=vocabulary)
    if ids is not None:
        check_ids("lm_head", "ids", ids, lowest=-1, vocabulary=vocabulary)
