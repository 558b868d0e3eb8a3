"""DPPO blocks a token once its distribution has left the region along its advantage, and touches no other token."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from batches import apart, as_batch, inputs, leaf_gradients, loss_and_grad, poison_padding, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral import SparseDist, TokenBatch, binary_kl, binary_tv, categorical_kl, categorical_tv, make_objective
from corral.objective.config import DPPOConfig
from corral.objective.masks import dppo
from tolerance import assert_close

INF = math.inf
SEEDS = st.integers(0, 2**20)
DIVERGENCES = ["tv", "kl", "ratio"]


def on_support(batch: TokenBatch, p_new: list[float], p_old: list[float]) -> TokenBatch:
    """The batch with both policies on one support at every token; the last probability is the rest's."""

    def dist(p: list[float]) -> SparseDist:
        logp = torch.tensor(p, dtype=torch.float64).log().expand(*batch.mask.shape, len(p))
        return SparseDist(torch.arange(len(p) - 1).expand_as(logp[..., 1:]), logp[..., :-1], logp[..., -1])

    return replace(batch, dist_new=dist(p_new), dist_old=dist(p_old))


def blocked(batch: TokenBatch, **config) -> Tensor:
    """Unmasked tokens with an advantage that get no loss."""
    return (make_objective("dppo", **config)(batch).loss == 0) & batch.mask & (batch.advantages != 0)


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_mask_and_gradient():
    # |Δp| = 0.4 > δ = 0.2 everywhere; ρ = 1.8, 1.8, 0.2, 0.2.  dL/dlogp = −m ρ Â, and L = −m ρ Â too.
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1], p_old=[0.5] * 4, adv=[+1.0, -1.0, -1.0, +1.0])
    out = dppo(batch, DPPOConfig(bound=0.2))
    out.loss.sum().backward()
    assert_close(out.loss.detach(), row([0.0, 1.8, 0.0, -0.2]))
    assert_close(batch.logp_new.grad, row([0.0, 1.8, 0.0, -0.2]))
    assert out.metrics["tr/active_frac"] == 0.5


@pytest.mark.parametrize(
    ("name", "config", "gradient"),
    [
        # 1e-4 → 1e-2, Â = 1: ρ = 100 > 1.2.   0.99 → 0.80, Â = −1: ρ = 80/99 = 0.808 ≥ 0.8.
        ("ppo_clip", {}, [0.0, 80 / 99]),
        # TV: 0.01 − 0.0001 = 0.0099 ≤ 0.15.   0.99 − 0.80 = 0.19 > 0.15.
        ("dppo", {"divergence": "tv", "bound": 0.15}, [-100.0, 0.0]),
        # KL: 1e-4 ln 0.01 + 0.9999 ln(0.9999/0.99) = −0.00046 + 0.00995 = 0.0095 ≤ 0.05.
        #     0.99 ln(0.99/0.80) + 0.01 ln(0.01/0.20) = 0.2110 − 0.0300 = 0.1810 > 0.05.
        ("dppo", {"divergence": "kl", "bound": 0.05}, [-100.0, 0.0]),
    ],
)
def test_golden_the_papers_two_tokens(name, config, gradient):
    batch = inputs(p_new=[1e-2, 0.80], p_old=[1e-4, 0.99], adv=[1.0, -1.0])
    _, grad = loss_and_grad(make_objective(name, **config), batch)
    assert_close(grad, row(gradient))


