"""Settings of corral in verl, which are checked before a GPU is allocated. Importing this module does not import verl."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.deployed.statistics import STATISTICS
from corral.engines.adapter import POLICY, EngineObjective
from corral.objective import make_objective, objective_names
from corral.validate import require

VERL_RANGE = ">=0.9,<0.10"
"""Range of supported verl releases. corral is not activated in other releases."""
PREFIX = "corral_"
"""Prefix of every name that corral registers with verl."""
MODEL_TYPE = "corral_language_model"
"""Value of verl's actor_rollout_ref.model.model_type for objectives on top-k tokens."""
CONFIG = "corral.engines.verl.config.CorralPolicyLossConfig"
"""Import path of the class with corral's settings, for verl's actor_rollout_ref.actor.policy_loss._target_."""
TRAINERS = ("sync", "colocate_async", "separate_async")
"""Names of the verl trainers that corral extends; corral registers each as PREFIX + its name."""

TOP_K, MASS = "corral_top_k", "corral_mass"
"""Keys of a verl batch's extra_info that request top-k tokens: the number to store, and their probability mass.
The old-policy pass stores them."""
DEPLOYED_BOUND, DEPLOYED_STATISTIC = "corral_deployed_bound", "corral_deployed_statistic"
"""Keys of a verl batch's extra_info: the bound on the network's KL from the sampler's weights, and the bounded statistic."""
DEPLOYED_SYNC = "corral_deployed_sync"
"""Key of a verl batch's extra_info; its value is true if the sampler receives the weights after this batch."""


def loss_modes() -> list[str]:
    """Return the names of corral's policy losses in verl, one for every objective that needs no teacher.

    verl supplies no teacher.
    """
    return [PREFIX + name for name in objective_names() if "dist_teacher" not in make_objective(name).needs]


@dataclass(kw_only=True)
class VerlSettings:
    """Settings of corral in verl's `actor.policy_loss`, next to verl's own settings; checked on creation."""

    loss_mode: str
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the objective as a mapping from name to value, such as {bound: 0.15}."""
    anchor: str = "auto"
    """Centre of the trust region: `old`, `rollout`, or `auto` for the centre that suits the objective.
    `old` is the old policy, recomputed by the trainer; `rollout` is the sampler, with the log-probs it reported."""
    bypass_mode: bool | None = None
    """True if verl passes the sampler's log-probs as the old policy's.
    Copy of ${algorithm.rollout_correction.bypass_mode}."""
    support_size: int = 64
    """Largest number of the old policy's most likely tokens to store at each position (top-k support)."""
    support_mass: float = 1 - 1e-5
    """Probability mass that the stored top-k tokens must reach; further tokens are not stored."""
    deployed_bound: float | None = None
    """Bound δ on the KL between successive networks that the sampler receives. With None, this KL is not measured.
    Weights beyond it are pulled back; inf only measures."""
    deployed_statistic: str = "mean"
    """Statistic of the per-token KL that `deployed_bound` limits: "mean", "p999", "cvar" or "max".
    "p999" is the 99.9th percentile, "cvar" the mean of the worst 1 %."""

    def __post_init__(self) -> None:
        if self.loss_mode not in loss_modes():
            raise ValueError(
                f"corral for verl: policy_loss._target_ is corral's, and policy_loss.loss_mode is {self.loss_mode!r}. It is "
                f"one of {', '.join(loss_modes())}."
            )
        require(self, "support_size", at_least=1, integer=True, name="corral for verl")
        require(self, "support_mass", above=0, at_most=1, name="corral for verl")
        require(self, "deployed_bound", above=0, optional=True, name="corral for verl")
        require(self, "deployed_statistic", one_of=STATISTICS, name="corral for verl")
        wanted = self.resolve()
        if self.bypass_mode is None:
            raise ValueError(
                f"corral for verl: {self.loss_mode} is anchored on the {POLICY[wanted.anchor]}, and nothing says whose "
                f"log-probs verl will pass as old_log_prob. Add actor_rollout_ref.actor.policy_loss.bypass_mode="
                f"'${{algorithm.rollout_correction.bypass_mode}}'."
            )
        if self.bypass_mode and wanted.needs_support:
            raise ValueError(
                f"corral for verl: {self.loss_mode} needs the support of the old policy, and bypass_mode makes no pass that "
                f"could keep it. Set algorithm.rollout_correction.bypass_mode=false."
            )
        if self.bypass_mode != (wanted.anchor == "rollout"):
            raise ValueError(
                f"corral for verl: {self.loss_mode} is anchored on the {POLICY[wanted.anchor]}, but with "
                f"algorithm.rollout_correction.bypass_mode={str(self.bypass_mode).lower()} verl passes the "
                f"{POLICY['rollout' if self.bypass_mode else 'old']} as old_log_prob. Set bypass_mode="
                f"{str(not self.bypass_mode).lower()}, or, if that is what you mean, policy_loss.anchor="
                f"{'rollout' if self.bypass_mode else 'old'}."
            )

    def resolve(self) -> EngineObjective:
        """Build the objective, with its anchor policy, from these settings."""
        name = self.loss_mode.removeprefix(PREFIX)
        return EngineObjective.of("corral for verl", name, self.objective, anchor=self.anchor, support=True)

    def support_request(self) -> dict[str, Any]:
        """Return entries of a batch's extra_info that request top-k tokens from the old-policy pass; empty if not needed."""
        wanted = self.resolve()
        if not wanted.needs_support:
            return {}
        if wanted.objective.config.support == "full":
            return {TOP_K: sys.maxsize, MASS: 1.0}
        return {TOP_K: self.support_size, MASS: self.support_mass}

    def deployed_request(self, *, sync: bool) -> dict[str, Any]:
        """Return entries of a batch's extra_info that request a KL measurement of the network; empty without `deployed_bound`.

        Args:
            sync: whether the sampler gets the network after these updates.
        """
        if self.deployed_bound is None:
            return {}
        return {DEPLOYED_BOUND: self.deployed_bound, DEPLOYED_STATISTIC: self.deployed_statistic, DEPLOYED_SYNC: sync}


def refuse_megatron(engine: Any, model: Any) -> None:
    """Raise ValueError for settings of verl's Megatron engine that do not work with top-k tokens.

    Under these settings a support was never tested, or would be of other tokens.

    Args:
        engine: verl's McoreEngineConfig, or `actor.megatron` of its configuration.
        model: verl's HFModelConfig, or `actor_rollout_ref.model`.
    """
    refused = {
        "context_parallel_size > 1": engine.context_parallel_size > 1,
        "dynamic_context_parallel": engine.dynamic_context_parallel,
        "pad_to_length": engine.pad_to_length,
        "use_megatron_fsdp": engine.use_megatron_fsdp,
        "model.mtp.enable": model.mtp.enable,
        "model.use_fused_kernels": model.use_fused_kernels,
    }
    if used := [name for name, on in refused.items() if on]:
        raise ValueError(
            f"corral for verl: a support on Megatron's logits is not kept beside {', '.join(used)}. Leave that off, or use "
            f"actor.strategy=fsdp2; tensor, pipeline, expert and sequence parallelism may stay."
        )
