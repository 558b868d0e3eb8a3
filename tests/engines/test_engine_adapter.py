"""What every engine's adapter shares: anchors, refusals, micro-batches without a token, weights of a sampler correction."""

import logging
from dataclasses import replace

import pytest
import torch

import corral
from corral.engines.adapter import EngineObjective, first_call, sampled_token_names
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close


def batch_of(
    p_new: list[float], p_old: list[float], advantages: list[float], mask: list[bool] | None = None
) -> corral.TokenBatch:
    live = torch.tensor([mask or [True] * len(p_new)])
    logp_new = torch.tensor([p_new], dtype=torch.float64).log().requires_grad_()
    return corral.TokenBatch(logp_new, torch.tensor([p_old], dtype=torch.float64).log(), torch.tensor([advantages]), live)


@pytest.mark.parametrize(
    ("name", "settings", "anchor"),
    [("dppo", {}, "rollout"), ("ppo_clip", {}, "old"), ("troll", {}, "old"), ("dppo", {"estimator": "topk"}, "old")],
)
def test_an_anchor_suits_the_objective_and_its_settings(name: str, settings: dict[str, str], anchor: str) -> None:
    made = EngineObjective.of("engine", name, settings, support=True)
    assert made.anchor == anchor
    assert made.needs_support == (name == "troll" or "estimator" in settings)


def test_what_an_engine_cannot_supply_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine: troll with these settings reads whole distributions.*estimator='binary'"):
        EngineObjective.of("engine", "troll", {})
    with pytest.raises(ValueError, match=r"samplers report none\. Use anchor='old'"):
        EngineObjective.of("engine", "dppo", {"estimator": "topk"}, anchor="rollout", support=True)
    with pytest.raises(ValueError, match=r"`anchor` is one of auto, old, rollout; got 'sampler'"):
        EngineObjective.of("engine", "dppo", {}, anchor="sampler")
    with pytest.raises(ValueError, match=r"no setting `bund`.*Did you mean 'bound'"):
        EngineObjective.of("engine", "dppo", {"bund": 1})


def test_golden_loss_and_weights() -> None:
    # |Δp| = .4 > δ = .2: −ρA = −1.8 is blocked, ρ = 1.8 against A = −1 stays 1.8; a weight of .5 halves it.
    batch = batch_of([0.9, 0.9], [0.5, 0.5], [1.0, -1.0])
    made = EngineObjective.of("engine", "dppo", {"bound": 0.2})
    loss, metrics = made.token_loss(batch)
    assert_close(loss, torch.tensor([[0.0, 1.8]], dtype=torch.float64))
    assert metrics["tr/active_frac"] == 0.5
    half, _ = made.token_loss(batch, torch.tensor([[0.5, 0.5]]))
    assert_close(half, torch.tensor([[0.0, 0.9]], dtype=torch.float64))


def test_an_engines_first_batch_is_compared_with_its_anchor(caplog: pytest.LogCaptureFixture) -> None:
    """Once in a process, however often the engine has its objective made."""
    first_call.cache_clear()
    far, near = batch_of([0.9, 0.2], [0.2, 0.9], [1.0, 1.0]), batch_of([0.5, 0.4], [0.5, 0.4], [1.0, 1.0])

    def lose(batch: corral.TokenBatch, engine: str = "corral for E") -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="corral"):
            EngineObjective.of(engine, "ppo_clip", {}).token_loss(batch)
        return caplog.messages

    assert lose(replace(far, mask=far.mask & False)) == [], "a micro-batch without a token says nothing"
    (said,) = lose(far)
    assert said.startswith("corral for E: ppo_clip: at the first call new and old log-probs differ by 1.50 nats")  # ln 4.5
    assert lose(far) == []
    assert lose(near, "corral for F") == lose(far, "corral for F") == []


def test_weights_leave_the_regression_alone() -> None:
    logp = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64).log()
    old = corral.top_k_support(logp, torch.tensor([[0]]), 2)
    moved = torch.tensor([[[0.8, 0.1, 0.1]]], dtype=torch.float64).log()
    batch = corral.TokenBatch(moved[..., 0], logp[..., 0], torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool),
                              corral.gather_support(moved, old.ids), old)  # fmt: skip
    made = EngineObjective.of("engine", "troll", {}, support=True)
    out = made.objective(batch)
    assert out.regression is not None
    loss, _ = made.token_loss(batch, torch.zeros(1, 1))
    assert_close(loss, out.regression)
    assert out.regression.item() > 0


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_a_micro_batch_without_a_token_is_connected_and_has_the_same_metrics(name: str) -> None:
    made = EngineObjective.of("engine", name, {}, support=True)
    batch = batch_of([0.5, 0.5], [0.5, 0.5], [1.0, torch.nan], [True, False])
    if made.needs_support:
        logp = torch.full((1, 2, 4), 0.25, dtype=torch.float64).log()
        old = corral.top_k_support(logp, torch.zeros(1, 2, dtype=torch.int64), 2)
        logp_new = torch.full_like(logp[..., 0], 0.25).log().requires_grad_()
        batch = corral.TokenBatch(logp_new, logp[..., 0], batch.advantages, batch.mask, old, old)
    batch = replace(batch, logp_rollout=batch.logp_old)
    _, metrics = made.token_loss(batch)
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    loss, nothing = made.token_loss(empty)
    assert nothing.keys() == metrics.keys()
    loss.sum().backward()
    assert batch.logp_new.grad is not None
    assert (batch.logp_new.grad == 0).all()


def test_reductions_that_are_not_the_objectives_own_are_named() -> None:
    assert EngineObjective.of("engine", "gspo", {}).other_reduction("seq-mean-token-mean") is None
    sentence = EngineObjective.of("engine", "gspo", {}).other_reduction("token-mean")
    assert sentence == "token-mean gives gspo another gradient than its own. Use seq-mean-token-mean."


def test_most_objectives_need_sampled_tokens_alone() -> None:
    assert set(corral.objective_names()) - set(sampled_token_names()) == {"decoupled_ppo", "distill", "troll"}


def test_a_teacher_is_for_another_door() -> None:
    with pytest.raises(ValueError, match="engine: distill with these settings reads a third policy, a teacher or a reference"):
        EngineObjective.of("engine", "distill", {}, support=True)
    with pytest.raises(ValueError, match="engine: troll with these settings reads a third policy"):
        EngineObjective.of("engine", "troll", {"centre": "reference"}, support=True)