def test_golden_the_kl_is_from_the_old_policy_to_the_new():
    # 0.99 → 0.80: KL(old‖new) = 0.181 and KL(new‖old) = 0.80 ln(0.80/0.99) + 0.20 ln(0.20/0.01) = −0.1705 + 0.5991 = 0.4287.
    # 0.80 → 0.99 the other way round. A bound of 0.3 lies between.
    down = inputs(p_new=[0.80], p_old=[0.99], adv=[-1.0])
    up = inputs(p_new=[0.99], p_old=[0.80], adv=[1.0])
    assert not blocked(down, divergence="kl", bound=0.3).any()
    assert blocked(up, divergence="kl", bound=0.3).all()
    # The same with the other 0.01 or 0.20 split in two: proportional splits change no KL.
    near, far = [0.99, 0.004, 0.006], [0.80, 0.08, 0.12]
    assert not blocked(on_support(down, far, near), divergence="kl", estimator="topk", bound=0.3).any()
    assert blocked(on_support(up, near, far), divergence="kl", estimator="topk", bound=0.3).all()


def test_golden_finer_estimators_see_more():
    # Sampled token 0.40 → 0.45: binary TV 0.05.  Support {0, 1}: ½(0.05 + |0.30−0.15| + |0.30−0.40|) = 0.15.
    # All four: ½(0.05 + 0.15 + |0.20−0.10| + |0.10−0.30|) = 0.25.
    batch = inputs(p_new=[0.45], p_old=[0.40], adv=[1.0])
    topk = on_support(batch, [0.45, 0.15, 0.40], [0.40, 0.30, 0.30])
    full = on_support(batch, [0.45, 0.15, 0.10, 0.30, 0.0], [0.40, 0.30, 0.20, 0.10, 0.0])
    seen = [
        (
            bool(blocked(batch, bound=b)),
            bool(blocked(topk, estimator="topk", bound=b)),
            bool(blocked(full, estimator="full", bound=b)),
        )
        for b in (0.04, 0.10, 0.20, 0.30)
    ]
    assert seen == [(True, True, True), (False, True, True), (False, False, True), (False, False, False)]


def test_golden_each_sign_has_its_own_bound():
    # Both tokens moved by 0.4; Â > 0 reads bound_high, Â < 0 reads bound_low, and what is not set reads bound.
    batch = inputs(p_new=[0.9, 0.1], p_old=[0.5, 0.5], adv=[1.0, -1.0])
    assert blocked(batch, bound_low=0.3, bound_high=0.5).tolist() == [[False, True]]
    assert blocked(batch, bound_low=0.5, bound_high=0.3).tolist() == [[True, False]]
    assert blocked(batch, bound=0.3, bound_low=0.5).tolist() == [[True, False]]
    assert blocked(batch, bound=0.5, bound_low=0.3).tolist() == [[False, True]]
    assert blocked(batch, bound=0.3, bound_high=0.5).tolist() == [[False, True]]
    assert blocked(batch, bound=0.5, bound_high=0.0).tolist() == [[True, False]]


@pytest.mark.parametrize(("divergence", "bounds"), [("tv", (0.2, 0.2)), ("kl", (0.05, 0.05)), ("ratio", (0.2, 0.2))])
def test_golden_default_bounds(divergence, bounds):
    assert DPPOConfig(divergence=divergence).bounds == bounds


def test_golden_a_capped_weight_keeps_its_gradient():
    # ρ = 8, 0.5, 8; min(ρ, 5) = 5, 0.5, 5.  Value −Â min(ρ, C), gradient the same: clamping ρ itself would give 0.
    batch = inputs(p_new=[0.8, 0.1, 0.8], p_old=[0.1, 0.2, 0.1], adv=[2.0, 2.0, -1.0])
    loss, grad = loss_and_grad(make_objective("dppo", bound=INF, ratio_cap=5.0), batch)
    assert_close(loss, row([-10.0, -1.0, 5.0]))
    assert_close(grad, row([-10.0, -1.0, 5.0]))


