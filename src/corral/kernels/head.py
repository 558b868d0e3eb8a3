"""The language-model head: hidden states → log-probs, entropy and a sparse support, one block of logits at a time."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dispatch import choose, own_top_k
from corral.kernels.foreseen import Expect, ExpectedLoss, can_foresee, head_foreseen
from corral.kernels.head_backward import HeadGradients, HeadState, head_backward
from corral.kernels.head_rows import HeadRequest, HeadRows, join, scan_rows
from corral.kernels.logits import LogitSpec
from corral.kernels.parallel import Shard
from corral.support import check_id_dtype, check_ids, check_unique
from corral.types import SparseDist
from corral.validate import number_in


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """What the head knows of each position's next-token distribution."""

    logp: Float[Tensor, "*b"]
    """Log-probability of the sampled token."""
    entropy: Float[Tensor, "*b"] | None
    """Entropy in nats, where asked for."""
    dist: SparseDist | None
    """The policy on a sparse support, where `top_k` or `ids` was given."""
    report: Float[Tensor, "2"] | None = None
    """Where the backward pass may be sparse: the share of dense rows, and the largest share left out; NaN until it is over."""


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
    group: torch.distributed.ProcessGroup | None = None,
    expect: Expect | None = None,
    tolerance: float = 0.0,
) -> HeadOutput:
    """Log-probs, entropy and support of the next-token distribution, without ever holding [N V] logits.

        z = softcap(scale · (h Wᵀ + b)) / temperature          log p = z − logsumexp z

    The logits of some rows at a time are made, read and dropped; the backward pass makes them again. With `top_k` the support
    is this policy's own, as `top_k_support` has it; with `ids` it is another's, as `gather_support` has it; with both it is
    their union: what either policy thinks likely. A token's log-prob does not depend on which: on a CPU, and with Triton's
    kernels, it is the same to the last bit, and the same whatever other rows are in the call.

    Args:
        hidden: last hidden states [*, H].
        weight, bias: the head's, [V, H] and [V].
        tokens: sampled tokens [*].
        scale, softcap, temperature: how the model and the sampler turn products into logits.
        top_k, mass: keep at most k of the most likely tokens, until they hold `mass`; slot 0 is the sampled token.
        ids: a support to evaluate on [*, K], −1 at padding, no token twice. With `top_k`, K + k slots: these, then the others.
        entropy: compute it too.
        impl: "torch" (any device), "triton" (a GPU), or "auto" for the best there is.
        group: processes that each hold some rows of `weight` and `bias`, in the order of their ranks, and all the same of
            everything else. Ids count through all of them; every process gets the same result, and a loss that each of them
            computes in full gives each the gradient of its own rows, and all of it for `hidden`.
        expect: the loss that will follow, of some of the flattened rows: (logp, dist on `ids`, which rows) → scalar; from
            `foresee`. Its gradients are then formed at once, which saves a quarter of the time: on the torch path of any such
            function and of all rows, on a GPU of objectives with a kernel, and of rows that will be dense. Whatever loss really
            follows, the gradients are its own.
        tolerance: share of a row's gradient, in Σ |dz|, that the backward pass may leave out on a GPU; 0 leaves out nothing.
    Returns:
        HeadOutput, float32 or better, differentiable in `hidden`, `weight` and `bias`.
    Ref:
        Milakov & Gimelshein 2018, arXiv:1805.02867 (online normaliser). Invariant: equal to top_k_support and gather_support
        on the full log-softmax.
    """
    spec, request = LogitSpec(scale, softcap, temperature), HeadRequest(top_k, mass, entropy)
    shard = Shard.of(weight, group)
    _check(hidden, weight, tokens, bias, request, ids, shard.vocabulary)
    _check_expected(expect, tokens)
    way = _Way(shard, expect if torch.is_grad_enabled() else None, tolerance)
    head, report = _head_function(impl, hidden, weight, request, way, 0 if ids is None else ids.shape[-1])
    shape, count = tokens.shape, tokens.numel()
    flat_ids = None if ids is None else ids.reshape(count, ids.shape[-1]).long()
    logp, nats, kept, rest, support, rest_max = head(
        hidden.reshape(count, hidden.shape[-1]), weight, bias, tokens.reshape(count).long(), flat_ids, spec, request
    )
    dist = None
    if ids is not None or top_k is not None:
        support = ids if ids is not None and top_k is None else support.reshape(*shape, support.shape[-1])
        dist = SparseDist(support, kept.reshape(support.shape), rest.reshape(shape), rest_max.reshape(shape))
    return HeadOutput(logp.reshape(shape), nats.reshape(shape) if entropy else None, dist, report)


@dataclass(frozen=True, eq=False)
class _Way:
    """How the head is run, beside what it computes."""

    shard: Shard
    expect: Expect | None
    tolerance: float


