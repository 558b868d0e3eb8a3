"""Objectives of the sampled token in one kernel against the objectives themselves in float64."""

import math

import pytest
import torch

import corral
from corral import TokenBatch
from interpreted import DEVICE

from corral.head.triton.loss import ACTED, FLAWED, LOSS, kernel_rule, row_losses, summarize  # isort: skip  # after `interpreted`

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernel computes with inf

OBJECTIVES = {
    "clip": ("ppo_clip", {}),
    "clip, higher": ("clip_higher", {}),
    "clip, dual": ("dual_clip", {"dual_clip": 1.5}),
    "mask by ratio": ("dppo", {"divergence": "ratio"}),
    "mask by binary tv": ("dppo", {}),
    "mask by binary kl, two bounds": ("dppo", {"divergence": "kl", "bound_low": 0.01, "bound_high": 0.1}),
    "mask by tv of the support": ("dppo", {"estimator": "topk"}),
    "mask by binary tv, both ways": ("dppo", {"mask": "symmetric"}),
    "mask by kl of the support, capped": ("dppo", {"divergence": "kl", "estimator": "topk", "ratio_cap": 1.1}),
    "no region": ("reinforce", {}),
    "no region, capped": ("reinforce", {"ratio_cap": 0.9}),
    "weight": ("cispo", {"cap_low": 0.8, "cap_high": 1.2}),
    "gate": ("sapo", {}),
    "penalty": ("spo", {}),
    "penalty on binary tv": ("drpo", {}),
    "clip by χ²": ("ripo", {}),
    "clip, weighed": ("decoupled_ppo", {}),
    "flip": ("aspo", {}),
}


def batch_of(support: bool) -> TokenBatch:
    """Twelve tokens whose policy has hardly moved, somewhat, and far; float64."""
    logits = 2 * torch.randn(4, 3, 40, dtype=torch.float64)
    moved = logits + torch.randn_like(logits) * torch.tensor([0.0, 0.01, 0.5, 3.0], dtype=torch.float64)[:, None, None]
    tokens = torch.randint(5, (4, 3))
    old = corral.top_k_support(logits.log_softmax(-1), tokens, 6, 0.99)
    new = corral.gather_support(moved.log_softmax(-1), old.ids)
    rollout = old.logp[..., 0] + 0.1 * torch.randn(4, 3, dtype=torch.float64)
    dists = (new, old) if support else (None, None)
    advantages = torch.randn(4, 3, dtype=torch.float64)
    advantages[1, 1] = 0.0
    return TokenBatch(new.logp[..., 0], old.logp[..., 0], advantages, torch.ones(4, 3).bool(), *dists, rollout.clamp(max=0))


@pytest.mark.parametrize(("name", "settings"), OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("support", [True, False])
def test_loss_gradient_and_metrics_are_the_objective_s(name, settings, support):
    batch, objective = batch_of(support), corral.make_objective(name, **settings)
    rule = kernel_rule(objective, batch)
    if "dist_old" in objective.needs and not support:
        assert rule is None
        return
    leaf = batch.logp_new.clone().requires_grad_()
    exact = objective(TokenBatch(leaf, *(getattr(batch, x) for x in FIELDS)))
    (wanted,) = torch.autograd.grad(exact.loss.sum(), leaf)

    packed = batch.map(lambda x: x.flatten(0, 1)[None]).to(DEVICE, torch.float32)
    found = row_losses(rule, packed)
    assert (found.field(LOSS).cpu() - exact.loss.flatten()).abs().max() < 2e-6 * (1 + exact.loss.abs().max())
    assert (found.logp.cpu() - wanted.flatten()).abs().max() < 2e-6 * (1 + wanted.abs().max())
    assert torch.equal(found.field(ACTED).cpu() > 0, exact.acted.flatten())
    metrics, _, flawed = summarize(rule, packed, found)
    assert flawed.item() == 0
    assert set(metrics) == set(exact.metrics)
    for key, value in exact.metrics.items():
        assert metrics[key].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), key


FIELDS = ("logp_old", "advantages", "mask", "dist_new", "dist_old", "logp_rollout")


def test_an_impossible_token_is_noticed():
    one = torch.ones(2, device=DEVICE)
    logp = torch.tensor([-1.0, -math.inf], device=DEVICE)
    batch = TokenBatch(logp[None], -one[None], one[None], one[None] > 0)
    found = row_losses(corral.make_objective("cispo").kernel, batch)
    assert found.field(FLAWED).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_what_the_kernel_does_not_compute_is_left_to_the_objective(name):
    batch = batch_of(True)
    assert kernel_rule(corral.make_objective(name), batch) is None
    assert kernel_rule(lambda batch: None, batch) is None
    assert kernel_rule(corral.make_objective("dppo", estimator="full"), batch) is None
    assert kernel_rule(corral.make_objective("dppo", estimator="topk"), batch_of(False)) is None
