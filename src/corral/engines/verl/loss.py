"""Loss function of corral's verl trainers: verl's ppo_loss, whose policy loss also receives top-k distributions."""

from typing import Any

import torch
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss

from corral.engines.verl.head import take_dists
from corral.engines.verl.policy_loss import BatchExtras, add_extras
from corral.tensors import metric_kind

_AGGREGATION = {"max": AggregationType.MAX, "sum": AggregationType.SUM}


def corral_ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's ppo_loss with corral's policy loss; entropy bonus, reference KL and reductions stay verl's own.

    Unlike verl's it reads the old policy's support and the sampler's log-probs, with which the anchor is compared token by
    token. It takes the new policy's support out of `model_output`.
    """
    dists = take_dists(model_output, data)
    logp_rollout = _padded(data, "rollout_log_probs") if "rollout_log_probs" in data else None
    if config.policy_loss.resolve().anchor == "rollout":
        _check_anchor(config.policy_loss.loss_mode, data, logp_rollout)
    new, old = dists or (None, None)
    config = add_extras(config, BatchExtras(new, old, logp_rollout))
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    return loss, {name: _aggregated(name, metric, data["dp_size"]) for name, metric in metrics.items()}


def _check_anchor(loss_mode: str, data: Any, logp_rollout: Tensor | None) -> None:
    """Raise ValueError if the anchor is the sampler but the batch's old log-probs are not the sampler's log-probs."""
    if logp_rollout is None:
        raise ValueError(
            f"corral for verl: {loss_mode} is anchored on the sampler's log-probs, and the batch has none. Set "
            f"actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    mask = _padded(data, "response_mask").bool()
    gap = torch.where(mask, _padded(data, "old_log_probs") - logp_rollout, 0.0).abs().max()
    if gap > 0:
        raise ValueError(
            f"corral for verl: {loss_mode} is anchored on the sampler's log-probs, and old_log_probs differ from them by up to "
            f"{float(gap):.3g} nats: verl has recomputed them. Set algorithm.rollout_correction.bypass_mode=true."
        )


def _padded(data: Any, field: str) -> Tensor:
    """Return the response part of a batch field, padded to [B T]."""
    return data.select(field).to_padded_tensor()[field]


def _aggregated(name: str, metric: Any, ranks: int) -> Any:
    """Set how verl combines values of a metric, since verl's default, the mean, is wrong for maxima and counts."""
    kind = metric_kind(name) if name.startswith("tr/") else "mean"
    if kind == "mean" or not isinstance(metric, Metric):
        return metric
    made = Metric(aggregation=_AGGREGATION[kind])
    made.extend([value * ranks for value in metric.values] if kind == "sum" else metric.values)
    return made
