"""PPO's clip and its two presets: pessimistic on both sides, wider above, and cut off where the advantage is negative."""

import math
from dataclasses import replace

import pytest
import torch
from batches import apart, inputs, loss_and_grad, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import TokenBatch, make_objective
from tolerance import assert_close

LIMITS = {"ppo_clip": (0.8, 1.2, math.inf), "clip_higher": (0.8, 1.28, math.inf), "dual_clip": (0.8, 1.2, 3.0)}
"""By default: the smallest and the largest ratio that is not clipped, and the dual clip's constant."""


def surrogate(r: float, a: float, low: float, high: float, c: float) -> float:
    """What is maximised: eq. 7 of arXiv:1707.06347, with arXiv:1912.09729's limit where Â < 0."""
    clipped = min(r * a, min(max(r, low), high) * a)
    return max(clipped, c * a) if a < 0 else clipped


def weight(r: float, a: float, low: float, high: float, c: float) -> float:
    """w in ∂loss/∂log π = −w Â: the ratio, unless the token is clipped."""
    return 0.0 if (a > 0 and r > high) or (a < 0 and (r < low or r > c)) else r


def assert_follows_the_formula(objective, draw, limits):
    p_new, p_old, adv = draw
    ratios = [p / q for p, q in zip(p_new, p_old, strict=True)]
    assume(apart(ratios, *limits))
    loss, grad = loss_and_grad(objective, inputs(*draw))
    assert_close(loss, row([-surrogate(r, a, *limits) for r, a in zip(ratios, adv, strict=True)]))
    assert_close(grad, row([-weight(r, a, *limits) * a for r, a in zip(ratios, adv, strict=True)]))


def test_golden_clip():
    # ρ = 1.8, 1.8, .2, .2 and ε = .2.
    # Â = +1: min(1.8, 1.2) = 1.2, clipped;   Â = −1: min(−1.8, −1.2) = −1.8, kept, so dL/dlogp = 1.8;
    # Â = −1: min(−.2, −.8) = −.8, clipped;   Â = +1: min(.2, .8) = .2, kept, so dL/dlogp = −.2.  Two of four are clipped.
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1], p_old=[0.5] * 4, adv=[+1.0, -1.0, -1.0, +1.0])
    loss, grad = loss_and_grad(make_objective("ppo_clip"), batch)
    assert_close(loss, row([-1.2, 1.8, 0.8, -0.2]))
    assert_close(grad, row([0.0, 1.8, 0.0, -0.2]))
    assert make_objective("ppo_clip")(batch).metrics["tr/active_frac"] == 0.5


def test_golden_clip_higher_lets_a_token_rise_to_1_28():
    # ρ = .5/.4 = 1.25 < 1.28 is kept where ppo_clip stops at 1.2; .52/.4 = 1.3 stops at 1.28; below, .3/.4 = .75 stops at .8.
    batch = inputs(p_new=[0.5, 0.52, 0.3], p_old=[0.4] * 3, adv=[1.0, 1.0, -1.0])
    loss, grad = loss_and_grad(make_objective("clip_higher"), batch)
    assert_close(loss, row([-1.25, -1.28, 0.8]))
    assert_close(grad, row([-1.25, 0.0, 0.0]))


def test_golden_dual_clip_stops_a_negative_token_beyond_ratio_3():
    # ρ = .8/.2, .5/.2, .8/.2 = 4, 2.5, 4.  Â = −1: max(−4, −3) = −3, stopped; max(−2.5, −3) = −2.5, kept.
    # Â = +1: min(4, 1.2) = 1.2, clipped as ever.  Without the dual clip the first would have loss and gradient 4.
    batch = inputs(p_new=[0.8, 0.5, 0.8], p_old=[0.2] * 3, adv=[-1.0, -1.0, 1.0])
    loss, grad = loss_and_grad(make_objective("dual_clip"), batch)
    assert_close(loss, row([3.0, 2.5, -1.2]))
    assert_close(grad, row([0.0, 2.5, 0.0]))
    assert_close(make_objective("dual_clip")(batch).metrics["tr/active_frac"], torch.tensor(2 / 3))


