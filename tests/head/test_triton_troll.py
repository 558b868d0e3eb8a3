"""TROLL in one kernel against the objective itself in float64: loss, gradient and metrics, whatever its settings."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from interpreted import DEVICE

from corral.head.triton.loss import ACTED, CONVERGED, DUAL, FLAWED, KL_AFTER, LOSS, kernel_rule, row_losses, summarize  # isort: skip  # after it

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernel computes with inf

SETTINGS = {
    "default": {},
    "constant dual": {"gradient": "constant_dual"},
    "unprojected": {"gradient": "unprojected"},
    "capped": {"ratio_cap": 1.01},
    "wide, without regression": {"bound": 0.3, "regression": 0.0},
    "nothing may move": {"bound": 0.0},
    "anything may": {"bound": math.inf},
    "tiny": {"bound": 1e-6},
}


def policies(far: float = 0.0) -> tuple[SparseDist, SparseDist, Tensor]:
    """Old and new policy on one support, three rows for each of four distances between them; the first row rules tokens out,
    and one likely token of the others lies `far` below where the new policy would have it.
    """
    noise, vocabulary = torch.tensor([0.0, 0.01, 0.5, 5.0], dtype=torch.float64), 40
    logits = 2 * torch.randn(len(noise), 3, vocabulary, dtype=torch.float64)
    moved = logits + torch.randn_like(logits) * noise[:, None, None]
    tokens = torch.randint(5, (len(noise), 3))
    moved[1:].scatter_add_(-1, logits[1:, :, 5:].argmax(-1, keepdim=True) + 5, torch.full((3, 3, 1), -far, dtype=torch.float64))
    logits[0, 0, 7:] = moved[0, 0, 7:] = -math.inf
    old = corral.top_k_support(logits.log_softmax(-1), tokens, 6, 0.99)
    new = corral.gather_support(moved.log_softmax(-1), old.ids)
    return old, new, torch.randn(len(noise), 3, dtype=torch.float64)


def packed(new: SparseDist, old: SparseDist, advantages: Tensor) -> TokenBatch:
    """Policies [B T K] in one row of tokens, in float32, without the largest log-probs of their tails."""
    new, old = (replace(x, rest_max=None) for x in (new, old))
    batch = TokenBatch.on_support(new, old, advantages, torch.ones_like(advantages, dtype=torch.bool))
    return batch.map(lambda x: x.flatten(0, 1)[None]).to(DEVICE, torch.float32).map(Tensor.contiguous)


@pytest.mark.parametrize("far", [0.0, pytest.param(300.0, marks=pytest.mark.slow), 7e3, 1e9])  # the last is a logit mask
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_gradient_and_metrics_are_the_objective_s(settings, far):
    old, new, advantages = policies(far)
    objective = corral.make_objective("troll", **settings)
    leaves = new.logp.clone().requires_grad_(), new.rest.clone().requires_grad_()
    mask = torch.ones(4, 3).bool()
    exact = objective(TokenBatch(leaves[0][..., 0], old.logp[..., 0], advantages, mask, SparseDist(old.ids, *leaves), old))
    weights = torch.rand(4, 3, dtype=torch.float64)
    wanted = torch.autograd.grad((exact.loss * weights).sum(), leaves)

    batch = packed(new, old, advantages)
    found = row_losses(objective.kernel, batch)
    loss, kl_after, active = (found.field(x) for x in (LOSS, KL_AFTER, ACTED))
    assert not found.field(FLAWED).any()
    assert (loss.cpu() - exact.loss.flatten()).norm() < 2e-6 * exact.loss.norm()
    size = sum(x.norm() for x in wanted)
    for actual, expected in zip((found.kept, found.rest), wanted, strict=True):
        scaled = actual.cpu() * weights.flatten().view(-1, *[1] * (actual.ndim - 1))
        assert (scaled - expected.flatten(0, 1)).norm() < 2e-5 * size
    assert ((kl_after.cpu() - exact.kl_after.flatten())[active.cpu() > 0].abs() <= 1e-6).all()
    met = (active > 0) & (found.field(CONVERGED) > 0)  # not where the old policy's mass on a ruled-out token is spent already
    assert met.any() or far > 1e4 or objective.config.bound == math.inf
    assert ((kl_after[met] - objective.config.bound).abs() <= 1e-6).all()
    metrics, _, flawed = summarize(objective.kernel, batch, found)
    assert flawed.item() == 0
    assert set(metrics) == set(exact.metrics)
    for name, value in exact.metrics.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=2e-3 if name == "tr/dual" else 1e-5, abs=1e-6), name


def test_policies_without_a_common_token_are_returned_to_the_old_one():
    # New and old allow different tokens: nothing is common, so r = old, η = inf, the row counts as not converged.
    new = SparseDist(torch.tensor([[[0, 1]]]), torch.tensor([[[0.0, -math.inf]]]), torch.tensor([[-math.inf]]))
    old = SparseDist(torch.tensor([[[0, 1]]]), torch.tensor([[[-math.inf, 0.0]]]), torch.tensor([[-math.inf]]))
    batch = replace(packed(new, old, torch.ones(1, 1)), logp_old=torch.full((1, 1), -1.0, device=DEVICE))
    found = row_losses(corral.make_objective("troll").kernel, batch)
    assert found.field(FLAWED).item() == 1  # and the objective itself has to say so
    assert found.field(CONVERGED).item() == 0
    assert found.field(DUAL).item() == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_bad_rows_are_noticed(wrong):
    old, new, advantages = policies()
    batch = packed(new, old, advantages)
    batch.dist_new.logp[0, 2, 1] = wrong
    found = row_losses(corral.make_objective("troll").kernel, batch)
    assert found.field(FLAWED).nonzero().flatten().tolist() == [2]


def test_what_the_kernel_does_not_compute_is_left_to_the_objective():
    old, new, advantages = policies()
    for objective in (
        corral.make_objective("troll", level="sequence"),
        corral.make_objective("troll", tail="fill", vocab_size=40),
        lambda batch: None,
    ):
        assert kernel_rule(objective, packed(new, old, advantages)) is None