def test_golden_metrics():
    # |Δp| = 0.4, 0.1, 0.4; unmasked tokens 0, 1, 2; one of the three blocked; ρ = 1.8, 1.2, 0.2.
    # kl_before: mean of ρ − 1 − ln ρ = (0.8 − ln 1.8 + 0.2 − ln 1.2 − 0.8 − ln 0.2) / 3 = (0.2 − ln 0.432) / 3.
    # kl_max: ½ ln(0.5/0.9) + ½ ln(0.5/0.1) = −½ ln 0.36.   mismatch: (|0.5−0.4| + |0.5−0.5| + |0.5−0.3|) / 3 = 0.1.
    batch = inputs(
        p_new=[0.9, 0.6, 0.1, 0.9],
        p_old=[0.5] * 4,
        adv=[1.0, 1.0, 1.0, 1.0],
        mask=[True, True, True, False],
        p_rollout=[0.4, 0.5, 0.3, 0.9],
    )
    metrics = make_objective("dppo", bound=0.2)(batch).metrics
    expected = {
        "tr/active_frac": 1 / 3,
        "tr/ratio_max": 1.8,
        "tr/kl_before": (0.2 - math.log(0.432)) / 3,
        "tr/kl_max": -0.5 * math.log(0.36),
        "tr/mismatch": 0.1,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6), name
        assert not metrics[name].requires_grad


# ---------------------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize(("p_new", "adv"), [(0.9, 1.0), (0.2, -1.0)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_bound_itself_is_inside(divergence, p_new, adv):
    batch = inputs(p_new=[p_new], p_old=[0.5], adv=[adv])
    old, new = batch.logp_old, batch.logp_new.detach()
    moved = {"tv": binary_tv(old, new), "kl": binary_kl(old, new), "ratio": torch.expm1(new - old).abs()}[divergence].item()
    assert not blocked(batch, divergence=divergence, bound=moved).any()
    assert blocked(batch, divergence=divergence, bound=math.nextafter(moved, 0)).all()


@pytest.mark.parametrize(("divergence", "measure"), [("tv", categorical_tv), ("kl", categorical_kl)])
def test_the_bound_itself_is_inside_on_a_support(divergence, measure):
    batch = on_support(inputs(p_new=[0.6], p_old=[0.5], adv=[1.0]), [0.6, 0.3, 0.1], [0.5, 0.2, 0.3])
    moved = measure(batch.dist_old.with_rest(), batch.dist_new.with_rest()).item()
    assert not blocked(batch, divergence=divergence, estimator="topk", bound=moved).any()
    assert blocked(batch, divergence=divergence, estimator="topk", bound=math.nextafter(moved, 0)).all()


@given(tokens(), st.sampled_from(DIVERGENCES), st.sampled_from([0.0, 1e-3, 0.2]))
def test_inward_moves_are_never_blocked(drawn, divergence, bound):
    p_new, p_old, adv = drawn
    inward = [-abs(a) if new > old else abs(a) for new, old, a in zip(p_new, p_old, adv, strict=True)]
    batch = inputs(p_new, p_old, inward)
    loss, grad = loss_and_grad(make_objective("dppo", divergence=divergence, bound=bound), batch)
    expected = row([-new / old * a for new, old, a in zip(p_new, p_old, inward, strict=True)])
    assert_close(loss, expected)
    assert_close(grad, expected)


@given(tokens(), st.sampled_from(DIVERGENCES))
def test_a_bound_of_0_blocks_every_outward_move(drawn, divergence):
    p_new, p_old, adv = drawn
    batch = inputs(p_new, p_old, [abs(a) if new > old else -abs(a) for new, old, a in zip(p_new, p_old, adv, strict=True)])
    moved_out = row(p_new).log() != row(p_old).log()
    assert torch.equal(blocked(batch, divergence=divergence, bound=0.0), moved_out & (batch.advantages != 0))


@given(st.floats(0.01, 0.9), st.floats(1e-6, 0.999), st.floats(1e-6, 0.999))
def test_an_unlikely_token_is_never_blocked_downward(bound, share, fall):
    # μ ≤ δ: the furthest it can fall, to 0, is a total variation of μ.
    p_old = bound * share
    batch = inputs(p_new=[p_old * fall], p_old=[p_old], adv=[-1.0])
    assert not blocked(batch, divergence="tv", bound=bound).any()


