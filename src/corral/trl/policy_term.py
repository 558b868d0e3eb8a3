"""The policy term of the loss, averaged as `loss_type` says, and its metrics summed over micro-batches."""

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from corral.head.batch_loss import batch_loss
from corral.head.packed import LossTerms, Packing
from corral.head.policy_loss import TOLERANCE, PolicyLoss
from corral.head.rows import AsyncCopy
from corral.objective import Objective, plain_objective
from corral.objective.metrics import masked_max
from corral.objective.ratio import clamp_log_ratio, log_ratio
from corral.tensors import SparseDist, TokenBatch, metric_kind
from corral.trl.api import FUSED
from corral.trl.old_policy import fill_unscored
from corral.trl.scoring import ScoringPass, SupportRequest
from corral.trl.teacher import Teacher

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer


class TermOutput(NamedTuple):
    """The policy term of a micro-batch, and what is reported of it."""

    loss: Float[Tensor, ""]
    tokens: int
    """Number of unmasked tokens."""
    metrics: dict[str, Tensor]


class PolicyTerm:
    """The policy term of one micro-batch: which scoring pass it needs, and the loss that it makes of the results.

        L = Σ w_t (c_t · policy_t + regression_t)        w: TRL's reduction · c: sampler correction, importance ratio, quantile

    Where the objective reads tokens one by one and nothing else reads the head's results, the head computes loss and gradient
    together. Otherwise it reports log-probs and a support, and autograd goes back through them.
    """

    def __init__(self, trainer: "CorralTrainer", inputs: dict[str, Any]) -> None:
        self.trainer, self.inputs = trainer, inputs
        mask = inputs["completion_mask"].bool()
        self.mask = mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
        self.weights = _reduction_weights(trainer, inputs, self.mask)

    def request(self) -> ScoringPass:
        """The pass that the term needs: the old policy's support, or on-policy its own, or a loss for the head to compute."""
        trainer, support = self.trainer, SupportRequest()
        if "corral_ids" in self.inputs:
            support = replace(trainer.own_support() if trainer.union else support, ids=self.inputs["corral_ids"])
        elif not trainer.objective.plain_on_policy:
            support = trainer.own_support()
        return ScoringPass(support=support, loss=self._loss_terms(support), tolerance=TOLERANCE)

    def _loss_terms(self, support: SupportRequest) -> LossTerms | None:
        """The loss for the head to compute; None if it needs more than the head's results for each token alone.

        Other terms read the head's results too, and without an old pass a correction, and the anchor of a token that the
        sampler could not score, are of log-probs that the head has yet to find.
        """
        trainer, inputs, mask = self.trainer, self.inputs, self.mask
        if not FUSED or trainer.has_other_terms:
            return None
        union = None
        if trainer.union and support.ids is not None and support.top_k is not None and trainer.token_observer is None:
            union = trainer.old_policy.union_support(inputs, support.top_k, support.mass)
        if support.top_k is not None and union is None:
            return None
        off_policy, reported = "old_per_token_logps" in inputs, inputs.get("sampling_per_token_logps")
        batch = self._batch(mask.new_zeros(mask.shape, dtype=torch.float32), None)
        objective = self._objective(batch)
        if not objective.config.tokenwise or (trainer.correction is not None and not off_policy):
            return None
        if trainer.anchor == "rollout" and reported is not None and not off_policy and bool((reported.isnan() & mask).any()):
            return None
        on_policy = not off_policy and batch.logp_rollout is not batch.logp_old
        weights = torch.where(mask, torch.as_tensor(self.weights, dtype=torch.float32, device=mask.device), 0.0)
        return LossTerms(objective, batch, weights, self._policy_weights(batch, None), on_policy, union)

    def loss(self, scoring: ScoringPass) -> TermOutput:
        """The term, once the pass has been scored."""
        first = scoring.results[0] if scoring.results else None
        if first is not None and isinstance(first.output, PolicyLoss):
            return self._from_head(first.output, first.packing)
        return self._from_policies(scoring)

    def _from_head(self, out: PolicyLoss, packing: Packing) -> TermOutput:
        """The loss that the head computed."""
        tokens = int(self.mask.sum()) if "tool_mask" in self.inputs else packing.count
        batch = self._batch(packing.unpack(out.logp[0]), None)
        if self.trainer.token_observer is not None:
            dist = None if out.dist is None else packing.unpack_dist(out.dist.map(lambda x: x[0]))
            self.trainer.token_observer(self.inputs, replace(batch, dist_new=dist), self._objective(batch))
        metrics = self._metrics(out.metrics, batch)
        if self.trainer.skips_trl_loss and out.entropy is not None:
            metrics["entropy"] = out.entropy.sum() / max(tokens, 1)  # TRL's, which would have been next; 0 at masked tokens
        return TermOutput(out.loss, tokens, metrics)

    def _from_policies(self, scoring: ScoringPass) -> TermOutput:
        """The objective's loss of the log-probs and the support that the head reported."""
        trainer, mask = self.trainer, self.mask
        assert scoring.logp is not None
        tokens, chosen = int(mask.sum()), None
        if trainer.top_entropy_quantile < 1.0:  # this talks to the other processes, which may have unmasked tokens
            assert scoring.entropy is not None
            chosen = trainer.get_high_entropy_mask(scoring.entropy, mask.int(), 1 - trainer.top_entropy_quantile)
        loss, metrics = scoring.logp * 0.0, dict[str, Tensor]()
        if tokens:  # else every completion of this micro-batch is masked out
            batch = self._batch(scoring.logp, scoring.dist())
            objective, weights = self._objective(batch), self._policy_weights(batch, chosen)
            # A kernel knows the sum of policy term and regression alone.
            apart = weights is not None and objective.config.regresses
            out = objective(batch) if apart else batch_loss(objective, batch)
            if trainer.token_observer is not None:
                trainer.token_observer(self.inputs, batch, objective)
            loss, metrics = out.loss if weights is None else out.weigh(weights), self._metrics(out.metrics, batch)
            if trainer.skips_trl_loss and scoring.entropy is not None:
                metrics["entropy"] = scoring.entropy.detach()[mask].mean()  # TRL's, which would have been next
        alike = not isinstance(self.weights, Tensor) or self.weights.ndim == 0
        total = loss.sum() * self.weights if alike else torch.where(mask, loss * self.weights, 0.0).sum()
        return TermOutput(total, tokens, metrics)

    def _objective(self, batch: TokenBatch) -> Objective:
        """The trainer's; on-policy, where a support changes nothing and none was made, the same gradient without one."""
        trainer = self.trainer
        return plain_objective() if trainer.needs_support and batch.dist_old is None else trainer.objective

    def _metrics(self, found: dict[str, Tensor], batch: TokenBatch) -> dict[str, Tensor]:
        """The objective's metrics, terms of `tr/ess`, and before any update what should be 0; checks a run's first batch."""
        self.trainer.first_call.look(self.trainer.objective.name, batch)
        metrics = {**found, **ratio_sums(batch)}
        if self.trainer.before_any_update:
            metrics["tr/drift_max"] = masked_max((batch.logp_new - batch.logp_old).abs(), self.mask)
        return metrics

    def _policy_weights(self, batch: TokenBatch, chosen: Tensor | None) -> Tensor | None:
        """c: what the policy term of each token [B T] is multiplied with, 0 where masked out; None for 1 everywhere.

        A sampler correction, TRL's importance ratio, and whether a token is among the most uncertain. A regression is no
        expectation over the sampler, and pulls every token back.
        """
        trainer = self.trainer
        correction = None if trainer.correction is None else trainer.correction(batch)
        corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        ratio = self.inputs["importance_sampling_ratio"] if corrects else None  # of the old policy to vLLM's, [B T] or [B 1]
        factors = [x for x in (correction, ratio, chosen) if x is not None]
        return torch.where(batch.mask, functools.reduce(torch.mul, factors).float(), 0.0) if factors else None

    def _batch(self, logp_new: Tensor, new: SparseDist | None) -> TokenBatch:
        """What the objective reads, with the new policy on a support where the pass has one."""
        trainer, inputs = self.trainer, self.inputs
        logp_old, old = inputs.get("old_per_token_logps", logp_new.detach()), trainer.old_policy.support(inputs)
        if old is not None and trainer.rollout_support is not None:
            old = fill_unscored(old, logp_old)
        if new is not None and old is None:
            old = new.detach()
        elif new is not None and old is not None:
            new, old = trainer.old_policy.union(inputs, new, self.mask) if trainer.union else (new, replace(old, ids=new.ids))
        # What is compared with one another comes from one head, in one precision.
        logp_old = logp_old if old is None else old.logp[..., 0]
        logp_new = logp_new if new is None else new.logp[..., 0]
        rollout = inputs.get("sampling_per_token_logps")
        if rollout is not None:  # NaN is vLLM's for a token it could not score; like TRL, take no mismatch there
            rollout = torch.where(rollout.isnan(), logp_old, rollout)
        if trainer.anchor == "rollout" and trainer.reports_logps:
            if rollout is None:
                raise ValueError(
                    "CorralTrainer: anchor='rollout' needs the sampler's log-probs, and it reported none. Have the rollout "
                    "function return `logprobs`, or use anchor='old'."
                )
            logp_old = rollout
        teacher = Teacher.support(inputs, old)
        return TokenBatch(logp_new, logp_old, inputs["advantages"], self.mask, new, old, rollout, teacher)


