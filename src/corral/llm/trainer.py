"""GRPOTrainer with a trust region: TRL samples, scores, accumulates and saves; corral computes the policy loss."""

import functools
import logging
import sys
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import trl
from accelerate.utils import DistributedType
from packaging.version import Version
from torch import Tensor, nn
from trl import GRPOTrainer

from corral.advantage import Advantage, group_advantages
from corral.kernels.batch_loss import NewRows, batch_loss
from corral.kernels.packed import LossTerms, Packing
from corral.kernels.policy_loss import TOLERANCE
from corral.llm.config import CorralConfig, Sampler, steps_per_batch
from corral.llm.deployed import DeployedCallback
from corral.llm.guard import SelfCheck
from corral.llm.ledger import Ledger, ratio_sums
from corral.llm.models import base_model
from corral.llm.old_policy import OldPolicy
from corral.llm.policy_head import PolicyHead, Scored, SupportRequest
from corral.objective import Objective, make_objective
from corral.objective.dppo import dppo
from corral.objective.metrics import masked_max
from corral.objective.troll import troll
from corral.types import SparseDist, TokenBatch

logger = logging.getLogger(__name__)

FUSED = Version(trl.__version__) >= Version("1.15")
"""Whether TRL's loss is known to begin with its fused scoring pass."""


class _Enough(Exception):
    """Leaves TRL's loss once it has scored the tokens, where nothing but a policy term would follow, which is not ours."""


