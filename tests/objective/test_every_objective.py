"""What holds for every objective, and for every setting that changes how it computes: one table, one test per promise."""

import math
from dataclasses import fields, replace

import pytest
import torch
from batches import (
    Objective,
    as_batch,
    inputs,
    leaf_gradients,
    poison_padding,
    random_batch,
    with_leaves,
)
from torch import Tensor
from torch.autograd import gradcheck

from corral import SparseDist, TokenBatch, make_objective, reduce_loss
from corral.numerics import log1mexp
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close
from typecheck import passed_unchecked

V = 5

CASES: dict[str, tuple[str, dict[str, object]]] = {name: (name, {}) for name in POLICY_OBJECTIVES} | {
    "reinforce, capped": ("reinforce", {"ratio_cap": 1.5}),
    "dppo, kl": ("dppo", {"divergence": "kl"}),
    "dppo, ratio": ("dppo", {"divergence": "ratio"}),
    "dppo, topk tv": ("dppo", {"estimator": "topk"}),
    "dppo, topk kl": ("dppo", {"estimator": "topk", "divergence": "kl"}),
    "dppo, symmetric": ("dppo", {"mask": "symmetric"}),
    "dppo, predictive": ("dppo", {"estimator": "topk", "mask": "predictive"}),
    "dppo, full": ("dppo", {"estimator": "full"}),
    "dppo, capped": ("dppo", {"ratio_cap": 1.5}),
    "cppo, topk": ("cppo", {"estimator": "topk"}),
    "troll, fill": ("troll", {"tail": "fill", "vocab_size": V}),
    "troll, fill full": ("troll", {"tail": "fill", "vocab_size": V}),
    "troll, sequence": ("troll", {"level": "sequence"}),
    "troll, constant dual": ("troll", {"gradient": "constant_dual"}),
    "troll, unprojected": ("troll", {"gradient": "unprojected"}),
    "troll, outward": ("troll", {"project": "outward"}),
    "troll, capped": ("troll", {"ratio_cap": 1.5}),
    "troll, no regression": ("troll", {"regression": 0.0}),
}
PULLED = [case for case, (name, settings) in CASES.items() if name == "troll" and settings.get("regression") != 0.0]
"""Their regression does not depend on the advantages."""
STOPPED = ["aspo", "cispo", "topr", "vespo", "clip_cov", "reinforce, capped", "dppo, capped", *PULLED]
"""Their gradient is by design not the derivative of their value: something in it is held constant."""

every_case = pytest.mark.parametrize("case", CASES)


def without(*left_out: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if case not in left_out])


def objective_of(case: str) -> Objective:
    name, settings = CASES[case]
    return make_objective(name, **settings)


def batch_of(case: str, *, B: int = 4, T: int = 5, **draw: object) -> tuple[TokenBatch, Tensor]:
    """A random batch and its leaf; unless told otherwise, some of its tokens are inside every region and some outside.

    "full" cases have nothing outside the support, and a slot of padding in it.
    """
    return random_batch(B, T, V, V if "full" in case else 2, **{"step": 2.0, "seed": 10, **draw})


def gradient(case: str, batch: TokenBatch, leaf: Tensor) -> Tensor:
    """Of the summed loss, in the dense logits that every part of the new policy comes from."""
    return torch.autograd.grad(objective_of(case)(batch).loss.sum(), leaf, retain_graph=True)[0]


def rows(batch: TokenBatch, index: Tensor) -> TokenBatch:
    """Some of the sequences, or all in another order."""

    def pick(x: Tensor | SparseDist | None) -> Tensor | SparseDist | None:
        return x.map(lambda field: field[index]) if isinstance(x, SparseDist) else x if x is None else x[index]

    return TokenBatch(**{field.name: pick(getattr(batch, field.name)) for field in fields(TokenBatch)})


