"""TROLL's loss is that of the projected policy, its gradient reaches every logit, and the regression acts outside alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import as_batch, leaf_gradients, poison_padding, random_batch, row
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import one_hot

from corral import (
    SparseDist,
    TokenBatch,
    categorical_kl,
    gather_support,
    make_objective,
    project_categorical_kl,
    reduce_loss,
    top_k_support,
)
from corral.objective.config import TROLLConfig
from tolerance import assert_close

INF = math.inf
SEEDS = st.integers(0, 2**20)


def policies(new: list[list[float]], old: list[list[float]], adv: list[float], k: int) -> tuple[TokenBatch, Tensor]:
    """One sequence from whole distributions [T V], token 0 sampled throughout, and the new policy's logits, the leaf."""
    logits = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    dist_old = top_k_support(torch.tensor([old], dtype=torch.float64).log(), torch.zeros(1, len(old), dtype=torch.int64), k)
    sampled = dist_old.logp[..., 0]
    like = TokenBatch(
        sampled, sampled, torch.tensor([adv], dtype=torch.float64), torch.ones_like(sampled, dtype=torch.bool), None, dist_old
    )
    return as_batch(logits, like), logits


def loss_and_logit_grad(batch: TokenBatch, logits: Tensor, name: str = "troll", **config) -> tuple[Tensor, Tensor]:
    """The loss per token [B T], and the gradient of its sum in the new policy's dense logits [B T V]."""
    loss = make_objective(name, **config)(batch).loss
    (grad,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    return loss.detach(), grad


def per_logit(*values: float) -> Tensor:
    """Numbers worked out by hand, as one token's logits [1 1 V]."""
    return row(values)[None]


# ---------------------------------------------------------------------------------------------------- golden

# With p = (¼, ½, ¼) and d = ln 4 · (1, 0, −1):   p eᵈ ∝ (.64, .32, .04) = q,   p e^{d/2} ∝ (4/9, 4/9, 1/9) = r.
# So with the bound KL(r‖p) the projection of q is r, at t = ½, η = 1.
OLD, NEW, HALFWAY = [0.25, 0.5, 0.25], [0.64, 0.32, 0.04], [4 / 9, 4 / 9, 1 / 9]
BOUND = 4 / 9 * math.log(16 / 9) + 4 / 9 * math.log(8 / 9) + 1 / 9 * math.log(4 / 9)
KL_BEFORE = 0.64 * math.log(2.56) + 0.32 * math.log(0.64) + 0.04 * math.log(0.16)
PULL = 0.64 * math.log(1.44) + 0.32 * math.log(0.72) + 0.04 * math.log(0.36)


@pytest.mark.parametrize("regression", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("k", [1, 3])  # token 2 is the rest, or there is none
def test_golden_loss_and_gradient_of_an_active_token(k, regression):
    # Ratio r_0/p_0 = 16/9, so with Â = 9 the policy gradient's loss is −16.
    # E_r d = ln 4/3, Var_r d = 4 ln²4/9, z = (1, −½, −2):
    #   ∂L/∂logit_j = −16 t (δ_j0 − r_j (1 + z_0 z_j)) = −8 (1 − 8/9, −2/9, 1/9) = (−8/9, 16/9, −8/9), along no part of d.
    # KL(q‖r) = .64 ln 1.44 + .32 ln .72 + .04 ln .36.   E_q d = .6 ln 4:
    #   (1 − t) q_j (d_j − E_q d) = ½ ln 4 · (.64 · .4, .32 · −.6, .04 · −1.6) = ln 4 · (.128, −.096, −.032).
    batch, logits = policies([NEW], [OLD], [9.0], k)
    loss, grad = loss_and_logit_grad(batch, logits, bound=BOUND, regression=regression)
    assert_close(loss, row([-16 + regression * PULL]))
    radial = math.log(4) * per_logit(0.128, -0.096, -0.032)
    assert_close(grad, per_logit(-8 / 9, 16 / 9, -8 / 9) + regression * radial)


def test_golden_tokens_of_the_rest_share_its_gradient_by_their_probability():
    # The rest's .04 is .03 + .01, whatever the old policy's .25 is made of: −8/9 splits into −6/9 and −2/9.
    batch, logits = policies([[0.64, 0.32, 0.03, 0.01]], [[0.25, 0.5, 0.05, 0.2]], [9.0], k=1)
    loss, grad = loss_and_logit_grad(batch, logits, bound=BOUND, regression=0.0)
    assert_close(loss, row([-16.0]))
    assert_close(grad, per_logit(-8 / 9, 16 / 9, -6 / 9, -2 / 9))


def test_golden_with_two_tokens_only_the_regression_acts():
    # ½ → .9 projects to .75 at ε = KL(¾‖½) = ¾ ln 3/2 − ¼ ln 2: logit .75 = ln 3 = ½ ln 9, so t = ½; ratio 1.5.
    # Pull: .9 ln 1.2 + .1 ln .4.   d_0 − E_q d = .1 ln 9, so its gradient is ½ · .9 · .1 ln 9 = .045 ln 9, and minus that.
    batch, logits = policies([[0.9, 0.1]], [[0.5, 0.5]], [2.0], k=2)
    bound = 0.75 * math.log(1.5) - 0.25 * math.log(2)
    loss, grad = loss_and_logit_grad(batch, logits, bound=bound, regression=0.0)
    assert_close(loss, row([-3.0]))
    assert_close(grad, per_logit(0.0, 0.0))
    loss, grad = loss_and_logit_grad(batch, logits, bound=bound, regression=1.0)
    assert_close(loss, row([-3.0 + 0.9 * math.log(1.2) + 0.1 * math.log(0.4)]))
    assert_close(grad, 0.045 * math.log(9) * per_logit(1.0, -1.0))


def test_golden_fill_renormalises_the_kept_tokens():
    # 3 of 5 kept: masses .9 and .8, plus 2 · 1e-12 each.  Ratio (.3/.8)/(.4/.9) = 27/32, to 2e-12 (1/.9 − 1/.8) = −3e-13.
    # Gradient −27/32 (e_0 − q̃) with q̃ = (3/8, 3/8, 2/8), nothing outside.
    # KL before: 3/8 ln(27/32) + 3/8 ln(9/8) + 2/8 ln(9/8).  The rest that is reported stays the true one, .1.
    batch, logits = policies([[0.3, 0.3, 0.2, 0.1, 0.1]], [[0.4, 0.3, 0.2, 0.06, 0.04]], [1.0], k=3)
    loss, grad = loss_and_logit_grad(batch, logits, bound=INF, tail="fill", vocab_size=5)
    assert_close(loss, row([-27 / 32]))
    assert_close(grad, -27 / 32 * per_logit(5 / 8, -3 / 8, -2 / 8, 0.0, 0.0))
    metrics = make_objective("troll", bound=INF, tail="fill", vocab_size=5)(batch).metrics
    assert metrics["tr/kl_before"].item() == pytest.approx(3 / 8 * math.log(27 / 32) + 5 / 8 * math.log(9 / 8), rel=1e-9)
    assert metrics["tr/rest_mass"].item() == pytest.approx(0.1, rel=1e-9)


def test_with_nothing_dropped_there_is_nothing_to_fill():
    batch, logits = random_batch(2, 3, 5, 5)
    filled, bucketed = (
        loss_and_logit_grad(batch, logits, bound=0.01, **tail)
        for tail in ({"tail": "fill", "vocab_size": 5}, {"tail": "bucket"})
    )
    assert torch.equal(filled[0], bucketed[0])
    assert torch.equal(filled[1], bucketed[1])


def test_golden_fill_gives_every_dropped_token_1e12th():
    # A vocabulary of 3 + 1e11 drops 1e11 tokens, .1 in all: masses .9 + .1 = 1 and .8 + .1 = .9; ratio (.3/.9)/.4 = 5/6.
    # KL before: ⅓ ln(5/6) + ⅓ ln(10/9) + 2/9 ln(10/9) + 1/9 ln(10/9).
    batch, logits = policies([[0.3, 0.3, 0.2, 0.1, 0.1]], [[0.4, 0.3, 0.2, 0.06, 0.04]], [1.0], k=3)
    config = {"bound": INF, "tail": "fill", "vocab_size": 3 + 10**11}
    loss, grad = loss_and_logit_grad(batch, logits, **config)
    assert_close(loss, row([-5 / 6]))
    # −5/6 (e_0 − q̃) on the kept three, q̃ = (3, 3, 2, 1)/9.  The fill ignores the softmax's normaliser: + π_j · 5/6 · 1/9.
    expected = -5 / 6 * per_logit(6 / 9, -3 / 9, -2 / 9, 0.0, 0.0) + 5 / 54 * per_logit(0.3, 0.3, 0.2, 0.1, 0.1)
    assert_close(grad, expected)
    kl_before = 1 / 3 * math.log(5 / 6) + 2 / 3 * math.log(10 / 9)
    assert make_objective("troll", **config)(batch).metrics["tr/kl_before"].item() == pytest.approx(kl_before, rel=1e-10)


def test_golden_a_capped_weight_keeps_its_gradient():
    # .001 → .02: KL = .02 ln 20 + .98 ln(.98/.999) = .0599 − .0188 < .05, inside, and yet the ratio is 20.
    # Capped at 5: loss −5 Â, gradient −5 Â (e_0 − π).
    batch, logits = policies([[0.02, 0.98]], [[0.001, 0.999]], [2.0], k=2)
    assert_close(loss_and_logit_grad(batch, logits)[0], row([-40.0]))
    loss, grad = loss_and_logit_grad(batch, logits, ratio_cap=5.0)
    assert_close(loss, row([-10.0]))
    assert_close(grad, -10 * per_logit(0.98, -0.98))


def test_golden_sequence_level():
    # Ratios .8/.2 = 4 and .5/.5 = 1: s = √4 = 2 on both tokens; gradient −2 Â (e_0 − π) on each.
    batch, logits = policies([[0.8, 0.2], [0.5, 0.5]], [[0.2, 0.8], [0.5, 0.5]], [3.0, 3.0], k=2)
    loss, grad = loss_and_logit_grad(batch, logits, bound=INF, level="sequence")
    assert_close(loss, row([-6.0, -6.0]))
    assert_close(grad, -6 * torch.cat([per_logit(0.2, -0.2), per_logit(0.5, -0.5)], dim=1))
    assert make_objective("troll", bound=INF, level="sequence")(batch).metrics["tr/ratio_max"].item() == pytest.approx(2)


def test_golden_metrics():
    # One active token (η = 1), one on-policy, one of padding.  Rests of the old policy: .25 and .5.
    # mismatch: (|.25 − .20| + |.5 − .35|) / 2 = .1.
    new, old = [NEW, [0.5, 0.3, 0.2], NEW], [OLD, [0.5, 0.3, 0.2], OLD]
    batch, _ = policies(new, old, [1.0, 1.0, 1.0], k=1)
    assert batch.dist_old.ids[0, 1].tolist() == [0, -1]  # its most likely token is the sampled one
    batch = replace(
        batch,
        mask=torch.tensor([[True, True, False]]),
        logp_rollout=row([0.20, 0.35, 1.0]).log(),
    )
    metrics = make_objective("troll", bound=BOUND)(batch).metrics
    expected = {
        "tr/active_frac": 0.5,
        "tr/kl_before": KL_BEFORE / 2,
        "tr/kl_max": KL_BEFORE,
        "tr/kl_after": BOUND / 2,
        "tr/dual": 1.0,
        "tr/unconverged": 0,
        "tr/rest_mass": (0.25 + 0.5) / 2,
        "tr/rest_max_ratio": 1.0,  # outside the support: .04 / .25 and .3 / .3; padding does not count
        "tr/hidden_kl_max": 0.0,  # one token outside has all of its tail in both policies
        "tr/ratio_max": 16 / 9,
        "tr/mismatch": 0.1,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6), name
        assert not metrics[name].requires_grad, name


# ---------------------------------------------------------------------------------------------------- oracle


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def projected(q: np.ndarray, p: np.ndarray, bound: float) -> tuple[np.ndarray, float]:
    """argmin KL(r‖q) with KL(r‖p) ≤ bound, and η, by bisection on η."""
    if kl(q, p) <= bound:
        return q, 0.0

    def tilted(dual: float) -> np.ndarray:
        logs = (np.log(q) + dual * np.log(p)) / (1 + dual)
        return np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()

    low, high = 0.0, 1.0
    while kl(tilted(high), p) > bound:
        high *= 2
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(tilted(middle), p) > bound else (low, middle)
    return tilted(high), high


def rows(logits: np.ndarray, batch: TokenBatch, config: TROLLConfig) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Of every unmasked token: old and new policy on the kept tokens and, where something is left, everything else."""
    for b, t in batch.mask.nonzero().tolist():
        ids = [i for i in batch.dist_old.ids[b, t].tolist() if i >= 0]
        dense = np.exp(logits[b, t] - logits[b, t].max())
        dense /= dense.sum()
        q, p = dense[ids], np.exp(batch.dist_old.logp[b, t, : len(ids)].numpy())
        if config.tail == "fill":
            rest_q = rest_p = (config.vocab_size - len(ids)) * 1e-12
        else:
            rest_q, rest_p = np.delete(dense, ids).sum(), math.exp(batch.dist_old.rest[b, t])
        if len(ids) < logits.shape[-1]:
            q, p = np.append(q, rest_q), np.append(p, rest_p)
        yield b, t, p / p.sum(), q / q.sum()


def loss_by_hand(
    logits: np.ndarray, batch: TokenBatch, config: TROLLConfig, targets: dict[tuple[int, int], np.ndarray] | None = None
) -> np.ndarray:
    """The loss per token, row by row; `targets` holds the regression's targets still."""
    mask = batch.mask.numpy()
    log_ratio, pull = np.zeros(mask.shape), np.zeros(mask.shape)
    for b, t, p, q in rows(logits, batch, config):
        r, _ = projected(q, p, config.bound)
        log_ratio[b, t] = math.log((q if config.gradient == "unprojected" else r)[0] / p[0])
        pull[b, t] = kl(q, r if targets is None else targets[b, t])
    if config.level == "sequence":
        log_ratio = np.where(mask, log_ratio.sum(-1, keepdims=True) / mask.sum(-1, keepdims=True), 0.0)
    weight = np.minimum(np.exp(log_ratio), INF if config.ratio_cap is None else config.ratio_cap)
    advantages = batch.advantages.numpy()
    return np.where(
        mask, config.regression * pull - weight * (advantages[:, None] if advantages.ndim == 1 else advantages), 0.0
    )


def numeric_gradient(f: Callable[[np.ndarray], float], x: np.ndarray, h: float = 1e-5) -> Tensor:
    grad = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = h
        grad[index] = (f(x + step) - f(x - step)) / (2 * h)
    return torch.from_numpy(grad)


@st.composite
def configs(draw) -> TROLLConfig:
    return TROLLConfig(
        bound=draw(st.sampled_from([1e-3, 0.05, 0.3, INF])),
        regression=draw(st.sampled_from([0.0, 1.0, 2.5])),
        tail=draw(st.sampled_from(["bucket", "fill"])),
        vocab_size=6,
        level=draw(st.sampled_from(["token", "sequence"])),
        gradient=draw(st.sampled_from(["exact", "constant_dual", "unprojected"])),
        ratio_cap=draw(st.sampled_from([None, 1.2])),
    )


@given(SEEDS, configs(), st.sampled_from([1, 3, 6]), st.booleans())
def test_the_loss_agrees_with_bisection(seed, config, k, per_token):
    batch, logits = random_batch(3, 3, 6, k, step=0.7, per_token=per_token, seed=seed)
    loss = make_objective("troll", **vars(config))(batch).loss
    assert_close(loss, torch.from_numpy(loss_by_hand(logits.detach().numpy(), batch, config)))


@given(SEEDS, st.sampled_from([1e-3, 0.05, 0.3]))
def test_fill_is_the_projection_of_the_filled_dense_policies(seed, bound):
    # Every token outside the support written out with its 1e-12, and both rows renormalised: V categories, and no rest.
    batch, logits = random_batch(3, 3, 9, 2, step=0.7, seed=seed)
    ids, kept = batch.dist_old.ids, batch.dist_old.ids >= 0
    dense = []
    for dist in (batch.dist_new, batch.dist_old):
        filled = torch.full((3, 3, 10), 1e-12, dtype=torch.float64)
        filled = filled.scatter(-1, torch.where(kept, ids, 9), torch.where(kept, dist.logp.detach().exp(), 1e-12))[..., :9]
        dense.append(filled.log().log_softmax(-1))
    out = project_categorical_kl(*dense, bound)
    ratio = (out.logp - dense[1]).gather(-1, ids[..., :1])[..., 0].exp()
    pull = torch.where(out.active, categorical_kl(dense[0], out.logp), 0.0)
    loss, _ = loss_and_logit_grad(batch, logits, bound=bound, tail="fill", vocab_size=9)
    assert_close(loss, torch.where(batch.mask, pull - ratio * batch.advantages[:, None], 0.0), rtol=1e-9)


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("regression", [0.0, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "fill"])
def test_the_gradient_agrees_with_finite_differences_of_dense_logits(tail, regression, k):
    # The regression's target is a constant: it is held still while the logits are varied.
    batch, logits = random_batch(2, 3, 5, k, step=0.6, per_token=True, seed=1)
    config = TROLLConfig(regression=regression, tail=tail, vocab_size=5)
    objective = make_objective("troll", **vars(config))
    assert 0 < objective(batch).metrics["tr/active_frac"] < 1
    (grad,) = torch.autograd.grad(objective(batch).loss.sum(), logits)
    x = logits.detach().numpy()
    targets = {(b, t): projected(q, p, config.bound)[0] for b, t, p, q in rows(x, batch, config)}
    assert_close(grad, numeric_gradient(lambda y: loss_by_hand(y, batch, config, targets).sum(), x), atol=1e-8)


@pytest.mark.parametrize("regression", [0.0, 1.0])
def test_the_sequence_level_gradient_is_that_of_the_mean_over_sequences(regression):
    # f = mean over sequences of −Â exp(mean_t log ρ_t) + α mean_t KL(π_t‖π̃_t): what "seq-mean-token-mean" reduces to.
    batch, logits = random_batch(3, 3, 4, 2, step=0.6, seed=1)
    config = TROLLConfig(regression=regression, level="sequence")
    out = make_objective("troll", **vars(config))(batch)
    assert 0 < out.metrics["tr/active_frac"] < 1
    (grad,) = torch.autograd.grad(reduce_loss(out.loss, batch.mask, "seq-mean-token-mean"), logits)
    x, live = logits.detach().numpy(), batch.mask.numpy()
    targets = {(b, t): projected(q, p, config.bound)[0] for b, t, p, q in rows(x, batch, config)}

    def objective(y: np.ndarray) -> float:
        loss = loss_by_hand(y, batch, config, targets)
        return float((loss.sum(-1) / live.sum(-1)).mean())

    assert_close(grad, numeric_gradient(objective, x), atol=1e-8)


@pytest.mark.parametrize("tail", ["bucket", "fill"])
@pytest.mark.parametrize("k", [2, 5])
def test_gradcheck_on_dense_logits(k, tail):
    batch, logits = random_batch(2, 3, 5, k, step=0.6, per_token=True, seed=1)
    objective = make_objective("troll", regression=0.0, tail=tail, vocab_size=5)
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits)


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from([1e-3, 0.05, 0.3]))
def test_metrics_agree_with_bisection(seed, k, bound):
    batch, logits = random_batch(3, 3, 6, k, step=0.7, seed=seed)
    metrics = make_objective("troll", bound=bound)(batch).metrics
    before, after, duals, ratios, rests = [], [], [], [], []
    for b, t, p, q in rows(logits.detach().numpy(), batch, TROLLConfig()):
        r, dual = projected(q, p, bound)
        before.append(kl(q, p))
        after.append(kl(r, p))
        duals.append(dual)
        ratios.append(r[0] / p[0])
        rests.append(math.exp(batch.dist_old.rest[b, t]))
    active = [dual for dual in duals if dual > 0]
    expected = {
        "tr/active_frac": len(active) / len(duals),
        "tr/kl_before": np.mean(before),
        "tr/kl_max": max(before),
        "tr/kl_after": np.mean(after),
        "tr/dual": np.mean(active) if active else 0.0,
        "tr/rest_mass": np.mean(rests),
        "tr/ratio_max": max(ratios),
        "tr/unconverged": 0,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-12), name


