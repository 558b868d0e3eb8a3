"""One batch through every door: the loss and the gradient of corral alone, for every objective."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doors import (
    DOORS,
    HOW,
    ONE_BY_ONE,
    SAMPLED_ONLY,
    SAMPLER_ONLY,
    TOP_K,
    VOCABULARY,
    Batch,
    Found,
    alone,
    by_verl,
    make_batch,
    token_batch,
)
from torch import Tensor

import corral
from corral.engines.adapter import EngineObjective, scales_with_advantages
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in POLICY_OBJECTIVES},
    "troll": ("troll", {"bound": 0.02}),
    "dppo": ("dppo", {"bound": 0.1}),
    "dppo, kl": ("dppo", {"divergence": "kl", "bound": 0.05}),
    "dppo, topk tv": ("dppo", {"estimator": "topk", "bound": 0.1}),
}
"""With bounds that act here."""

MARKS = {"verl": pytest.mark.supports("objective: {what}", door="verl")}


def seeded(door: Any, *given: Any) -> Any:
    """Some objectives draw which tokens they act on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return door(*given)


def refused(door: str, wanted: EngineObjective) -> str | None:
    """What a door says of an objective that its engine cannot run."""
    if wanted.needs_support and door in SAMPLED_ONLY:
        return "reads whole distributions on a support"
    if door == "SkyRL" and not scales_with_advantages(wanted):
        return "loss is no multiple of them"
    return None


@pytest.mark.parametrize("what", OBJECTIVES)
@pytest.mark.parametrize("door", [pytest.param(door, marks=MARKS.get(door, ())) for door in DOORS])
def test_every_adapter_has_the_loss_and_gradient_of_corral_alone(door: str, what: str) -> None:
    objective, settings = OBJECTIVES[what]
    batch, wanted = make_batch(), EngineObjective.of("door", objective, settings, support=True)
    why = refused(door, wanted)
    if why is not None:
        with pytest.raises(ValueError, match=why):
            DOORS[door](objective, settings, batch)
        return
    anchor = "rollout" if door in SAMPLER_ONLY else wanted.anchor
    loss, gradient = seeded(DOORS[door], objective, settings, batch)
    expected, expected_gradient = seeded(alone_through(door), objective, settings, batch, anchor)
    assert_close(loss, expected, atol=1e-5)
    assert_close(gradient, expected_gradient, atol=1e-5)
    assert gradient.abs().max() > 1e-2
    assert (gradient[~batch.mask] == 0).all()


def alone_through(door: str) -> Any:
    return lambda *given: alone(*given, one_by_one=door in ONE_BY_ONE)


# The TRL door: its trainer on a model whose hidden states are the new policy's logits, before a head that is the identity.


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A CorralTrainer for each kind of objective; the objective itself is exchanged."""
    pytest.importorskip("trl", reason="needs TRL")
    from tiny_models import FakeVLLM, make_trainer

    kinds = {
        "old": ("ppo_clip", {}),
        "rollout": ("dppo", {}),
        "support": ("troll", {}),
        "decoupled": ("decoupled_ppo", {}),
    }
    given = {"use_vllm": True, "vllm_importance_sampling_correction": False, "temperature": 1.0, "loss_type": "grpo"}
    given |= {"packed_batches": "off"}  # the backbone's output is replaced by that of a padded batch
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
        for kind, (objective, settings) in kinds.items():
            made[kind] = make_trainer(
                tmp_path_factory.mktemp(kind), objective, model=_identity_head(), objective_config=settings, support_size=TOP_K,
                support_mass=1.0, **given,
            )  # fmt: skip
    return made


def _identity_head() -> Any:
    from tiny_models import tiny_model

    model = tiny_model(vocab_size=VOCABULARY, hidden_size=VOCABULARY, head_dim=6)
    torch.nn.init.eye_(model.lm_head.weight)
    return model


def trl_loss(trainer: Any, batch: Batch, support: bool = False) -> Tensor:
    """What a trainer of TRL's makes of the batch."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        # A position's hidden state predicts the next token: the prompt's one the first, the last one none.
        return SimpleNamespace(last_hidden_state=torch.cat([batch.logits, batch.logits[:, :1]], 1), past_key_values=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.model.model, "forward", forward)
        trainer.current_gradient_accumulation_steps = 1
        return trainer.compute_loss(trainer.model, trl_inputs(batch, support))