def cast(batch: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """Every floating-point field in another precision, rounded and detached."""

    def to(x: Tensor) -> Tensor:
        return x.detach().to(dtype)

    dists = {f"dist_{which}": getattr(batch, f"dist_{which}") for which in ("new", "old")}
    return TokenBatch(
        to(batch.logp_new).requires_grad_(),
        to(batch.logp_old),
        to(batch.advantages),
        batch.mask,
        logp_rollout=to(batch.logp_rollout),
        **{field: dist.map(lambda x: to(x) if x.is_floating_point() else x) for field, dist in dists.items()},
    )


# ------------------------------------------------------------------------------------------------- the table itself


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name != "reinforce"])
def test_the_test_batch_has_tokens_inside_the_region_and_outside(case):
    batch, _ = batch_of(case)
    assert 0 < objective_of(case)(batch).metrics["tr/active_frac"] < 1


# ---------------------------------------------------------------------------------------------------------- on-policy


# "fill" conditions on the support wherever something is left outside it, so its gradient is that of another policy.
# decoupled_ppo weighs by another sampler, and clip_cov masks tokens wherever the policy is.
@without("troll, fill", "decoupled_ppo", "clip_cov")
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_the_gradient_is_that_of_reinforce(case, seed):
    batch, leaf = batch_of(case, step=0.0, seed=seed)
    assert_close(gradient(case, batch, leaf), gradient("reinforce", batch, leaf))


# whose values are −(2/τ) Â and −Â log π, or see above
@without("sapo", "cispo", "topr", "vespo", "troll, fill", "decoupled_ppo", "clip_cov")
def test_on_policy_the_loss_is_minus_the_advantage(case):
    batch, _ = batch_of(case, step=0.0)
    assert_close(objective_of(case)(batch).loss, torch.where(batch.mask, -batch.advantages[:, None], 0.0))


@without("clip_cov")
def test_on_policy_no_region_acts(case):
    batch, _ = batch_of(case, step=0.0)
    metrics = objective_of(case)(batch).metrics
    assert metrics["tr/active_frac"] == 0
    assert metrics["tr/ratio_max"] == 1
    assert metrics["tr/kl_before"].abs() < 1e-15
    assert metrics["tr/kl_max"].abs() < 1e-15


# ------------------------------------------------------------------------------------------------------------ padding


@every_case
@pytest.mark.parametrize(
    ("garbage", "per_token"), [(math.nan, False), (math.nan, True), (math.inf, False), (-math.inf, True), (1e30, False)]
)
def test_what_padding_holds_reaches_no_loss_gradient_or_metric(case, garbage, per_token):
    batch, _ = batch_of(case, per_token=per_token)
    batch.mask[1] = False
    clean, poisoned = with_leaves(batch), poison_padding(batch, garbage)
    expected, out = objective_of(case)(clean), objective_of(case)(poisoned)
    assert torch.equal(out.loss, expected.loss)
    assert (out.loss[~batch.mask] == 0).all()
    for ours, theirs in zip(
        leaf_gradients(objective_of(case), poisoned), leaf_gradients(objective_of(case), clean), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert (ours[~batch.mask] == 0).all()
    assert out.metrics == expected.metrics


@every_case
def test_a_sequence_without_a_live_token_is_as_if_it_were_not_there(case):
    batch, _ = batch_of(case)
    batch.mask[2] = False
    others = torch.tensor([0, 1, 3])
    out, expected = objective_of(case)(batch), objective_of(case)(rows(batch, others))
    assert (out.loss[2] == 0).all()
    assert_close(out.loss[others], expected.loss)
    for key, value in expected.metrics.items():
        assert_close(out.metrics[key].double(), value.double())


@every_case
def test_a_single_token_is_enough(case):
    batch, leaf = batch_of(case, B=1, T=1)
    loss = objective_of(case)(batch).loss
    assert loss.shape == (1, 1)
    assert loss.isfinite().all()
    assert gradient(case, batch, leaf).isfinite().all()


# --------------------------------------------------------------------------------------------------- shape and dtype


@every_case
def test_one_advantage_per_sequence_is_the_same_on_each_of_its_tokens(case):
    batch, leaf = batch_of(case)
    spread = replace(batch, advantages=batch.advantages[:, None].expand_as(batch.mask))
    assert torch.equal(objective_of(case)(batch).loss, objective_of(case)(spread).loss)
    assert torch.equal(gradient(case, batch, leaf), gradient(case, spread, leaf))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("troll")])