@given(st.floats(0.01, 0.9), st.floats(1e-3, 0.999), st.floats(1e-3, 0.999))
def test_a_likely_token_is_never_blocked_upward(bound, share, rise):
    # μ ≥ 1 − δ: the furthest it can rise, to 1, is a total variation of 1 − μ.
    p_old = 1 - bound * share
    batch = inputs(p_new=[p_old + (1 - p_old) * rise], p_old=[p_old], adv=[1.0])
    assert not blocked(batch, divergence="tv", bound=bound).any()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_tokens_without_advantage_are_never_counted(divergence):
    batch = inputs(p_new=[0.9, 0.1, 0.9], p_old=[0.5, 0.5, 0.5], adv=[0.0, 0.0, 1.0])
    out = make_objective("dppo", divergence=divergence, bound=0.0)(batch)
    assert out.metrics["tr/active_frac"].item() == pytest.approx(1 / 3)
    assert out.loss.tolist() == [[0.0, 0.0, 0.0]]


@given(SEEDS, st.sampled_from([("tv", "binary"), ("kl", "binary"), ("ratio", "binary"), ("tv", "topk"), ("kl", "topk")]))
def test_a_larger_bound_blocks_a_subset(seed, kind):
    divergence, estimator = kind
    batch, _ = random_batch(3, 4, 6, 3, per_token=True, seed=seed)
    masks = [blocked(batch, divergence=divergence, estimator=estimator, bound=b) for b in (0.0, 0.01, 0.05, 0.1, 0.3, 1.0, INF)]
    for tight, loose in pairwise(masks):
        assert not (loose & ~tight).any()
    assert not masks[-1].any()


@given(SEEDS, st.sampled_from(["tv", "kl"]), st.floats(1e-3, 0.5))
def test_a_finer_estimator_blocks_a_superset(seed, divergence, bound):
    masks = [blocked(random_batch(3, 4, 6, 1, per_token=True, seed=seed)[0], divergence=divergence, bound=bound)]
    for k, estimator in ((1, "topk"), (3, "topk"), (6, "full")):
        batch, _ = random_batch(3, 4, 6, k, per_token=True, seed=seed)
        masks.append(blocked(batch, divergence=divergence, estimator=estimator, bound=bound))
    for coarse, fine in pairwise(masks):
        assert not (coarse & ~fine).any()


@given(SEEDS, st.sampled_from(["tv", "kl"]), st.floats(1e-3, 0.5))
def test_with_two_tokens_binary_is_full(seed, divergence, bound):
    batch, _ = random_batch(3, 4, 2, 2, step=1.5, per_token=True, seed=seed)
    binary = blocked(batch, divergence=divergence, bound=bound)
    assert torch.equal(binary, blocked(batch, divergence=divergence, estimator="full", bound=bound))


@given(SEEDS, st.sampled_from(["tv", "kl"]), st.floats(1e-3, 0.5))
def test_topk_on_the_whole_vocabulary_is_full(seed, divergence, bound):
    batch, logits = random_batch(2, 4, 6, 6, per_token=True, seed=seed)
    topk = make_objective("dppo", divergence=divergence, estimator="topk", bound=bound)(batch).loss
    full = make_objective("dppo", divergence=divergence, estimator="full", bound=bound)(batch).loss
    assert torch.equal(topk, full)
    assert torch.equal(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (topk, full)))


# ---------------------------------------------------------------------------------------------------- which way


