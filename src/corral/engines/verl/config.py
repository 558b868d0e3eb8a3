"""verl's PolicyLossConfig with corral's settings, for `actor_rollout_ref.actor.policy_loss._target_`."""

from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

from corral.engines.verl.plugin import missing
from corral.engines.verl.settings import VerlSettings


@dataclass
class CorralPolicyLossConfig(VerlSettings, PolicyLossConfig):
    """Settings of a verl policy loss: verl's own and corral's. Invalid settings raise an error when a worker starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        why = missing(self.loss_mode)
        if why is not None:
            raise RuntimeError(why)
