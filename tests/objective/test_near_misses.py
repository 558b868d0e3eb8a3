"""What is easily passed by mistake gets the sentence that leads to the fix."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import corral
from corral.objective.check import FirstCall

LOGITS = torch.arange(24.0).reshape(2, 4, 3).sin() * 3
TOKENS = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]])
LOGP = LOGITS.log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]
MASK = torch.ones(2, 4, dtype=torch.bool)


def batch(new: torch.Tensor = LOGP, old: torch.Tensor = LOGP, advantages: torch.Tensor | None = None) -> corral.TokenBatch:
    return corral.TokenBatch(new, old, torch.tensor([1.0, -1.0]) if advantages is None else advantages, MASK)


def test_a_layer_in_the_place_of_its_weight(unchecked_shapes: None) -> None:
    hidden, layer = torch.randn(2, 4, 5), nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"lm_head: `weight` is .* got Linear.*layer\.weight"):
        corral.lm_head(hidden, layer, TOKENS)
    weights = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"policy_loss_from_hidden: `weight` is .* got Linear"):
        corral.policy_loss_from_hidden(hidden, layer, TOKENS, batch(), corral.make_objective("ppo_clip"), weights=weights)
    with pytest.raises(ValueError, match=r"got the name 'ppo_clip'\. Pass corral\.make_objective\('ppo_clip'\)"):
        corral.policy_loss_from_hidden(hidden, layer.weight, TOKENS, batch(), "ppo_clip", weights=weights)


def test_advantages_with_an_axis_too_many(unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=r"advantages is \[2, 1\].*Use advantages\.squeeze\(-1\)"):
        corral.make_objective("ppo_clip")(batch(advantages=torch.tensor([[1.0], [-1.0]])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_old_log_probs_in_half_precision(dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match="logp_old is .*Keep old log-probs in float32"):
        corral.make_objective("ppo_clip")(batch(old=LOGP.to(dtype)))


def test_logits_shifted_by_one_are_noticed_where_a_run_starts(caplog: pytest.LogCaptureFixture) -> None:
    shifted = LOGITS.roll(1, dims=1).log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]
    first = FirstCall()
    with caplog.at_level(logging.WARNING, logger="corral"):
        first.look("ppo_clip", batch(new=shifted))
        first.look("ppo_clip", batch(new=shifted))
    assert [record.message for record in caplog.records if "shifted by a token" in record.message] == [caplog.messages[0]]
    mean = float((shifted - LOGP).abs().mean())  # an independent mean of |log ρ|
    assert f"differ by {mean:.2f} nats" in caplog.messages[0]
    caplog.clear()
    fine = FirstCall()
    fine.look("ppo_clip", batch())
    fine.look("ppo_clip", batch(new=shifted))  # later on a policy may be anywhere
    assert not caplog.messages


def test_a_batch_without_any_token_is_not_the_first(caplog: pytest.LogCaptureFixture) -> None:
    masked, first = replace(batch(new=LOGP - 1), mask=torch.zeros_like(MASK)), FirstCall()
    with caplog.at_level(logging.WARNING, logger="corral"):
        first.look("ppo_clip", masked)
        assert not caplog.messages
        first.look("ppo_clip", batch(new=LOGP - 1))
    assert len(caplog.messages) == 1


def test_an_objective_by_itself_compares_policies_of_any_distance(caplog: pytest.LogCaptureFixture) -> None:
    far = LOGITS.roll(1, dims=1).log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]
    with caplog.at_level(logging.WARNING, logger="corral"):
        corral.make_objective("ppo_clip")(batch(new=far))
    assert not caplog.messages
