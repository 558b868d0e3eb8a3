"""Support of a policy: its most likely tokens (top-k) and the sampled token, with the exact probability mass of the tail."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.numerics import at_least_float32, logsumexp, require_tensors
from corral.tensors import SparseDist
from corral.validate import number_in

ANCHOR_TOLERANCE = 1e-3
"""Largest allowed difference, in nats, between two log-probs of a sampled token: in `logp_old` and in the old support."""
_LOGP_MAX = 1e-3
"""Largest log-probability above 0 that rounding errors can explain. Larger values are refused."""
_MASS_TOLERANCE, _MASS_TOLERANCE_HALF = 1e-3, 5e-2
"""Largest allowed deviation of a distribution's total probability from 1, in float32 and in half precision."""
LEAST_LEFT = 1e-6
"""Smallest share of the tail mass that remains after tokens have moved from the tail to the support."""


def top_k_support(
    logp: Float[Tensor, "*b V"],
    tokens: Int[Tensor, "*b"],
    k: int,
    mass: float = 1.0,
    *,
    ids: Int[Tensor, "*b K"] | None = None,
    check: bool = True,
) -> SparseDist:
    """Compute the support of a policy: its most likely tokens until they reach `mass`, at most k, and the sampled token.

        S = {sampled} ∪ {the first n of the ranking},   n = min(k, fewest with Σ p ≥ mass)

    The ranking is by probability, ties by lower id. `mass=1.0` sets no threshold; k = V keeps the whole vocabulary.
    With another policy's support `ids` it is the union, `ids ∪ S`: what either policy thinks likely.

    Args:
        logp: log-probabilities of the full softmax [*, V].
        tokens: the sampled tokens [*].
        k: how many of the most likely tokens to keep at most, 1 … V.
        mass: probability after which further tokens are dropped, in (0, 1].
        ids: another policy's support [*, K], the sampled token in slot 0, −1 at padding.
        check: refuse rows whose mass is not 1, such as logits; False takes them as they are.
    Returns:
        SparseDist with k + 1 slots, the sampled token in slot 0, padding (−1) last; differentiable in `logp`. With `ids` it
        has K + k slots: `ids`, then the other members.
    Ref:
        Becker et al. 2025, arXiv:2510.03817 (k = 64, mass = 1 − 1e-5). Invariant: Σ exp(logp) + exp(rest) = 1.
    """
    _check_logp("top_k_support", logp)
    require_tensors("top_k_support", tokens=tokens)
    vocabulary = logp.shape[-1]
    if type(k) is not int or not 1 <= k <= vocabulary:
        raise ValueError(f"top_k_support: `k` must lie in 1 … V = {vocabulary}; got {k!r}. k = V keeps every token.")
    if not (number_in(mass, 0, 1) and mass > 0):
        raise ValueError(f"top_k_support: `mass` is a probability in (0, 1], 1.0 for no threshold; got {mass!r}.")
    if tokens.shape != logp.shape[:-1]:
        raise ValueError(
            f"top_k_support: one sampled token per row: logp is {list(logp.shape)}, so tokens must be "
            f"{list(logp.shape[:-1])}; got {list(tokens.shape)}."
        )
    check_ids("top_k_support", "tokens", tokens, lowest=0, vocabulary=vocabulary)

    if ids is not None:
        _check_given("top_k_support", logp, ids)
    logp = at_least_float32(logp)
    with torch.no_grad():
        ranked = rank_top_k(logp, k)
        support = choose_support(tokens.long(), ranked, logp.gather(-1, ranked), mass, ids)
    return _gather("top_k_support", logp, support, check)


def gather_support(logp: Float[Tensor, "*b V"], ids: Int[Tensor, "*b K"], *, check: bool = True) -> SparseDist:
    """Evaluate a policy on given tokens: the log-probabilities of these tokens, and the mass of all other tokens (the tail).

    Args:
        logp: log-probabilities of the full softmax [*, V].
        ids: the support [*, K], −1 at padding.
        check: refuse rows whose mass is not 1, such as logits; False takes them as they are.
    Returns:
        SparseDist on the same `ids`, differentiable in `logp`, through the tail too.
    Ref:
        Invariant: the gradient of every field reaches every logit, as the dense softmax would have it.
    """
    _check_logp("gather_support", logp)
    _check_given("gather_support", logp, ids)
    return _gather("gather_support", logp, ids, check)