def _reduction_weights(trainer: "CorralTrainer", inputs: dict[str, Any], mask: Tensor) -> float | Tensor:
    """w: what TRL multiplies every unmasked token's loss with before it adds them up: a number, or [B 1], or [B T]."""
    accumulation = trainer.accumulation
    if trainer.loss_type == "dapo":
        # The count spans the batch of rollouts, so it is scaled to one optimizer step.
        steps = trainer.args.steps_per_generation if trainer.model.training else 1.0
        assert steps is not None  # TRL has filled it in
        return steps * trainer.accelerator.num_processes / accumulation / inputs["num_items_in_batch"].clamp(min=1.0)
    if trainer.loss_type == "grpo":
        return 1 / (len(mask) * accumulation) / mask.sum(-1, keepdim=True).clamp(min=1)
    if trainer.loss_type == "bnpo":
        return 1 / accumulation / mask.sum().clamp(min=1)
    if trainer.loss_type == "dr_grpo":
        assert trainer.max_completion_length is not None  # CorralConfig refuses it
        return 1 / (len(mask) * trainer.max_completion_length * accumulation)
    return 1 / (len(mask) * accumulation)  # luspo


_RATIO_SUMS = ("Σρ", "Σρ²")
"""Terms of `tr/ess`, which is of all micro-batches of an update together."""