# ---------------------------------------------------------------------------------------------------- relations to others


def policy_gradient(batch: TokenBatch, logits: Tensor, weight: Tensor) -> Tensor:
    """−w Â (e_a − π) at every unmasked token."""
    advantages = batch.advantages[:, None] if batch.advantages.ndim == 1 else batch.advantages
    credit = torch.where(batch.mask, weight * advantages, 0.0)[..., None]
    return -credit * (one_hot(batch.dist_old.ids[..., 0], logits.shape[-1]) - logits.detach().softmax(-1))


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from([0.0, 0.05]))
def test_on_policy_it_is_the_vanilla_policy_gradient(seed, k, bound):
    batch, logits = random_batch(2, 4, 6, k, step=0.0, per_token=True, seed=seed)
    for level in ("token", "sequence"):
        for gradient in ("exact", "constant_dual", "unprojected"):
            loss, grad = loss_and_logit_grad(batch, logits, bound=bound, level=level, gradient=gradient)
            assert_close(loss, torch.where(batch.mask, -batch.advantages, 0.0))
            assert_close(grad, policy_gradient(batch, logits, torch.ones_like(loss)))


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from([0.0, 1.0]), st.sampled_from([None, 1.2]))
def test_without_a_bound_it_is_reinforce(seed, k, regression, cap):
    batch, logits = random_batch(2, 4, 6, k, step=1.0, per_token=True, seed=seed)
    loss, grad = loss_and_logit_grad(batch, logits, bound=INF, regression=regression, ratio_cap=cap)
    expected_loss, expected_grad = loss_and_logit_grad(batch, logits, "reinforce", ratio_cap=cap)
    assert_close(loss, expected_loss)
    assert_close(grad, expected_grad)


