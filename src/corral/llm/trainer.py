"""GRPOTrainer with a trust region: TRL samples, scores, accumulates and saves; corral computes the policy loss."""

import logging
import sys
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from corral.advantage import group_advantages
from corral.kernels.batch_loss import batch_loss
from corral.kernels.foreseen import Expect, foresee
from corral.kernels.policy_loss import TOLERANCE
from corral.llm.config import CorralConfig
from corral.llm.policy_head import Pick, PolicyHead, SupportRequest
from corral.objective import Objective, make_objective
from corral.objective.dppo import dppo
from corral.objective.troll import troll
from corral.types import ObjectiveOutput, SparseDist, TokenBatch

logger = logging.getLogger(__name__)

SUPPORT_KEYS = ("corral_ids", "corral_logp", "corral_rest")
"""How a support rides along in TRL's buffer of rollouts, which shuffles and slices any tensor by its first axis."""


class Scored(NamedTuple):
    """What one scoring pass of TRL's gave, for the completion tokens."""

    logp: Tensor
    entropy: Tensor | None
    dist: SparseDist | None


class CorralTrainer(GRPOTrainer):
    """Drop-in for GRPOTrainer. Five methods are overridden, each calls TRL's own, none is copied.

    TRL's loss is called with advantages of zero: what comes back is everything but the policy term (KL to a reference,
    entropy bonus, auxiliary loss, their metrics). The policy term is corral's, averaged as `loss_type` says.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "corral"]
    _name = "corral"
    _paper: ClassVar[dict[str, str]] = {}  # the objectives are many; each has its reference in docs/objectives

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
        args.check_sampler("vllm" if self.use_vllm else "rollout_func" if self.reports_logps else "transformers")
        self.objective, self.correction, self.anchor = args.make_objective(), args.make_correction(), args.resolve_anchor()
        self.needs_support = args.needs_support
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self.policy_head = PolicyHead(base, self.temperature)
        self._request: SupportRequest | None = None
        self._scored: Scored | None = None
        self._rewards: Tensor | None = None
        if self.accelerator.is_main_process:
            self._announce()

    @property
    def off_policy(self) -> bool:
        """Whether a batch of rollouts outlives an update, so that its policy is an old one: then TRL keeps its log-probs."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0

    def _announce(self) -> None:
        sampler_anchor = self.anchor == "rollout" and self.reports_logps
        if not self.off_policy and not sampler_anchor:
            logger.warning(
                "One update per batch of rollouts: the new policy is the old one, no trust region acts, and tr/active_frac "
                "stays 0. Raise num_iterations or steps_per_generation to make the region matter."
            )
        elif self.anchor == "rollout" and not sampler_anchor:
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
        self._ask(self._own_support() if self.needs_support and self.off_policy else None)
        output = super()._generate_and_score_completions(inputs)
        scored, self._scored = self._scored, None
        if self.needs_support and self.off_policy:
            if scored is None or scored.dist is None or "old_per_token_logps" not in output:
                raise RuntimeError(
                    "CorralTrainer: TRL made no old-policy pass, though updates follow. Has it changed? Please report it."
                )
            slots = max(1, int((scored.dist.ids >= 0).sum(-1).max()))  # the others are padding
            support = scored.dist.ids[..., :slots].int(), scored.dist.logp[..., :slots], scored.dist.rest
            output.update(zip(SUPPORT_KEYS, support, strict=True))
        if self.args.advantage is not None:
            output["advantages"] = self._own_advantages(len(output["completion_ids"]))
        return output

    def _ask(self, request: SupportRequest | None) -> None:
        """Keep the next scoring pass, with this support: the first alone, since a reference's may come after the policy's."""
        self._request, self._scored = request, None

    def _own_support(self) -> SupportRequest:
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
            advantages[compared] = group_advantages(rewards[compared], group[compared], self.args.advantage)
        log = self._logs["advantages"]  # TRL's own are the last ones in there
        for _ in range(min(len(log), len(advantages))):
            log.pop()
        log.extend(advantages.tolist())
        start = self.accelerator.process_index * local
        return advantages[start : start + local]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's scoring pass, with a support where one was asked for."""
        passing = (model, input_ids, attention_mask, logits_to_keep, *args)
        request, self._request = self._request, None
        if request is None:
            result, dist = super()._get_per_token_logps_and_entropies(*passing, **kwargs), None
        else:
            with self.policy_head.reporting(request, logits_to_keep) as pieces:
                result = super()._get_per_token_logps_and_entropies(*passing, **kwargs)
                dist = None
                if pieces:
                    whole = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("ids", "logp", "rest"))
                    dist = SparseDist(*whole)
        if self._scored is None:
            self._scored = Scored(result[0], result[1], dist)
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss without its policy term, plus corral's."""
        zeroed = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if self.beta == 0 or not self.args.use_bias_correction_kl:
            zeroed.pop("old_per_token_logps", None)  # nothing reads the ratio, and 0 · inf would be NaN
        mode = "train" if self.model.training else "eval"
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        request = replace(self._support_of(inputs), tolerance=TOLERANCE, foresee=partial(self._foresee, inputs, mask, mode))
        # Which tokens are the most uncertain hangs on the last digit; without a support those of TRL's own head are at hand.
        self._ask(request if request.supported or self.top_entropy_quantile == 1.0 else None)
        loss = super()._compute_loss(model, zeroed)
        scored, self._scored = self._scored, None
        assert scored is not None
        policy = self._policy_loss(inputs, scored, mask, mode)
        self._mend_metrics(policy.detach(), mode)
        return loss + policy

    def _support_of(self, inputs: dict[str, Any]) -> SupportRequest:
        """The old policy's support, or where the policy is its own anchor its own, if anything depends on it."""
        if "corral_ids" in inputs:
            return SupportRequest(ids=inputs["corral_ids"].long())
        return self._own_support() if self.needs_support and not _plain_at_rest(self.objective) else SupportRequest()

    def _foresee(self, inputs: dict[str, Any], mask: Tensor, mode: str, pick: Pick) -> Expect | None:
        """What `_policy_loss` will be, as far as the head's results go; None where other terms read them too."""
        other = self.beta != 0 or self.top_entropy_quantile < 1.0 or self.correction is not None
        if other or getattr(self, "_entropy_bonus_enabled", False) or not bool(mask.any()):
            return None
        blank = torch.zeros(mask.shape, device=mask.device)
        dist = None
        if "corral_ids" in inputs:
            dist = SparseDist(inputs["corral_ids"].long(), inputs["corral_logp"], inputs["corral_rest"])
        batch = self._token_batch(inputs, Scored(blank, None, dist), mask)
        at_rest = "old_per_token_logps" not in inputs and batch.logp_rollout is not batch.logp_old
        with torch.enable_grad():
            ones = torch.ones_like(blank, requires_grad=True)
            (weights,) = torch.autograd.grad(self._average(ones, mask, inputs, mode), ones)
        return foresee(self._objective_for(dist), batch, pick, weights, at_rest=at_rest)

    def _objective_for(self, dist: SparseDist | None) -> Objective:
        """At rest a support changes nothing, so none was made."""
        return make_objective("reinforce") if self.needs_support and dist is None else self.objective

    def _policy_loss(self, inputs: dict[str, Any], scored: Scored, mask: Tensor, mode: str) -> Tensor:
        """The objective's loss, weighted and averaged as TRL's own would be."""
        if bool(mask.any()):
            batch = self._token_batch(inputs, scored, mask)
            objective = self._objective_for(batch.dist_new)
            out = batch_loss(objective, batch)
            self._look(inputs, batch, objective)
            weighted = out.loss if self.correction is None else out.loss * self.correction(batch)
        else:  # every completion of this micro-batch is masked out
            out = ObjectiveOutput(scored.logp * 0.0, {})
            weighted = out.loss
        # Both of these talk to the other processes, which may have live tokens where this one has none.
        if self.top_entropy_quantile < 1.0:
            weighted = weighted * self.get_high_entropy_mask(scored.entropy, mask.int(), 1 - self.top_entropy_quantile)
        self._record(out.metrics | self._head_metrics(), int(mask.sum()), mode)
        return self._average(weighted, mask, inputs, mode)

    def _average(self, loss: Tensor, mask: Tensor, inputs: dict[str, Any], mode: str) -> Tensor:
        """Of every token's loss what TRL makes of its own: corrected for vLLM if asked to, masked and reduced."""
        if self.use_vllm and self.vllm_importance_sampling_correction:
            loss = loss * inputs["importance_sampling_ratio"]
        return self._reduce(torch.where(mask, loss, 0.0), mask, inputs, mode)

    def _head_metrics(self) -> dict[str, Tensor]:
        """Of the backward passes since the last micro-batch: the share of dense rows, and the most that was left out."""
        reports = self.policy_head.finished_reports()
        if not reports:
            return {}
        dense, dropped = torch.stack(reports).unbind(-1)
        return {"head/dense_share": dense.mean(), "head/dropped_max": dropped.amax()}

    def _look(self, inputs: dict[str, Any], batch: TokenBatch, objective: Objective) -> None:
        """What an objective is given, for those who want to look at single tokens. Nobody does here."""

    def _token_batch(self, inputs: dict[str, Any], scored: Scored, mask: Tensor) -> TokenBatch:
        logp_new, new = scored.logp, scored.dist
        logp_old, old = inputs.get("old_per_token_logps", logp_new.detach()), None
        if new is not None:
            # What is compared with one another comes from one head, in one precision.
            logp_new = new.logp[..., 0]
            _, logp, rest = (inputs[key] for key in SUPPORT_KEYS) if "corral_ids" in inputs else (None, new.logp, new.rest)
            old = SparseDist(new.ids, logp.detach(), rest.detach())
            logp_old = old.logp[..., 0]
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

    def _reduce(self, loss: Tensor, mask: Tensor, inputs: dict[str, Any], mode: str) -> Tensor:
        """TRL's averages, of a loss that is 0 where masked out."""
        if self.loss_type == "dapo":
            # The count spans the batch of rollouts, so it is scaled to one optimizer step.
            total = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if mode == "train":
                total = total * self.current_gradient_accumulation_steps / self.args.steps_per_generation
            return loss.sum() / total
        if self.loss_type == "grpo":
            average = (loss.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        elif self.loss_type == "bnpo":
            average = loss.sum() / mask.sum().clamp(min=1)
        elif self.loss_type == "dr_grpo":
            average = loss.sum() / (len(loss) * self.max_completion_length)
        else:  # luspo
            average = loss.sum(-1).mean()
        return average / self._accumulation(mode)

    def _accumulation(self, mode: str) -> float:
        return self.current_gradient_accumulation_steps if mode == "train" else 1.0

    def _record(self, metrics: dict[str, Tensor], tokens: int, mode: str) -> None:
        """Metrics over the live tokens of all processes; one of them may have none, so names travel with the values."""
        values = torch.stack([value.float() for value in metrics.values()]).tolist() if metrics else []
        everyone = gather_object([(tokens, dict(zip(metrics, values, strict=True)))])
        for name in sorted({name for _, theirs in everyone for name in theirs}):
            found = [(count, theirs[name]) for count, theirs in everyone if name in theirs]
            if name.endswith("_max"):
                value = max(x for _, x in found)
            elif name == "tr/unconverged":
                value = sum(x for _, x in found)
            else:
                value = sum(count * x for count, x in found) / sum(count for count, _ in found)
            self._metrics[mode][name].append(value)

    def _mend_metrics(self, policy: Tensor, mode: str) -> None:
        """What TRL reported of a policy term that it thought was zero."""
        metrics = self._metrics[mode]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]  # TRL's clip never acts here; tr/active_frac says what does
        if metrics.get("policy_loss"):  # there with an entropy bonus, and before accumulation is divided out
            scale = 1.0 if self.loss_type == "dapo" else self._accumulation(mode)
            metrics["policy_loss"][-1] += (self.accelerator.gather(policy) * scale).nanmean().item()


def _plain_at_rest(objective: Objective) -> bool:
    """Whether at π = π_old the objective is known to be the plain policy gradient, whatever the support."""
    config: Any = objective.config  # one of the two's, once the function is known
    if objective.function is troll:
        return config.ratio_cap is None and config.tail == "bucket"
    return objective.function is dppo and config.ratio_cap is None


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