@torch.no_grad()
def ratio_sums(batch: TokenBatch) -> dict[str, Tensor]:
    """Σρ and Σρ² over the unmasked tokens, for the ledger: effective sample sizes of micro-batches cannot be averaged."""
    rho = torch.where(batch.mask, clamp_log_ratio(log_ratio(batch)).exp(), 0.0)
    return dict(zip(_RATIO_SUMS, (rho.sum(), rho.square().sum()), strict=True))


_Line = tuple[str, int, dict[str, float]]
"""Mode (train or eval), number of unmasked tokens, and metrics of them."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """Metrics of one micro-batch, still being copied to the host."""

    mode: str
    tokens: int
    names: list[str]
    values: AsyncCopy | None
    backward: AsyncCopy | None
    """Reports of earlier backward passes [n 2]: share of dense rows and the largest dropped share of a gradient."""

    def line(self) -> _Line:
        """The numbers, once the copy is done."""
        found = dict(zip(self.names, self.values.wait(), strict=True)) if self.values is not None else {}
        reports = [] if self.backward is None else self.backward.wait()
        if over := [report for report in reports if not math.isnan(report[0])]:  # a pass may have had no backward
            dense, dropped = zip(*over, strict=True)
            found |= {"head/dense_share": sum(dense) / len(dense), "head/dropped_max": max(dropped)}
        return self.mode, self.tokens, found


class Ledger:
    """Metrics of the micro-batches since the last `flush`."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._reports: list[Tensor] = []

    def add(self, mode: str, tokens: int, metrics: dict[str, Tensor], reports: list[Tensor]) -> None:
        """Add an entry, for every micro-batch and on every process, even without metrics.

        `reports` [2] each are written by the backward pass that follows, and go into the next entry.
        """
        backward = AsyncCopy(torch.stack(self._reports)) if self._reports else None
        self._reports = reports
        values = AsyncCopy(torch.stack([value.detach().float() for value in metrics.values()])) if metrics else None
        self._entries.append(_Entry(mode, tokens, list(metrics), values, backward))

    def flush(self) -> list[tuple[str, str, float]]:
        """(mode, name, value) of every entry, over the unmasked tokens of all processes; `tr/ess` once for all entries."""
        entries, self._entries = self._entries, []
        everyone: list[list[_Line]] = gather_object([[entry.line() for entry in entries]]) if entries else []
        found = [
            (lines[0][0], name, _over_all(name, [(tokens, found[name]) for _, tokens, found in lines if name in found]))
            for lines in zip(*everyone, strict=True)
            # A process without unmasked tokens has none.
            for name in sorted({name for _, _, found in lines for name in found if name not in _RATIO_SUMS})
        ]
        for mode in dict.fromkeys(mode for lines in everyone for mode, _, _ in lines):
            each = [(tokens, x) for lines in everyone for of, tokens, x in lines if of == mode and _RATIO_SUMS[0] in x]
            if each:  # (Σρ)²/(N Σρ²): the share of the tokens that the ratios leave to count, in (0, 1]
                count, first, second = (
                    sum(part) for part in zip(*((n, *map(x.get, _RATIO_SUMS)) for n, x in each), strict=True)
                )
                size = first**2 / (count * second) if second else 0.0  # where every ratio has underflown
                found.append((mode, "tr/ess", min(size, 1.0)))  # in this order NaN stays NaN
        return found


def _over_all(name: str, found: list[tuple[int, float]]) -> float:
    """A metric of several processes, from its (unmasked tokens, value) on each: a maximum, a sum or a mean over tokens."""
    kind = metric_kind(name)
    if kind != "mean":
        return (max if kind == "max" else sum)(value for _, value in found)
    total = sum(tokens for tokens, _ in found)
    return sum(tokens * value for tokens, value in found) / total if total else sum(x for _, x in found) / len(found)