@given(SEEDS)
def test_with_a_bound_that_nothing_reaches_it_is_the_same_as_without(seed):
    batch, logits = random_batch(2, 4, 6, 3, step=0.3, per_token=True, seed=seed)
    furthest = make_objective("troll")(batch).metrics["tr/kl_max"].item()
    for ours, theirs in zip(
        loss_and_logit_grad(batch, logits, bound=furthest), loss_and_logit_grad(batch, logits, bound=INF), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_one_token_sequences_have_the_same_loss_on_both_levels():
    batch, logits = random_batch(3, 1, 6, 3, step=1.0)
    token, sequence = (loss_and_logit_grad(batch, logits, level=level) for level in ("token", "sequence"))
    assert_close(token[0], sequence[0])
    assert_close(token[1], sequence[1])


# ---------------------------------------------------------------------------------------------------- the policy gradient


@given(SEEDS, st.sampled_from([0.01, 0.05]))
def test_through_an_active_projection_nothing_pushes_further_out(seed, bound):
    # On the whole vocabulary every direction is visible: the gradient has no component along d = log π − log π_old.
    batch, logits = random_batch(2, 4, 5, 5, step=2.0, per_token=True, seed=seed)
    _, grad = loss_and_logit_grad(batch, logits, bound=bound, regression=0.0)
    old = torch.empty_like(grad).scatter(-1, batch.dist_old.ids[..., :5], batch.dist_old.logp[..., :5])
    d = logits.detach().log_softmax(-1) - old
    outside = (logits.detach().softmax(-1) * d).sum(-1) > bound
    assert_close((grad * d).sum(-1)[outside], torch.zeros(int(outside.sum())))


@given(SEEDS, st.sampled_from([(2, 2), (6, 1)]))
def test_with_two_categories_an_active_token_has_no_policy_gradient(seed, size):
    # V = 2, or the sampled token on top of the old policy and everything else in the rest.
    vocabulary, k = size
    batch, logits = random_batch(3, 4, vocabulary, k, step=2.0, per_token=True, seed=seed)
    loss, grad = loss_and_logit_grad(batch, logits, bound=0.01, regression=0.0)
    inside, _ = loss_and_logit_grad(batch, logits, bound=INF, regression=0.0)
    two = (batch.dist_old.ids >= 0).sum(-1) + (batch.dist_old.rest > -INF) == 2
    stopped = two & (loss != inside)
    assert_close(grad[stopped], torch.zeros_like(grad[stopped]))


def test_constant_dual_is_the_gradient_at_a_fixed_multiplier():
    batch, logits = random_batch(3, 4, 6, 3, step=0.7, per_token=True)
    config = TROLLConfig(regression=0.0, gradient="constant_dual")
    loss, grad = loss_and_logit_grad(batch, logits, **vars(config))
    dual = torch.zeros_like(loss)
    for b, t, p, q in rows(logits.detach().numpy(), batch, config):
        dual[b, t] = projected(q, p, config.bound)[1]
    new, old = (dist.with_rest().clamp(min=-700) for dist in (batch.dist_new, batch.dist_old))  # −inf · 0 is NaN
    ratio = (((new + dual[..., None] * old) / (1 + dual[..., None])).log_softmax(-1) - old)[..., 0].exp()
    (expected,) = torch.autograd.grad(torch.where(batch.mask, -ratio * batch.advantages, 0.0).sum(), logits)
    assert_close(grad, expected)


def test_constant_dual_differs_from_exact_at_active_tokens_only():
    batch, logits = random_batch(3, 4, 6, 6, step=0.5, per_token=True)
    loss, exact = loss_and_logit_grad(batch, logits, regression=0.0)
    same_loss, constant = loss_and_logit_grad(batch, logits, regression=0.0, gradient="constant_dual")
    free, _ = loss_and_logit_grad(batch, logits, bound=INF)
    active = loss != free
    assert 0 < active.sum() < batch.mask.sum()
    assert torch.equal(loss, same_loss)
    assert torch.equal(exact[~active], constant[~active])
    assert ((exact - constant).norm(dim=-1) > 0.1 * exact.norm(dim=-1))[active].all()


@given(SEEDS, st.sampled_from([1, 3, 6]))
def test_unprojected_is_reinforce_with_the_same_regression(seed, k):
    batch, logits = random_batch(2, 4, 6, k, step=0.7, per_token=True, seed=seed)
    reinforce = loss_and_logit_grad(batch, logits, "reinforce")
    exact = loss_and_logit_grad(batch, logits, regression=1.0)
    no_pull = loss_and_logit_grad(batch, logits, regression=0.0)
    unprojected = loss_and_logit_grad(batch, logits, regression=1.0, gradient="unprojected")
    for i in range(2):  # the loss, then its gradient
        assert_close(unprojected[i], reinforce[i] + exact[i] - no_pull[i])


def test_with_a_bound_of_0_the_ratio_is_1_and_only_the_regression_acts():
    # r = π_old: KL(π‖π_old) pulls with gradient q_j (d_j − KL).
    batch, logits = policies([NEW], [OLD], [9.0], k=3)
    loss, grad = loss_and_logit_grad(batch, logits, bound=0.0, regression=0.0)
    assert_close(loss, row([-9.0]))
    assert_close(grad, per_logit(0.0, 0.0, 0.0))
    loss, grad = loss_and_logit_grad(batch, logits, bound=0.0, regression=1.0)
    assert_close(loss, row([-9.0 + KL_BEFORE]))
    assert_close(grad, math.log(4) * 2 * per_logit(0.128, -0.096, -0.032))


# ---------------------------------------------------------------------------------------------------- the regression


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from([0.5, 1.0]))
def test_the_regression_gradient_is_radial(seed, k, regression):
    # α (1 − t) q_j (d_j − E_q d), where a token outside the support has the rest's d.
    batch, logits = random_batch(2, 4, 6, k, step=0.7, per_token=True, seed=seed)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))  # no policy gradient
    config = TROLLConfig(regression=regression)
    for gradient in ("exact", "constant_dual", "unprojected"):
        _, grad = loss_and_logit_grad(batch, logits, regression=regression, gradient=gradient)
        expected = torch.zeros_like(grad)
        for b, t, p, q in rows(logits.detach().numpy(), batch, config):
            t_star = 1 / (1 + projected(q, p, config.bound)[1])
            d = np.log(q / p)
            radial = torch.full((6,), d[-1], dtype=torch.float64)
            for slot, i in enumerate(i for i in batch.dist_old.ids[b, t].tolist() if i >= 0):
                radial[i] = d[slot]
            expected[b, t] = regression * (1 - t_star) * logits[b, t].detach().softmax(-1) * (radial - (q * d).sum())
        assert_close(grad, expected)