def test_golden_a_symmetric_mask_looks_at_how_far_alone():
    # |Δp| = .4, .4, .4, .1, .4 and δ = .2: all but the fourth are outside, whichever way; the fifth has no advantage.
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.6, 0.9], p_old=[0.5] * 5, adv=[1.0, -1.0, 1.0, 1.0, 0.0])
    out = make_objective("dppo", mask="symmetric")(batch)
    assert out.acted.tolist() == [[True, True, True, False, False]]
    loss, grad = loss_and_grad(make_objective("dppo", mask="symmetric"), batch)
    assert_close(loss, row([0.0, 0.0, 0.0, -1.2, 0.0]))
    assert_close(grad, row([0.0, 0.0, 0.0, -1.2, 0.0]))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_golden_a_predictive_mask_looks_at_all_tokens(divergence):
    # μ = .2, .7, .1 and π = .3, .1, .6, with a = 0: a step up takes log π by [j=0] − π_j − π_0 + s, s = .09 + .01 + .36 = .46,
    # so by .86, .06, −.44.   KL(μ‖π) changes by −(.2·.86 + .7·.06 − .1·.44) = −.17, TV by ½(.3·.86 − .1·.06 − .6·.44) = −.006.
    # The sampled token has risen and would rise further: mask="outward" blocks it. What has gone wrong is token 2, and this
    # step takes mass from it: "predictive" lets it pass, and blocks the way down.
    batch = on_support(inputs(p_new=[0.3, 0.3], p_old=[0.2, 0.2], adv=[1.0, -1.0]), [0.3, 0.1, 0.6], [0.2, 0.7, 0.1])
    settings = {"divergence": divergence, "estimator": "topk"}
    assert blocked(batch, **settings).tolist() == [[True, False]]
    assert blocked(batch, mask="predictive", **settings).tolist() == [[False, True]]
    loss, grad = loss_and_grad(make_objective("dppo", mask="predictive", **settings), batch)
    assert_close(loss, row([-1.5, 0.0]))
    assert_close(grad, row([-1.5, 0.0]))


@given(SEEDS, st.sampled_from(["tv", "kl"]), st.floats(0.0, 0.3))
def test_a_predictive_mask_blocks_the_steps_that_raise_the_divergence(seed, divergence, bound):
    # By taking a small step on the logits of the support and its tail, and measuring again.
    batch, _ = random_batch(2, 4, 6, 3, step=1.0, per_token=True, seed=seed)
    settings = {"divergence": divergence, "estimator": "topk", "bound": bound}
    ours = make_objective("dppo", mask="predictive", **settings)(batch).acted
    for b, t in batch.mask.nonzero().tolist():
        old, new = (dist.with_rest()[b, t].exp().tolist() for dist in (batch.dist_old, batch.dist_new))
        size = 1e-5 * batch.advantages[b, t].item()
        stepped = [p * math.exp(size * ((j == 0) - p)) for j, p in enumerate(new)]
        before, after = (distance(divergence, old, [p / sum(q) for p in q]) for q in (new, stepped))
        if abs(after - before) > 1e-4 * abs(size) and abs(before - bound) > 1e-9:
            assert ours[b, t].item() == (before > bound and after > before)


@given(SEEDS, st.sampled_from(["tv", "kl"]), st.floats(1e-3, 0.5))
def test_with_two_tokens_there_is_one_way_out(seed, divergence, bound):
    batch, _ = random_batch(3, 4, 2, 2, step=1.5, per_token=True, seed=seed)
    settings = {"divergence": divergence, "estimator": "full", "bound": bound}
    assert torch.equal(blocked(batch, **settings), blocked(batch, mask="predictive", **settings))


@given(SEEDS, st.sampled_from([("tv", "binary"), ("kl", "binary"), ("ratio", "binary"), ("tv", "topk"), ("kl", "topk")]))
def test_a_symmetric_mask_blocks_all_that_others_do(seed, kind):
    divergence, estimator = kind
    batch, _ = random_batch(3, 4, 6, 3, step=1.0, per_token=True, seed=seed)
    settings = {"divergence": divergence, "estimator": estimator, "bound": 0.1}
    symmetric = blocked(batch, mask="symmetric", **settings)
    for mask in ("outward", *(["predictive"] if estimator == "topk" else [])):
        assert not (blocked(batch, mask=mask, **settings) & ~symmetric).any()
    assert torch.equal(symmetric, blocked(replace(batch, advantages=-batch.advantages), mask="symmetric", **settings))


