"""GRPOTrainer with a trust region: TRL samples, scores, accumulates and saves; corral computes the policy loss."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import trl
from accelerate.utils import DistributedType, is_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from trl import GRPOTrainer

from corral.advantage import Advantage, group_advantages
from corral.head.batch_loss import batch_loss
from corral.head.packed import LossTerms
from corral.head.policy_loss import TOLERANCE, PolicyLoss
from corral.objective import Objective, plain_objective
from corral.objective.check import FirstCall
from corral.objective.metrics import masked_max
from corral.tensors import SparseDist, TokenBatch
from corral.trl import packing
from corral.trl.api import FUSED, steps_per_batch
from corral.trl.callbacks import RunRecord, SelfCheck
from corral.trl.card import settings_section
from corral.trl.config import CorralConfig, Sampler
from corral.trl.ledger import Ledger, ratio_sums
from corral.trl.old_policy import (
    Behaviour,
    OldPolicy,
    RolloutSupport,
    check_server,
    fill_unscored,
    read_teacher,
    write_support,
)
from corral.trl.processes import ALONE, base_model, check_processes, is_alone_by_mistake, one_autocast, vocabulary_size
from corral.trl.scoring import PolicyHead, ScoringPass, SupportRequest
from corral.validate import RewardError

if TYPE_CHECKING:
    from corral.trl.deployed import DeployedCallback
    from corral.trl.lag import PastWeights
    from corral.trl.teacher import Teacher

logger = logging.getLogger(__name__)

KEPT = "corral_kept"
"""Key in TRL's rollout buffer for the tokens that top-p, top-k or min-p kept [B T K], −1 at padding."""
MOST_KEPT = 1024
"""Largest number of tokens that top-p, top-k or min-p sampling may keep at a position."""
_SCORING_INPUTS = tuple(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)[5:]
"""Names of optional inputs of TRL's scoring pass, such as images. A batch of rollouts uses the same names."""

TokenObserver = Callable[[dict[str, Any], TokenBatch, Objective], None]
"""Type of a function that is called for every micro-batch with TRL's inputs, the token batch and the objective."""