def test_tokens_without_an_advantage_are_never_counted(case):
    batch, _ = batch_of(case, step=5.0)
    out = objective_of(case)(replace(batch, advantages=torch.zeros_like(batch.advantages)))
    assert not out.acted.any()
    assert out.metrics["tr/active_frac"] == 0
    assert case.startswith("reinforce") or objective_of(case)(batch).acted.any()  # it does act on these policies


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(case, dtype):
    half = cast(batch_of(case)[0], dtype)
    unchecked = replace(objective_of(case), check=False)  # log-probs that bfloat16 has rounded do not sum to 1 ± 0.001
    out, expected = objective_of(case)(half), unchecked(cast(half, torch.float32))
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss, expected.loss)
    assert out.metrics == expected.metrics


@pytest.mark.supports("objective: {case}", door="import corral")
@every_case
def test_metrics_are_finite_numbers_without_gradient(case):
    batch, _ = batch_of(case)
    metrics = objective_of(case)(batch).metrics
    everyones = {"active_frac", "ratio_max", "kl_before", "kl_max", "rest_mass", "rest_max_ratio", "hidden_kl_max", "mismatch"}
    trolls = {"kl_after", "dual", "unconverged"} if case.startswith("troll") else set()
    assert set(metrics) == {f"tr/{name}" for name in everyones | trolls}
    for key, value in metrics.items():
        assert isinstance(value, Tensor), key
        assert value.shape == (), key
        assert not value.requires_grad, key
        assert value.isfinite(), key


# ---------------------------------------------------------------------------------------------------------- gradients


@without(*STOPPED)
def test_the_gradient_is_the_derivative_of_the_reduced_loss(case):
    # Sequence-level objectives are straight-through token by token and exact under this reduction. No token of these draws
    # lies within gradcheck's step of a kink.
    batch, leaf = batch_of(case, B=2, T=3, seed=0)

    def loss(logits: Tensor) -> Tensor:
        return reduce_loss(objective_of(case)(as_batch(logits, batch)).loss, batch.mask, "seq-mean-token-mean")

    assert gradcheck(loss, leaf)


