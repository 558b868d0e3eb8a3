"""True divergences per token, from both policies' full distributions, and the tokens on which each rule acts."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.divergence import binary_tv, categorical_kl, categorical_tv
from corral.lab.audit.rules import Rules
from corral.objective import Objective
from corral.projection import project_categorical_kl
from corral.support import gather_support, top_k_support
from corral.tensors import TokenBatch

_AT_ONCE = 1 << 24
"""Number of probabilities per policy that are compared at a time, 64 MB in float32."""


@torch.no_grad()
def measure(
    tokens: Int[Tensor, " N"],
    old: Float[Tensor, "N V"],
    new: Float[Tensor, "N V"],
    advantages: Float[Tensor, " N"],
    rules: Rules,
    logp_rollout: Float[Tensor, " N"] | None = None,
) -> dict[str, Tensor]:
    """Compute each token's true KL and TV over the whole vocabulary, and which trust-region rules would act on the token.

    `clipped`, `dppo_binary` and `dppo_topk` are where those objectives block a token, `troll` is where TROLL projects it.
    DPPO on the sampled token is anchored on what the sampler reported, where it did; everything else on `old`.

    Args:
        tokens: the sampled tokens of one completion, in order.
        old, new: log-probabilities of the full softmax at each of them, before and after the updates; on any device.
        advantages: credit of each.
        rules: what is held against them.
        logp_rollout: the sampler's own log-probs; NaN where it had none.
    Returns:
        Columns [N], float32 or bool, on the CPU: logp_old, logp_new, logp_rollout, entropy, kl = KL(new‖old), tv, tv_binary,
        tv_topk, troll_kl (after the projection), troll_tv (how far it moves), clipped, dppo_binary, dppo_topk, troll.
    Ref:
        Invariant: tv_binary ≤ tv_topk ≤ tv, and the verdicts are those of the objectives on the same batch.
    """
    if not len(tokens):
        raise ValueError("measure: a completion has one token or more; got none. Leave empty ones out.")
    rows = max(1, _AT_ONCE // old.shape[-1])
    pieces = []
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        token, before, after, credit = (x[part].to(new.device) for x in (tokens, old, new, advantages))
        pieces.append(_measure_rows(token, before, after, credit, rules))
    found = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    credit = advantages.float().cpu()
    rollout = found["logp_old"] if logp_rollout is None else logp_rollout.float().cpu()
    batch = _batch(found["logp_new"], found["logp_old"], credit)
    found["clipped"] = _acted(rules.clip, batch)
    # Where the sampler has no number, the trainer's own takes its place, as in training.
    anchor = torch.where(rollout.isnan(), found["logp_old"], rollout)
    found["dppo_binary"] = _acted(rules.dppo("binary"), replace(batch, logp_old=anchor[None]))
    found["tv_binary"] = binary_tv(anchor, found["logp_new"])
    found["logp_rollout"] = torch.full_like(credit, torch.nan) if logp_rollout is None else rollout
    return found


def _measure_rows(tokens: Tensor, old: Tensor, new: Tensor, advantages: Tensor, rules: Rules) -> dict[str, Tensor]:
    """Compute the columns of `measure` that need full distributions, for some of a completion's tokens."""
    vocabulary = old.shape[-1]
    few_old = top_k_support(old[None], tokens[None], k=min(rules.top_k, vocabulary))
    few_new = gather_support(new[None], few_old.ids)
    batch = _batch(few_new.logp[0, :, 0], few_old.logp[0, :, 0], advantages.float())
    on_few = replace(batch, dist_new=few_new, dist_old=few_old)
    support = top_k_support(old, tokens, k=min(rules.support_size, vocabulary), mass=rules.support_mass)
    wanted = gather_support(new, support.ids).with_rest()
    projection = project_categorical_kl(wanted, support.with_rest(), rules.kl_bound)
    columns = {
        "logp_old": few_old.logp[0, :, 0],
        "logp_new": few_new.logp[0, :, 0],
        "entropy": torch.distributions.Categorical(logits=old, validate_args=False).entropy(),
        "kl": categorical_kl(new, old),
        "tv": categorical_tv(new, old),
        "tv_topk": categorical_tv(few_new.with_rest()[0], few_old.with_rest()[0]),
        "troll_kl": projection.kl_after,
        "troll_tv": torch.where(projection.active, categorical_tv(wanted, projection.logp), 0.0),
        "dppo_topk": _acted(rules.dppo("topk"), on_few),
        "troll": projection.active,
    }
    return {name: column.cpu() for name, column in columns.items()}


def _batch(logp_new: Tensor, logp_old: Tensor, advantages: Tensor) -> TokenBatch:
    mask = torch.ones_like(logp_new, dtype=torch.bool)
    return TokenBatch(logp_new[None], logp_old[None], advantages[None], mask[None])


def _acted(objective: Objective, batch: TokenBatch) -> Tensor:
    """Return the mask [N] of the tokens whose gradient an objective sets to zero."""
    acted = objective(batch).acted
    assert acted is not None
    return acted[0]
