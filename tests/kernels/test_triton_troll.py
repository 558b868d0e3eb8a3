"""TROLL in one kernel against the objective itself in float64: loss, gradient and metrics, whatever its settings."""

import math

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from interpreted import DEVICE

from corral.kernels.troll_loss import TrollSettings, troll_loss  # isort: skip  # after `interpreted`

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


def policies(noise: tuple[float, ...] = (0.0, 0.01, 0.5, 5.0), vocabulary: int = 40) -> tuple[SparseDist, SparseDist, Tensor]:
    """Old and new policy on one support, three rows for each distance between them; the first row rules tokens out."""
    logits = 2 * torch.randn(len(noise), 3, vocabulary, dtype=torch.float64)
    moved = logits + torch.randn_like(logits) * torch.tensor(noise, dtype=torch.float64)[:, None, None]
    tokens = torch.randint(5, (len(noise), 3))
    logits[0, 0, 7:] = moved[0, 0, 7:] = -math.inf
    old = corral.top_k_support(logits.log_softmax(-1), tokens, 6, 0.99)
    new = corral.gather_support(moved.log_softmax(-1), old.ids)
    return old, new, torch.randn(len(noise), 3, dtype=torch.float64)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_loss_gradient_and_metrics_are_the_objective_s(settings):
    old, new, advantages = policies()
    objective = corral.make_objective("troll", **settings)
    leaves = new.logp.clone().requires_grad_(), new.rest.clone().requires_grad_()
    mask = torch.ones(4, 3).bool()
    exact = objective(TokenBatch(leaves[0][..., 0], old.logp[..., 0], advantages, mask, SparseDist(old.ids, *leaves), old))
    weights = torch.rand(4, 3, dtype=torch.float64)
    wanted = torch.autograd.grad((exact.loss * weights).sum(), leaves)

    flat = [x.flatten(0, 1).float().to(DEVICE).requires_grad_() for x in (new.logp, new.rest)]
    fixed = SparseDist(old.ids.flatten(0, 1).to(DEVICE), *(x.flatten(0, 1).float().to(DEVICE) for x in (old.logp, old.rest)))
    credit = advantages.flatten().float().to(DEVICE)
    rows = troll_loss(SparseDist(fixed.ids, *flat), fixed, fixed.logp[:, 0], credit, TrollSettings.of(objective))
    got = torch.autograd.grad((rows.loss * weights.flatten().to(DEVICE)).sum(), flat)
    assert not rows.flawed.any()
    assert (rows.loss.cpu() - exact.loss.flatten()).norm() < 2e-6 * exact.loss.norm()
    size = sum(x.norm() for x in wanted)
    for actual, expected in zip(got, wanted, strict=True):
        assert (actual.cpu() - expected.flatten(0, 1)).norm() < 2e-5 * size
    bound = objective.config.bound
    assert ((rows.kl_after[rows.active] - bound).abs() <= 1e-6).all()
    metrics = rows.metrics(fixed.rest)
    assert set(metrics) == set(exact.metrics)
    for name, value in exact.metrics.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=2e-3 if name == "tr/dual" else 1e-5, abs=1e-6), name


def test_policies_without_a_common_token_are_returned_to_the_old_one():
    # New and old allow different tokens: nothing is common, so r = old, η = inf, the row counts as not converged.
    new = SparseDist(torch.tensor([[0, 1]]), torch.tensor([[0.0, -math.inf]]), torch.tensor([-math.inf]))
    old = SparseDist(torch.tensor([[0, 1]]), torch.tensor([[-math.inf, 0.0]]), torch.tensor([-math.inf]))
    new, old = (SparseDist(x.ids.to(DEVICE), x.logp.to(DEVICE), x.rest.to(DEVICE)) for x in (new, old))
    one = torch.ones(1, device=DEVICE)
    rows = troll_loss(new, old, -one, one, TrollSettings.of(corral.make_objective("troll")))
    assert rows.flawed.item()  # and the objective itself has to say so
    assert not rows.converged.item()
    assert rows.dual.item() == math.inf


@pytest.mark.parametrize("wrong", ["anchor", "advantage", "new", "old"])
def test_bad_rows_are_noticed(wrong):
    old, new, advantages = policies()
    rows = {
        "new": new.logp.flatten(0, 1), "old": old.logp.flatten(0, 1), "anchor": old.logp.flatten(0, 1)[:, 0].clone(),
        "advantage": advantages.flatten(),
    }  # fmt: skip
    rows = {name: x.float().to(DEVICE).clone() for name, x in rows.items()}
    if wrong == "anchor":
        rows["anchor"][2] += 0.01
    elif wrong == "advantage":
        rows["advantage"][2] = math.inf
    else:
        rows[wrong][2, 1] = math.nan
    rest = [x.rest.flatten().float().to(DEVICE) for x in (new, old)]
    ids = old.ids.flatten(0, 1).to(DEVICE)
    found = troll_loss(
        SparseDist(ids, rows["new"], rest[0]), SparseDist(ids, rows["old"], rest[1]), rows["anchor"], rows["advantage"],
        TrollSettings.of(corral.make_objective("troll")),
    )  # fmt: skip
    assert found.flawed.nonzero().flatten().tolist() == [2]


def test_what_the_kernel_does_not_compute_is_left_to_the_objective():
    for objective in (
        corral.make_objective("ppo_clip"),
        corral.make_objective("troll", level="sequence"),
        corral.make_objective("troll", tail="fill", vocab_size=40),
        lambda batch: None,
    ):
        assert TrollSettings.of(objective) is None
