"""Differentiable LM head: log-probs, entropy and top-k tokens from hidden states, one block of logits at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.head.dispatch import choose, own_top_k
from corral.head.logits import LogitSpec
from corral.head.rows import Gradients, HeadInput, HeadRows, Upstream
from corral.head.torch.stream import Shard, check_tokens, head_backward, head_forward
from corral.numerics import require_tensors
from corral.support import check_id_dtype
from corral.tensors import SparseDist, Tensors
from corral.validate import number_in

HeadBackward = Callable[..., Gradients]
"""Type of the LM head's backward pass: a function that returns the gradients of hidden states, weight and bias.
Its arguments: inputs, results, upstream gradients, and which of dH, dW and db are needed."""


@dataclass(frozen=True, eq=False)
class HeadOutput(Tensors):
    """Results of the LM head: log-prob, entropy and top-k distribution of the next token at each position."""

    SHARED: ClassVar[tuple[str, ...]] = ("report",)

    logp: Float[Tensor, "*b"]
    """Log-probability of the sampled token at each position."""
    entropy: Float[Tensor, "*b"] | None
    """Entropy of the next-token distribution at each position; None unless requested."""
    dist: SparseDist | None
    """Next-token distribution on the top-k tokens or on given `ids`, with its tail mass; None if neither was requested."""
    report: Float[Tensor, "2"] | None = None
    """Share of tokens with a dense logit gradient, and largest share of a token's gradient that was dropped.
    A sparse backward pass writes both numbers; NaN until then. None if no gradient may be dropped."""


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
    joins: Bool[Tensor, "*b"] | None = None,
    entropy: bool = False,
    impl: str = "auto",
    group: torch.distributed.ProcessGroup | None = None,
    tolerance: float = 0.0,
) -> HeadOutput:
    """Compute log-probs, entropy and top-k tokens of the next-token distribution, without storing the logits of all tokens.

        z = softcap(scale · (h Wᵀ + b)) / temperature          log p = z − logsumexp z

    The differentiable building block: the logits of some rows at a time are made, read and dropped, and the backward pass makes
    them again, four GEMMs where a row's gradient is dense. `policy_loss_from_hidden` takes three. With `top_k` the support
    is this policy's own, as `top_k_support` has it; with `ids` it is another's, as `gather_support` has it; with both it is
    their union: what either policy thinks likely. A token's log-prob does not depend on which: on a CPU, and with Triton's
    kernels, it is the same to the last bit, and the same whatever other rows are in the call.

    Args:
        hidden: last hidden states [*, H].
        weight, bias: the head's, [V, H] and [V].
        tokens: sampled tokens [*].
        scale, softcap, temperature: how the model and the sampler turn h Wᵀ + b into logits.
        top_k, mass: keep at most k of the most likely tokens, until they hold `mass`; slot 0 is the sampled token.
        ids: a support to evaluate on [*, K], −1 at padding, no token twice. With `top_k`, K + k slots: these, then the others.
        joins: where the others of `top_k` are added to `ids` [*]; everywhere if None.
        entropy: compute it too.
        impl: "torch" (any device), "triton" (a GPU), or "auto" for the best there is.
        group: processes that each hold some rows of `weight` and `bias`, in the order of their ranks, and all the same of
            everything else. Ids count through all of them; every process gets the same result, and a loss that each of them
            computes in full gives each the gradient of its own rows, and all of it for `hidden`.
        tolerance: share of a row's gradient, in Σ |dz|, that the backward pass may leave out on a GPU; 0 leaves out nothing.
    Returns:
        HeadOutput, float32 or better, differentiable in `hidden`, `weight` and `bias`.
    Ref:
        Milakov & Gimelshein 2018, arXiv:1805.02867 (online normaliser). Invariant: equal to top_k_support and gather_support
        on the full log-softmax.
    """
    check_weight("lm_head", weight)
    require_tensors("lm_head", hidden=hidden, tokens=tokens)
    spec, shard = LogitSpec(scale, softcap, temperature), Shard.of(weight, group)
    source = HeadInput(hidden, weight, bias, tokens, ids, spec, top_k, mass, entropy, joins)
    if (problem := _problem(source, shard.vocabulary)) is not None:
        raise ValueError(f"lm_head: {problem}")
    check_id_dtype("lm_head", "tokens", tokens)
    if ids is not None:
        check_id_dtype("lm_head", "ids", ids)
    if group is not None:
        if impl == "triton":
            raise ValueError("lm_head: a vocabulary split over a `group` runs on the torch path. Use impl='auto' or 'torch'.")
        impl = "torch" if impl == "auto" else impl
    shape, report = tokens.shape, None
    source = source.map(lambda x: x.reshape(tokens.numel(), *x.shape[tokens.ndim :]))
    if choose("lm_head", impl, hidden, weight, top_k, 0 if ids is None else ids.shape[-1]) == "torch":
        source = check_tokens("lm_head", source, shard.vocabulary)
        rows = HeadFunction.on(source, partial(head_forward, shard=shard), partial(head_backward, shard=shard))
    else:
        from corral.head.triton.backward import lm_head_backward  # Triton is an optional dependency
        from corral.head.triton.support import lm_head_forward

        if tolerance > 0:
            report = torch.full((2,), torch.nan, device=hidden.device)
            if ids is None and top_k is None:  # the policy's own support carries the gradient
                source = replace(source, top_k=own_top_k(hidden, len(weight)))
        source = replace(source, tokens=source.tokens.long(), ids=None if source.ids is None else source.ids.long())
        source = source.map(Tensor.contiguous, shared=True)  # kernels read one row behind the other
        with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
            rows = HeadFunction.on(source, lm_head_forward, partial(lm_head_backward, tolerance=tolerance, report=report))
    dist = None
    if ids is not None or top_k is not None:
        dist = rows.dist.map(lambda x: x.reshape(*shape, *x.shape[1:]))
        if ids is not None and top_k is None:  # in the caller's dtype
            dist = replace(dist, ids=ids)
    return HeadOutput(rows.logp.reshape(shape), rows.entropy.reshape(shape) if entropy else None, dist, report)


class HeadFunction(torch.autograd.Function):
    """Autograd function of the LM head. The PyTorch and the Triton path each pass it a forward and a backward function.

    Hidden states are [N, H], one row per token.
    """

    @classmethod
    def on(cls, source: HeadInput, forward: Callable[[HeadInput], HeadRows], backward: HeadBackward) -> HeadRows:
        """Apply the LM head's autograd function to `source`, with the given forward and backward functions.

        Hidden states, weight and bias are separate arguments too, since autograd tracks arguments.
        """
        return HeadRows(*cls.apply(source.hidden, source.weight, source.bias, source.detach(), forward, backward))

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: HeadInput, run: Any, differentiate: HeadBackward
    ) -> tuple[Tensor, ...]:
        rows = run(source)
        ctx.spec, ctx.entropy, ctx.differentiate = source.spec, source.entropy, differentiate
        ctx.set_materialize_grads(False)  # the kernels skip what has no gradient
        ctx.mark_non_differentiable(rows.lse, rows.ids, rows.rest_max)
        ctx.save_for_backward(hidden, weight, bias, source.tokens, *vars(rows).values())
        return tuple(vars(rows).values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, *fields = ctx.saved_tensors
        source = HeadInput(hidden, weight, bias, tokens, None, ctx.spec, entropy=ctx.entropy)
        _, logp, _, kept, rest, entropy, _ = upstream
        given = Upstream(logp=logp, kept=kept, rest=rest, entropy=entropy)
        gradients = ctx.differentiate(source, HeadRows(*fields), given, ctx.needs_input_grad[:3])
        return (*vars(gradients).values(), None, None, None)


def check_weight(owner: str, weight: object) -> None:
    """Raise ValueError if `weight` is not a tensor, for example because a whole layer was passed in place of its weight."""
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"{owner}: `weight` is the head's matrix [V H]; got {type(weight).__name__}. Of a layer pass layer.weight, and its "
            f"bias as bias=layer.bias."
        )


def _problem(source: HeadInput, vocabulary: int) -> str | None:
    """Return a message about the first wrong shape, dtype or setting among the inputs of the LM head; None if all are valid."""
    hidden, weight, tokens, ids, joins = source.hidden, source.weight, source.tokens, source.ids, source.joins
    bias, top_k, mass = source.bias, source.top_k, source.mass
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1] or tokens.shape != hidden.shape[:-1]:
        shapes = ", ".join(str(list(x.shape)) for x in (hidden, weight, tokens))
        return f"hidden is [*, H], weight [V, H], tokens [*]; got {shapes}."
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias is [V] with V = {len(weight)}; got {list(bias.shape)}."
    if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= vocabulary):
        return f"`top_k` must lie in 1 … V = {vocabulary}; got {top_k!r}."
    if not (number_in(mass, 0, 1) and mass > 0):
        return f"`mass` is a probability in (0, 1], 1.0 for no threshold; got {mass!r}."
    if top_k is None and mass != 1.0:
        return f"`mass` is where `top_k` stops; got {mass} without a `top_k`. Pass both."
    if ids is not None and ids.shape[:-1] != tokens.shape:
        return f"ids is {list(tokens.shape)} + [K]; got {list(ids.shape)}."
    if joins is not None and (joins.shape != tokens.shape or joins.dtype != torch.bool or ids is None or top_k is None):
        return (
            f"`joins` says where `top_k` adds to `ids`, bool {list(tokens.shape)}, and goes with both; got {joins.dtype} "
            f"{list(joins.shape)}, top_k = {top_k}, ids {None if ids is None else list(ids.shape)}."
        )
    return None