def extend_support(dist: SparseDist, ids: Int[Tensor, "*b K"], logp: Float[Tensor, "*b M"]) -> SparseDist:
    """Add tokens with known log-probabilities to a policy's support, and subtract their probabilities from the tail mass.

        rest′ = log(e^rest − Σ_new p)

    The one place where mass is subtracted: the result is known to about 1e-6 of the old tail, and is at least that.

    Args:
        dist: a policy on its support [*, K₀].
        ids: the larger support [*, K]: all of `dist.ids`, in their order, then up to M others, then padding.
        logp: log-probabilities of those others [*, M], in their order, beginning at each row's first; anything at padding.
    Returns:
        SparseDist on `ids`. `rest_max` stays: an upper bound.
    """
    logp = torch.nn.functional.pad(logp, (0, int(logp.shape[-1] == 0)), value=-torch.inf)  # `gather` needs at least one column
    members = (dist.ids >= 0).sum(-1, keepdim=True)
    slot = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    new = (slot >= members) & (ids >= 0)
    wide = torch.nn.functional.pad(at_least_float32(dist.logp), (0, ids.shape[-1] - dist.ids.shape[-1]), value=-torch.inf)
    added = at_least_float32(logp).gather(-1, (slot - members).clamp(0, logp.shape[-1] - 1))
    added = torch.where(new, added, -torch.inf)
    share = (logsumexp(added) - dist.rest).exp()
    left = torch.where(share > 0, dist.rest + (1 - share).clamp(min=LEAST_LEFT).log(), dist.rest)
    return SparseDist(ids, torch.where(new, added, wide), left, dist.rest_max)


def condition_on_support(dist: SparseDist) -> SparseDist:
    """Condition a policy on its support: renormalise its probabilities over the support, as top-p or top-k sampling does.

        log p(v | S) = log p(v) − log Σ_{u ∈ S} p(u)          v ∈ S

    Two policies that are conditioned on the tokens the sampler kept have the ratio of what was sampled from. The ratio of the
    whole policies is off by the share of mass that each has there.

    Args:
        dist: a policy on the kept tokens [*, K], the sampled one in slot 0, −1 at padding.
    Returns:
        SparseDist on the same tokens with an empty tail, differentiable in `dist.logp`. A row without tokens stays empty.
    Ref:
        DeepSeek-AI 2025, arXiv:2512.02556 §3.1 ("keep sampling mask"). Invariant: the softmax of the kept logits.
    """
    logp = torch.where(dist.ids < 0, -torch.inf, at_least_float32(dist.logp))
    total = logsumexp(logp).unsqueeze(-1)
    nothing = torch.full_like(dist.rest, -torch.inf, dtype=logp.dtype)
    return SparseDist(dist.ids, logp - torch.where(total == -torch.inf, 0.0, total), nothing, nothing)


@torch.no_grad()
def hidden_kl(
    rest_new: Float[Tensor, "*b"], max_new: Float[Tensor, "*b"], rest_old: Float[Tensor, "*b"], max_old: Float[Tensor, "*b"]
) -> Float[Tensor, "*b"]:
    """Lower bound on the part of KL(new‖old) that is lost by merging all tokens outside the support into one category.

        r (q log(q/b) − q + b)          where q > b, else 0

    r is the tail's mass under the new policy and q the share of its likeliest token. That token had at most the share b, which
    is the share of the old policy's likeliest token. (1 − q) log((1 − q)/(1 − b)) ≥ b − q gives the bound from the two-way KL.
    """
    rest_new, max_new, rest_old, max_old = (at_least_float32(x) for x in (rest_new, max_new, rest_old, max_old))
    log_q, log_b = max_new - rest_new, max_old - rest_old
    moved = log_q > log_b  # not where a tail is empty: −inf + inf is NaN
    log_q, log_b = torch.where(moved, log_q, 0.0), torch.where(moved, log_b, 0.0)
    return torch.where(moved, rest_new.exp() * (log_q.exp() * (log_q - log_b - 1) + log_b.exp()), 0.0)


