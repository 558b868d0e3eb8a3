"""NeMo-RL adapter: a GRPO loss function with corral's objectives, on sampled tokens or on the old policy's top-k tokens.

loss_fn = CorralLoss("troll")          # in a copy of run_grpo.py, after setup(): in the place of its loss_fn
keep_support(policy, k=64)             # before grpo_train: its policy.train then finds the old policy's top-k tokens first
"""

import importlib
import logging
from collections.abc import MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from corral.engines.adapter import EngineObjective, dist_from_top, read_metrics, warn_once
from corral.objective.reduction import reduce_loss
from corral.tensors import SparseDist, TokenBatch, metric_kind

logger = logging.getLogger(__name__)

INTERFACES = "nemo_rl.algorithms.loss.interfaces"
OLD_LOGP = "corral_old_logp"


class CorralLoss:
    """Loss function for NeMo-RL that computes one of corral's objectives."""

    zero_outside_topk, kl_type = True, "forward"
    """Attributes that NeMo-RL reads from a loss; these values request log-probs of the whole softmax, without entropy.
    NeMo-RL reads them from losses on top-k tokens."""

    def __init__(
        self,
        objective: str,
        *,
        anchor: str = "auto",
        reduction: Literal["token-mean", "seq-mean-token-mean"] = "token-mean",
        **settings: Any,
    ) -> None:
        self.wanted = EngineObjective.of("corral for NeMo-RL", objective, settings, anchor=anchor, support=True)
        warn_once("corral for NeMo-RL", self.wanted.other_reduction(reduction))
        self.reduction: Literal["token-mean", "seq-mean-token-mean"] = reduction
        interfaces: Any = importlib.import_module(INTERFACES)
        tokens = reduction == "token-mean"
        self.loss_type = interfaces.LossType.TOKEN_LEVEL if tokens else interfaces.LossType.SEQUENCE_LEVEL
        kind = interfaces.LossInputType
        self.input_type = kind.DISTILLATION if self.wanted.needs_support else kind.LOGPROB
        # Releases up to 0.7.0 have no such enumeration, and always pass their totals.
        self._normalizer: Any = vars(interfaces).get("MetricNormalizer")
        self.metric_normalizations: dict[str, Any] = {}
        """Divisor of each metric in NeMo-RL, filled in by calls of the loss.
        Used by releases of NeMo-RL that first pass totals of 1."""

    def __call__(
        self,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor | None = None,
        student_topk_logprobs: Tensor | None = None,
        teacher_topk_logprobs: Tensor | None = None,
        H_all: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the reduced loss of a NeMo-RL batch, and its metrics.

        Fields [B S] are shifted by one token here, log-probs [B S−1] by NeMo-RL.
        """
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()
        rollout = data["generation_logprobs"][:, 1:]
        old = rollout if self.wanted.anchor == "rollout" else data["prev_logprobs"][:, 1:]
        new = next_token_logprobs
        dists: tuple[SparseDist | None, SparseDist | None] = (None, None)
        if student_topk_logprobs is not None:
            if OLD_LOGP not in data:
                raise ValueError("corral for NeMo-RL: the batch has no support. Call keep_support(policy) before grpo_train.")
            old_logp = data[OLD_LOGP][:, :-1].to(student_topk_logprobs)
            ids = torch.where(old_logp == -torch.inf, -1, data["teacher_topk_indices"][:, :-1].to(old_logp.device))
            dists = (dist_from_top(ids, student_topk_logprobs), dist_from_top(ids, old_logp))
            new = student_topk_logprobs[..., 0]
        assert new is not None
        if self.wanted.anchor == "old":
            _check_old(old[mask], new[mask])
        loss, metrics = self.wanted.token_loss(
            TokenBatch(new, old, data["advantages"][:, 1:], mask, *dists, logp_rollout=rollout)
        )
        total = global_valid_toks if self.reduction == "token-mean" else global_valid_seqs
        reduced = reduce_loss(loss, mask, self.reduction, total=total)
        found = self._summable(metrics, mask.sum() / global_valid_toks.clamp(min=1))
        return reduced, {"loss": float(reduced.detach()), "num_valid_samples": float(data["sample_mask"].sum()), **found}

    def _summable(self, metrics: dict[str, Tensor], share: Tensor) -> dict[str, float]:
        """Scale metrics of a micro-batch so that NeMo-RL can sum them; `share` is the micro-batch's share of tokens.

        Maxima are left out, as their sum is no maximum, and so is `tr/dual`, a mean over the projected tokens alone: the share
        of those is not known here.
        """
        kinds = {name: metric_kind(name) for name in metrics if name != "tr/dual"}
        kept = {name: metrics[name] * (share if kind == "mean" else 1) for name, kind in kinds.items() if kind != "max"}
        if self._normalizer is not None:
            divisors = {"mean": self._normalizer.TOKENS, "sum": self._normalizer.NONE}
            self.metric_normalizations.update({name: divisors[kinds[name]] for name in kept})
            self.metric_normalizations["num_valid_samples"] = self._normalizer.NONE
        return read_metrics(kept)


def keep_support(policy: Any, k: int = 64) -> None:
    """Wrap `policy.train` so that NeMo-RL's training loop computes the loss on the old policy's top-k tokens.

    Losses other than CorralLoss pass through. The tokens are found once for each batch of rollouts, before its first update.
    """
    train = policy.train

    def train_on_support(data: Any, loss_fn: Any, eval_mode: bool = False, **more: Any) -> Any:
        if isinstance(loss_fn, CorralLoss) and loss_fn.wanted.needs_support and OLD_LOGP not in data:
            if eval_mode:
                raise ValueError("corral for NeMo-RL: an evaluation has no old policy. Train on this batch first.")
            policy.prepare_for_lp_inference()
            topk = policy.get_topk_logits(data, k=k)
            policy.prepare_for_training()
            outside = add_old_support(data, topk)
            logger.info("corral for NeMo-RL: %.2g of the tokens are outside the old policy's top %d.", outside, k)
        return train(data, loss_fn, eval_mode, **more)

    policy.train = train_on_support


def _check_old(old: Tensor, new: Tensor) -> None:
    """Raise ValueError if all old log-probs are 0, the value that NeMo-RL fills in if it did not compute them."""
    if not old.any() and bool((new < -0.01).any()):
        raise ValueError(
            "corral for NeMo-RL: every prev_logprob is 0, as loss_fn.force_on_policy_ratio=true makes them. Set it to false."
        )


def add_old_support(data: MutableMapping[str, Any], topk: Any) -> float:
    """Write the old policy's top-k tokens into a batch, in NeMo-RL's fields for a teacher.

    Returns the share of sampled tokens outside their top k.

    `get_topk_logits` reports no normaliser. The sampled token's old log-prob gives it where that token is among the K. Where
    it is not, the support is the sampled token against all others: exact too, but coarse.

    Args:
        data: with `input_ids` and `prev_logprobs` [B S]; fields are added.
        topk: what `policy.get_topk_logits(data, k)` returned: `topk_logits` and `topk_indices` [B S k], at temperature 1.
    """
    _check_old(data["prev_logprobs"], topk["topk_logits"] - topk["topk_logits"].logsumexp(-1, keepdim=True))
    logits, ids = topk["topk_logits"].float(), topk["topk_indices"]
    tokens, logp = (torch.roll(data[name], -1, 1).unsqueeze(-1) for name in ("input_ids", "prev_logprobs"))
    sampled = ids == tokens
    known = sampled.any(-1, keepdim=True)
    normaliser = torch.where(sampled, logits, 0.0).sum(-1, keepdim=True) - logp
    others = torch.where(known & ~sampled, logits - normaliser, -torch.inf)
    data["teacher_topk_indices"] = torch.cat([tokens, torch.where(others == -torch.inf, tokens, ids)], -1)
    data["teacher_topk_logits"] = data[OLD_LOGP] = torch.cat([logp.float(), others], -1)
    return float((~known[:, :-1]).float().mean())