@given(SEEDS, st.sampled_from(["bucket", "fill"]), st.sampled_from([torch.float64, torch.float32]))
def test_inside_the_region_the_regression_is_exactly_0(seed, tail, dtype):
    batch, logits = random_batch(2, 4, 6, 3, step=0.5, per_token=True, seed=seed, dtype=dtype)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    config = {"tail": tail, "vocab_size": 6}
    furthest = make_objective("troll", **config)(batch).metrics["tr/kl_max"].item()
    loss, grad = loss_and_logit_grad(batch, logits, bound=furthest, **config)
    assert not loss.any()
    assert not grad.any()


# ---------------------------------------------------------------------------------------------------- what it reads


def test_everything_comes_from_the_distributions():
    batch, logits = random_batch(3, 4, 6, 3, step=0.7, per_token=True)
    other = replace(
        batch,
        logp_new=(batch.logp_new.detach() - 0.7).requires_grad_(),
        logp_old=batch.logp_old + 9e-4 * torch.randn_like(batch.logp_old).clamp(-1, 1),
    )
    for level in ("token", "sequence"):
        for ours, theirs in zip(
            loss_and_logit_grad(batch, logits, level=level), loss_and_logit_grad(other, logits, level=level), strict=True
        ):
            assert torch.equal(ours, theirs)
        loss = make_objective("troll", level=level)(other).loss.sum()
        assert torch.autograd.grad(loss, other.logp_new, allow_unused=True) == (None,)