@every_case
def test_the_anchor_is_a_constant(case):
    batch, _ = batch_of(case)
    anchor = batch.dist_old
    constants = [x.detach().clone().requires_grad_() for x in (batch.logp_old, anchor.logp, anchor.rest, batch.logp_rollout)]
    logp_old, logp, rest, logp_rollout = constants
    batch = replace(batch, logp_old=logp_old, dist_old=SparseDist(anchor.ids, logp, rest), logp_rollout=logp_rollout)
    grads = torch.autograd.grad(objective_of(case)(batch).loss.sum(), constants, allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adv", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_ratio_that_overflows_leaves_loss_and_gradient_finite(case, dtype, adv, log_ratio):
    # The sampled token 0 has log π = −200 under one policy and 0 under the other; the second position is on-policy.
    peaked, level = [200.0, 0.0, 0.0], [0.0, 200.0, 0.0]
    old, new = (level, peaked) if log_ratio > 0 else (peaked, level)
    like, _ = random_batch(1, 2, 3, 3, dtype=dtype)
    ids = torch.tensor([[[0, 1, 2, -1]] * 2])
    on_policy = [0.0, 0.0, 0.0]
    like = as_batch(torch.tensor([[old, on_policy]], dtype=dtype), replace(like, dist_old=replace(like.dist_old, ids=ids)))
    like = replace(
        like,
        logp_old=like.logp_new,
        dist_old=like.dist_new,
        mask=torch.ones(1, 2).bool(),
        advantages=torch.full((1,), adv, dtype=dtype),
    )
    leaf = torch.tensor([[new, on_policy]], dtype=dtype, requires_grad=True)
    name, settings = CASES[case]
    objective = make_objective(name, **settings | ({"vocab_size": 3} if "fill" in case else {}))
    out = objective(as_batch(leaf, like))
    assert_close(like.logp_old[0, 0] - as_batch(leaf, like).logp_new[0, 0], torch.tensor(-log_ratio))
    assert out.loss.isfinite().all()
    assert torch.autograd.grad(out.loss.sum(), leaf)[0].isfinite().all()
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gspo", {"clip_high": 9.0}), ("gmpo", {"clip": 99.0}), ("troll", {"level": "sequence", "bound": math.inf})],
)
def test_every_token_of_a_sequence_has_its_value_to_the_last_bit(name, settings):
    # In float32, with log-ratios of ±15 that cancel in the mean, 2.5e-3: added to a token's own it would lose its last digits.
    logp_old = torch.tensor([[-16.0, -1.0, -16.0, -1.0]])
    logp_new = torch.tensor([[-0.999, -15.998, -0.997, -15.996]])
    ids = torch.zeros(1, 4, 1, dtype=torch.int64)
    new, old = (SparseDist(ids, logp[..., None], log1mexp(logp)) for logp in (logp_new, logp_old))
    batch = TokenBatch(logp_new, logp_old, torch.ones(1), torch.ones(1, 4, dtype=torch.bool), new, old)
    loss = make_objective(name, **settings)(batch).loss
    assert (loss == loss[0, 0]).all()
    assert_close(loss[0, 0], torch.tensor(-math.exp(2.5e-3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
@pytest.mark.parametrize("case", ["dppo, full", "troll"])
def test_compiled_equals_eager_forward_and_backward(case):
    # Of the two that look at whole distributions. Tracing takes long: the projection's own test does it each time.
    if passed_unchecked(reduce_loss):
        return
    (batch, leaf), objective = batch_of(case), objective_of(case)

    def loss(logits: Tensor) -> Tensor:
        return reduce_loss(objective(as_batch(logits, batch)).loss, batch.mask, "token-mean")

    eager, compiled = loss(leaf), torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf)
    assert_close(compiled, eager)
    assert_close(*(torch.autograd.grad(x, leaf)[0] for x in (compiled, eager)))


# --------------------------------------------------------------------------------------------------------- advantages


@without(*PULLED)
def test_without_advantages_there_is_no_loss_and_no_gradient(case):
    batch, leaf = batch_of(case)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert (objective_of(case)(batch).loss == 0).all()
    assert (gradient(case, batch, leaf) == 0).all()


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name != "troll"])
def test_without_advantages_no_clip_or_mask_acts(case):
    batch, _ = batch_of(case)
    assert objective_of(case)(replace(batch, advantages=torch.zeros_like(batch.advantages))).metrics["tr/active_frac"] == 0


@without(*PULLED, "kl_cov", "clip_cov")  # whose penalty does not scale, and whose window is one of covariances
def test_scaled_advantages_scale_loss_and_gradient(case):
    batch, leaf = batch_of(case, per_token=True)
    scaled = replace(batch, advantages=3.5 * batch.advantages)
    assert_close(objective_of(case)(scaled).loss, 3.5 * objective_of(case)(batch).loss)
    assert_close(gradient(case, scaled, leaf), 3.5 * gradient(case, batch, leaf))


# ------------------------------------------------------------------------------------------------------- independence


@without("m2po", "bapo", "kl_cov", "clip_cov")  # which look at all tokens of a call
def test_every_sequence_is_on_its_own(case):
    batch, _ = batch_of(case)
    order = torch.tensor([2, 0, 3, 1])
    assert_close(objective_of(case)(rows(batch, order)).loss, objective_of(case)(batch).loss[order])
    for b in range(len(order)):
        assert_close(objective_of(case)(rows(batch, torch.tensor([b]))).loss, objective_of(case)(batch).loss[[b]])