def test_a_predictive_mask_needs_a_support():
    with pytest.raises(ValueError, match="mask='predictive' looks at what a step does to the support, so it goes with estim"):
        make_objective("dppo", mask="predictive")


# ---------------------------------------------------------------------------------------------------- relations to others


@given(tokens(), st.floats(0.0, 1.0), st.floats(0.0, 1.5))
def test_on_the_ratio_it_has_the_gradient_of_ppo_clip(drawn, low, high):
    p_new, p_old, adv = drawn
    moved = [new / old - 1 for new, old in zip(p_new, p_old, strict=True) if new != old]
    assume(apart(moved, high, -low))  # exactly on the clip's edge rounding decides, in either objective
    batch = inputs(p_new, p_old, adv)
    _, ours = loss_and_grad(make_objective("dppo", divergence="ratio", bound_low=low, bound_high=high), batch)
    _, theirs = loss_and_grad(make_objective("ppo_clip", clip_low=low, clip_high=high), batch)
    assert_close(ours, theirs)


@given(SEEDS, st.sampled_from([("tv", "binary"), ("kl", "binary"), ("ratio", "binary"), ("tv", "full"), ("kl", "topk")]))
def test_without_a_bound_it_is_reinforce(seed, kind):
    divergence, estimator = kind
    batch, logits = random_batch(2, 4, 6, 6, step=2.0, per_token=True, seed=seed)
    for cap in (None, 1.5):
        ours = make_objective("dppo", divergence=divergence, estimator=estimator, bound=INF, ratio_cap=cap)(batch).loss
        theirs = make_objective("reinforce", ratio_cap=cap)(batch).loss
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)))


def test_golden_a_token_rounded_to_certainty_is_not_infinitely_far():
    # In float32 log π = 0 stands for any π from 1 − 6e-8 on; it is read as 1 − 1e-8, which is
    # from 0.999: KL = 0.999 ln 0.999 + 0.001 ln(0.001/1e-8) = 0.0105, inside 0.05;
    # from 0.5:   KL = 2 · 0.5 ln 0.5 + 0.5 ln 1e8 = 8.52, outside.
    batch = inputs(p_new=[1.0, 1.0], p_old=[0.999, 0.5], adv=[1.0, 1.0])
    assert blocked(batch, divergence="kl").tolist() == [[False, True]]
    assert blocked(batch, divergence="kl", bound=0.0104).all()
    assert blocked(batch, divergence="kl", bound=8.51)[0, 1]
    assert not blocked(batch, divergence="kl", bound=8.52).any()


def test_golden_a_token_that_rises_from_next_to_impossible_is_blocked():
    # e^−105 is 0 in float32 and the ratio overflows: KL(0‖e^−1.5) = −ln(1 − e^−1.5) = 0.252 > 0.05, and inside 0.26.
    batch = TokenBatch(torch.tensor([[-1.5]]), torch.tensor([[-105.0]]), torch.tensor([[1.0]]), torch.tensor([[True]]))
    assert blocked(batch, divergence="kl").all()
    assert not blocked(batch, divergence="kl", bound=0.26).any()
    assert make_objective("dppo", divergence="kl")(batch).metrics["tr/kl_max"].item() == pytest.approx(0.2525, abs=1e-4)


def test_without_a_bound_even_an_infinite_kl_is_inside():
    # KL(½, ½ ‖ 1, 0) = ½ ln ½ + ½ ln(½/0) = inf.
    batch = on_support(inputs(p_new=[1.0], p_old=[0.5], adv=[1.0]), p_new=[1.0, 0.0], p_old=[0.5, 0.5])
    assert blocked(batch, divergence="kl", estimator="topk", bound=1e9).all()
    assert not blocked(batch, divergence="kl", estimator="topk", bound=INF).any()