def test_an_anchor_that_is_not_the_distributions_is_refused():
    batch, _ = random_batch(2, 3, 6, 3)
    with pytest.raises(ValueError, match=r"troll: dist_old.logp\[..., 0\] and logp_old differ by more than 0.001 nats"):
        make_objective("troll")(replace(batch, logp_old=batch.logp_old + 2e-3))


@pytest.mark.parametrize("field", ["dist_new", "dist_old"])
def test_a_batch_without_distributions_is_refused(field):
    batch, _ = random_batch(2, 3, 6, 3)
    with pytest.raises(ValueError, match=f"troll: needs `{field}`"):
        make_objective("troll")(replace(batch, **{field: None}))


@pytest.mark.parametrize("k", [2, 3])  # the token that is ruled out is in the rest, or in the support
def test_an_old_policy_that_rules_out_what_the_new_one_allows_is_refused(k):
    batch, logits = policies([[0.5, 0.3, 0.2]], [[0.6, 0.4, 0.0]], [1.0], k)
    with pytest.raises(ValueError, match="the old policy rules out tokens that the new one allows, at 1 unmasked positions"):
        make_objective("troll")(batch)
    # Without the regression there is no target to reach: r = (5/8, 3/8) is inside, with ratio (5/8)/.6 = 25/24.
    assert_close(loss_and_logit_grad(batch, logits, regression=0.0)[0], row([-25 / 24]))
    # Without a bound there is no projection: the ratio is .5/.6.
    assert_close(loss_and_logit_grad(batch, logits, bound=INF)[0], row([-5 / 6]))


