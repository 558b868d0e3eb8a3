"""verl trainers with corral's trust region, which check settings before workers start and request top-k tokens."""

import functools
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils.config import omega_conf_to_dataclass

from corral.engines.verl.config import CorralPolicyLossConfig
from corral.engines.verl.head import OLD
from corral.engines.verl.loss import corral_ppo_loss
from corral.engines.verl.settings import CONFIG, MODEL_TYPE, PREFIX, refuse_megatron


class _WithRegion:
    """Mixin that adds corral's trust region to a verl trainer by extending verl's own methods."""

    config: Any
    actor_rollout_wg: Any
    local_trigger_step: int
    """Number of batches trained on since the last weight synchronisation."""
    parameter_sync_step: int
    """Number of batches between two weight synchronisations; separate_async can have more than one."""

    def __init__(self, config: Any) -> None:
        # verl's trainers tell themselves apart by this name, and each looks its settings up under it.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(PREFIX)
        super().__init__(config)  # type: ignore[call-arg]  # a mixin: verl's trainer is its other base

    def _setup(self) -> None:
        """Check the configuration, run verl's set-up, and send corral's loss function to the workers."""
        actor = check_config(self.config)
        super()._setup()  # type: ignore[misc]  # of verl's trainer
        self.actor_rollout_wg.set_loss_fn(functools.partial(corral_ppo_loss, config=actor))

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's old-policy pass. If the objective needs top-k tokens, the pass also stores these with their log-probs."""
        request = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor.policy_loss).support_request()
        batch.extra_info |= request
        result = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]  # of verl's trainer
        for name in request:  # a reference's pass through the same engine must not take its place
            batch.extra_info.pop(name, None)
            result.extra_info.pop(name, None)
        return result

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's reference-policy pass without fetching the stored top-k tokens."""
        return _without_support(super()._compute_ref_log_prob, batch, metrics)  # type: ignore[misc]  # of verl's trainer

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's critic pass without fetching the stored top-k tokens."""
        return _without_support(super()._compute_values, batch, metrics)  # type: ignore[misc]  # of verl's trainer

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Run verl's update of the policy. With `deployed_bound`, workers also bound the KL from the sampler's network."""
        settings = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor.policy_loss)
        sync = self.local_trigger_step == self.parameter_sync_step - 1
        batch.extra_info |= settings.deployed_request(sync=sync) | settings.support_request()
        return super()._update_actor(batch, metrics)  # type: ignore[misc]  # of verl's trainer


def _without_support(compute: Callable[[Any, dict[str, Any]], Any], batch: Any, metrics: dict[str, Any]) -> Any:
    """Run a forward pass of a verl worker without the stored top-k tokens, by removing them from the list of batch fields."""
    fields = batch.fields
    if fields is not None:
        batch.fields = [name for name in fields if not name.startswith(OLD)]
    try:
        return compute(batch, metrics)
    finally:
        batch.fields = fields


def check_config(config: Any) -> Any:
    """Return verl's ActorConfig. Raises ValueError if corral's trainers cannot run this configuration."""
    settings = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    if not isinstance(settings, CorralPolicyLossConfig):
        raise ValueError(f"corral for verl: set actor_rollout_ref.actor.policy_loss._target_={CONFIG}.")
    bypass = bool(config.algorithm.rollout_correction.bypass_mode)
    if bypass != settings.bypass_mode:
        raise ValueError(
            f"corral for verl: policy_loss.bypass_mode is {settings.bypass_mode} and algorithm.rollout_correction.bypass_mode "
            f"is {bypass}. Write policy_loss.bypass_mode='${{algorithm.rollout_correction.bypass_mode}}', and they are one."
        )
    wanted = settings.resolve()
    reads_sampler = wanted.anchor == "rollout" or "logp_rollout" in wanted.objective.needs
    if reads_sampler and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ValueError(
            f"corral for verl: {settings.loss_mode} reads the sampler's log-probs. Set "
            f"actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    rollout = config.actor_rollout_ref.rollout
    if reads_sampler and (rollout.top_p < 1 or rollout.top_k > 0):
        raise ValueError(
            f"corral for verl: {settings.loss_mode} reads the sampler's log-probs, which rollout.top_p={rollout.top_p} and "
            f"top_k={rollout.top_k} renormalise, and verl does not hand over the tokens that they kept. Use top_p=1 and "
            f"top_k=-1."
        )
    if wanted.needs_support:
        _check_support(config, f"{settings.loss_mode} needs a support")
    if settings.deployed_bound is not None:
        _check_support(config, "deployed_bound needs hidden states")
        actor = config.actor_rollout_ref.actor
        if actor.strategy != "fsdp2":
            raise ValueError(
                f"corral for verl: deployed_bound holds the weights of FSDP2; got actor.strategy={actor.strategy}."
            )
        if max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size) > 1:
            raise ValueError(
                "corral for verl: deployed_bound measures whole sequences. Set "
                "actor.fsdp_config.ulysses_sequence_parallel_size=1."
            )
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def _check_support(config: Any, why: str) -> None:
    """Raise ValueError for settings with which verl would bypass corral's LM head."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2", "megatron"):
        raise ValueError(
            f"corral for verl: {why}, which corral's FSDP and Megatron engines alone have; got actor.strategy="
            f"{actor.strategy}. Use fsdp2."
        )
    if model.get("model_type", "language_model") != MODEL_TYPE:
        raise ValueError(f"corral for verl: {why}. Set +actor_rollout_ref.model.model_type={MODEL_TYPE}.")
    if model.use_fused_kernels:
        raise ValueError("corral for verl: set actor_rollout_ref.model.use_fused_kernels=false; corral's head is in its place.")
    if actor.strategy == "megatron":
        refuse_megatron(omega_conf_to_dataclass(actor).megatron, model)


@register_trainer(PREFIX + "sync")
class RegionTrainerSync(_WithRegion, PPOTrainerSync):
    """verl's synchronous trainer with corral's trust region, for trainer.v1.trainer_mode=corral_sync."""


@register_trainer(PREFIX + "colocate_async")
class RegionTrainerColocateAsync(_WithRegion, PPOTrainerColocateAsync):
    """verl's asynchronous trainer on shared GPUs with corral's trust region, for trainer_mode=corral_colocate_async."""


@register_trainer(PREFIX + "separate_async")
class RegionTrainerSeparateAsync(_WithRegion, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer on separate GPUs with corral's trust region, for trainer_mode=corral_separate_async."""
