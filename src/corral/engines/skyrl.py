"""SkyRL adapter: registers an objective of corral as a SkyRL policy loss, from the script that starts the run.

from corral.engines.skyrl import register
register("dppo", bound=0.2)                  # before initialize_ray; then trainer.algorithm.policy_loss_type=corral_dppo
"""

import importlib
from typing import Any

from torch import Tensor

from corral.engines.adapter import EngineObjective, read_metrics, scales_with_advantages
from corral.tensors import TokenBatch

REGISTRY = "skyrl.backends.skyrl_train.utils.ppo_utils"


def make_policy_loss(objective: str, *, anchor: str = "auto", **settings: Any) -> Any:
    """Make the policy loss function that SkyRL calls; it sums the losses of all tokens. Advantages come scaled by SkyRL.

    SkyRL writes its reduction into the advantages. An objective whose loss is no multiple of its advantages would be reduced
    in another way, and is refused.
    """
    wanted = EngineObjective.of("corral for SkyRL", objective, settings, anchor=anchor)
    if not scales_with_advantages(wanted):
        raise ValueError(
            f"corral for SkyRL: SkyRL scales advantages instead of the loss, and {objective}'s loss is no multiple of them. "
            f"Use another objective, or another engine."
        )

    def corral_policy_loss(
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        asked = vars(config.off_policy_correction)
        used = [key for key in ("tis_ratio_type", "sequence_mask_metric") if asked.get(key) is not None]
        used += [key for key, value in asked.items() if "_threshold_" in key and value is not None]
        if used:
            raise ValueError(
                f"corral for SkyRL: off_policy_correction.{used[0]} is set, and corral's losses apply none of SkyRL's "
                f"corrections. Anchor on the sampler (anchor='rollout'), or leave it out."
            )
        old = wanted.anchor_logp({"old": old_log_probs, "rollout": rollout_logprobs})
        mask = (log_probs == log_probs) if loss_mask is None else loss_mask.bool()
        loss, metrics = wanted.token_loss(TokenBatch(log_probs, old, advantages, mask, logp_rollout=rollout_logprobs))
        found = read_metrics(metrics)
        return loss.sum(), {"clip_ratio": found["tr/active_frac"], **found}

    return corral_policy_loss


def register(objective: str, *, anchor: str = "auto", **settings: Any) -> str:
    """Register an objective with these settings as a SkyRL policy_loss_type, and return its name, "corral_" + `objective`."""
    name = f"corral_{objective}"
    registry: Any = importlib.import_module(REGISTRY)
    registry.PolicyLossRegistry.register(name, make_policy_loss(objective, anchor=anchor, **settings))
    return name