@pytest.mark.parametrize("kind", [("tv", "binary"), ("kl", "binary"), ("ratio", "binary"), ("tv", "topk"), ("kl", "topk")])
def test_on_policy_nothing_is_blocked_and_the_gradient_is_the_advantage(kind):
    divergence, estimator = kind
    batch, _ = random_batch(3, 4, 6, 3, step=0.0, per_token=True)
    out = make_objective("dppo", divergence=divergence, estimator=estimator, bound=0.0)(batch)
    (grad,) = torch.autograd.grad(out.loss.sum(), batch.logp_new)
    assert_close(grad, torch.where(batch.mask, -batch.advantages, 0.0))
    assert out.metrics["tr/active_frac"] == 0


@given(tokens(), st.floats(0.0, 6.0))
def test_a_cap_cuts_the_value_and_never_the_gradient(drawn, cap):
    p_new, p_old, adv = drawn
    batch = inputs(p_new, p_old, adv)
    loss, grad = loss_and_grad(make_objective("dppo", bound=INF, ratio_cap=cap), batch)
    expected = row([-a * min(new / old, cap) for new, old, a in zip(p_new, p_old, adv, strict=True)])
    assert_close(loss, expected)
    assert_close(grad, expected)


# ---------------------------------------------------------------------------------------------------- oracle, gradient


def distance(divergence: str, p: list[float], q: list[float]) -> float:
    """D(p, q) as the paper prints it, eqs. 13–16: p is the old policy's."""
    if divergence == "tv":
        return 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def weights_by_the_paper(batch: TokenBatch, config: DPPOConfig) -> Tensor:
    """M_t min(ρ_t, C), token by token, eqs. 11 and 12."""
    low, high = config.bounds
    weights = torch.zeros_like(batch.logp_old)
    for b, t in batch.mask.nonzero().tolist():
        p = [math.exp(x) for x in batch.dist_old.with_rest()[b, t].tolist()]
        q = [math.exp(x) for x in batch.dist_new.with_rest()[b, t].tolist()]
        ratio, adv = q[0] / p[0], batch.advantages[b, t].item()
        if config.divergence == "ratio":
            moved = abs(ratio - 1)
        elif config.estimator == "binary":
            moved = distance(config.divergence, [p[0], 1 - p[0]], [q[0], 1 - q[0]])
        else:
            moved = distance(config.divergence, p, q)
        dropped = (adv > 0 and ratio > 1 and moved > high) or (adv < 0 and ratio < 1 and moved > low)
        weights[b, t] = 0.0 if dropped else min(ratio, config.ratio_cap or INF)
    return weights


@st.composite
def configs(draw) -> DPPOConfig:
    divergence = draw(st.sampled_from(DIVERGENCES))
    return DPPOConfig(
        divergence=divergence,
        estimator="binary" if divergence == "ratio" else draw(st.sampled_from(["binary", "topk", "full"])),
        bound=draw(st.none() | st.floats(0.0, 0.6)),
        bound_low=draw(st.none() | st.floats(0.0, 0.6)),
        bound_high=draw(st.none() | st.floats(0.0, 0.6)),
        ratio_cap=draw(st.none() | st.floats(0.1, 3.0)),
    )


@given(SEEDS, configs())
def test_loss_and_logit_gradient_agree_with_the_paper(seed, config):
    # L = −w Â with w = M min(ρ, C), and through the softmax ∂L/∂logits = −w Â (e_a − π).
    batch, logits = random_batch(2, 4, 6, 6 if config.estimator == "full" else 2, per_token=True, seed=seed)
    loss = dppo(batch, config).loss
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    weighted = torch.where(batch.mask, weights_by_the_paper(batch, config) * batch.advantages, 0.0)
    sampled = torch.nn.functional.one_hot(batch.dist_old.ids[..., 0], logits.shape[-1])
    assert_close(loss, -weighted)
    assert_close(grad, -weighted[..., None] * (sampled - logits.detach().softmax(-1)))