def _head_function(
    impl: str, hidden: Tensor, weight: Tensor, request: HeadRequest, way: _Way, given: int
) -> tuple[Callable[..., Any], Tensor | None]:
    """The implementation that runs: (hidden, weight, bias, tokens, ids, spec, request) → logp, nats, kept, rest, ids, rest_max.

    And where it will report on its backward pass, if that may be sparse.
    """
    if way.shard.group is not None:
        if impl == "triton":
            raise ValueError("lm_head: a vocabulary split over a `group` runs on the torch path. Use impl='auto' or 'torch'.")
        impl = "torch" if impl == "auto" else impl
    if choose("lm_head", impl, hidden, weight, request.top_k, given) == "torch":
        return lambda *inputs: _Head.apply(*inputs, way.shard, way.expect), None
    from corral.kernels.triton_head import Plan, TritonHead  # Triton is there by now

    report = torch.full((2,), torch.nan, device=hidden.device) if way.tolerance > 0 else None

    def run(hidden: Tensor, weight: Tensor, bias: Any, tokens: Tensor, ids: Any, spec: LogitSpec, request: HeadRequest) -> Any:
        if way.tolerance > 0 and ids is None and request.top_k is None:  # the policy's own support carries the gradient
            request = dataclasses.replace(request, top_k=own_top_k(hidden, len(weight)))
        plan = Plan(spec, request, way.tolerance, report, way.expect)
        with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
            return TritonHead.apply(hidden, weight, bias, tokens, ids, plan)

    return run, report


class _Head(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, support and rest; logits are made block by block, in both directions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, *how: Any
    ) -> tuple[Tensor, ...]:
        ctx.spec, ctx.request, ctx.shard, expect = how
        check_ids("lm_head", "tokens", tokens, lowest=0, vocabulary=ctx.shard.vocabulary)
        if ids is not None:
            check_ids("lm_head", "ids", ids, lowest=-1, vocabulary=ctx.shard.vocabulary)
            check_unique("lm_head", "ids", ids)
        ctx.foreseen, needed = None, ctx.needs_input_grad[:3]
        if expect is not None and any(needed) and can_foresee(ctx.spec, ctx.request, ctx.shard):
            rows, ctx.foreseen = head_foreseen(hidden, weight, bias, tokens, ids, ctx.spec, ctx.request, expect, needed)
        else:
            rows = head_forward(hidden, weight, bias, tokens, ids, ctx.spec, ctx.request, ctx.shard)
        ctx.mark_non_differentiable(rows.ids, rows.rest_max)
        ctx.save_for_backward(hidden, weight, bias, tokens, rows.ids, rows.lse, rows.rest, rows.entropy)
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids, rows.rest_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_nats: Tensor, g_kept: Tensor, g_rest: Tensor, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, ids, lse, rest, nats = ctx.saved_tensors
        state = HeadState(
            hidden, weight, bias, tokens, ids, lse, rest, nats=nats if ctx.request.entropy else None, shard=ctx.shard
        )
        grads, needed = HeadGradients(g_logp, g_kept, g_rest, g_nats), ctx.needs_input_grad[:3]
        foreseen, ctx.foreseen = ctx.foreseen, None  # handed on, not copied; a second backward pass starts from nothing
        found = (
            head_backward(ctx.spec, state, grads, needed)
            if foreseen is None
            else foreseen.backward(ctx.spec, state, grads, needed)
        )
        return (*found, None, None, None, None, None, None)


def head_forward(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    tokens: Int[Tensor, " N"],
    ids: Int[Tensor, "N K"] | None,
    spec: LogitSpec,
    request: HeadRequest,
    shard: Shard,
) -> HeadRows:
    """Some tokens at a time, over the whole vocabulary."""
    return join([rows for _, rows, _ in scan_rows(hidden, weight, bias, tokens, ids, spec, request, shard)])


def _check(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None,
    request: HeadRequest,
    ids: Tensor | None,
    vocabulary: int,
) -> None:
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1] or tokens.shape != hidden.shape[:-1]:
        raise ValueError(
            f"lm_head: hidden is [*, H], weight [V, H], tokens [*]; got {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(tokens.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lm_head: bias is [V] with V = {len(weight)}; got {list(bias.shape)}.")
    if request.top_k is not None and (type(request.top_k) is not int or not 1 <= request.top_k <= vocabulary):
        raise ValueError(f"lm_head: `top_k` must lie in 1 … V = {vocabulary}; got {request.top_k!r}.")
    if not (number_in(request.mass, 0, 1) and request.mass > 0):
        raise ValueError(f"lm_head: `mass` is a probability in (0, 1], 1.0 for no threshold; got {request.mass!r}.")
    if request.top_k is None and request.mass != 1.0:
        raise ValueError(f"lm_head: `mass` is where `top_k` stops; got {request.mass} without a `top_k`. Pass both.")
    if ids is not None and ids.shape[:-1] != tokens.shape:
        raise ValueError(f"lm_head: ids is {list(tokens.shape)} + [K]; got {list(ids.shape)}.")
    check_id_dtype("lm_head", "tokens", tokens)
    if ids is not None:
        check_id_dtype("lm_head", "ids", ids)


def _check_expected(expect: Expect | None, tokens: Tensor) -> None:
    if isinstance(expect, ExpectedLoss) and expect.batch.mask.numel() != tokens.numel():
        raise ValueError(
            f"lm_head: `expect` foresees the loss of {expect.batch.mask.numel()} rows and there are {tokens.numel()}. Was "
            f"`foresee` given the `pick` that chose them?"
        )
