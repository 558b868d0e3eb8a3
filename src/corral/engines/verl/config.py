"""verl's PolicyLossConfig with corral's settings, for `actor_rollout_ref.actor.policy_loss._target_`."""

from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import PolicyLossConfig

from corral.engines.verl.plugin import missing
from corral.engines.verl.settings import VerlSettings


@dataclass
class CorralPolicyLossConfig(PolicyLossConfig):
    """verl's own keys and corral's. Every worker makes one at start-up, which refuses settings that cannot work."""

    objective: dict[str, Any] = field(default_factory=dict)
    anchor: str = "auto"
    bypass_mode: bool | None = None
    support_size: int = VerlSettings.support_size
    support_mass: float = VerlSettings.support_mass
    deployed_bound: float | None = None
    deployed_statistic: str = VerlSettings.deployed_statistic

    def __post_init__(self) -> None:
        given = {item.name: vars(self)[item.name] for item in fields(VerlSettings)}
        self.corral = VerlSettings(**given | {"objective": dict(self.objective)})
        why = missing(self.loss_mode)
        if why is not None:
            raise RuntimeError(why)
