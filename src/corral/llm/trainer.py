"""GRPOTrainer with a trust region: TRL samples, scores, accumulates and saves; corral computes the policy loss."""

import logging
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer

from corral.advantage import group_advantages
from corral.llm.config import CorralConfig
from corral.llm.policy_head import PolicyHead, SupportRequest
from corral.objective import make_objective
from corral.objective.config import NEEDS_SUPPORT
from corral.types import SparseDist, TokenBatch

logger = logging.getLogger(__name__)

SUPPORT_KEYS = ("corral_ids", "corral_logp", "corral_rest")
"""How a support rides along in TRL's buffer of rollouts, which shuffles and slices any tensor by its first axis."""


class CorralTrainer(GRPOTrainer):
    """Drop-in for GRPOTrainer. Four methods are overridden, each calls TRL's own, none is copied.

    TRL's loss is called with advantages of zero: what comes back is everything but the policy term (KL to a reference,
    entropy bonus, auxiliary loss, their metrics). The policy term is corral's, averaged as `loss_type` says.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "corral"]
    _name = "corral"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args") or next((a for a in args if isinstance(a, CorralConfig)), None)
        if not isinstance(config, CorralConfig):
            raise ValueError(f"CorralTrainer: `args` must be a CorralConfig; got {type(config).__name__}.")
        super().__init__(*args, **kwargs)
        self.objective, self.correction, self.anchor = (
            config.make_objective(),
            config.make_correction(),
            config.resolve_anchor(),
        )
        self.needs_support = self.objective.needs >= NEEDS_SUPPORT
        self.policy_head = PolicyHead(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        self._scored: tuple[Tensor, Tensor | None] | None = None
        self._rewards: Tensor | None = None
        self._announce()

    @property
    def can_differ(self) -> bool:
        """Whether the new policy can differ from the anchor: more updates than one per batch, or a sampler of its own."""
        return (
            self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0 or self.use_vllm
        )

    def _announce(self) -> None:
        if not self.can_differ:
            logger.warning(
                "One update per batch of rollouts: the new policy is the old one, every objective has the plain policy "
                "gradient and tr/active_frac stays 0. Raise steps_per_generation or num_iterations to make the trust region matter."
            )
        elif self.anchor == "rollout" and not self.use_vllm:
            logger.info("The sampler is the trainer's own model, so its recomputed log-probs are the rollout anchor.")

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rollouts, with the old policy's support from TRL's own old-policy pass."""
        if not (self.needs_support and self.can_differ):
            output = super()._generate_and_score_completions(inputs)
        else:
            request = SupportRequest(top_k=self.args.support_size, mass=self.args.support_mass)
            with self.policy_head.reporting(request) as dists:
                output = super()._generate_and_score_completions(inputs)
            # The old policy's pass comes first, in pieces; a reference that is this model without its adapter comes after.
            tokens = output["completion_ids"].shape
            pieces, rows = [], 0
            while rows < tokens[0]:
                pieces.append(dists[len(pieces)])
                rows += len(pieces[-1].rest)
            for key, field in zip(SUPPORT_KEYS, ("ids", "logp", "rest"), strict=True):
                whole = torch.cat([getattr(piece, field)[:, -tokens[1] :] for piece in pieces])
                output[key] = whole.int() if field == "ids" else whole
        if self.args.advantage is not None:
            output["advantages"] = self._own_advantages(len(output["completion_ids"]))
        return output

    def _own_advantages(self, local: int) -> Tensor:
        """Advantages of corral's, over all processes; 0 for completions that no reward function could score."""
        assert self._rewards is not None
        weights = self.reward_weights.to(self._rewards.device)
        scorable = ~self._rewards.isnan().all(-1)
        rewards = (self._rewards * weights).nansum(-1)
        size = self.num_generations if self.model.training else self.num_generations_eval
        group = torch.arange(len(rewards), device=rewards.device) // size
        advantages = torch.zeros_like(rewards)
        advantages[scorable] = group_advantages(rewards[scorable], group[scorable], self.args.advantage)
        start = self.accelerator.process_index * local
        return advantages[start : start + local]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scored = result[0], result[1]
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss without its policy term, plus corral's."""
        zeroed = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if self.beta == 0:
            zeroed.pop("old_per_token_logps", None)  # nothing reads the ratio, and 0 · inf would be NaN
        if "corral_ids" in inputs:
            with self.policy_head.reporting(SupportRequest(ids=inputs["corral_ids"].long())) as dists:
                loss = super()._compute_loss(model, zeroed)
            (dist,) = dists
        else:
            loss, dist = super()._compute_loss(model, zeroed), None
        mode = "train" if self.model.training else "eval"
        for name in [name for name in self._metrics[mode] if name.startswith("clip_ratio/")]:
            del self._metrics[mode][name]  # TRL's clip never acts here; tr/active_frac says what does
        return loss + self._policy_loss(inputs, dist, mode)

    def _policy_loss(self, inputs: dict[str, Any], dist: SparseDist | None, mode: str) -> Tensor:
        assert self._scored is not None
        logp_new, entropies = self._scored
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        if not bool(mask.any()):
            return (logp_new * 0.0).sum()  # every completion of this micro-batch is masked out
        batch = self._token_batch(inputs, logp_new, dist, mask)
        # Where TRL keeps no old policy, nothing differs from it, and every objective has the plain policy gradient.
        on_policy = self.needs_support and dist is None
        out = (make_objective("reinforce") if on_policy else self.objective)(batch)
        weighted = out.loss
        if self.top_entropy_quantile < 1.0:
            weighted = weighted * self.get_high_entropy_mask(entropies, mask.int(), 1 - self.top_entropy_quantile)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            weighted = weighted * inputs["importance_sampling_ratio"]
        if self.correction is not None:
            weighted = weighted * self.correction(batch)
        for name, value in out.metrics.items():
            self._metrics[mode][name].append(self.accelerator.gather(value.float().reshape(1)).mean().item())
        return self._reduce(torch.where(mask, weighted, 0.0), mask, inputs, mode)

    def _token_batch(self, inputs: dict[str, Any], logp_new: Tensor, dist: SparseDist | None, mask: Tensor) -> TokenBatch:
        rollout = inputs.get("sampling_per_token_logps")
        logp_old = inputs.get("old_per_token_logps")
        if self.anchor == "rollout" and self.use_vllm:
            if rollout is None:
                raise ValueError("CorralTrainer: anchor='rollout' needs the sampler's log-probs, and vLLM reported none.")
            logp_old = rollout
        if logp_old is None:
            logp_old = logp_new.detach()
        old = new = None
        if dist is not None:
            tokens = mask.shape[1]
            ids, logp, rest = (inputs[key] for key in SUPPORT_KEYS)
            new = SparseDist(ids.long(), dist.logp[:, -tokens:], dist.rest[:, -tokens:])
            old = SparseDist(new.ids, logp, rest)
        return TokenBatch(logp_new, logp_old, inputs["advantages"], mask, new, old, rollout)

    def _reduce(self, loss: Tensor, mask: Tensor, inputs: dict[str, Any], mode: str) -> Tensor:
        """TRL's averages, of a loss that is 0 where masked out."""
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        tokens = mask.sum(-1).clamp(min=1)
        if self.loss_type == "grpo":
            return (loss.sum(-1) / tokens).mean() / steps
        if self.loss_type == "bnpo":
            return loss.sum() / mask.sum().clamp(min=1) / steps
        if self.loss_type == "dr_grpo":
            return loss.sum() / (len(loss) * self.max_completion_length) / steps
        if self.loss_type == "luspo":
            return loss.sum(-1).mean() / steps
        # dapo: the count spans the batch of rollouts, so it is scaled to one optimizer step
        total = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":
            total = total * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return loss.sum() / total