@torch.no_grad()
def tail_gap(new: Float[Tensor, "*b"], old: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Compute log (max π / max π_old), the log-ratio of the largest probabilities outside the support; 0 without a tail.

    The arguments are both policies' `rest_max`.

    It is a lower bound on the largest log-ratio outside the support.
    """
    return (at_least_float32(new) - at_least_float32(old)).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _check_given(where: str, logp: Tensor, ids: Tensor) -> None:
    """Raise an error if ids [*, K] are not a valid support of a policy [*, V], because an id is out of range or repeated."""
    require_tensors(where, ids=ids)
    if ids.shape[:-1] != logp.shape[:-1]:
        raise ValueError(
            f"{where}: logp is {list(logp.shape)}, so ids must be {list(logp.shape[:-1])} + [K]; got {list(ids.shape)}."
        )
    check_ids(where, "ids", ids, lowest=-1, vocabulary=logp.shape[-1])
    check_unique(where, "ids", ids)


def choose_support(
    tokens: Int[Tensor, "*b"],
    ranked: Int[Tensor, "*b k"],
    logp: Float[Tensor, "*b k"],
    mass: float,
    given: Int[Tensor, "*b K"] | None = None,
) -> Int[Tensor, "*b slots"]:
    """Choose the token ids of a support: the sampled token or given tokens, then likely tokens until they reach `mass`."""
    first = tokens.unsqueeze(-1) if given is None else given.long()
    left_out = (ranked.unsqueeze(-1) == first.unsqueeze(-2)).any(-1)
    if mass != 1.0:  # more likely tokens already reach `mass`, up to the rounding of their probabilities
        p = logp.double().exp()
        before = p.cumsum(-1) - p
        left_out |= (before > 0) & (before >= mass - 2 * torch.finfo(logp.dtype).eps)
    ids = torch.cat([first, torch.where(left_out, -1, ranked)], dim=-1)
    return ids.gather(-1, torch.argsort((ids < 0).byte(), dim=-1, stable=True))


def _gather(where: str, logp: Tensor, ids: Tensor, check: bool) -> SparseDist:
    """Evaluate a policy on a validated support. With `check`, raise an error for rows whose total probability is not 1.

    NaN passes, since padding may contain it. The tolerance is that of float32, which the result is in, also for log-probs that
    were rounded to half precision before: an objective would refuse the support otherwise.
    """
    logp = at_least_float32(logp)
    padding = ids < 0
    kept = torch.where(padding, -torch.inf, logp.gather(-1, torch.where(padding, 0, ids).long()))
    # Padding marks one column past the vocabulary. Clamped to 0 instead, it would take token 0 out of the tail.
    outside = torch.ones(*logp.shape[:-1], logp.shape[-1] + 1, dtype=torch.bool, device=logp.device)
    outside = outside.scatter(-1, torch.where(padding, logp.shape[-1], ids).long(), False)[..., :-1]
    tail = torch.where(outside, logp, -torch.inf)
    dist = SparseDist(ids, kept, logsumexp(tail), tail.detach().amax(-1))
    if check and not torch.compiler.is_compiling():
        mass = dist.detach().with_rest().exp().sum(-1)
        off = (mass - 1).abs() > _MASS_TOLERANCE
        if bool(off.any()):
            raise ValueError(
                f"{where}: `logp` holds no log-probabilities: a row sums to {mass[off][0]:.6g}, not 1 ± {_MASS_TOLERANCE:g}, "
                f"at {int(off.sum())} of {off.numel()} rows. Take log_softmax over the last axis, of logits in float32; "
                f"check=False takes them as they are."
            )
    return dist


def rank_top_k(logp: Float[Tensor, "*b V"], k: int) -> Int[Tensor, "*b k"]:
    """Return the ids of the k largest log-probabilities, largest first. On a tie, the lower id comes first.

    `torch.topk` finds the right values, but the device decides which of several equal entries it returns, and in which order.
    So the lowest ids are taken where the k-th value equals the next one, and then all are put in order.
    """
    values, ids = logp.topk(min(k + 1, logp.shape[-1]), dim=-1)
    last, ids = values[..., k - 1 : k], ids[..., :k]
    tied = (values[..., k:] == last).any(-1)
    if bool(tied.any()):
        rows, bar, position = logp[tied], last[tied], torch.arange(logp.shape[-1], device=logp.device)
        order = torch.where(rows == bar, position, torch.where(rows > bar, -1, logp.shape[-1]))
        ids[tied] = order.topk(k, dim=-1, largest=False).indices
    ids = ids.sort(dim=-1).values
    by_value = torch.sort(logp.gather(-1, ids), dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, by_value)


def _check_logp(where: str, logp: Tensor) -> None:
    """Raise an error if a tensor cannot hold log-probabilities because of its dtype or shape: integers, or a single number."""
    require_tensors(where, logp=logp)
    if not logp.is_floating_point() or not logp.ndim:
        raise ValueError(f"{where}: `logp` holds log-probabilities [*, V]; got {logp.dtype} {list(logp.shape)}.")


class LogpTolerance(NamedTuple):
    """Tolerances for checks of log-probs: the largest allowed value, and the largest allowed error of the total probability."""

    logp: float = torch.inf
    mass: float = torch.inf

    @classmethod
    def of(cls, *policies: Tensor | SparseDist | None) -> "LogpTolerance":
        """Build the tolerances for the given policies. The lowest precision among their dtypes decides."""
        given = [
            x for policy in policies for x in ((policy.logp, policy.rest) if isinstance(policy, SparseDist) else (policy,))
        ]
        half = any(x is not None and x.dtype in (torch.float16, torch.bfloat16) for x in given)
        return cls(_LOGP_MAX, _MASS_TOLERANCE_HALF if half else _MASS_TOLERANCE)


def check_ids(where: str, what: str, ids: Tensor, *, lowest: int, vocabulary: int) -> None:
    """Raise an error for token ids that are not integers, or lie outside `lowest` … V − 1."""
    check_id_dtype(where, what, ids)
    if ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    refuse_ids(where, what, low, high, lowest=lowest, vocabulary=vocabulary)


def check_id_dtype(where: str, what: str, ids: Tensor) -> None:
    """Raise an error for token ids whose dtype is not int64 or int32."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: `{what}` holds token ids, int64 or int32; got {ids.dtype}.")