@pytest.mark.parametrize("kind", [("tv", "binary"), ("kl", "binary"), ("ratio", "binary"), ("tv", "topk"), ("kl", "topk")])
def test_gradcheck_on_dense_logits(kind):
    divergence, estimator = kind
    batch, logits = random_batch(3, 4, 5, 2, step=1.0, per_token=True)
    objective = make_objective("dppo", divergence=divergence, estimator=estimator, bound=0.04)
    assert 0 < objective(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits)


# ---------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("estimator", ["binary", "topk"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_may_hold_anything(estimator, garbage):
    batch, _ = random_batch(3, 4, 6, 3, per_token=True)
    objective = make_objective("dppo", divergence="kl", estimator=estimator)
    out, poisoned = objective(batch), objective(poison_padding(batch, garbage))
    assert torch.equal(out.loss, poisoned.loss)
    assert (poisoned.loss[~batch.mask] == 0).all()
    for name, value in out.metrics.items():
        assert torch.equal(value, poisoned.metrics[name]), name
    for grad in leaf_gradients(objective, poison_padding(batch, garbage)):
        assert grad.isfinite().all()
        assert (grad[~batch.mask] == 0).all()


def test_a_batch_without_a_live_token_is_refused():
    batch = inputs(p_new=[0.5], p_old=[0.5], adv=[1.0], mask=[False])
    with pytest.raises(ValueError, match="dppo: mask has no unmasked token"):
        make_objective("dppo")(batch)


def test_a_blocked_token_may_overflow():
    # log ρ = 999: e^999 is inf, and 0 · inf would be NaN.
    logp_new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    batch = TokenBatch(logp_new, torch.tensor([[-1000.0, -1.0]]), torch.tensor([1.0]), torch.tensor([[True, True]]))
    loss, grad = loss_and_grad(make_objective("dppo"), batch)
    assert loss.tolist() == [[0.0, -1.0]]
    assert grad.tolist() == [[0.0, -1.0]]


def test_a_capped_weight_keeps_its_gradient_however_large_the_ratio():
    logp_new = torch.tensor([[-1.0]], requires_grad=True)
    batch = TokenBatch(logp_new, torch.tensor([[-1000.0]]), torch.tensor([2.0]), torch.tensor([[True]]))
    loss, grad = loss_and_grad(make_objective("dppo", bound=INF, ratio_cap=5.0), batch)
    assert (loss.item(), grad.item()) == (-10.0, -10.0)


def test_one_advantage_per_sequence_counts_for_each_of_its_tokens():
    batch, _ = random_batch(3, 4, 6, 3)
    objective = make_objective("dppo", bound=0.05)
    per_token = replace(batch, advantages=batch.advantages[:, None].expand(3, 4))
    assert torch.equal(objective(batch).loss, objective(per_token).loss)


def test_full_refuses_a_support_that_leaves_something_over():
    batch = on_support(inputs(p_new=[0.6], p_old=[0.5], adv=[1.0]), [0.6, 0.4, 0.0], [0.5, 0.25, 0.25])
    with pytest.raises(ValueError, match=r"nothing left over, but up to 0\.25 of the probability is outside it"):
        make_objective("dppo", estimator="full")(batch)


def test_it_asks_for_what_it_reads():
    sampled = {"logp_new", "logp_old", "advantages", "mask"}
    assert make_objective("dppo").needs == sampled
    for estimator in ("topk", "full"):
        assert make_objective("dppo", estimator=estimator).needs == sampled | {"dist_new", "dist_old"}
    assert DPPOConfig.anchor == "rollout"