class CorralTrainer(GRPOTrainer):
    """Drop-in for GRPOTrainer. Seven methods are overridden, each calls TRL's own, none is copied.

    TRL's loss is called with advantages of zero: what comes back is everything but the policy term (KL to a reference,
    entropy bonus, auxiliary loss, their metrics). The policy term is corral's, averaged as `loss_type` says. Where there is no
    other term, TRL's loss is left as soon as it has scored the tokens.
    """

    # What TRL and transformers leave untyped, or type as None until they have filled it in.
    args: CorralConfig
    model: nn.Module
    num_generations: int
    num_generations_eval: int
    _logs: dict[str, Any]
    objective: Objective
    _tag_names: ClassVar[list[str]] = ["trl", "corral"]  # type: ignore[misc]  # TRL leaves ClassVar out
    _name = "corral"
    _paper: ClassVar[dict[str, str]] = {}  # type: ignore[misc]  # as above; objectives have theirs in docs/objectives

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: CorralConfig | None = None, *more: Any, **kwargs: Any
    ) -> None:
        args = CorralConfig() if args is None else args
        if not isinstance(args, CorralConfig):
            raise ValueError(
                f"CorralTrainer: `args` must be a CorralConfig; got {type(args).__name__}. It takes the same settings: from "
                f"corral.llm import CorralConfig."
            )
        _check_surroundings(args)
        super().__init__(model, reward_funcs, args, *more, **kwargs)
        self.reports_logps = self.use_vllm or self.rollout_func is not None
        sampler: Sampler = "vllm" if self.use_vllm else "rollout_func" if self.reports_logps else "transformers"
        args.check_sampler(sampler, getattr(self.model, "generation_config", None))  # a model may be without one
        self.objective, self.correction, self.anchor = args.make_objective(), args.make_correction(), args.resolve_anchor()
        self.needs_support = args.needs_support
        base = base_model(self.model)
        own = replace(self.own_support(), union=self.union) if self.needs_support else SupportRequest()
        models = [base] if self.ref_model is None else [base, self.ref_model]
        self.policy_head = PolicyHead(models, self.temperature, own)
        fill = getattr(self.objective.config, "tail", None) == "fill"  # which only troll has
        if args.deployed_bound is not None and not FUSED:
            raise ValueError(
                f"CorralTrainer: `deployed_bound` needs hidden states, which TRL {trl.__version__} does not hand over. Install "
                f"TRL 1.15 or newer."
            )
        if self.union and not fill and not FUSED:
            raise ValueError(
                f"CorralTrainer: support='union' needs the old hidden states, which TRL {trl.__version__} does not hand over. "
                f"Install TRL 1.15 or newer, or use support='old'."
            )
        # An evaluation may come in the middle of a batch, and has rollouts of its own.
        self._old_policies = {mode: OldPolicy(args.support_mass, fill) for mode in ("train", "eval")}
        self._request: SupportRequest | None = None
        self._scored: Scored | None = None
        self._rewards: Tensor | None = None
        self._ledger = Ledger()
        self.self_check = SelfCheck(self)
        self.add_callback(self.self_check)
        if args.deployed_bound is not None:
            self.callback_handler.callbacks.insert(0, DeployedCallback(self))  # before a reference is synchronised, or saved
        if self.accelerator.is_main_process:
            self._announce()

    @property
    def off_policy(self) -> bool:
        """Whether a batch of rollouts outlives an update, so that its policy is an old one: then TRL keeps its log-probs."""
        return self.args.gradient_accumulation_steps % steps_per_batch(self.args) != 0

    @property
    def at_rest(self) -> bool:
        """Whether the new policy always is its anchor: one update per batch, and no other sampler for an anchor."""
        return not self.off_policy and not (self.anchor == "rollout" and self.reports_logps)

    @property
    def old_policy(self) -> OldPolicy:
        """What is kept of the policy that drew the rollouts at hand."""
        return self._old_policies["train" if self.model.training else "eval"]

    @property
    def _not_yet_updated(self) -> bool:
        """Whether no update has followed on the rollouts yet, so that every ratio to the old policy should be 1."""
        done, every = self._step, self.args.gradient_accumulation_steps
        started = done - done % steps_per_batch(self.args)
        return self.off_policy and done // every == started // every

    @property
    def _other_terms(self) -> bool:
        """Whether the loss reads the head's results elsewhere than in its policy term."""
        bonus = getattr(self, "_entropy_bonus_enabled", False)  # not every release has one
        return self.beta != 0 or self.top_entropy_quantile < 1.0 or bonus

    @property
    def _leaves(self) -> bool:
        """Whether TRL's loss would have nothing to add once the tokens are scored."""
        return FUSED and not self._other_terms and not self.aux_loss_enabled

    def _announce(self) -> None:
        if self.args.other_reduction:
            logger.warning(self.args.other_reduction)
        if self.at_rest:
            logger.warning(
                "One update per batch of rollouts: the new policy is the old one, no trust region acts, and tr/active_frac "
                "stays 0. Raise num_iterations or steps_per_generation to make the region matter."
            )
        elif self.anchor == "rollout" and not self.reports_logps:
            logger.warning("The sampler is the trainer's own model, so its recomputed log-probs are the rollout anchor.")

    def create_accelerator_and_postprocess(self) -> None:
        """Where transformers meets the model. Later on it writes `use_cache` into the configuration that is saved."""
        if self.args.use_cache is None:
            self.args.use_cache = getattr(self.model.config, "use_cache", False)  # not every family has one
        super().create_accelerator_and_postprocess()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rollouts, with the old policy's support from TRL's own old-policy pass, and corral's advantages if asked for."""
        if self.use_vllm and self.vllm_generation.logprobs:
            raise ValueError(
                f"CorralTrainer: vllm_generation.logprobs is {self.vllm_generation.logprobs}. vLLM then ranks tokens by "
                f"likelihood, and TRL takes the first for the sampled one. Leave it at 0."
            )
        keep = self.union and not self.old_policy.fill
        self._ask(replace(self.own_support(), keep=keep) if self.needs_support and self.off_policy else SupportRequest())
        output = super()._generate_and_score_completions(inputs)
        scored, self._scored = self._scored, None
        if self.needs_support and self.off_policy:
            if scored is None or scored.support() is None or "old_per_token_logps" not in output:
                raise RuntimeError(
                    "CorralTrainer: TRL made no old-policy pass, though updates follow. Has it changed? Please report it."
                )
            self.old_policy.store(output, scored)
        if self.args.advantage is not None:
            output["advantages"] = self._own_advantages(len(output["completion_ids"]))
        return output

    def _ask(self, request: SupportRequest) -> None:
        """Keep the next scoring pass, with this support: the first alone, since a reference's may come after the policy's."""
        self._request, self._scored = request, None

    @property
    def union(self) -> bool:
        """Whether the new policy's likeliest tokens join the old policy's support in an update."""
        return self.args.support == "union" and self.needs_support and self.off_policy

    def own_support(self) -> SupportRequest:
        """How much of its own policy an old pass keeps."""
        # Only dppo has an estimator; its "full" one leaves nothing over.
        full = getattr(self.objective.config, "estimator", None) == "full"
        return SupportRequest(
            top_k=sys.maxsize if full else self.args.support_size,
            mass=1.0 if full else self.args.support_mass,
        )

    def _own_advantages(self, local: int) -> Tensor:
        """Advantages of corral's, over all processes; 0 where nothing scored a completion, or any other of its group."""
        assert self._rewards is not None
        rewards = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(-1)
        size = self.num_generations if self.model.training else self.num_generations_eval
        group = torch.arange(len(rewards), device=rewards.device) // size
        scored = ~self._rewards.isnan().all(-1)
        compared = scored & (torch.bincount(group, scored.float())[group] > 1)
        advantages = torch.zeros_like(rewards)
        if bool(compared.any()):
            how = cast(Advantage, self.args.advantage)  # CorralConfig refuses any other
            advantages[compared] = group_advantages(rewards[compared], group[compared], how)
        log = self._logs["advantages"]  # TRL's own are the last ones in there
        for _ in range(min(len(log), len(advantages))):
            log.pop()
        log.extend(advantages.tolist())
        start = self.accelerator.process_index * local
        return advantages[start : start + local]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's scoring pass, of the old, the new or the reference policy, through one head; with a support if asked for."""
        passing = (model, input_ids, attention_mask, logits_to_keep, *args)
        request, self._request = self._request or SupportRequest(), None
        with self.policy_head.reporting(request, logits_to_keep) as reports:
            result = super()._get_per_token_logps_and_entropies(*passing, **kwargs)
        if self._scored is None:
            self._scored = Scored(result[0], result[1], reports)
        if request.alone:
            raise _Enough
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss without its policy term, plus corral's."""
        mode = "train" if self.model.training else "eval"
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        backward = self.policy_head.take_backward_reports()
        weights = self._weights(inputs, mask, mode)
        loss_terms = functools.partial(self._loss_terms, inputs, mask, weights)
        request = replace(self._support_of(inputs), tolerance=TOLERANCE, loss=loss_terms)
        self._ask(replace(request, alone=self._leaves))
        try:
            loss = super()._compute_loss(model, self._without_policy(inputs))
        except _Enough:
            loss = None
        scored, self._scored = self._scored, None
        assert scored is not None
        compute = self._policy_loss if scored.fused is None else self._fused_loss
        policy, tokens, metrics = compute(inputs, scored, mask, weights)
        self._ledger.add(mode, tokens, metrics, backward)
        if loss is None:
            # The hooks of distributed training sit on what the model returned.
            alone = self.accelerator.distributed_type == DistributedType.NO
            return policy if alone else policy + 0.0 * scored.logp.sum()
        self._mend_metrics(policy.detach(), mode)
        return loss + policy

    def _without_policy(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs for which TRL's policy term is zero; where that is all there would be, it never gets so far."""
        if self._leaves:
            return inputs
        zeroed = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if self.beta == 0 or not self.args.use_bias_correction_kl:
            zeroed.pop("old_per_token_logps", None)  # nothing reads the ratio, and 0 · inf would be NaN
        return zeroed

    def _support_of(self, inputs: dict[str, Any]) -> SupportRequest:
        """The old policy's support, or where the policy is its own anchor its own, if anything depends on it."""
        if "corral_ids" in inputs:
            return replace(self.own_support() if self.union else SupportRequest(), ids=inputs["corral_ids"])
        # Functions of others may share these settings and mean something else by them.
        plain = self.objective.function in (troll, dppo) and self.objective.config.plain_on_policy
        return self.own_support() if self.needs_support and not plain else SupportRequest()

    def _loss_terms(self, inputs: dict[str, Any], mask: Tensor, weights: float | Tensor, packing: Packing) -> LossTerms | None:
        """The loss of the scored tokens for the head to take at once; None where that needs more than tokens one by one.

        Other terms read the head's results too, a union changes the old policy, and a correction without an old pass is of
        log-probs that the head has yet to find.
        """
        off_policy = "old_per_token_logps" in inputs
        batch = self._token_batch(inputs, mask.new_zeros(mask.shape, dtype=torch.float32), None, mask)
        objective = self._objective_for(batch.dist_old)
        needs_support = self._support_of(inputs).top_k is not None  # its own, or a union
        alone = objective.config.tokenwise and not needs_support and not self._other_terms and packing.shape == mask.shape
        if not alone or (self.correction is not None and not off_policy) or not FUSED:
            return None
        on_policy = not off_policy and batch.logp_rollout is not batch.logp_old
        of_each = torch.where(mask, torch.as_tensor(weights, dtype=torch.float32, device=mask.device), 0.0)
        terms = LossTerms(objective, batch, of_each, self._policy_weights(inputs, batch, None), on_policy)
        return terms.pack(packing)

    def _fused_loss(
        self, inputs: dict[str, Any], scored: Scored, mask: Tensor, weights: float | Tensor
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        """The loss that the head has taken; unmasked tokens, and metrics of them."""
        out, packing = scored.fused, scored.reports[0].live
        assert out is not None
        assert packing is not None
        logp = packing.unpack(out.logp[0])
        tokens = int(mask.sum()) if "tool_mask" in inputs else packing.count
        batch = self._token_batch(inputs, logp, None, mask)
        if type(self)._look is not CorralTrainer._look:
            dist = None if out.dist is None else packing.unpack_dist(out.dist.map(lambda x: x[0]))
            self._look(inputs, replace(batch, dist_new=dist), self._objective_for(batch.dist_old))
        metrics = {**out.metrics, **ratio_sums(batch)}
        if self._not_yet_updated:
            metrics["tr/drift_max"] = masked_max((batch.logp_new - batch.logp_old).abs(), mask)
        if self._leaves and out.entropy is not None:
            metrics["entropy"] = out.entropy.sum() / max(tokens, 1)  # TRL's, which would have been next; 0 at masked tokens
        return out.loss, tokens, metrics

    def _objective_for(self, dist: SparseDist | None) -> Objective:
        """At rest a support changes nothing, so none was made."""
        return make_objective("reinforce") if self.needs_support and dist is None else self.objective

    def _policy_loss(
        self, inputs: dict[str, Any], scored: Scored, mask: Tensor, weights: float | Tensor
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        """The objective's loss, weighted and averaged as TRL's own would be; live tokens, and metrics of them."""
        new, entropy = scored.rows()
        if new is not None and "tool_mask" in inputs:  # of the scored tokens those that no tool wrote
            kept = new.packing.pack(mask).nonzero().squeeze(-1)
            new, entropy = new.only(kept, mask), None if entropy is None else entropy[kept]
        tokens = int(mask.sum()) if new is None else new.packing.count
        if new is not None and new.dist is not None and (self.union or "corral_ids" not in inputs):
            new = None  # its own anchor, or on a support that the old policy has to follow
        # This talks to the other processes, which may have live tokens where this one has none.
        chosen = None
        if self.top_entropy_quantile < 1.0:
            assert scored.entropy is not None
            chosen = self.get_high_entropy_mask(scored.entropy, mask.int(), 1 - self.top_entropy_quantile)
        if not tokens:  # every completion of this micro-batch is masked out
            loss, metrics = scored.logp * 0.0, dict[str, Tensor]()
        else:
            loss, metrics = self._token_loss(inputs, scored, mask, new, chosen)
            if self._leaves and entropy is not None:
                metrics["entropy"] = entropy.detach().mean()  # TRL's, which would have been next
        alike = not isinstance(weights, Tensor) or weights.ndim == 0
        average = loss.sum() * weights if alike else torch.where(mask, loss * weights, 0.0).sum()
        return average, tokens, metrics

    def _token_loss(
        self, inputs: dict[str, Any], scored: Scored, mask: Tensor, new: NewRows | None, chosen: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's loss of every token, 0 where masked out, its policy term weighted if asked to; metrics."""
        batch = self._token_batch(inputs, scored.logp, scored.support() if new is None else None, mask)
        objective = self._objective_for(batch.dist_old)
        weights = self._policy_weights(inputs, batch, chosen)
        if weights is not None and objective.config.regresses:  # a kernel knows the sum of policy term and regression alone
            out = objective(batch if new is None else new.within(batch))
        else:
            out = batch_loss(objective, batch, new)
        if type(self)._look is not CorralTrainer._look:
            self._look(inputs, batch if new is None else new.within(batch), objective)
        metrics = {**out.metrics, **ratio_sums(batch)}
        if self._not_yet_updated:
            metrics["tr/drift_max"] = masked_max((batch.logp_new - batch.logp_old).abs(), mask)
        return out.loss if weights is None else out.weigh(weights), metrics

    def _policy_weights(self, inputs: dict[str, Any], batch: TokenBatch, chosen: Tensor | None) -> Tensor | None:
        """What the policy term of each token [B T] is multiplied with, 0 where masked out; None for 1 everywhere.

        A sampler correction, TRL's importance ratio, and whether a token is among the most uncertain. A regression is no
        expectation over the sampler, and pulls every token back.
        """
        correction = None if self.correction is None else self.correction(batch)
        factors = [x for x in (correction, self._sampler_ratio(inputs), chosen) if x is not None]
        if not factors:
            return None
        return torch.where(batch.mask, functools.reduce(torch.mul, factors).float(), 0.0)

    def _sampler_ratio(self, inputs: dict[str, Any]) -> Tensor | None:
        """TRL's importance ratio of the old policy to vLLM's, [B T] or [B 1], where it corrects for that."""
        return inputs["importance_sampling_ratio"] if self.use_vllm and self.vllm_importance_sampling_correction else None

    def _look(self, inputs: dict[str, Any], batch: TokenBatch, objective: Objective) -> None:
        """What an objective is given, for subclasses that want to look at single tokens. Here it is not even put together."""

    def _token_batch(self, inputs: dict[str, Any], logp_new: Tensor, new: SparseDist | None, mask: Tensor) -> TokenBatch:
        """What the objective reads; without the new policy on a support where that is known as rows."""
        logp_old, old = inputs.get("old_per_token_logps", logp_new.detach()), self.old_policy.support(inputs)
        if new is not None and old is None:
            old = new.detach()
        elif new is not None and old is not None:
            new, old = self.old_policy.union(inputs, new, mask) if self.union else (new, replace(old, ids=new.ids))
        # What is compared with one another comes from one head, in one precision.
        logp_old = logp_old if old is None else old.logp[..., 0]
        logp_new = logp_new if new is None else new.logp[..., 0]
        rollout = inputs.get("sampling_per_token_logps")
        if rollout is not None:  # NaN is vLLM's for a token it could not score; like TRL, take no mismatch there
            rollout = torch.where(rollout.isnan(), logp_old, rollout)
        if self.anchor == "rollout" and self.reports_logps:
            if rollout is None:
                raise ValueError(
                    "CorralTrainer: anchor='rollout' needs the sampler's log-probs, and it reported none. Have the rollout "
                    "function return `logprobs`, or use anchor='old'."
                )
            logp_old = rollout
        return TokenBatch(logp_new, logp_old, inputs["advantages"], mask, new, old, rollout)

    def _weights(self, inputs: dict[str, Any], mask: Tensor, mode: str) -> float | Tensor:
        """What TRL multiplies every live token's loss with before it adds them up: a number, or [B 1], or [B T]."""
        accumulation = self._accumulation(mode)
        if self.loss_type == "dapo":
            # The count spans the batch of rollouts, so it is scaled to one optimizer step.
            steps = self.args.steps_per_generation if mode == "train" else 1.0
            assert steps is not None  # TRL has filled it in
            count = inputs["num_items_in_batch"].clamp(min=1.0)
            return steps * self.accelerator.num_processes / accumulation / count
        if self.loss_type == "grpo":
            return 1 / (len(mask) * accumulation) / mask.sum(-1, keepdim=True).clamp(min=1)
        if self.loss_type == "bnpo":
            return 1 / accumulation / mask.sum().clamp(min=1)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None  # CorralConfig refuses it
            return 1 / (len(mask) * self.max_completion_length * accumulation)
        return 1 / (len(mask) * accumulation)  # luspo

    def _accumulation(self, mode: str) -> float:
        return self.current_gradient_accumulation_steps if mode == "train" else 1.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's, and then what was measured is written down: the device has said it by now."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.settle_metrics()
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, with all that was measured until now."""
        self.settle_metrics()
        super().log(*args, **kwargs)

    def settle_metrics(self) -> None:
        """Write down what was measured since the last time, over all processes, each of which has to call this."""
        for mode, name, value in self._ledger.settle():
            self._metrics[mode][name].append(value)

    def _mend_metrics(self, policy: Tensor, mode: str) -> None:
        """What TRL reported of a policy term that it thought was zero."""
        metrics = self._metrics[mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # TRL's clip never acts here; tr/active_frac says what does
        if metrics.get("policy_loss"):  # there with an entropy bonus, and before accumulation is divided out
            scale = 1.0 if self.loss_type == "dapo" else self._accumulation(mode)
            metrics["policy_loss"][-1] += (self.accelerator.gather(policy) * scale).nanmean().item()


def _check_surroundings(args: CorralConfig) -> None:
    """Refuse what would run something else than this trainer, or what was never tested with it."""
    if any("unsloth" in f"{cls.__module__}.{cls.__qualname__}".lower() for cls in CorralTrainer.__mro__):
        raise ValueError(
            "CorralTrainer: Unsloth has replaced GRPOTrainer, and corral's methods would never run. Use a process that does "
            "not import it."
        )
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "CorralTrainer: DeepSpeed ZeRO-3 is untested, and its partitioned head is gone when corral's backward pass reads "
            "it again. Use ZeRO-2, or FSDP2."
        )