def refuse_ids(where: str, what: str, low: int, high: int, *, lowest: int, vocabulary: int) -> None:
    """Raise an error if the smallest or largest token id lies outside `lowest` … V − 1."""
    if low < lowest or high >= vocabulary:
        ignored = " At padding put any token, such as 0: the mask leaves it out." if low < lowest == 0 else ""  # labels of −100
        raise ValueError(
            f"{where}: `{what}` must lie in {lowest} … {vocabulary - 1} for a vocabulary of {vocabulary}; got "
            f"{low if low < lowest else high}. Were they made with another tokenizer?{ignored}"
        )


def check_unique(where: str, what: str, ids: Tensor) -> None:
    """Raise an error if a support [* K] contains a token id twice. The padding id −1 may repeat."""
    if not torch.compiler.is_compiling():
        refuse_repeats(where, what, bool(has_repeats(ids)))


def has_repeats(ids: Tensor) -> Tensor:
    """True if a support [* K] contains a token id twice, as a tensor on the device. The padding id −1 may repeat."""
    ordered = ids.sort(-1).values
    return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()


def refuse_repeats(where: str, what: str, repeated: bool) -> None:
    """Raise an error if a support contains a token twice, because its probability would count twice."""
    if repeated:
        raise ValueError(
            f"{where}: `{what}` has a token twice in one row. A support is a set: keep one of them, −1 pads the row."
        )
