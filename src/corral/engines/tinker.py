"""Tinker adapter: a loss for `forward_backward_custom`, on sampled tokens or on the sampler's top-k tokens.

targets = support_targets(tokens, top_ids, top_logp, logp)      # from sampling with topk_sample_logprobs=K
datum = tinker.Datum(model_input, loss_fn_inputs={**targets, "advantages": …, "mask": …})
training_client.forward_backward_custom(data, make_loss("troll")).result()
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corral.engines.adapter import EngineObjective, dist_from_top, read_metrics
from corral.objective.config import Reduction
from corral.objective.reduction import reduce_loss
from corral.tensors import SparseDist, TokenBatch

OLD_LOGP = "logprobs"
"""Field of a Tinker datum with the sampler's log-probs: [N] of sampled tokens, or [N K] of top-k tokens."""


def support_targets(
    tokens: Int[Tensor, " N"], top_ids: Int[Tensor, "N K"], top_logp: Float[Tensor, "N K"], logp: Float[Tensor, " N"]
) -> dict[str, Tensor]:
    """Build the inputs `target_tokens` and `logprobs` of a Tinker datum for a loss on the sampler's top-k tokens [N K+1].

    The sampled token comes first, then the sampler's other top-k tokens. A slot that is not needed repeats the sampled token,
    with a log-prob of −inf.
    """
    repeated = top_ids == tokens[:, None]
    ids = torch.cat([tokens[:, None], torch.where(repeated, tokens[:, None], top_ids)], -1)
    return {"target_tokens": ids, OLD_LOGP: torch.cat([logp[:, None], torch.where(repeated, -torch.inf, top_logp)], -1)}


def make_loss(
    objective: str, *, reduction: Reduction = "token-mean", length: float | None = None, **settings: Any
) -> Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """Make a loss function with a corral objective for Tinker's `forward_backward_custom`.

    Each datum has, beside `target_tokens`, `logprobs` (what the sampler reported, which is the anchor), `advantages` [N] and
    `mask` [N]. Data of one call are one batch: the reduction is over them.
    """
    wanted = EngineObjective.of("corral for Tinker", objective, settings, support=True)

    def corral_loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def field(name: str) -> Tensor:
            return pad_sequence([datum.loss_fn_inputs[name].to_torch() for datum in data], batch_first=True)

        new = pad_sequence(list(logprobs), batch_first=True)
        old, ids, mask = (field(name) for name in (OLD_LOGP, "target_tokens", "mask"))
        dists: tuple[SparseDist | None, SparseDist | None] = (None, None)
        if new.ndim == 3:
            ids = torch.where(old == -torch.inf, -1, ids)
            dists = (dist_from_top(ids, new), dist_from_top(ids, old))
            new, old = new[..., 0], old[..., 0]
        elif wanted.needs_support:
            raise ValueError("corral for Tinker: this objective reads a support. Make `target_tokens` [N K]: support_targets.")
        batch = TokenBatch(new, old, field("advantages"), mask.bool(), *dists, logp_rollout=old)
        loss, metrics = wanted.token_loss(batch)
        live = bool(batch.mask.any())
        return reduce_loss(loss, batch.mask, reduction, length=length, total=None if live else 1.0), read_metrics(metrics)

    return corral_loss