def test_golden_an_infeasible_token_is_counted_and_goes_back_to_the_old_policy():
    # The new policy rules out .3 of the old one: on what is left, KL(r‖old) ≥ −ln .7 = .357 > .05 for every r.
    # So r = (5/7, 2/7), ratio 10/7, no policy gradient; the pull is ½ ln(.5 · 7/5) + ½ ln(.5 · 7/2) = ½ ln 1.225 with
    # gradient ½ (ln .7 − ½ ln 1.225) = ¼ ln(.7/1.75) = ¼ ln .4 on token 0 and minus that on token 1.
    batch, logits = policies([[0.5, 0.5, 0.0], [0.5, 0.2, 0.3]], [[0.5, 0.2, 0.3]] * 2, [7.0, 1.0], k=3)
    loss, grad = loss_and_logit_grad(batch, logits, regression=0.0)
    assert_close(loss, row([-10.0, -1.0]))
    assert_close(grad[:, :1], per_logit(0.0, 0.0, 0.0))
    loss, grad = loss_and_logit_grad(batch, logits, regression=1.0)
    assert_close(loss, row([-10 + 0.5 * math.log(1.225), -1.0]))
    assert_close(grad[:, :1], 0.25 * math.log(0.4) * per_logit(1.0, -1.0, 0.0))
    metrics = make_objective("troll")(batch).metrics
    assert metrics["tr/unconverged"] == 1
    assert metrics["tr/active_frac"] == 0.5
    assert metrics["tr/dual"] == 0  # no finite multiplier to average
    assert metrics["tr/kl_after"].item() == pytest.approx(-math.log(0.7) / 2)


# ---------------------------------------------------------------------------------------------- tokens that lead back


@pytest.mark.parametrize("k", [1, 3])
def test_golden_a_token_whose_step_leads_back_is_left_alone(k):
    # d = ln 2.56, ln .64, ln .16 and KL = .3855: π (d − KL) = .3549, −.2662, −.0887, so along e_a − π the KL rises by
    # .3549 − (.64 · .3549 − .32 · .2662 − .04 · .0887) = .2165.  With Â = 1 it is projected as ever; with Â = −1 its step
    # lowers the KL, and it has the loss of reinforce: −ρÂ = 2.56, in logits 2.56 (.36, −.32, −.04), and no regression.
    config = {"bound": BOUND, "project": "outward"}
    (out, leaf), (back, other) = (policies([NEW], [OLD], [a], k) for a in (1.0, -1.0))
    for ours, theirs in zip(loss_and_logit_grad(out, leaf, **config), loss_and_logit_grad(out, leaf, bound=BOUND), strict=True):
        assert torch.equal(ours, theirs)
    loss, grad = loss_and_logit_grad(back, other, **config)
    assert_close(loss, row([2.56]))
    assert_close(grad, 2.56 * per_logit(0.36, -0.32, -0.04))
    result = make_objective("troll", **config)(back)
    assert not result.acted.any()
    assert_close(result.kl_after, row([KL_BEFORE]))
    assert (result.regression == 0).all()
    assert make_objective("troll", **config)(policies([NEW], [OLD], [0.0], k)[0]).acted.all()  # no step: projected


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from(["exact", "constant_dual", "unprojected"]))
def test_what_leads_back_is_what_lowers_the_kl(seed, k, gradient):
    """By a small step of the token's own gradient, on the support and its tail; then reinforce there, and troll elsewhere."""
    batch, logits = random_batch(3, 4, 6, k, step=1.5, per_token=True, seed=seed)
    ours = make_objective("troll", project="outward", gradient=gradient)(batch)
    theirs, plain = make_objective("troll", gradient=gradient)(batch), make_objective("reinforce")(batch)
    new, old = batch.dist_new.with_rest().detach(), batch.dist_old.with_rest()
    step = torch.zeros_like(new)
    step[..., 0] = 1
    step = 1e-6 * batch.advantages[..., None] * (step - new.exp())
    change = categorical_kl((new + step).log_softmax(-1), old) - categorical_kl((new - step).log_softmax(-1), old)
    left = theirs.acted & ~ours.acted
    assert not (ours.acted & ~theirs.acted).any()
    clear = change.abs() > 1e-10
    assert torch.equal((left & clear), theirs.acted & (change < 0) & clear)
    assert_close(torch.where(left, ours.loss, 0.0), torch.where(left, plain.loss, 0.0))
    assert_close(torch.where(left, 0.0, ours.loss), torch.where(left, 0.0, theirs.loss))
    mixed = torch.where(left, plain.loss, theirs.loss)
    assert_close(*(torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (ours.loss, mixed)))


