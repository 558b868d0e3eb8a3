"""Advantages under a trust region → a loss per token. This file is the one registry."""

import dataclasses
from collections.abc import Callable
from typing import Any

from corral.objective.aspo import ASPOConfig, aspo
from corral.objective.bapo import BAPOConfig, bapo
from corral.objective.check import check_batch
from corral.objective.cispo import CISPOConfig, cispo
from corral.objective.clip_cov import ClipCovConfig, clip_cov
from corral.objective.config import ObjectiveConfig
from corral.objective.cppo import CPPOConfig, cppo
from corral.objective.decoupled_ppo import DecoupledPPOConfig, decoupled_ppo
from corral.objective.distill import DistillConfig, distill
from corral.objective.dppo import DPPOConfig, dppo
from corral.objective.drpo import DRPOConfig, drpo
from corral.objective.gmpo import GMPOConfig, gmpo
from corral.objective.gspo import GSPOConfig, gspo
from corral.objective.kl_cov import KLCovConfig, kl_cov
from corral.objective.m2po import M2POConfig, m2po
from corral.objective.ppo_clip import ClipHigherConfig, DualClipConfig, PPOClipConfig, ppo_clip
from corral.objective.reinforce import ReinforceConfig, reinforce
from corral.objective.ripo import RIPOConfig, ripo
from corral.objective.sapo import SAPOConfig, sapo
from corral.objective.spo import SPOConfig, spo
from corral.objective.topr import TOPRConfig, topr
from corral.objective.troll import TROLLConfig, troll
from corral.objective.vespo import VESPOConfig, vespo
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import build_config, nearest

ObjectiveFunction = Callable[[TokenBatch, Any], ObjectiveOutput]

OBJECTIVES: dict[str, tuple[ObjectiveFunction, type[ObjectiveConfig]]] = {
    "aspo": (aspo, ASPOConfig),
    "bapo": (bapo, BAPOConfig),
    "cispo": (cispo, CISPOConfig),
    "clip_cov": (clip_cov, ClipCovConfig),
    "clip_higher": (ppo_clip, ClipHigherConfig),
    "cppo": (cppo, CPPOConfig),
    "decoupled_ppo": (decoupled_ppo, DecoupledPPOConfig),
    "distill": (distill, DistillConfig),
    "dppo": (dppo, DPPOConfig),
    "drpo": (drpo, DRPOConfig),
    "dual_clip": (ppo_clip, DualClipConfig),
    "gmpo": (gmpo, GMPOConfig),
    "gspo": (gspo, GSPOConfig),
    "kl_cov": (kl_cov, KLCovConfig),
    "m2po": (m2po, M2POConfig),
    "ppo_clip": (ppo_clip, PPOClipConfig),
    "reinforce": (reinforce, ReinforceConfig),
    "ripo": (ripo, RIPOConfig),
    "sapo": (sapo, SAPOConfig),
    "spo": (spo, SPOConfig),
    "topr": (topr, TOPRConfig),
    "troll": (troll, TROLLConfig),
    "vespo": (vespo, VESPOConfig),
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A named objective with its settings: a checked batch → ObjectiveOutput."""

    name: str
    function: ObjectiveFunction
    config: ObjectiveConfig
    check: bool = True
    """Refuse logits, probabilities and other numbers that are no log-probabilities."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of TokenBatch that a batch must have."""
        return self.config.needs

    def __call__(self, batch: TokenBatch) -> ObjectiveOutput:
        check_batch(self.name, batch, self.needs, check=self.check)
        return self.function(batch, self.config)


def make_objective(name: str, /, *, check: bool = True, **config: Any) -> Objective:
    """The objective `name` with these settings; `objective_names()` lists what there is.

    Args:
        name: a registered name.
        check: refuse numbers that are no log-probabilities: above 0, or a support and its tail that do not sum to 1. False
            takes them as they are.
        config: settings of the objective.
    """
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ValueError(f"make_objective: there is no objective {name!r}.{nearest(name, OBJECTIVES)}")
    if not isinstance(check, bool):
        raise ValueError(f"make_objective: `check` is True or False; got {check!r}.")
    function, config_cls = OBJECTIVES[name]
    return Objective(name, function, build_config(name, config_cls, config), check)


def objective_names() -> list[str]:
    """Every registered objective, in alphabetical order."""
    return sorted(OBJECTIVES)


def register_objective(name: str, function: ObjectiveFunction, config_cls: type[ObjectiveConfig]) -> None:
    """Add an objective of your own, for every door and report to find.

    Args:
        name: what `make_objective` will call it; a name that is taken is refused.
        function: (TokenBatch, config) → ObjectiveOutput, with the loss unreduced and 0 where masked out.
        config_cls: its settings, a frozen dataclass derived from ObjectiveConfig.
    """
    if not isinstance(name, str) or not name or not callable(function):
        raise ValueError(f"register_objective: takes a name and a function of (batch, config); got {name!r} and {function!r}.")
    if name in OBJECTIVES:
        raise ValueError(f"register_objective: {name!r} is taken. Choose another name; objectives are never replaced.")
    # A subclass that is not decorated itself still counts as a dataclass, but its own settings are none.
    decorated = isinstance(config_cls, type) and "__dataclass_fields__" in vars(config_cls)
    if not (decorated and issubclass(config_cls, ObjectiveConfig)):
        raise ValueError(f"register_objective: settings are a dataclass derived from ObjectiveConfig; got {config_cls!r}.")
    if "check" in (field.name for field in dataclasses.fields(config_cls)):
        raise ValueError(f"register_objective: `check` is make_objective's own argument; rename that setting of {name!r}.")
    OBJECTIVES[name] = (function, config_cls)
