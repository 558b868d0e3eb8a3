"""Log-probs, entropy and top-k tokens from an engine's logits; processes may each hold a part of the vocabulary."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.head.forward import HeadFunction, HeadOutput
from corral.head.logits import LogitSpec, Scratch, slices
from corral.head.rows import Gradients, HeadInput, HeadRows, Upstream
from corral.head.torch.stream import HELD, MOST_ROWS, HeadGradients, LogitGradient, Shard, check_tokens, read_logits
from corral.numerics import common_dtype, require_tensors


def head_from_logits(
    logits: Float[Tensor, "N V"],
    tokens: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    mass: float = 1.0,
    ids: Int[Tensor, "N K"] | None = None,
    entropy: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
) -> HeadOutput:
    """Compute log-probs, entropy and top-k tokens from logits [N, V], as `lm_head` does from hidden states.

        log p = z / temperature − logsumexp(z / temperature)

    For engines whose own output layer runs, such as Megatron's. Nothing but the logits is kept for the backward pass; their
    gradient is made a few rows at a time, in the dtype of the logits.

    Args:
        logits: of the whole vocabulary, or of this process's part of it.
        tokens: sampled tokens [N].
        temperature: what the sampler divides logits by.
        top_k, mass: keep at most k of the most likely tokens, until they hold `mass`; slot 0 is the sampled token.
        ids: a support to evaluate on [N, K], −1 at padding, no token twice. Either this or `top_k`, or neither.
        entropy: compute it too.
        group: processes that each hold some columns of the logits, in the order of their ranks, and the same of everything
            else. Every process gets the same result, and a loss that each of them computes in full gives each the gradient of
            its own columns.
    Returns:
        HeadOutput, float32 or better, differentiable in `logits`.
    Ref:
        Invariant: equal to top_k_support and gather_support on the full log-softmax.
    """
    require_tensors("head_from_logits", logits=logits, tokens=tokens)
    if logits.ndim != 2 or tokens.shape != logits.shape[:1] or (ids is not None and ids.shape[:-1] != tokens.shape):
        raise ValueError(
            f"head_from_logits: logits are [N V], tokens [N], ids [N K]; got {list(logits.shape)}, {list(tokens.shape)}, "
            f"{None if ids is None else list(ids.shape)}."
        )
    if ids is not None and top_k is not None:
        raise ValueError("head_from_logits: `top_k` chooses a support and `ids` gives one. Pass one of them.")
    shard = Shard.of(logits.T, group)
    if top_k is not None and not 1 <= top_k <= shard.vocabulary:
        raise ValueError(f"head_from_logits: `top_k` must lie in 1 … V = {shard.vocabulary}; got {top_k!r}.")
    spec = LogitSpec(temperature=temperature)
    # The logits stand in the place of hidden states, whose autograd function this is; `weight` is not read.
    source = HeadInput(logits, logits.detach(), None, tokens, ids, spec, top_k, mass, entropy)
    source = check_tokens("head_from_logits", source, shard.vocabulary)
    rows = HeadFunction.on(source, partial(_forward, shard=shard), partial(_backward, shard=shard))
    dist = None if ids is None and top_k is None else rows.dist
    return HeadOutput(rows.logp, rows.entropy if entropy else None, dist)


def _forward(source: HeadInput, shard: Shard) -> HeadRows:
    """Compute log-probs, entropy and top-k tokens from all rows of logits, a few rows at a time."""
    logits, dtype, scratch = source.hidden, common_dtype(source.hidden), Scratch(source.hidden.device)
    return HeadRows.cat(
        [
            read_logits(source.spec.finish_(logits[part].to(dtype, copy=True)), source[part], shard, scratch)[0]
            # The same slices in all processes, which talk to each other about each; one of no rows for an empty batch.
            for part in list(slices(len(logits), _rows_at_once(shard))) or [slice(0, 0)]
        ]
    )


def _backward(source: HeadInput, rows: HeadRows, upstream: Upstream, needed: Sequence[bool], shard: Shard) -> Gradients:
    """Compute the gradient with respect to the logits, a few rows at a time, in the dtype of the logits."""
    logits, spec, grads = source.hidden, source.spec, HeadGradients.of(upstream, rows, source.spec.slope)
    picked, whole, found = grads.nonzero(), [slice(0, logits.shape[1])], torch.zeros_like(logits)
    for part in slices(len(picked), _rows_at_once(shard)):
        row = picked[part]
        z = spec.finish_(logits[row].to(rows.lse.dtype))
        make = LogitGradient(source.tokens[row], rows[row], grads[row], whole, first=shard.start, entropy=source.entropy)
        found[row] = make.block(z, 0, torch.empty_like(z) if source.entropy else None).to(found.dtype)
    return Gradients(found, None, None)


def _rows_at_once(shard: Shard) -> int:
    """Return the number of rows of logits that are processed together."""
    return max(1, min(HELD["cpu"] // shard.vocabulary, MOST_ROWS))