def test_with_tokens_left_alone_the_gradient_is_the_derivative():
    batch, logits = random_batch(2, 3, 4, 2, step=1.5, per_token=True, seed=4)
    objective = make_objective("troll", project="outward", regression=0.0)
    every = make_objective("troll")(batch).acted.sum()
    assert 0 < objective(batch).acted.sum() < every
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits)


@pytest.mark.parametrize("size", [1e5, 1e9, 1e300])
@pytest.mark.parametrize("regression", [0.0, 1.0])
def test_a_mask_of_large_finite_numbers_is_a_mask(regression, size):
    # The infeasible token from above, and one that both policies rule out.
    outs = []
    for gone in (-size, -INF):
        logits = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]], dtype=torch.float64).log().nan_to_num(neginf=gone).requires_grad_()
        old = torch.tensor([[[0.5, 0.2, 0.3, 0.0]]], dtype=torch.float64).log().nan_to_num(neginf=gone)
        dist_old = top_k_support(old, torch.zeros(1, 1, dtype=torch.int64), 4)
        sampled = dist_old.logp[..., 0]
        like = TokenBatch(sampled, sampled, row([7.0]), torch.ones(1, 1, dtype=torch.bool), None, dist_old)
        outs.append(loss_and_logit_grad(as_batch(logits, like), logits, regression=regression))
        assert make_objective("troll", regression=regression)(as_batch(logits, like)).metrics["tr/unconverged"] == 1
    (loss, grad), (expected_loss, expected_grad) = outs
    assert_close(loss, expected_loss)
    assert_close(grad, expected_grad)


@given(SEEDS, st.sampled_from([1e-4, 0.05, 0.3]), st.sampled_from(["bucket", "fill"]))
def test_after_the_projection_the_bound_holds(seed, bound, tail):
    batch, _ = random_batch(3, 4, 6, 3, step=2.0, seed=seed)
    metrics = make_objective("troll", bound=bound, tail=tail, vocab_size=6)(batch).metrics
    assert metrics["tr/kl_after"] <= bound * (1 + 1e-9)
    assert metrics["tr/kl_after"] <= metrics["tr/kl_before"]
    assert metrics["tr/unconverged"] == 0


# ---------------------------------------------------------------------------------------------------- around a reference


def with_reference(batch: TokenBatch, seed: int = 0, step: float = 1.0) -> TokenBatch:
    """A third policy on the same support, `step` away from the old one in its log-probs."""
    noise = torch.randn(batch.dist_old.with_rest().shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logp = (batch.dist_old.with_rest() + step * noise).log_softmax(-1)
    return replace(batch, dist_teacher=SparseDist(batch.dist_old.ids, logp[..., :-1], logp[..., -1]))


def test_golden_the_ball_is_around_the_reference_and_the_ratio_to_the_old_policy():
    # Odds 1 : 1 of the new policy, 4 : 1 of the reference: halfway, at t = ½, they are 2 : 1, r = (2/3, 1/3). The bound is
    # KL(r‖reference) = 2/3 ln 5/6 + 1/3 ln 5/3. The old policy has (¼, ¾): ratio (2/3) / ¼ = 8/3, and with Â = 3 a loss of −8;
    # KL(new‖r) = ½ ln ¾ + ½ ln 3/2 = ½ ln 9/8.
    batch, logits = policies([[0.5, 0.5]], [[0.25, 0.75]], [3.0], k=1)
    reference = gather_support(torch.tensor([[[0.8, 0.2]]], dtype=torch.float64).log(), batch.dist_old.ids)
    bound = 2 / 3 * math.log(5 / 6) + 1 / 3 * math.log(5 / 3)
    objective = make_objective("troll", centre="reference", bound=bound)
    out = objective(replace(batch, dist_teacher=reference))
    assert_close(out.loss, row([-8 + math.log(9 / 8) / 2]))
    assert_close(out.kl_after, row([bound]))
    # With two categories the projection does not move along the ball; the pull is ½ · ½ (d − E d), d = ln (5/8, 5/2).
    (grad,) = torch.autograd.grad(out.loss.sum(), logits)
    assert_close(grad, per_logit(-math.log(4) / 8, math.log(4) / 8))
    with pytest.raises(ValueError, match="needs `dist_teacher`"):
        objective(batch)


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from([1e-3, 0.05, 0.3]))
def test_around_a_reference_the_bound_holds_there(seed, k, bound):
    batch, _ = random_batch(2, 4, 6, k, step=1.0, per_token=True, seed=seed)
    batch = with_reference(batch, seed)
    out = make_objective("troll", centre="reference", bound=bound)(batch)
    expected = project_categorical_kl(batch.dist_new.with_rest(), batch.dist_teacher.with_rest(), bound)
    assert_close(out.kl_after[batch.mask], expected.kl_after[batch.mask])
    assert (out.kl_after[batch.mask] <= bound * (1 + 1e-9)).all()
    assert (out.acted == (expected.active & batch.mask)).all()


