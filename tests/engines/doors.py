"""One batch, and every engine's door to it: loss and gradient as each adapter computes them from its engine's own fields.

All doors average as "seq-mean-token-mean", the one reduction that is every objective's own. A door is called with the
objective, its settings and the batch, and returns the reduced loss and its gradient in the new policy's logits [B T V].
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

import corral
from corral.engines import nemo_rl, prime_rl, rllm, skyrl, slime, tinker
from corral.engines.adapter import EngineObjective
from corral.engines.verl.policy_loss import BatchExtras, add_extras, make_policy_loss
from corral.engines.verl.settings import VerlSettings

HOW: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
VOCABULARY, TOP_K = 12, 4
Found = tuple[Tensor, Tensor]
"""Loss, and its gradient in the logits."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Three sequences of other lengths [B T] under three policies [B T V]: the new one, the old one, the sampler's."""

    tokens: Tensor
    logits: Tensor
    """Of the new policy; gradients are with respect to these."""
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    """One for each sequence, as TRL has them, [B]."""
    mask: Tensor

    @property
    def new(self) -> Tensor:
        return self.logits.log_softmax(-1)

    @property
    def lengths(self) -> list[int]:
        return [int(row.nonzero().max()) + 1 for row in self.mask]

    @property
    def credit(self) -> Tensor:
        """The advantages on every token."""
        return self.advantages[:, None].expand(self.mask.shape)

    def sampled(self, policy: Tensor) -> Tensor:
        """Log-probs [B T] of the tokens."""
        return policy.gather(-1, self.tokens[..., None])[..., 0]

    def rows(self) -> "list[Batch]":
        """Each sequence as a batch of its own, without padding; gradients go to the same logits."""
        return [
            Batch(*(x[i : i + 1, :n] if x.ndim > 1 else x[i : i + 1] for x in vars(self).values()))
            for i, n in enumerate(self.lengths)
        ]

    def gradient(self, loss: Tensor) -> Found:
        return loss.detach(), torch.autograd.grad(loss, self.logits)[0]


def make_batch() -> Batch:
    """The sampled tokens are among the old policy's and the sampler's likeliest, as NeMo-RL's top K needs it."""
    draw = torch.Generator().manual_seed(4)
    old = (2 * torch.randn(3, 6, VOCABULARY, generator=draw)).log_softmax(-1)
    rollout = (old + 0.1 * torch.randn(old.shape, generator=draw)).log_softmax(-1)
    logits = (old + 0.6 * torch.randn(old.shape, generator=draw)).requires_grad_()
    tokens = (old + rollout).topk(2).indices[..., 1]
    mask = torch.arange(6) < torch.tensor([[4], [6], [5]])
    mask[1, 0] = False
    return Batch(tokens, logits, old, rollout, torch.tensor([1.0, -1.3, 0.6]), mask)


def alone(objective: str, settings: dict[str, Any], batch: Batch, anchor: str, *, one_by_one: bool = False) -> Found:
    """By corral without an engine; `one_by_one`, where a door is called with one sequence at a time."""
    made = corral.make_objective(objective, **settings)
    parts = batch.rows() if one_by_one else [batch]
    losses = [_mean_of_means(made(token_batch(made, part, anchor)).loss, part.mask).sum() for part in parts]
    return batch.gradient(torch.stack(losses).sum() / len(batch.mask))


def token_batch(made: Any, batch: Batch, anchor: str) -> corral.TokenBatch:
    """What an objective reads of the batch, with its support where it needs one."""
    policy = batch.rollout if anchor == "rollout" else batch.old
    dists: tuple[Any, Any] = (None, None)
    if "dist_old" in made.needs:
        old = corral.top_k_support(policy, batch.tokens, TOP_K)
        dists = (corral.gather_support(batch.new, old.ids), old)
    new = batch.sampled(batch.new) if dists[0] is None else dists[0].logp[..., 0]
    return corral.TokenBatch(new, batch.sampled(policy), batch.credit, batch.mask, *dists, batch.sampled(batch.rollout))