def trl_inputs(batch: Batch, support: bool) -> dict[str, Any]:
    """The batch as TRL buffers it, behind one prompt token; a token that does not count is a tool's."""
    lengths = torch.tensor(batch.lengths)[:, None]
    found: dict[str, Any] = {
        "prompt_ids": torch.ones(3, 1, dtype=torch.int64), "prompt_mask": torch.ones(3, 1, dtype=torch.int64),
        "completion_ids": batch.tokens, "completion_mask": (torch.arange(6) < lengths).int(), "tool_mask": batch.mask.int(),
        "advantages": batch.advantages, "old_per_token_logps": batch.sampled(batch.old),
        "sampling_per_token_logps": batch.sampled(batch.rollout), "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    if support:
        dist = corral.top_k_support(batch.old, batch.tokens, TOP_K)
        found |= {"corral_ids": dist.ids, "corral_logp": dist.logp, "corral_rest": dist.rest, "corral_rest_max": dist.rest_max}
    return found


@pytest.mark.long
@pytest.mark.parametrize("what", OBJECTIVES)
def test_the_trl_door_has_the_loss_and_gradient_of_corral_alone(trainers: dict[str, Any], what: str) -> None:
    objective, settings = OBJECTIVES[what]
    batch, wanted = make_batch(), EngineObjective.of("TRL", objective, settings, support=True)
    kind = "support" if wanted.needs_support else "decoupled" if objective == "decoupled_ppo" else wanted.anchor
    trainer = trainers[kind]
    trainer.objective = corral.make_objective(objective, **settings)

    loss = seeded(trl_loss, trainer, batch, kind == "support")
    expected, expected_gradient = seeded(alone, objective, settings, batch, wanted.anchor)
    found, gradient = batch.gradient(loss)
    assert_close(found, expected, atol=1e-5)
    assert_close(gradient, expected_gradient, atol=1e-5)
    assert gradient.abs().max() > 1e-2


# A sampler correction beside an objective with a regression: Σ w (c · policy + regression) at every door that has one.


BOUND = {"bound": 0.02}


def correct(batch: Batch) -> tuple[corral.TokenBatch, Tensor]:
    """What `troll` reads of the batch, and the weights of a correction that keeps, weighs and drops tokens."""
    seen = token_batch(corral.make_objective("troll", **BOUND), batch, "old")
    weights = corral.make_correction("icepop", low=0.97, high=1.03)(seen)
    assert (weights[batch.mask] == 0).any()
    assert ((weights != 0) & (weights != 1)).any()
    return seen, weights


def corrected_by_hand(batch: Batch) -> Found:
    seen, weights = correct(batch)
    out = corral.make_objective("troll", **BOUND)(seen)
    assert out.regression is not None
    assert (out.regression[weights == 0] > 0).any(), "a dropped token is pulled back"
    loss = weights * (out.loss - out.regression) + out.regression
    return batch.gradient(corral.reduce_loss(loss, batch.mask, HOW))


def corrected_from_hidden(batch: Batch) -> Found:
    seen, weights = correct(batch)
    reduction = torch.where(batch.mask, 1 / (len(batch.mask) * batch.mask.sum(-1, keepdim=True)), 0.0)
    loss = corral.policy_loss_from_hidden(
        batch.logits, torch.eye(VOCABULARY), batch.tokens, replace(seen, dist_new=None),
        corral.make_objective("troll", **BOUND), weights=reduction, policy_weights=weights,
    )  # fmt: skip
    return batch.gradient(loss.loss)


def corrected_by_adapter(batch: Batch) -> Found:
    """What the adapters of all engines share."""
    seen, weights = correct(batch)
    loss, _ = EngineObjective.of("door", "troll", BOUND, support=True).token_loss(seen, weights)
    return batch.gradient(corral.reduce_loss(loss, batch.mask, HOW))


CORRECTED = {
    "policy_loss_from_hidden": corrected_from_hidden,
    "adapter": corrected_by_adapter,
    "verl": lambda batch: by_verl("troll", BOUND, batch, correct(batch)[1]),
}


@pytest.mark.parametrize("door", CORRECTED)
def test_a_correction_leaves_the_regression_alone_at_every_door(door: str) -> None:
    batch = make_batch()
    for found, expected in zip(CORRECTED[door](batch), corrected_by_hand(batch), strict=True):
        assert_close(found, expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_a_correction_leaves_the_regression_alone_in_the_trl_door(trainers: dict[str, Any], *, fused: bool) -> None:
    trainer, batch = trainers["support"], make_batch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "objective", corral.make_objective("troll", **BOUND))
        patch.setattr(trainer, "correction", corral.make_correction("icepop", low=0.97, high=1.03))
        if not fused:
            from tiny_models import without_fused_loss

            patch.setattr(trainer.policy_head, "expect", trainer.policy_head.expect)
            without_fused_loss(trainer)
        found = batch.gradient(trl_loss(trainer, batch, support=True))
    for mine, expected in zip(found, corrected_by_hand(batch), strict=True):
        assert_close(mine, expected, atol=1e-5)


# TRL's own losses


TRLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("ppo_clip", {}, {}),
    "dapo": ("clip_higher", {"clip_high": 0.28}, {"epsilon_high": 0.28}),
    "cispo": ("cispo", {"cap_high": 1.5}, {"epsilon_high": 1.5}),
    "sapo": ("sapo", {}, {}),
    "gspo": ("gspo", {"clip_low": 0.03, "clip_high": 0.04}, {"epsilon_low": 0.03, "epsilon_high": 0.04, "level": "sequence"}),
    "vespo": ("vespo", {}, {}),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl", reason="needs TRL")
    from tiny_models import even_words, prompts, settings, tiny_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    given = settings(tmp_path_factory.mktemp("stock"), temperature=1.0)
    return GRPOTrainer(_identity_head(), even_words, GRPOConfig(**given), prompts(), processing_class=tiny_tokenizer())


@pytest.mark.long
@pytest.mark.parametrize("theirs", TRLS)
def test_gradients_are_those_of_trls_own_losses(stock: Any, theirs: str) -> None:
    objective, settings, change = TRLS[theirs]
    if theirs == "vespo" and not hasattr(stock, "get_gamma_weights"):
        pytest.skip("this TRL has no vespo")
    stock.loss_type = "grpo" if theirs == "gspo" else theirs
    stock.importance_sampling_level = change.get("level", "token")
    stock.epsilon_low, stock.epsilon_high = change.get("epsilon_low", 0.2), change.get("epsilon_high", 0.2)
    batch = make_batch()
    loss, gradient = batch.gradient(trl_loss(stock, batch))
    made = corral.make_objective(objective, **settings)
    seen = corral.TokenBatch(
        batch.sampled(batch.new), batch.sampled(batch.old), batch.credit, batch.mask, logp_rollout=batch.sampled(batch.rollout)
    )
    losses = made(seen).loss
    if stock.loss_type in ("grpo", "sapo"):
        expected = corral.reduce_loss(losses, batch.mask, HOW)
    else:  # over the tokens of a batch of rollouts, of which this is one of two micro-batches
        expected = corral.reduce_loss(losses, batch.mask, "token-mean") * stock.args.steps_per_generation
    own, own_gradient = batch.gradient(expected)
    assert_close(loss, own, atol=1e-5)
    assert_close(gradient, own_gradient, atol=1e-5)
    assert gradient.abs().max() > 1e-2