@given(SEEDS, st.sampled_from([1, 3, 6]), st.sampled_from(["all", "outward"]))
def test_around_the_old_policy_a_reference_changes_nothing(seed, k, project):
    batch, logits = random_batch(2, 4, 6, k, step=1.0, per_token=True, seed=seed)
    batch = replace(batch, dist_teacher=batch.dist_old)
    ours = loss_and_logit_grad(batch, logits, centre="reference", project=project)
    for found, expected in zip(ours, loss_and_logit_grad(batch, logits, project=project), strict=True):
        assert torch.equal(found, expected)
    without = loss_and_logit_grad(with_reference(batch, seed), logits, centre="reference", bound=INF)
    for found, expected in zip(without, loss_and_logit_grad(batch, logits, "reinforce"), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("k", [2, 4])
def test_gradcheck_around_a_reference(k):
    batch, logits = random_batch(2, 3, 4, k, step=1.0, per_token=True, seed=4)
    batch, objective = with_reference(batch), make_objective("troll", centre="reference", regression=0.0)
    assert objective(batch).acted.any()
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits)


# ---------------------------------------------------------------------------------------------------- reduction, edges


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_reduction_sees_sequences(level):
    batch, logits = random_batch(4, 5, 6, 3, step=0.7, seed=3)
    config = TROLLConfig(level=level)
    loss = make_objective("troll", **vars(config))(batch).loss
    sequences = [
        list(x[live]) for x, live in zip(loss_by_hand(logits.detach().numpy(), batch, config), batch.mask.numpy(), strict=True)
    ]
    assert len({len(s) for s in sequences}) > 2
    expected = {
        "token-mean": np.mean(np.concatenate(sequences)),
        "seq-mean-token-mean": np.mean([np.mean(s) for s in sequences]),
        "seq-mean-token-sum": np.mean([np.sum(s) for s in sequences]),
        "seq-mean-token-sum-norm": np.mean([np.sum(s) / 8 for s in sequences]),
    }
    for how, value in expected.items():
        assert reduce_loss(loss, batch.mask, how, length=8.0).item() == pytest.approx(value, rel=1e-10), how


@pytest.mark.parametrize("config", [{}, {"tail": "fill", "vocab_size": 6}, {"level": "sequence"}, {"gradient": "unprojected"}])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("k", [3, 6])
def test_padding_may_hold_anything(config, garbage, k):
    batch, _ = random_batch(3, 4, 6, k, step=0.7)
    objective = make_objective("troll", **config)
    out, poisoned = objective(batch), objective(poison_padding(batch, garbage))
    assert torch.equal(out.loss, poisoned.loss)
    assert (poisoned.loss[~batch.mask] == 0).all()
    for name, value in out.metrics.items():
        assert torch.equal(value, poisoned.metrics[name]), name
    for grad in leaf_gradients(objective, poison_padding(batch, garbage)):
        assert grad.isfinite().all()
        assert (grad[~batch.mask] == 0).all()


def test_a_batch_without_a_live_token_is_refused():
    batch, _ = random_batch(2, 3, 6, 3)
    with pytest.raises(ValueError, match="troll: mask has no unmasked token"):
        make_objective("troll")(replace(batch, mask=torch.zeros_like(batch.mask)))


@pytest.mark.parametrize("tail", ["bucket", "fill"])
def test_float32_agrees_with_float64(tail):
    double, _ = random_batch(3, 4, 6, 3, step=0.7)
    single = poison_padding(double, 0.0)
    cast = {
        name: replace(dist, logp=dist.logp.detach().float(), rest=dist.rest.detach().float())
        for name, dist in (("dist_new", single.dist_new), ("dist_old", single.dist_old))
    }
    single = replace(single, logp_old=single.logp_old.float(), advantages=single.advantages.float(), **cast)
    objective = make_objective("troll", tail=tail, vocab_size=6)
    assert_close(objective(single).loss, objective(double).loss.detach(), torch.float32)


def test_a_capped_weight_keeps_its_gradient_however_large_the_ratio():
    # π_old(a) = e^−50 and ratio e^50/2, inside without a bound: loss −5 Â, gradient −5 Â (e_0 − π).
    batch, logits = policies([[0.5, 0.5]], [[math.exp(-50), 1.0]], [2.0], k=2)
    loss, grad = loss_and_logit_grad(batch, logits, bound=INF, ratio_cap=5.0)
    assert_close(loss, row([-10.0]))
    assert_close(grad, per_logit(-5.0, 5.0))


def test_fill_refuses_a_vocabulary_smaller_than_the_support():
    batch, _ = policies([[0.5, 0.3, 0.2]], [[0.4, 0.3, 0.3]], [1.0], k=3)
    with pytest.raises(ValueError, match="`vocab_size` counts every token, and a support has 3 of them; got 2"):
        make_objective("troll", tail="fill", vocab_size=2)(batch)


def test_a_tail_that_was_summed_in_another_order_moves_no_ratio():
    # On a GPU the tail of an own support and that of a given one may differ in their last digits; the sampled tokens do not.
    logp = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    old = top_k_support(logp, torch.zeros(2, 3, dtype=torch.int64), 3)
    new = replace(old, rest=old.rest + 2e-6)
    sampled, mask = old.logp[..., 0], torch.ones(2, 3, dtype=torch.bool)
    metrics = make_objective("troll")(TokenBatch(sampled, sampled, torch.ones(2), mask, new, old)).metrics
    assert metrics["tr/ratio_max"] == 1.0
