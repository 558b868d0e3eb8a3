"""Policy losses for verl that compute corral's objectives."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from corral.engines.adapter import EngineObjective, read_metrics, warn_once
from corral.engines.verl.settings import CONFIG, MODEL_TYPE, VerlSettings
from corral.head.packed import Packing
from corral.tensors import SparseDist, TokenBatch

_NO_LENGTH = (
    "seq-mean-token-sum-norm without actor.loss_scale_factor divides by the longest response of each micro-batch, so that an "
    "update depends on how its batch is split. Set it to data.max_response_length."
)

Aggregate = Callable[..., Tensor]
"""Type of verl's function agg_loss, which reduces the losses of all tokens to a number."""


@dataclass(frozen=True, eq=False)
class BatchExtras:
    """Tensors of a micro-batch that verl's policy losses cannot receive as arguments; verl's configuration carries them."""

    dist_new: SparseDist | None = None
    dist_old: SparseDist | None = None
    """Old policy on its own top-k tokens; `dist_new` is the new policy on the same tokens.
    Both hold unmasked tokens only [N K], to save memory."""
    logp_rollout: Tensor | None = None
    """Log-probs of the sampled tokens under the sampler [B T]."""


def add_extras(config: Any, extras: BatchExtras) -> Any:
    """Return a copy of verl's ActorConfig that carries `extras` for the policy loss."""
    config = copy.copy(config)
    config.corral_extras = extras
    return config


def make_policy_loss(loss_mode: str, aggregate: Aggregate) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Make the policy loss that verl calls for a `loss_mode`. The loss reduces its per-token losses with verl's agg_loss."""

    def compute_policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        settings = config.policy_loss
        if not isinstance(settings, VerlSettings):  # verl's own PolicyLossConfig
            raise ValueError(
                f"corral for verl: {loss_mode} finds no settings. Add actor_rollout_ref.actor.policy_loss._target_={CONFIG}; "
                f"`corral doctor --engine verl` prints every line."
            )
        if settings.loss_mode != loss_mode:
            raise ValueError(f"corral for verl: settings are of {settings.loss_mode}, and verl calls {loss_mode}.")
        wanted, extras = settings.resolve(), vars(config).get("corral_extras")
        if wanted.needs_support and (extras is None or extras.dist_new is None):
            raise ValueError(
                f"corral for verl: {loss_mode} reads a support, and verl's own engine keeps none. Set "
                f"actor_rollout_ref.model.model_type={MODEL_TYPE} and trainer.v1.trainer_mode=corral_sync."
            )
        if settings.deployed_bound is not None and extras is None:
            raise ValueError(
                "corral for verl: deployed_bound is held by corral's trainers, and this one is verl's own. Set "
                "trainer.v1.trainer_mode=corral_sync."
            )
        warn_once("corral for verl: loss_agg_mode", wanted.other_reduction(loss_agg_mode))
        if loss_agg_mode == "seq-mean-token-sum-norm" and config.global_batch_info.get("loss_scale_factor") is None:
            warn_once("corral for verl: loss_agg_mode", _NO_LENGTH)
        extras = extras or BatchExtras()
        mask = response_mask.bool()
        batch = TokenBatch(log_prob, old_log_prob, advantages, mask, logp_rollout=extras.logp_rollout)
        loss, metrics = _token_loss(wanted, batch, extras, rollout_is_weights)
        reduced = aggregate(
            loss_mat=loss, loss_mask=mask.to(loss.dtype), loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return reduced, read_metrics(metrics)

    return compute_policy_loss


def _token_loss(
    wanted: EngineObjective, batch: TokenBatch, extras: BatchExtras, weights: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the objective's loss for each token [B T], and its metrics.

    With top-k tokens it is computed on unmasked tokens alone, if the objective allows it.
    """
    if extras.dist_new is None or extras.dist_old is None:
        return wanted.token_loss(batch, weights)
    packing = Packing(batch.mask)
    if wanted.objective.config.tokenwise and packing.count:
        rows = batch.map(lambda x: packing.pack(x)[None])
        rows = replace(rows, dist_new=extras.dist_new.map(lambda x: x[None]), dist_old=extras.dist_old.map(lambda x: x[None]))
        loss, metrics = wanted.token_loss(rows, None if weights is None else packing.pack(weights)[None])
        return packing.unpack(loss[0]), metrics
    whole = replace(batch, dist_new=packing.unpack_dist(extras.dist_new), dist_old=packing.unpack_dist(extras.dist_old))
    return wanted.token_loss(whole, weights)