def _mean_of_means(loss: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's tokens, [B]."""
    return (loss * mask).sum(-1) / mask.sum(-1)


def by_verl(objective: str, settings: dict[str, Any], batch: Batch, weights: Tensor | None = None) -> Found:
    """`weights`: verl's sampler correction."""

    def aggregate(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **_: Any) -> Tensor:
        assert loss_agg_mode == HOW
        return _mean_of_means(loss_mat, loss_mask).mean()

    wanted = EngineObjective.of("verl", objective, settings, support=True)
    bypass = wanted.anchor == "rollout"
    given = VerlSettings(loss_mode=f"corral_{objective}", objective=settings, bypass_mode=bypass)
    config = SimpleNamespace(policy_loss=given, global_batch_info={})
    seen = token_batch(wanted.objective, batch, wanted.anchor)
    dists = (None if dist is None else dist[seen.mask] for dist in (seen.dist_new, seen.dist_old))
    config = add_extras(config, BatchExtras(*dists, seen.logp_rollout))
    loss, _ = make_policy_loss(f"corral_{objective}", aggregate)(
        seen.logp_old, seen.logp_new, seen.advantages, seen.mask.int(), loss_agg_mode=HOW, config=config,
        rollout_is_weights=weights,
    )  # fmt: skip
    return batch.gradient(loss)


@dataclass(frozen=True)
class LossInputs:
    """prime-rl's."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """prime-rl's."""

    loss: Tensor
    metrics: dict[str, Tensor]


def by_prime_rl(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    losses = []
    for row in batch.rows():
        share = torch.full_like(row.mask[0], 1.0, dtype=torch.float32) / row.mask.sum() / len(batch.mask)
        given = (row.sampled(row.new)[0], row.sampled(row.rollout)[0], None, row.credit[0], row.mask[0], share)
        losses.append(prime_rl.rl_loss(LossInputs(*given), objective=objective, anchor="rollout", **settings).loss)
    return batch.gradient(torch.stack(losses).sum())


def skyrl_config(**asked: Any) -> Any:
    """Of SkyRL's AlgorithmConfig, what the adapter reads."""
    none = {"tis_ratio_type": None, "sequence_mask_metric": None, "outlier_token_is_threshold_low": None, "geo_mask_high": 1.01}
    return SimpleNamespace(off_policy_correction=SimpleNamespace(**(none | asked)))


def by_skyrl(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    share = 1 / (len(batch.mask) * batch.mask.sum(-1, keepdim=True))  # SkyRL's sequence_mean
    loss, _ = skyrl.make_policy_loss(objective, **settings)(
        batch.sampled(batch.new), batch.sampled(batch.old), batch.credit * share, skyrl_config(), batch.mask.float(),
        batch.sampled(batch.rollout),
    )  # fmt: skip
    return batch.gradient(loss)


def by_slime(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    rows, module = batch.rows(), ModuleType(slime.LOSS)
    logits: Tensor = torch.cat([row.sampled(row.new)[0] for row in rows])[None]
    module.get_log_probs_and_entropy = lambda logits, **_: (None, {"log_probs": list(logits[0].split(batch.lengths))})  # type: ignore[attr-defined]
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}  # type: ignore[attr-defined]
    fields = {
        "log_probs": [row.sampled(row.old)[0] for row in rows],
        "rollout_log_probs": [row.sampled(row.rollout)[0] for row in rows],
        "advantages": [row.credit[0] for row in rows], "loss_masks": [row.mask[0].int() for row in rows],
        "response_lengths": batch.lengths, "total_lengths": batch.lengths, "unconcat_tokens": [],
    }  # fmt: skip

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        parts = zip(x.split(batch.lengths), rows, strict=True)
        return torch.stack([_mean_of_means(part[None], row.mask)[0] for part, row in parts]).sum()

    args = {"corral_objective": objective, "corral_settings": settings, "calculate_per_token_loss": False, "entropy_coef": 0.0}
    with module_named(slime.LOSS, module):
        loss, _ = slime.policy_loss_function(SimpleNamespace(**args), fields, logits, sum_of_sample_mean)
    return batch.gradient(loss / len(rows))  # slime divides by the samples of a step


class LossType(Enum):
    """NeMo-RL's."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """NeMo-RL's, of which these two are used."""

    LOGPROB = "logprob"
    DISTILLATION = "distillation"


class MetricNormalizer(Enum):
    """What NeMo-RL's main has divided a metric by; its releases up to 0.7.0 have no such enumeration."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


def nemo_interfaces(**more: Any) -> ModuleType:
    """NeMo-RL's module of interfaces, with `more` names in it."""
    module: Any = ModuleType(nemo_rl.INTERFACES)
    vars(module).update(LossType=LossType, LossInputType=LossInputType, **more)
    return module


def nemo_rl_call(batch: Batch, *, support: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """NeMo-RL's fields, which begin with the prompt's last token, and the log-probs that it computes for a loss."""

    def behind_a_prompt(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(len(x), 1), x], 1)

    data: dict[str, Any] = {
        "input_ids": behind_a_prompt(batch.tokens), "token_mask": behind_a_prompt(batch.mask.float()),
        "sample_mask": torch.ones(3),
        "advantages": behind_a_prompt(batch.credit), "prev_logprobs": behind_a_prompt(batch.sampled(batch.old)),
        "generation_logprobs": behind_a_prompt(batch.sampled(batch.rollout)),
    }  # fmt: skip
    if not support:
        return data, {"next_token_logprobs": batch.sampled(batch.new)}
    top = torch.cat([batch.old, batch.old[:, :1]], 1).topk(TOP_K)  # the last position predicts what nobody reads
    nemo_rl.add_old_support(data, {"topk_logits": top.values + 3, "topk_indices": top.indices})  # logits, up to a constant
    return data, {"student_topk_logprobs": batch.new.gather(-1, data["teacher_topk_indices"][:, :-1])}


def by_nemo_rl(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    with module_named(nemo_rl.INTERFACES, nemo_interfaces()):
        loss_fn = nemo_rl.CorralLoss(objective, reduction=HOW, **settings)
    data, given = nemo_rl_call(batch, support=loss_fn.input_type is LossInputType.DISTILLATION)
    loss, _ = loss_fn(data, torch.tensor(3.0), batch.mask.sum(), **given)
    return batch.gradient(loss)


def by_tinker(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    data, logprobs = [], []
    support = bool(corral.make_objective(objective, **settings).needs & {"dist_old"})
    for row in batch.rows():
        fields = {"target_tokens": row.tokens[0], "logprobs": row.sampled(row.rollout)[0]}
        if support:
            top = row.rollout[0].topk(TOP_K)
            fields = tinker.support_targets(row.tokens[0], top.indices, top.values, fields["logprobs"])
        fields |= {"advantages": row.credit[0], "mask": row.mask[0].float()}
        targets = fields["target_tokens"] if support else fields["target_tokens"][:, None]
        found = row.new[0].gather(-1, targets)
        logprobs.append(found if support else found[:, 0])
        data.append(SimpleNamespace(loss_fn_inputs={key: SimpleNamespace(to_torch=lambda x=x: x) for key, x in fields.items()}))
    loss, _ = tinker.make_loss(objective, reduction=HOW, **settings)(data, logprobs)
    return batch.gradient(loss)


def rllm_context(batch: Batch, params: dict[str, Any], *, one: bool, bypass: bool = False) -> Any:
    """rLLM's LossContext: of all sequences, as on verl, or of one, as on Tinker and Fireworks."""
    rollout = batch.sampled(batch.rollout)
    fields = {
        "logp_curr": batch.sampled(batch.new), "logp_old": rollout if bypass else batch.sampled(batch.old),
        "advantages": batch.credit, "action_mask": batch.mask.float(), "obs_mask": 1 - batch.mask.float(),
        "logp_rollout": rollout,
    }  # fmt: skip

    def aggregate(per_token: Tensor, mask: Tensor, mode: str | None = None) -> Tensor:
        assert mode in (None, HOW)
        assert per_token.shape == mask.shape
        return _mean_of_means(per_token, mask).mean()

    added = {"eps_clip": 0.2, "eps_clip_high": None, "kl_beta": 0.0, "clip_ratio_c": 3.0}
    fields = {name: x[0] if one else x for name, x in fields.items()}
    return SimpleNamespace(**fields, logp_ref=None, params=added | params, aggregate=aggregate, backend="")


def by_rllm(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    loss, _ = rllm.make_loss(objective)(rllm_context(batch, settings, one=False))
    return batch.gradient(loss)


def by_rllm_managed(objective: str, settings: dict[str, Any], batch: Batch) -> Found:
    contexts = [rllm_context(row, settings, one=True) for row in batch.rows()]
    return batch.gradient(torch.stack([rllm.make_loss(objective)(ctx)[0] for ctx in contexts]).mean())


@contextmanager
def module_named(name: str, module: ModuleType) -> Any:
    """Inside, importing `name` finds `module`."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


Door = Callable[[str, dict[str, Any], Batch], Found]
DOORS: dict[str, Door] = {
    "verl": by_verl, "NeMo-RL": by_nemo_rl, "prime-rl": by_prime_rl, "SkyRL": by_skyrl, "slime": by_slime, "Tinker": by_tinker,
    "rLLM on verl": by_rllm, "rLLM on Tinker": by_rllm_managed,
}  # fmt: skip
ONE_BY_ONE = ("prime-rl", "rLLM on Tinker")
"""Doors that are called with one sequence at a time."""
SAMPLER_ONLY = ("prime-rl", "Tinker")
"""Doors whose engine keeps no other anchor than the sampler's log-probs."""
SAMPLED_ONLY = ("prime-rl", "SkyRL", "slime", "rLLM on verl", "rLLM on Tinker")
"""Doors without a support."""