class CorralTrainer(GRPOTrainer):
    """Drop-in replacement for GRPOTrainer with the policy loss of a corral objective. All overridden methods call TRL's own.

    TRL's loss is called with advantages of zero: what comes back is everything but the policy term (KL to a reference,
    entropy bonus, auxiliary loss, their metrics). The policy term is corral's, averaged as `loss_type` says. Where there is no
    other term, TRL's scoring pass is all of its loss that runs. `ScoringPass` draws the whole exchange.
    """

    # What TRL and transformers leave untyped, or type as None until they have filled it in.
    args: CorralConfig
    model: nn.Module
    num_generations: int
    num_generations_eval: int
    _logs: dict[str, Any]
    _buffered_inputs: list[dict[str, Any]]  # type: ignore[assignment]  # TRL fills it in
    objective: Objective
    token_observer: TokenObserver | None = None
    deployed: "DeployedCallback | None" = None
    """Callback that measures and bounds the network's KL after every step. None without `deployed_bound`."""
    teacher: "Teacher | None" = None
    """Teacher of a distillation, or reference policy of a trust region. None if the objective reads no third policy."""
    behaviour: Behaviour | None = None
    """Recorder of the sampling log-probs in transformers' generation. None if the log-probs are not needed."""
    past: "PastWeights | None" = None
    """Stored weights of earlier steps, with which the rollouts are sampled. None without `rollout_lag`."""
    next_batches: tuple[list[Any], Any]
    """Dataset batches of the next update, as transformers' training loop fetched them, and the number of tokens in them."""
    _drawn_at: int | None = None
    """Value of `_step` at which the rollouts of the next update were sampled in advance. None if they were not."""
    _fitted = False
    """True once the number of tokens per pass has been fitted to the free memory."""
    _foresees_order = False
    """True while the old-policy pass packs sequences in the shuffled order in which later updates will read them."""
    _order: Tensor | None = None
    """Order in which the updates will read the sequences of the current rollouts."""
    _tag_names: ClassVar[list[str]] = ["trl", "corral"]  # type: ignore[misc]  # TRL leaves ClassVar out
    _name: str
    _paper: dict[str, str]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: CorralConfig | None = None,
        *more: Any,
        teacher: PreTrainedModel | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Accept the arguments of GRPOTrainer. For `objective="distill"`, also accept a `teacher`.

        The teacher is a model, its name, or None for a frozen copy of the model that reads the dataset's `teacher_prompt`.
        """
        args = CorralConfig() if args is None else args
        if not isinstance(args, CorralConfig):
            raise ValueError(
                f"CorralTrainer: `args` must be a CorralConfig; got {type(args).__name__}. It takes the same settings: from "
                f"corral.llm import CorralConfig."
            )
        if any("unsloth" in f"{cls.__module__}.{cls.__qualname__}".lower() for cls in CorralTrainer.__mro__):
            raise ValueError(
                "CorralTrainer: Unsloth has replaced GRPOTrainer, and corral's methods would never run. Use a process that "
                "does not import it."
            )
        args.in_corral_trainer = True  # type: ignore[misc]  # of this instance, until it is made
        try:
            super().__init__(model, reward_funcs, args, *more, **kwargs)
        finally:
            del args.in_corral_trainer
        base = base_model(self.model)
        sampler: Sampler = "vllm" if self.use_vllm else "rollout_func" if self.rollout_func is not None else "transformers"
        self.draws_itself = sampler == "transformers"
        args.check_sampler(sampler, base.generation_config)
        self.objective, self.correction, self.anchor = args.make_objective(), args.make_correction(), args.resolve_anchor()
        paper = self.objective.config.paper  # TRL's card names and cites it
        self._name = f"corral's {self.objective.name}" if paper is None else paper.name
        self._paper = {} if paper is None else {"title": paper.plain_title, "id": paper.arxiv, "citation": paper.bibtex}
        self.needs_support = args.needs_support
        self.union = args.support == "union" and self.needs_support and self.off_policy
        """True if the loss is computed on the union of the new and the old policy's most likely tokens."""
        bonus = vars(self).get("_entropy_bonus_enabled", False)  # not every release has one
        self.has_other_terms = self.beta != 0 or self.top_entropy_quantile < 1.0 or bonus
        """True if TRL's loss has other terms that read log-probs or entropy, such as a KL penalty."""
        self.skips_trl_loss = FUSED and not self.has_other_terms and not self.aux_loss_enabled
        """True if all other terms of TRL's loss are off, so that only its scoring pass needs to run."""
        self.separable = self.skips_trl_loss and self.objective.config.tokenwise
        """True if a micro-batch's loss is a plain sum over tokens, without other terms from TRL."""
        models: list[nn.Module] = [base] if self.ref_model is None else [base, self.ref_model]
        self.own_support = SupportRequest()
        """Support (most likely tokens) requested in the old-policy pass. Empty if the objective reads only sampled tokens."""
        if self.objective.config.support == "full":
            self.own_support = SupportRequest(top_k=sys.maxsize)
        elif self.needs_support:
            self.own_support = SupportRequest(top_k=args.support_size, mass=args.support_mass)
        taught = "dist_teacher" in self.objective.needs
        self.policy_head = PolicyHead(models, self.temperature, self.own_support, union=self.union or taught)
        self.tokens_per_pass = args.tokens_per_pass
        for model in models:
            self.pack(model)
        self.packs = base in self.policy_head.packed
        """True if the policy's batches are packed into rows without padding."""
        if taught:
            from corral.trl.teacher import Teacher  # few runs need it

            self.teacher = Teacher(self, teacher)
        elif teacher is not None:
            raise ValueError(f"CorralTrainer: objective={args.objective!r} reads no teacher. Use objective='distill', or none.")
        fill = self.objective.config.filled_tail
        if self.union and fill is None and not FUSED:
            raise ValueError(
                f"CorralTrainer: support='union' needs the old hidden states, which TRL {trl.__version__} does not hand over. "
                f"Install TRL 1.15 or newer, or use support='old'."
            )
        if self.anchor == "rollout" and self.use_vllm and self.accelerator.is_main_process:
            check_server(self)
        self.reports_logps = not self.draws_itself or args.records_logps
        sampled = self.needs_support and self.anchor == "rollout" and self.reports_logps
        self.replays = self.draws_itself and args.truncates
        if self.replays:
            self._check_replay(vocabulary_size(base))
        if self.draws_itself and (self.reports_logps or self.replays):
            self.behaviour = Behaviour(self.own_support if sampled else None, replays=self.replays)
        self.rollout_support = (self.behaviour or RolloutSupport(self)) if sampled else None
        # An evaluation may come in the middle of a batch, and has rollouts of its own.
        # With a teacher every token has a union: what it knows may be all of the student's tail.
        request = replace(self.own_support, mass=1.0 if taught else args.support_mass)
        self._old_policies = {mode: OldPolicy(request, fill) for mode in ("train", "eval")}
        if args.rollout_lag:
            from corral.trl.lag import PastWeights  # few runs need it

            self.past = PastWeights(self, args.rollout_lag)
        self._rewards: Tensor | None = None
        self.ledger = Ledger()
        self.first_call = FirstCall(over=not self.accelerator.is_main_process)
        self.self_check = SelfCheck(self)
        self.add_callback(self.self_check)
        self.add_callback(RunRecord.of(self))
        if args.deployed_bound is not None:
            from corral.trl.deployed import DeployedCallback  # few runs need it

            self.deployed = DeployedCallback(self)
            self.callback_handler.callbacks.insert(0, self.deployed)  # before a reference is synchronised, or saved
        if not self.accelerator.is_main_process:
            return
        if is_alone_by_mistake():
            logger.warning(ALONE)
        if args.other_reduction:
            logger.warning(args.other_reduction)
        if self.on_policy:
            logger.warning(
                "One update per batch of rollouts: the new policy is the old one, no trust region acts, and tr/active_frac "
                "stays 0. Raise num_iterations or steps_per_generation to make the region matter."
            )
        elif self.anchor == "rollout" and not self.reports_logps:
            logger.warning("The sampler is the trainer's own model, so its recomputed log-probs are the rollout anchor.")

    def _check_replay(self, vocabulary: int) -> None:
        """Refuse truncated sampling (top-p, top-k, min-p) in setups where training cannot use the kept tokens."""
        top_k = self.args.truncations["top_k"] or 0
        refused = {
            f"needs TRL 1.15 or newer; found {trl.__version__}": not FUSED,
            "is not supported with tools, whose answers are not sampled": bool(self.tools),
            "is not supported with `beta`, an entropy bonus or `top_entropy_quantile`, which read whole policies": (
                self.has_other_terms
            ),
            f"may keep up to {vocabulary:,} tokens at a position. Bound them by a top_k of at most {MOST_KEPT:,}, such as "
            f"512": (top_k or vocabulary) > MOST_KEPT and vocabulary > MOST_KEPT,
        }
        for why, applies in refused.items():
            if applies:
                raise ValueError(
                    f"CorralTrainer: sampling with top_p, top_k or min_p trains on the tokens that these kept, and {why}."
                )

    def pack(self, model: PreTrainedModel) -> None:
        """Score a model on packed rows from now on, or log the reason why its batches stay padded."""
        why, adapted = None, cast(Any, self.model)  # torch types what a module has as tensor or module
        if not FUSED:
            why = f"TRL {trl.__version__} computes all logits; TRL 1.15 packs"
        elif self.is_deepspeed_enabled:
            why = "DeepSpeed has its own ways with a model's layers"
        elif is_peft_model(self.model) and adapted.active_peft_config.is_prompt_learning:
            why = "a learned prompt stands before every sequence"
        # Weights that are loaded in parts are no model to try yet.
        if self.args.packed_batches == "auto" and packing.can_pack(model, why, verify=not self.is_fsdp_enabled):
            self.policy_head.packed.append(model)
            if self.args.compile_layers:
                packing.compile_layers(model)
        elif self.args.compile_layers:
            logger.warning("`compile_layers` is for packed batches, and these are padded: nothing is compiled.")

    @property
    def splits(self) -> bool:
        """True if micro-batches are cut into pieces of at most `tokens_per_pass` tokens."""
        return self.packs and self.tokens_per_pass is not None and self.separable

    @property
    def mode(self) -> Literal["train", "eval"]:
        """Name that TRL uses for the current phase: "train" or "eval"."""
        return "train" if self.model.training else "eval"

    @property
    def off_policy(self) -> bool:
        """True if several updates use one batch of rollouts, so that TRL stores the old log-probs."""
        return self.args.gradient_accumulation_steps % steps_per_batch(self.args) != 0

    @property
    def on_policy(self) -> bool:
        """True if the trust region is inactive: new and old policy are equal in every update, and there is no teacher."""
        other_sampler = (
            self.anchor == "rollout" and self.reports_logps and (self.behaviour is None or self.args.rollout_lag > 0)
        )
        return not self.off_policy and not other_sampler and self.teacher is None

    @property
    def old_policy(self) -> OldPolicy:
        """Old policy's data for the rollouts of the current phase, train or eval."""
        return self._old_policies[self.mode]

    def create_accelerator_and_postprocess(self) -> None:
        """Check the model and the parallelism before transformers wraps the model.

        Reads `use_cache`, which is overwritten later, and refuses parallelism that GRPO does not support.
        """
        if self.args.use_cache is None:
            self.args.use_cache = getattr(self.model.config, "use_cache", False)  # not every family has one
        super().create_accelerator_and_postprocess()
        check_processes(self)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Fetch the dataset batches of the next update with the parent's method, and store them for `draw_ahead`."""
        self.next_batches = super().get_batch_samples(*args, **kwargs)
        return self.next_batches

    def draw_ahead(self) -> None:
        """Sample and score the rollouts of the next update in advance. The next update then uses these rollouts."""
        self.model_wrapped.train()
        self._prepare_inputs(self.next_batches[0][0])
        self._drawn_at = self._step

    def _prepare_inputs(self, batch: Any) -> Any:
        """Prepare a micro-batch as TRL does. Rollouts that were sampled in advance are not sampled again."""
        if self.model.training and self._step == self._drawn_at:
            return self._buffered_inputs[self._step % len(self._buffered_inputs)]
        inputs = super()._prepare_inputs(batch)
        if self.model.training and packing.ORDER in inputs:
            self._buffered_inputs = packing.in_order(self._buffered_inputs)
            return self._buffered_inputs[self._step % len(self._buffered_inputs)]
        return inputs

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample completions with TRL's method. Under autocast, weights are rounded once instead of at every token."""
        past = self.past if self.model.training else None  # an evaluation is of the present weights
        with nullcontext() if past is None else past.in_use(), one_autocast(self):
            generated = super()._generate(*args, **kwargs)
        if self.packs and self.model.training and not self._fitted:
            self._fitted = True
            self._fit_memory(max(len(a) + len(b) for a, b in zip(generated[0], generated[1], strict=True)))
        if self.deployed is not None:
            self.deployed.probe.tool_mask = generated[2]
        return generated

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Sample completions with TRL's method. If needed, also return the sampling log-probs of transformers' generation."""
        if self.behaviour is None:
            return super()._generate_single_turn(*args, **kwargs)
        with self.behaviour.record(base_model(self.accelerator.unwrap_model(self.model))):
            tokens, _ = super()._generate_single_turn(*args, **kwargs)
        logps = self.behaviour.logps(tokens)
        return tokens, logps if self.reports_logps else None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute rewards with TRL's method, and store them. Raises a RewardError if no completion has a reward."""
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        if bool(self._rewards.isnan().all()):
            raise RewardError(
                f"no reward function gave a number for any of {len(self._rewards)} completions: "
                f"{', '.join(self.reward_func_names)} returned None for each. Return a finite number where there is something "
                f"to judge."
            )
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of rollouts with TRL's method, and add corral's data: old policy, advantages and teacher log-probs."""
        if self.use_vllm and self.vllm_generation.logprobs and self.rollout_support is None:
            raise ValueError(
                f"CorralTrainer: vllm_generation.logprobs is {self.vllm_generation.logprobs}. vLLM then ranks tokens by "
                f"likelihood, and TRL takes the first for the sampled one. Leave it at 0."
            )
        keeps = self.needs_support and self.off_policy and self.rollout_support is None
        hidden = self.teacher is not None or (self.union and self.old_policy.fill is None)
        scoring = ScoringPass(support=self.own_support, keep_hidden=hidden)
        if self.replays:
            scoring = ScoringPass(replay=True)
        expected = scoring if keeps or self.replays else ScoringPass()
        probe = None if self.deployed is None or self.mode == "eval" else self.deployed.probe
        if probe is not None:
            probe.watch(expected)
        self._foresees_order = self.packs and self.off_policy and self.mode == "train"
        with self.policy_head.expect(expected):
            output = super()._generate_and_score_completions(inputs)
        if self._order is not None:
            output[packing.ORDER] = self._order.argsort()
        self._foresees_order, self._order = False, None
        if probe is not None:
            probe.add(output, expected)
        if self.teacher is not None:
            self.teacher.store(inputs, output, scoring)
        elif keeps:
            dist = scoring.dist()
            if dist is None or "old_per_token_logps" not in output:
                raise RuntimeError(
                    "CorralTrainer: TRL made no old-policy pass, though updates follow. Has it changed? Please report it."
                )
            if self.replays:  # as wide as the kept tokens: sums over other widths would round differently
                write_support(output, dist, whole=True)
            else:
                self.old_policy.store(output, scoring)
        elif self.rollout_support is not None:
            self.rollout_support.store(output)
        if self.replays:
            assert self.behaviour is not None
            output[KEPT] = self.behaviour.dist(output["completion_ids"].shape[1]).ids.int()
        if self.past is not None and self.model.training:
            output["corral_sampled_at"] = torch.full_like(output["completion_ids"][:, 0], self.past.sampled_at)
        if self.args.advantage is not None:
            output["advantages"] = self._own_advantages(len(output["completion_ids"]))
        return output

    def _own_advantages(self, local: int) -> Tensor:
        """Compute corral's advantages over all processes. Completions without another scored completion in the group get 0."""
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
        return advantages[self.accelerator.process_index * local :][:local]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Score completions under any policy as TRL does, but with corral's LM-head function in place of TRL's.

        `batch_size` sequences at a time, and where they are packed in the order of the updates that follow.
        """
        score = super()._get_per_token_logps_and_entropies
        if self._foresees_order and self._order is None and batch_size is not None:
            # The old pass packs the same sequences into a row as the updates will, so that their log-probs are the same bits.
            with torch.random.fork_rng(devices=[]):  # TRL will draw this permutation to shuffle its buffer
                self._order = torch.randperm(len(input_ids)).to(input_ids.device)
        order, size = self._order if batch_size is not None else None, batch_size or len(input_ids)
        with self.policy_head.run(attention_mask[:, -logits_to_keep:].bool()) as scoring:
            if scoring.replay and scoring.ids is None:  # the old pass, right after the completions were drawn
                assert self.behaviour is not None
                scoring.ids = self.behaviour.dist(logits_to_keep).ids
            if order is not None:
                scoring.order, input_ids, attention_mask = order, input_ids[order], attention_mask[order]
            if batch_size is None or not self.splits:  # a piece of an update is not cut again
                result = score(model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs)
            else:
                parts = []
                for start in range(0, len(input_ids), size):
                    ids, seen = input_ids[start : start + size], attention_mask[start : start + size]
                    for rows in self._pieces(seen):
                        parts.append(score(model, ids[rows], seen[rows], logits_to_keep, None, *args, **kwargs))
                result = (*(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)),)
            if order is not None:
                result = tuple(None if x is None else x[order.argsort()] for x in result)
        scoring.logp, scoring.entropy = result[:2]
        return result

    def _fit_memory(self, longest: int) -> None:
        """Choose tokens per pass and gradient checkpointing by the free memory, unless the user's settings fix them."""
        args, base, device = self.args, base_model(self.model), self.accelerator.device
        cuts = args.tokens_per_pass is None and device.type == "cuda"
        if not (cuts or args.chooses_checkpointing) or self.is_fsdp_enabled:
            return
        checkpointed = base.is_gradient_checkpointing
        if checkpointed:
            base.gradient_checkpointing_disable()

        def score(tokens: int) -> Any:
            ids = (torch.arange(tokens, device=device) % base.config.vocab_size).view(2, -1)
            return self._get_per_token_logps_and_entropies(self.model, ids, torch.ones_like(ids), ids.shape[1] - 1)

        with self.policy_head.expect(ScoringPass()), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            kept = packing.bytes_per_token(score)
        trained = sum(x.numel() * x.element_size() for x in base.parameters() if x.requires_grad)
        # Gradients, the optimizer's two moments, and the weights before a step that is measured.
        room = packing.SHARE * (packing.free_bytes(device) - (3 + (self.deployed is not None)) * trained)
        room = float(self.accelerator.gather(torch.tensor([room], device=device)).min())  # all processes choose alike
        text, whole = base.config.get_text_config(), args.per_device_train_batch_size * longest
        needed = max(packing.LEAST, 2 * longest) if self.separable else whole
        layer, layers = 4.0 * text.hidden_size, text.num_hidden_layers
        tokens, checkpoints = packing.fit_tokens(max(room, 1.0), kept, layer, layers, longest=longest, needed=needed)
        if checkpointed and (checkpoints or not args.chooses_checkpointing):
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        if cuts:
            self.tokens_per_pass = tokens
        if self.accelerator.is_main_process:
            logger.info(
                "A token of an update keeps %.3g MiB, and %.3g GiB are there for it: passes of up to %s tokens, with%s "
                "gradient checkpointing.", kept / 2**20, room / 2**30, self.tokens_per_pass or f"{whole:,}",
                "" if base.is_gradient_checkpointing else "out",
            )  # fmt: skip

    def _pieces(self, seen: Tensor) -> list[slice]:
        """Group the sequences of a packed micro-batch into pieces of at most `tokens_per_pass` tokens.

        All processes have equally many pieces: a forward pass of a sharded model takes all of them.
        """
        if not self.splits:
            return [slice(0, len(seen))]
        pieces = packing.cut(seen.sum(-1).tolist(), self.tokens_per_pass)
        if self.accelerator.num_processes > 1:
            count = torch.tensor([len(pieces)], device=self.accelerator.device)
            pieces = packing.halve(pieces, int(self.accelerator.gather(count).max()))
        return pieces

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute a micro-batch's loss, in pieces of at most `tokens_per_pass` tokens to save memory.

        Every piece but the last takes its backward pass at once, so that memory holds one piece. The sum has the gradient of
        the last piece alone, which is all that is left to take.
        """
        mask = inputs["completion_mask"].bool()
        mask = mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
        # Weight of every unmasked token's loss in TRL's reduction: one number, or one per sequence [B 1].
        weights: float | Tensor
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1.0
        if self.loss_type == "dapo":
            # The count spans the batch of rollouts, so it is scaled to one optimizer step.
            steps = self.args.steps_per_generation if self.model.training else 1.0
            assert steps is not None  # TRL has filled it in
            weights = steps * self.accelerator.num_processes / accumulation / inputs["num_items_in_batch"].clamp(min=1.0)
        elif self.loss_type == "grpo":
            weights = 1 / (len(mask) * accumulation) / mask.sum(-1, keepdim=True).clamp(min=1)
        elif self.loss_type == "bnpo":
            weights = 1 / accumulation / mask.sum().clamp(min=1)
        else:  # dr_grpo or luspo
            length = self.max_completion_length if self.loss_type == "dr_grpo" else 1
            assert length is not None  # CorralConfig refuses it
            weights = 1 / (len(mask) * length * accumulation)
        pieces = self._pieces(torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1))
        if len(pieces) == 1:
            return self._piece_loss(model, inputs, mask, weights)
        total = torch.zeros((), device=mask.device)
        for rows in pieces:
            some = {
                name: x[rows] if isinstance(x, list) or (isinstance(x, Tensor) and x.ndim) else x for name, x in inputs.items()
            }
            own, more = weights[rows] if isinstance(weights, Tensor) and weights.ndim else weights, rows is not pieces[-1]
            # The last piece's backward pass sends the sum of the gradients.
            with model.no_sync() if more and isinstance(model, DistributedDataParallel) else nullcontext():
                loss = self._piece_loss(model, some, mask[rows], own, more=more)
                if more and loss.requires_grad:
                    self.accelerator.backward(loss)
            total = total + (loss.detach() if more else loss)
        return total

    def _piece_loss(
        self, model: Any, inputs: dict[str, Any], mask: Tensor, weights: float | Tensor, *, more: bool = False
    ) -> Tensor:
        """Compute the loss of a micro-batch, or of a piece of a micro-batch, with corral's policy loss in place of TRL's.

            L = Σ w_t (c_t · policy_t + regression_t)    w: TRL's reduction · c: sampler correction, importance ratio, quantile

        Where the objective reads tokens one by one and nothing else reads the head's results, the head computes loss and
        gradient together. Otherwise it reports log-probs and a support, and autograd goes back through them.
        """
        # What the scoring pass has to find: the old policy's support, its own, or the whole loss.
        ids = inputs[KEPT] if self.replays else inputs.get("corral_ids")
        brings = not self.replays and (self.union if ids is not None else not self.objective.plain_on_policy)
        support = self.own_support if brings else SupportRequest()
        terms = self._fused_terms(inputs, mask, weights, support)
        scoring = ScoringPass(support=support, ids=ids, replay=self.replays, loss=terms, tolerance=TOLERANCE)
        other = None
        with self.policy_head.expect(scoring):
            if self.skips_trl_loss:
                self._score(model, inputs)
            else:
                rest = inputs | {"advantages": torch.zeros_like(inputs["advantages"])}
                if self.beta == 0 or not self.args.use_bias_correction_kl:
                    rest.pop("old_per_token_logps", None)  # nothing reads the ratio, and 0 · inf would be NaN
                other = super()._compute_loss(model, rest)

        # The policy term, by the head or from its log-probs and support.
        batch, found, entropy = None, dict[str, Tensor](), None
        out, packed = scoring.results[0] if scoring.results else (None, None)
        if isinstance(out, PolicyLoss):
            assert packed is not None
            policy, found = out.loss, out.metrics
            tokens = int(mask.sum()) if "tool_mask" in inputs else packed.count
            batch = self._token_batch(inputs, mask, packed.unpack(out.logp[0]))
            observed, objective = batch, self._objective_for(batch)
            if out.dist is not None and self.token_observer is not None:
                observed = replace(batch, dist_new=packed.unpack_dist(out.dist.map(lambda x: x[0])))
            if out.entropy is not None and self.skips_trl_loss:
                entropy = out.entropy.sum() / max(tokens, 1)  # 0 at masked tokens
        else:
            assert scoring.logp is not None
            tokens, chosen, loss = int(mask.sum()), None, scoring.logp * 0.0
            if self.top_entropy_quantile < 1.0:  # this talks to the other processes, which may have unmasked tokens
                assert scoring.entropy is not None
                chosen = self.get_high_entropy_mask(scoring.entropy, mask.int(), 1 - self.top_entropy_quantile)
            if tokens:  # else every completion of this micro-batch is masked out
                observed = batch = self._token_batch(inputs, mask, scoring.logp, scoring.dist() if self.needs_support else None)
                objective, factors = self._objective_for(batch), self._policy_weights(inputs, batch, chosen)
                # A kernel knows the sum of policy term and regression alone.
                apart = factors is not None and objective.config.regresses
                result = objective(batch) if apart else batch_loss(objective, batch)
                loss, found = result.loss if factors is None else result.weigh(factors), result.metrics
                if scoring.entropy is not None and self.skips_trl_loss:
                    entropy = scoring.entropy.detach()[mask].mean()
            alike = not isinstance(weights, Tensor) or weights.ndim == 0
            policy = loss.sum() * weights if alike else torch.where(mask, loss * weights, 0.0).sum()

        metrics: dict[str, Tensor] = {}
        if batch is not None:
            if self.token_observer is not None:
                self.token_observer(inputs, observed, objective)
            self.first_call.look(self.objective.name, batch)
            metrics = {**found, **ratio_sums(batch)}
            done, every = self._step, self.args.gradient_accumulation_steps
            if self.off_policy and done // every == (done - done % steps_per_batch(self.args)) // every:
                # Before the first update on the rollouts every ratio to the old policy should be 1.
                metrics["tr/drift_max"] = masked_max((batch.logp_new - batch.logp_old).abs(), mask)
            if self.past is not None and "corral_sampled_at" in inputs:
                metrics["tr/staleness"] = self.past.step - inputs["corral_sampled_at"].float().mean()
            if entropy is not None:
                metrics["entropy"] = entropy  # TRL's, which would have been next
        reports = [out.report for out, _ in scoring.results if out.report is not None and torch.is_grad_enabled()]
        self.ledger.add(self.mode, tokens, metrics, reports, more=more)

        if other is not None:  # with the metrics that TRL computed from its zeroed policy loss
            logged = self._metrics[self.mode]
            for name in [name for name in logged if name.startswith("clip_ratio/")]:
                del logged[name]  # TRL's clip never acts here; tr/active_frac says what does
            if logged.get("policy_loss"):  # there with an entropy bonus, and before accumulation is divided out
                divided = self.loss_type != "dapo" and self.model.training
                scale = self.current_gradient_accumulation_steps if divided else 1.0
                logged["policy_loss"][-1] += (self.accelerator.gather(policy.detach()) * scale).nanmean().item()
            return other + policy
        if self.accelerator.distributed_type == DistributedType.NO:
            return policy
        assert scoring.logp is not None
        return policy + 0.0 * scoring.logp.sum()  # the hooks of distributed training sit on what the model returned

    def _score(self, model: Any, inputs: dict[str, Any]) -> None:
        """Run only the scoring pass with which TRL's loss begins."""
        ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        others = {name: inputs[name] for name in _SCORING_INPUTS if name in inputs}
        tokens = inputs["completion_ids"].size(1)
        self._get_per_token_logps_and_entropies(model, ids, mask, tokens, compute_entropy=True, **others)

    def _fused_terms(
        self, inputs: dict[str, Any], mask: Tensor, weights: float | Tensor, support: SupportRequest
    ) -> LossTerms | None:
        """Return inputs for an LM head that computes loss and gradient together, or None if the loss needs log-probs first.

        Other terms read the head's results too, and without an old pass a correction, and the anchor of a token that the
        sampler could not score, are of log-probs that the head has yet to find.
        """
        if not FUSED or self.has_other_terms or self.replays:
            return None
        union = None
        if self.union and "corral_ids" in inputs and support.top_k is not None and self.token_observer is None:
            union = self.old_policy.union_support(inputs)
        if support.top_k is not None and union is None:
            return None
        off_policy, reported = "old_per_token_logps" in inputs, inputs.get("sampling_per_token_logps")
        batch = self._token_batch(inputs, mask, mask.new_zeros(mask.shape, dtype=torch.float32))
        objective = self._objective_for(batch)
        if not objective.config.tokenwise or (self.correction is not None and not off_policy):
            return None
        if self.anchor == "rollout" and reported is not None and not off_policy and bool((reported.isnan() & mask).any()):
            return None
        on_policy = not off_policy and batch.logp_rollout is not batch.logp_old
        each = torch.where(mask, torch.as_tensor(weights, dtype=torch.float32, device=mask.device), 0.0)
        return LossTerms(objective, batch, each, self._policy_weights(inputs, batch), on_policy, union)

    def _objective_for(self, batch: TokenBatch) -> Objective:
        """Return the trainer's objective. If a batch lacks the required top-k tokens, return the plain policy gradient."""
        return plain_objective() if self.needs_support and batch.dist_old is None else self.objective

    def _policy_weights(self, inputs: dict[str, Any], batch: TokenBatch, chosen: Tensor | None = None) -> Tensor | None:
        """Return the weight of each token's policy loss [B T], 0 at masked tokens. None means weight 1 everywhere.

        A sampler correction, TRL's importance ratio, and whether a token is among the most uncertain. A regression is no
        expectation over the sampler, and pulls every token back.
        """
        correction = None if self.correction is None else self.correction(batch)
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        ratio = inputs["importance_sampling_ratio"] if corrects else None  # of the old policy to vLLM's, [B T] or [B 1]
        factors = [x for x in (correction, ratio, chosen) if x is not None]
        return torch.where(batch.mask, functools.reduce(torch.mul, factors).float(), 0.0) if factors else None

    def _token_batch(self, inputs: dict[str, Any], mask: Tensor, logp_new: Tensor, new: SparseDist | None = None) -> TokenBatch:
        """Collect the objective's inputs from TRL's batch, the new log-probs and the new policy's top-k distribution."""
        logp_old, old = inputs.get("old_per_token_logps", logp_new.detach()), OldPolicy.support(inputs)
        if old is not None and self.rollout_support is not None:
            old = fill_unscored(old, logp_old)
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
        return TokenBatch(logp_new, logp_old, inputs["advantages"], mask, new, old, rollout, read_teacher(inputs, old))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a micro-batch as TRL does, unless its step has ended already. Collect metrics after each update."""
        if self.deployed is not None and self.deployed.spent:
            self._step += 1  # as TRL counts micro-batches; without a gradient, the optimizer's step changes nothing
            return torch.zeros((), device=self.args.device)
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.flush_metrics()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with corral's metrics since the previous log. The run's last log has the final KL measurement."""
        if self.deployed is not None and "train_runtime" in logs:
            self.deployed.finish()
        self.flush_metrics()
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. If an exception ends the run, the network's KL is still bounded."""
        if self.past is not None:
            self.past.weights.clear()
        try:
            return super().train(*args, **kwargs)
        except BaseException:  # Ctrl-C among them
            if self.deployed is not None:
                self.deployed.abandon()
            raise

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save as transformers does. If the run ends here, the network's KL is bounded first."""
        if self.deployed is not None and self.control.should_training_stop:
            self.deployed.finish()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint as TRL does. If the run was stopped, the network's KL is bounded first."""
        if self.deployed is not None:
            self.deployed.before_save()
        super()._save_checkpoint(*args, **kwargs)
        if self.past is not None and self.args.should_save and not self.args.save_only_model:
            self.past.save(Path(self._get_output_dir(None), f"checkpoint-{self.state.global_step}"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint as transformers does. With `rollout_lag`, also load the stored weights of earlier steps."""
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        if self.past is not None:
            self.past.load(Path(resume_from_checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, and append the objective, its citation and the settings of the run."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(cast(str, self.args.output_dir), "README.md")
            about = RunRecord.of(self).about
            settings = about["settings"] | {"reduction": about["reduction"]["name"], "corral": about["versions"]["corral"]}
            beside = card.with_name(".README.part")
            section = settings_section(settings.pop("objective"), settings)
            # TRL's template links to the model of that name on the hub even if the model has none there.
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", "a local model").rstrip()
            beside.write_text(f"{text}\n\n{section}", encoding="utf-8")
            beside.replace(card)

    def flush_metrics(self) -> None:
        """Move the collected metrics into TRL's `_metrics`, combined over all processes. Every process must call this."""
        for mode, name, value in self.ledger.flush():
            self._metrics[mode][name].append(value)