@pytest.mark.parametrize("name", LIMITS)
@given(draw=tokens())
def test_defaults_follow_the_formula(name, draw):
    assert_follows_the_formula(make_objective(name), draw, LIMITS[name])


@given(tokens(), st.floats(0.0, 0.9), st.floats(0.0, 3.0), st.floats(1.01, 10.0))
def test_any_setting_follows_the_formula(draw, clip_low, clip_high, dual_clip):
    objective = make_objective("ppo_clip", clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    # A dual clip inside the clip range acts on the same side, so both limits on ρ hold where Â < 0.
    assert_follows_the_formula(objective, draw, (1 - clip_low, 1 + clip_high, dual_clip))


@given(tokens())
def test_the_loss_is_never_below_the_unclipped_one_without_a_dual_clip(draw):
    # −min(ρÂ, …) ≥ −ρÂ: the surrogate is pessimistic.
    clipped, _ = loss_and_grad(make_objective("ppo_clip"), inputs(*draw))
    free, _ = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    assert (clipped >= free).all()


@given(tokens(), st.floats(0.0, 0.9))
def test_its_gradient_is_that_of_dppo_with_the_ratio_as_divergence(draw, clip):
    assume(apart([p / q for p, q in zip(*draw[:2], strict=True)], 1 - clip, 1 + clip))
    _, ppo = loss_and_grad(make_objective("ppo_clip", clip_low=clip, clip_high=clip), inputs(*draw))
    _, dppo = loss_and_grad(make_objective("dppo", divergence="ratio", bound=clip), inputs(*draw))
    assert_close(ppo, dppo)


@given(tokens())
def test_infinite_limits_are_no_limits(draw):
    objective = make_objective("ppo_clip", clip_low=1, clip_high=math.inf, dual_clip=math.inf)
    free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    for ours, theirs in zip(loss_and_grad(objective, inputs(*draw)), free, strict=True):
        assert_close(ours, theirs)


def test_a_ratio_at_the_limit_is_not_clipped():
    # ε = 0 puts the limit at ρ = 1, where an on-policy token stands exactly: inequalities are strict, so it still learns.
    objective = make_objective("ppo_clip", clip_low=0.0, clip_high=0.0)
    batch = inputs(p_new=[0.3, 0.3], p_old=[0.3, 0.3], adv=[1.0, -1.0])
    assert_close(loss_and_grad(objective, batch)[1], row([-1.0, 1.0]))
    assert objective(batch).metrics["tr/active_frac"] == 0


@pytest.mark.parametrize("name", LIMITS)
def test_gradient_is_the_derivative_of_the_loss(name):
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1, 0.8, 0.5], p_old=[0.5] * 4 + [0.2, 0.45], adv=[1.0, -1.0, -1.0, 1.0, -2.0, 0.0])
    assert gradcheck(lambda logp: make_objective(name)(replace(batch, logp_new=logp)).loss, batch.logp_new)


def test_a_token_rounded_to_certainty_is_not_infinitely_far() -> None:
    # In float32 log p = 0 stands for any p from 1 − 6e-8 on; metrics read it as 1 − 1e-8. From 1 − 1e-7, that is
    # KL = (1 − 1e-7) log((1 − 1e-7)/(1 − 1e-8)) + 1e-7 log(1e-7/1e-8) = 1e-7 (log 10 − 1) + 1e-8 + O(1e-15).
    old, new = torch.tensor([[-1e-7]]), torch.tensor([[0.0]])
    batch = TokenBatch(new, old, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    kl = make_objective("ppo_clip")(batch).metrics["tr/kl_max"]
    assert kl.item() == pytest.approx(1e-7 * (math.log(10) - 1) + 1e-8, rel=1e-3)
