"""Small batches for the tests of objectives: worked by hand, drawn at random, or poisoned at padding.

- `inputs(p_new, p_old, adv)`: one sequence from probabilities in a list; `logp_new` is the leaf to differentiate.
- `random_batch(B, T, V, k)`: dense random policies on one top-k support; the new policy's logits are the leaf.
- `as_batch(logits, like)`: the batch `like` with the new policy of these logits, for gradcheck and on-policy cases.
- `with_leaves(batch)`: the same values with fresh leaves: `logp_new`, `dist_new.logp`, `dist_new.rest`.
- `poison_padding(batch, garbage)`: `with_leaves` with garbage wherever the mask is False, ids included.
- `row(values)`: a list of numbers as [1 T] float64, to compare with.
- `loss_and_grad(objective, batch)` and `leaf_gradients(objective, batch)`: what came out, detached.
- `tokens()`: a hypothesis strategy for the first three arguments of `inputs`; `apart` keeps a draw off a formula's kinks.

Everything is float64 unless told otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from corral import ObjectiveOutput, SparseDist, TokenBatch, gather_support, top_k_support

Objective = Callable[[TokenBatch], ObjectiveOutput]


def inputs(
    p_new: Sequence[float],
    p_old: Sequence[float],
    adv: Sequence[float],
    mask: Sequence[bool] | None = None,
    *,
    p_rollout: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> TokenBatch:
    """One sequence [1 T] from the sampled tokens' probabilities; every token is live unless `mask` says otherwise."""
    logp_new = torch.tensor([p_new], dtype=dtype).log().requires_grad_()
    return TokenBatch(
        logp_new=logp_new,
        logp_old=torch.tensor([p_old], dtype=dtype).log(),
        advantages=torch.tensor([adv], dtype=dtype),
        mask=torch.ones_like(logp_new, dtype=torch.bool) if mask is None else torch.tensor([mask]),
        logp_rollout=None if p_rollout is None else torch.tensor([p_rollout], dtype=dtype).log(),
    )


def random_batch(
    B: int,
    T: int,
    V: int,
    k: int,
    *,
    step: float = 0.5,
    per_token: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[TokenBatch, Tensor]:
    """Random policies on one support, and the new one's logits [B T V], the leaf that everything of it depends on.

    Args:
        B, T, V, k: sequences, tokens, vocabulary, support (k + 1 slots; k = V leaves no rest).
        step: size of the normal noise between the old logits and the new; 0 is on-policy, bit for bit.
        per_token: advantages [B T] instead of [B].
        seed: of this draw alone.
    Returns:
        The batch, with a rollout policy close to the old one. The mask is ragged: the first sequence is whole but for a
        masked-out second token (where T > 2), the last one has a single token.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    old = 1.5 * normal(B, T, V)
    logits = (old + step * normal(B, T, V)).requires_grad_()
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[-1], lengths[0] = 1, T
    mask = torch.arange(T) < lengths[:, None]
    if T > 2:
        mask[0, 1] = False
    logp_old = old.log_softmax(-1)
    sampled = _sample(logp_old, generator)
    dist_old = top_k_support(logp_old, sampled, k)
    like = TokenBatch(
        logp_new=dist_old.logp[..., 0],
        logp_old=dist_old.logp[..., 0],
        advantages=normal(B, T) if per_token else normal(B),
        mask=mask,
        dist_old=dist_old,
        logp_rollout=(dist_old.logp[..., 0] + 0.05 * normal(B, T)).clamp(max=0),
    )
    return as_batch(logits, like), logits


def as_batch(logits: Tensor, like: TokenBatch) -> TokenBatch:
    """The batch `like`, on its own support and tokens, with the new policy that `logits` [B T V] define."""
    assert like.dist_old is not None
    dist_new = gather_support(logits.log_softmax(-1), like.dist_old.ids)
    return replace(like, logp_new=dist_new.logp[..., 0], dist_new=dist_new)


def with_leaves(batch: TokenBatch) -> TokenBatch:
    """The same values, with leaves for everything that a gradient may reach, so that padding's gradient can be seen."""
    new = batch.dist_new
    return replace(
        batch,
        logp_new=_leaf(batch.logp_new),
        dist_new=None if new is None else SparseDist(new.ids, _leaf(new.logp), _leaf(new.rest), new.rest_max),
    )


def poison_padding(batch: TokenBatch, garbage: float = torch.nan) -> TokenBatch:
    """The same batch, with leaves, and `garbage` at padding: in every field, and in each distribution with its own ids.

    Per-sequence advantages [B] become garbage where a sequence has no unmasked token.
    """

    def poison(x: Tensor, with_: float) -> Tensor:
        live = batch.mask.any(-1) if x.ndim == 1 else batch.mask
        return x.detach().clone().masked_fill(~live.reshape(*live.shape, *[1] * (x.ndim - live.ndim)), with_)

    def poison_dist(dist: SparseDist | None, id_: int) -> SparseDist | None:
        if dist is None:
            return None
        return dist.map(lambda x: poison(x, garbage if x.is_floating_point() else id_))

    return with_leaves(
        TokenBatch(
            logp_new=poison(batch.logp_new, garbage),
            logp_old=poison(batch.logp_old, garbage),
            advantages=poison(batch.advantages, garbage),
            mask=batch.mask,
            dist_new=poison_dist(batch.dist_new, 2**31 - 1),
            dist_old=poison_dist(batch.dist_old, -7),
            logp_rollout=None if batch.logp_rollout is None else poison(batch.logp_rollout, garbage),
            dist_teacher=poison_dist(batch.dist_teacher, 5),
        )
    )


def row(values: Sequence[float]) -> Tensor:
    """Numbers worked out by hand or by an oracle, as one sequence [1 T]."""
    return torch.tensor([values], dtype=torch.float64)


def loss_and_grad(objective: Objective, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The loss per token, and the gradient of its sum in `batch.logp_new`, both [B T]."""
    loss = objective(batch).loss
    (grad,) = torch.autograd.grad(loss.sum(), batch.logp_new)
    return loss.detach(), grad


def leaf_gradients(objective: Objective, batch: TokenBatch) -> list[Tensor]:
    """Gradients of the summed loss in the leaves of `with_leaves(batch)`, 0 in those that the objective does not read."""
    leaves = [batch.logp_new]
    if batch.dist_new is not None:
        leaves += [batch.dist_new.logp, batch.dist_new.rest]
    grads = torch.autograd.grad(objective(batch).loss.sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]


def tokens(min_size: int = 1, max_size: int = 6) -> st.SearchStrategy[tuple[list[float], list[float], list[float]]]:
    """(p_new, p_old, adv): proper probabilities, so ratios in [0.05, 20]; advantages of both signs, and 0."""
    p = st.floats(0.05, 0.99)
    token = st.tuples(p, p, st.floats(-3.0, 3.0, allow_subnormal=False))
    return st.lists(token, min_size=min_size, max_size=max_size).map(
        lambda rows: tuple(list(x) for x in zip(*rows, strict=True))
    )


def apart(values: Sequence[float], *kinks: float) -> bool:
    """Whether every value is clearly on one side of every kink, so that rounding cannot change the gradient."""
    return all(abs(value - kink) > 1e-9 for value in values for kink in kinks)


def _sample(logp: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row [* V] → [*]."""
    return torch.multinomial(logp.exp().flatten(0, -2), 1, generator=generator).reshape(logp.shape[:-1])


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
