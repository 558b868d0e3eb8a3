"""A loss in one kernel, on what a head has said: the objective's own loss, gradient and metrics."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from interpreted import DEVICE
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

from corral.head.batch_loss import batch_loss  # isort: skip  # after `interpreted`

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

VOCABULARY = 12
CASES = {
    **{name: (name, {}) for name in POLICY_OBJECTIVES},
    "troll, tight": ("troll", {"bound": 0.005}),
    "dppo on a support": ("dppo", {"estimator": "topk", "bound": 0.02}),
    "troll by sequence": ("troll", {"level": "sequence"}),
}
OF_SUPPORTS = ("troll", "dppo on a support")
BOTH = [(case, support) for case in CASES for support in (True, False) if support or not case.startswith(OF_SUPPORTS)]


def make_batch(support: bool = True) -> tuple[TokenBatch, list[Tensor]]:
    """Two completions of four tokens, of which one and two are padding that holds anything; and the leaves behind them."""
    draw = torch.Generator().manual_seed(1)
    old = (2 * torch.randn(2, 4, VOCABULARY, generator=draw)).log_softmax(-1)
    new = (old + 0.3 * torch.randn(old.shape, generator=draw)).log_softmax(-1)
    tokens = torch.randint(VOCABULARY, (2, 4), generator=draw)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]], device=DEVICE)
    dist_old = corral.top_k_support(old, tokens, 4)
    dist_new = corral.gather_support(new, dist_old.ids)
    leaves = [x.to(DEVICE).requires_grad_() for x in (dist_new.logp[..., 0].clone(), dist_new.logp, dist_new.rest)]
    logp_old = torch.where(mask, dist_old.logp[..., 0].to(DEVICE), math.nan)
    ids, kept, rest = (x.to(DEVICE) for x in (dist_old.ids, dist_old.logp, dist_old.rest))
    advantages = torch.tensor([1.0, -0.7], device=DEVICE)
    dists = (SparseDist(ids, leaves[1], leaves[2]), SparseDist(ids, kept, rest)) if support else (None, None)
    return TokenBatch(leaves[0], logp_old, advantages, mask, *dists, logp_old), leaves


@pytest.mark.parametrize(("case", "support"), BOTH)
def test_it_is_the_objective(case, support):
    name, config = CASES[case]
    objective = corral.make_objective(name, **config)
    (batch, leaves), weights = make_batch(support), torch.arange(1.0, 9.0, device=DEVICE).view(2, 4)
    got, wanted = batch_loss(objective, batch, kernels=True), objective(batch)
    assert_close(got.loss, wanted.loss, atol=2e-6)
    assert got.metrics.keys() == wanted.metrics.keys()
    for key, value in wanted.metrics.items():
        assert got.metrics[key].item() == pytest.approx(value.item(), rel=1e-3, abs=1e-5), key
    gradients = [torch.autograd.grad((x.loss * weights).sum(), leaves, allow_unused=True) for x in (got, wanted)]
    # The sampled token is in both places: only the sum of the two is defined.
    sums = []
    for logp, kept, rest in gradients:
        kept = torch.zeros_like(leaves[1]) if kept is None else kept.clone()
        kept[..., 0] += 0.0 if logp is None else logp
        sums.append((kept, torch.zeros_like(leaves[2]) if rest is None else rest))
    for actual, expected in zip(*sums, strict=True):
        assert_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("log_old", [-80.0, -100.0, -300.0])
def test_a_token_that_rises_from_next_to_nothing_has_a_finite_divergence(log_old):
    """Its ratio is beyond float32, its binary KL is not: q − p at the least."""
    objective = corral.make_objective("dppo", divergence="kl")
    new, mask = torch.full((1, 1), -9.0, device=DEVICE), torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    batch = TokenBatch(new, torch.full_like(new, log_old), torch.ones(1, device=DEVICE), mask)
    got, wanted = batch_loss(objective, batch, kernels=True), objective(batch)
    assert got.metrics["tr/kl_max"].item() == pytest.approx(math.exp(-9), rel=1e-4)
    assert {key: value.item() for key, value in got.metrics.items()} == pytest.approx(
        {key: value.item() for key, value in wanted.metrics.items()}, rel=1e-4
    )


def test_the_objective_says_what_is_wrong():
    """At once where there is no gradient, and else when the backward pass is over: by then nobody has to wait for it."""
    batch, leaves = make_batch()
    with torch.no_grad():
        leaves[1][0, 0] = math.nan
        leaves[0][0, 0] = math.nan
    objective = corral.make_objective("troll")
    with torch.no_grad(), pytest.raises(ValueError, match="troll: logp_new is not finite"):
        batch_loss(objective, batch, kernels=True)
    out = batch_loss(objective, batch, kernels=True)
    with pytest.raises(ValueError, match="troll: logp_new is not finite"):
        out.loss.sum().backward()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize(("case", "support"), BOTH)
def test_an_old_policy_that_is_not_finite_is_refused(case, support, bad):
    """A ratio to NaN would be the largest that there is, or none, and neither is NaN."""
    name, config = CASES[case]
    objective, (batch, _) = corral.make_objective(name, **config), make_batch(support)
    batch.logp_old[1, 1] = bad
    if support:
        batch.dist_old.logp[1, 1, 0] = bad
    given = batch if "logp_rollout" in objective.needs else dataclasses.replace(batch, logp_rollout=None)
    with torch.no_grad(), pytest.raises(ValueError, match="logp_old is not finite at an unmasked token"):
        batch_loss(objective, given, kernels=True)


@pytest.mark.parametrize(("case", "support"), BOTH)
def test_a_sampler_that_is_not_finite_is_refused(case, support):
    """No loss shows it where the objective does not read it."""
    name, config = CASES[case]
    objective, (batch, _) = corral.make_objective(name, **config), make_batch(support)
    rollout = batch.logp_old.clone()
    rollout[1, 1] = math.nan
    with torch.no_grad(), pytest.raises(ValueError, match="logp_rollout is not finite at an unmasked token"):
        batch_loss(objective, dataclasses.replace(batch, logp_rollout=rollout), kernels=True)


@pytest.mark.parametrize("case", CASES)
def test_two_old_policies_that_disagree_are_refused(case):
    name, config = CASES[case]
    objective, (batch, _) = corral.make_objective(name, **config), make_batch()
    batch.logp_old[1, 1] += 0.002
    with torch.no_grad(), pytest.raises(ValueError, match=r"and logp_old differ by more than 0\.001 nats"):
        batch_loss(objective, batch, kernels=True)


@pytest.mark.parametrize("case", ["ppo_clip", "dppo on a support", "troll"])
@pytest.mark.parametrize("field", ["logp_old", "logp_rollout", "dist_new", "dist_old"])
def test_log_probs_that_are_none_are_refused_unless_told_otherwise(case, field):
    """In the same words by kernel and reference; with check=False both take them as they are."""
    (name, config), (batch, _) = CASES[case], make_batch()
    batch, old = dataclasses.replace(batch, logp_rollout=batch.logp_old.clone()), batch.dist_old
    if field == "logp_rollout":
        batch.logp_rollout[0, 1] = 0.002
    elif field == "logp_old":
        old.logp[0, 1], old.rest[0, 1] = -20.0, -20.0  # nothing else has any mass
        old.logp[0, 1, 0] = batch.logp_old[0, 1] = 0.002
    else:
        getattr(batch, field).rest.data[0, 1] = 0.2
    sampled = field.startswith("logp")
    says = rf"{field} is above 0 at an unmasked token.*Got 0.002 at" if sampled else rf"{field} is no distribution.* = \[0, 1\]"
    objective, unchecked = (corral.make_objective(name, check=check, **config) for check in (True, False))
    for loss in (objective, lambda given: batch_loss(objective, given, kernels=True)):
        with torch.no_grad(), pytest.raises(ValueError, match=says):
            loss(batch)
    with torch.no_grad():
        assert_close(batch_loss(unchecked, batch, kernels=True).loss, unchecked(batch).loss, atol=2e-6)


@pytest.mark.parametrize("support", [True, False])
def test_a_new_policy_above_0_is_refused(support):
    batch, leaves = make_batch(support)
    leaves[0].data[0, 1] = 0.002
    with torch.no_grad(), pytest.raises(ValueError, match="ppo_clip: logp_new is above 0"):
        batch_loss(corral.make_objective("ppo_clip"), batch, kernels=True)


def test_any_function_is_an_objective_and_a_cpu_asks_it():
    batch, _ = make_batch()
    asked = []

    def objective(given):
        asked.append(given)
        return corral.ObjectiveOutput(given.logp_new * 2, {})

    for kernels in (True, None):
        out = batch_loss(objective, batch, kernels=kernels)
        assert torch.equal(out.loss, batch.logp_new * 2)
    assert asked == [batch, batch]


def test_nothing_to_train_on_is_the_objective_s_affair():
    batch, _ = make_batch()
    empty = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    with pytest.raises(ValueError, match="mask has no unmasked token"):
        batch_loss(corral.make_objective("troll"), empty, kernels=True)
