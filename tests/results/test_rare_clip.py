"""Clipping lifted for rare tokens: its numbers by hand, its gradient, and clipping itself where no token is rare."""

import pytest
import torch
from torch.autograd import gradcheck

from corral import ObjectiveOutput, TokenBatch, make_objective
from corral.objective import OBJECTIVES
from results.evidence.plans import PLANS, RARE
from results.evidence.rare_clip import RareClipConfig, rare_clip
from results.evidence.spec import OWN_OBJECTIVES, VARIANTS
from tolerance import assert_close


def batch_of(p_new: list[float], p_old: list[float], adv: list[float]) -> TokenBatch:
    new, old, credit = (torch.tensor([values], dtype=torch.float64) for values in (p_new, p_old, adv))
    return TokenBatch(new.log().requires_grad_(), old.log(), credit, torch.ones_like(new, dtype=torch.bool))


def with_gradient(out: ObjectiveOutput, batch: TokenBatch) -> tuple[list[float], list[float]]:
    (grad,) = torch.autograd.grad(out.loss.sum(), batch.logp_new)
    return out.loss[0].tolist(), grad[0].tolist()


def test_golden_loss_and_gradient() -> None:
    # ρ = 2, .5, 2, .5. The first two were rare (.05 < .1): L = −ρÂ = −2 and .5, with gradients −ρÂ of the same value.
    # The others are clipped at 1.2 and .8: L = −1.2 and .8, no gradient. Two of four are acted on.
    batch = batch_of([0.1, 0.025, 0.8, 0.2], [0.05, 0.05, 0.4, 0.4], [1.0, -1.0, 1.0, -1.0])
    out = rare_clip(batch, RareClipConfig())
    loss, grad = with_gradient(out, batch)
    assert loss == pytest.approx([-2.0, 0.5, -1.2, 0.8], abs=1e-12)
    assert grad == pytest.approx([-2.0, 0.5, 0.0, 0.0], abs=1e-12)
    assert out.metrics["tr/active_frac"] == 0.5
    assert out.acted is not None
    assert out.acted.tolist() == [[False, False, True, True]]


def test_a_smaller_threshold_clips_tokens_above_it() -> None:
    # .05 is not below .01, so ρ = 2 is clipped; .005 is.
    batch = batch_of([0.1, 0.01], [0.05, 0.005], [1.0, 1.0])
    loss, grad = with_gradient(rare_clip(batch, RareClipConfig(rare=0.01)), batch)
    assert loss == pytest.approx([-1.2, -2.0], abs=1e-12)
    assert grad == pytest.approx([0.0, -2.0], abs=1e-12)


def test_with_no_rare_token_it_is_clipping() -> None:
    old, new = torch.rand(2, 3, 7, dtype=torch.float64).log()
    mask = torch.rand(3, 7) < 0.8
    batch = TokenBatch(new.requires_grad_(), old, torch.randn(3, dtype=torch.float64), mask)
    ours, theirs = rare_clip(batch, RareClipConfig(rare=0.0)), make_objective("ppo_clip")(batch)
    assert_close(ours.loss, theirs.loss)
    assert with_gradient(ours, batch) == with_gradient(theirs, batch)
    assert {name: float(value) for name, value in ours.metrics.items()} == pytest.approx(
        {name: float(value) for name, value in theirs.metrics.items()}
    )


def test_gradient_and_padding() -> None:
    old = torch.tensor([[0.05, 0.5, 0.5, 0.05]], dtype=torch.float64).log()
    mask, advantages = torch.tensor([[True, True, True, False]]), torch.tensor([1.0], dtype=torch.float64)
    new = torch.tensor([[0.2, 0.55, 0.9, torch.e]], dtype=torch.float64).log().requires_grad_()
    assert gradcheck(lambda logp: rare_clip(TokenBatch(logp, old, advantages, mask), RareClipConfig()).loss, new)
    assert rare_clip(TokenBatch(new, old, advantages, mask), RareClipConfig()).loss[0, 3] == 0.0


@pytest.mark.parametrize("given", [{"rare": -0.1}, {"rare": 1.1}, {"clip": -0.1}])
def test_settings_that_are_none(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        RareClipConfig(**given)


def test_the_plan_lifts_clipping_at_both_thresholds_and_shares_the_rest() -> None:
    runs = PLANS["f-rare"]()
    assert len(runs) == 5 * 3 * 4  # seeds × settings × arms
    assert {VARIANTS[variant]["objective_config"]["rare"] for name, variant in RARE if name == "rare_clip"} == {0.1, 0.01}
    others = {spec.key for name in ("a", "a-reuse") for spec in PLANS[name]()}
    assert {spec.objective for spec in runs if spec.key not in others} == {"rare_clip"}


def test_corral_itself_does_not_have_it() -> None:
    assert not OWN_OBJECTIVES.keys() & OBJECTIVES.keys(), "importing the study must not change the registry"
