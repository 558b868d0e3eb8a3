"""prime-rl: `[trainer.loss] type = "custom"`, one sequence at a time.

[trainer.loss]
type = "custom"
import_path = "corral.engines.prime_rl.rl_loss"
kwargs = { objective = "dppo", bound = 0.2 }
"""

import importlib
from typing import Any

from corral.engines.adapter import EngineObjective, check_anchor, warn_once
from corral.objective.config import Anchor
from corral.tensors import TokenBatch

PACKAGE, LOOKED_UP = "prime-rl", ("prime_rl.trainer.rl.loss:LossInputs", "prime_rl.trainer.rl.loss:LossOutputs")
ANCHORS: tuple[Anchor, ...] = ("rollout",)
"""prime-rl recomputes no old policy: log-probs are the trainer's, with a gradient, and the sampler's."""


def rl_loss(inputs: Any, objective: str = "dppo", anchor: str = "auto", **settings: Any) -> Any:
    """prime-rl's LossOutputs: the sum over a sequence's tokens, which prime-rl divides by all tokens of the batch.

    Args:
        inputs: prime-rl's LossInputs, every field [T].
        objective, settings: which objective, and its settings.
        anchor: "rollout" where the objective means the old policy otherwise, and the sampler's is what you want.
    """
    wanted = EngineObjective.of("corral for prime-rl", objective, settings, anchor=anchor)
    check_anchor("corral for prime-rl", wanted, ANCHORS)
    warn_once("corral for prime-rl", wanted.other_reduction("token-mean"))
    mask = inputs.loss_mask[None]
    old = inputs.inference_logprobs[None].detach()
    batch = TokenBatch(inputs.trainer_logprobs[None], old, inputs.advantages[None], mask, logp_rollout=old)
    loss, metrics = wanted.token_loss(batch)
    if inputs.loss_weights is not None:
        loss = loss * inputs.loss_weights
    outputs: Any = importlib.import_module(type(inputs).__module__)  # LossOutputs stands beside LossInputs
    return outputs.LossOutputs(loss=loss.sum(), metrics=metrics)