@without("cppo", "cppo, topk")  # which counts them
def test_the_order_of_tokens_within_a_sequence_does_not_matter(case):
    batch, _ = batch_of(case, per_token=True)
    order = torch.tensor([3, 0, 4, 1, 2])

    def pick(x: Tensor | SparseDist | None) -> Tensor | SparseDist | None:
        if isinstance(x, SparseDist):
            return SparseDist(*(field[:, order] for field in (x.ids, x.logp, x.rest)))
        return None if x is None else x[:, order]

    shuffled = TokenBatch(**{field.name: pick(getattr(batch, field.name)) for field in fields(TokenBatch)})
    assert_close(objective_of(case)(shuffled).loss, objective_of(case)(batch).loss[:, order])


@every_case
def test_calling_twice_gives_the_same_and_changes_no_input(case):
    batch, leaf = batch_of(case)
    before = cast(batch, torch.float64)
    first, second = objective_of(case)(batch), objective_of(case)(batch)
    assert torch.equal(first.loss, second.loss)
    assert first.metrics == second.metrics
    assert torch.equal(gradient(case, batch, leaf), gradient(case, batch, leaf))
    for field in ("logp_new", "logp_old", "advantages", "mask", "logp_rollout"):
        assert torch.equal(getattr(batch, field), getattr(before, field)), field
    for dist in ("dist_new", "dist_old"):
        for field in ("ids", "logp", "rest"):
            assert torch.equal(getattr(getattr(batch, dist), field), getattr(getattr(before, dist), field)), (dist, field)


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("name", [name for name in POLICY_OBJECTIVES if name != "troll"])
def test_golden_metrics_from_sampled_tokens_alone(name):
    # Unmasked tokens: π_old = ½, ½ and π = ¾, ¼, so ρ = 3/2, ½; the third would have had the largest of everything.
    # k3 = ρ − 1 − ln ρ = ½ − ln 1.5 and ln 2 − ½, mean ½(ln 2 − ln 1.5) = ½ ln(4/3).
    # Two-way KL(½‖½ ± ¼) = −½ ln(1 − 4/16) = ½ ln(4/3) at both.  |π_rollout − π_old| = .1, .2, mean .15.
    batch = inputs([0.75, 0.25, 0.9], [0.5, 0.5, 0.1], [1.0, -1.0, 1.0], [True, True, False], p_rollout=[0.6, 0.3, 0.9])
    metrics = make_objective(name)(batch).metrics
    expected = {"ratio_max": 1.5, "kl_before": 0.5 * math.log(4 / 3), "kl_max": 0.5 * math.log(4 / 3), "mismatch": 0.15}
    for key, value in expected.items():
        assert_close(metrics[f"tr/{key}"], torch.tensor(value, dtype=torch.float64))
    assert set(metrics) == {"tr/active_frac", *[f"tr/{key}" for key in expected]}


@without("troll, fill")  # which measures the policies that it has filled
def test_metrics_on_a_support_are_the_exact_ones(case):
    batch, _ = batch_of(case)
    p, q = batch.dist_new.with_rest().exp().tolist(), batch.dist_old.with_rest().exp().tolist()
    live = batch.mask.nonzero().tolist()
    kls = [sum(x * math.log(x / y) for x, y in zip(p[b][t], q[b][t], strict=True) if x > 0) for b, t in live]
    metrics = objective_of(case)(batch).metrics
    assert metrics["tr/kl_before"].item() == pytest.approx(sum(kls) / len(kls), rel=1e-10)
    assert metrics["tr/kl_max"].item() == pytest.approx(max(kls), rel=1e-10)
    assert metrics["tr/rest_mass"].item() == pytest.approx(sum(q[b][t][-1] for b, t in live) / len(live), rel=1e-10)
