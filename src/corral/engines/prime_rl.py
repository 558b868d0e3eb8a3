"""prime-rl adapter: a custom loss with corral's objectives, which prime-rl calls on one sequence at a time.

[trainer.loss]
type = "custom"
import_path = "corral.engines.prime_rl.rl_loss"
kwargs = { objective = "dppo", bound = 0.2 }
"""

import importlib
from typing import Any

from corral.engines.adapter import EngineObjective, warn_once
from corral.tensors import TokenBatch


def rl_loss(inputs: Any, objective: str = "dppo", anchor: str = "auto", **settings: Any) -> Any:
    """Compute the loss of one sequence, as prime-rl's LossOutputs: the sum over the sequence's tokens.

    prime-rl divides the loss by the number of tokens in the batch.

    Args:
        inputs: prime-rl's LossInputs, every field [T].
        objective, settings: which objective, and its settings.
        anchor: "rollout" where the objective means the old policy otherwise, and the sampler's is what you want.
    """
    wanted = EngineObjective.of("corral for prime-rl", objective, settings, anchor=anchor)
    # prime-rl recomputes no old policy: log-probs are the trainer's, with a gradient, and the sampler's.
    old = wanted.anchor_logp({"rollout": inputs.inference_logprobs[None].detach()})
    warn_once("corral for prime-rl", wanted.other_reduction("token-mean"))
    mask = inputs.loss_mask[None]
    batch = TokenBatch(inputs.trainer_logprobs[None], old, inputs.advantages[None], mask, logp_rollout=old)
    loss, metrics = wanted.token_loss(batch)
    if inputs.loss_weights is not None:
        loss = loss * inputs.loss_weights
    outputs: Any = importlib.import_module(type(inputs).__module__)  # LossOutputs stands beside LossInputs
    return outputs.LossOutputs(loss=loss.sum(), metrics=metrics)
