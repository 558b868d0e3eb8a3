"""Every fused rule against its reference at the ends of float32: certain tokens, impossible ones, bounds of 0 and inf."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from corral.numerics import log1mexp
from corral.objective.config import ProjectionRule
from interpreted import DEVICE
from tolerance import assert_close

from corral.head.triton.loss import ACTED, FLAWED, KL_AFTER, LOSS, LossRows, row_losses, summarize  # isort: skip  # after it

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernel computes with inf

LOGPS = (0.0, -1e-9, -1e-8, -1e-7, -1e-4, -0.01, -0.3, -1.0, -5.0, -15.0, -40.0, -60.0)
"""log π of the sampled token. −40 against −60 is a ratio of e²⁰, at which ratios are cut off, and −15 is far beyond."""
ADVANTAGES = (1.3, 0.0, -0.7)
OTHERS = ((0.5, 0.3, 0.1, 0.1), (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0), (0.1, 0.2, 0.3, 0.4))
"""How all other mass lies on three more slots and the rest."""

ENDS = (0.0, 0.1, math.inf)
CAPS = (None, 0.0, 1.5, math.inf)
SETTINGS: dict[str, list[dict[str, object]]] = {
    "reinforce": [{"ratio_cap": cap} for cap in CAPS],
    "ppo_clip": [
        {"clip_low": low, "clip_high": high, "dual_clip": dual}
        for low, high, dual in ((0.0, 0.0, None), (0.1, math.inf, None), (1.0, 0.1, 1.5), (0.1, 0.1, math.inf))
    ],
    "clip_higher": [{}],
    "dual_clip": [{}],
    "cispo": [{"cap_low": low, "cap_high": high} for low, high in ((0.0, 0.0), (0.8, 1.2), (0.0, math.inf))],
    "sapo": [{}, {"tau_positive": 1e-3, "tau_negative": 50.0}],
    "aspo": [{"clip_low": low, "clip_high": high, "cap": cap} for low, high, cap in ((0.0, 0.0, 1.5), (0.1, math.inf, 3.0))],
    "ripo": [{"bound_low": low, "bound_high": high} for low, high in ((0.0, 0.0), (0.05, 0.01), (math.inf, math.inf))],
    "decoupled_ppo": [{}],
    "drpo": [{"bound": bound} for bound in (1e-3, 0.2, math.inf)],
    "spo": [{"epsilon": epsilon} for epsilon in (1e-3, 0.2, math.inf)],
    "dppo": [
        {"divergence": divergence, "estimator": estimator, "bound_low": low, "bound_high": high, "ratio_cap": cap}
        for (divergence, estimator), (low, high, cap) in itertools.product(
            (("ratio", "binary"), ("tv", "binary"), ("kl", "binary"), ("tv", "topk"), ("kl", "topk")),
            ((0.0, 0.0, None), (0.1, math.inf, 1.5), (math.inf, 0.1, 0.0), (0.1, 0.1, None)),
        )
    ] + [
        {"divergence": divergence, "estimator": estimator, "bound_low": 0.1, "bound_high": 0.0, "mask": "symmetric"}
        for divergence, estimator in (("ratio", "binary"), ("tv", "binary"), ("kl", "topk"))
    ],
    "troll": [
        {"bound": bound, "regression": regression, "gradient": gradient, "ratio_cap": cap}
        for bound, regression, gradient, cap in (
            (0.0, 1.0, "exact", None), (0.1, 1.0, "exact", None), (0.1, 0.0, "constant_dual", 1.5),
            (0.1, 1.0, "unprojected", 0.0), (math.inf, 1.0, "exact", None),
        )
    ] + [{"bound": 0.1, "regression": 1.0, "gradient": "exact", "project": "outward"}],
}  # fmt: skip
CASES = [(name, settings) for name, listed in SETTINGS.items() for settings in listed]


def test_every_objective_with_a_kernel_is_here():
    assert {name for name in corral.objective_names() if corral.make_objective(name).kernel} == set(SETTINGS)


def policy(logp: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of four slots [1 N 4] and the rest [1 N], the sampled token's given."""
    spread = log1mexp(logp)[..., None] + others.log()
    return torch.cat([logp[..., None], spread[..., :-1]], -1), spread[..., -1].contiguous()


def every_pair(*, support: bool, few: bool = False, sampler: bool = False) -> TokenBatch:
    """One completion with a token for each old and new log-prob and advantage, or with a seventh of them."""
    rows = list(itertools.product(LOGPS, LOGPS, ADVANTAGES))[:: 7 if few else 1]
    new, old, advantages = (torch.tensor(x, device=DEVICE)[None] for x in zip(*rows, strict=True))
    dists, rollout = [], (0.5 * (new + old) if sampler else None)
    if support:
        at = torch.arange(len(rows), device=DEVICE)
        others, ids = torch.tensor(OTHERS, device=DEVICE), torch.arange(4, device=DEVICE).expand(1, len(rows), 4)
        dists = [SparseDist(ids, *policy(new, others[at % 4][None])), SparseDist(ids, *policy(old, others[at // 4 % 4][None]))]
    dists = dists or [None, None]
    return TokenBatch(new, old, advantages, torch.ones_like(new, dtype=torch.bool), *dists, rollout)


def kernel(rule, batch: TokenBatch) -> tuple[LossRows, dict[str, Tensor]]:
    """What the kernel says of every token of a batch, and its metrics."""
    batch = batch.map(lambda x: x.detach().contiguous())
    found = row_losses(rule, batch)
    return found, summarize(rule, batch, found)[0]


def out_of_reach(batch: TokenBatch) -> Tensor:
    """Tokens [N] whose new policy has mass where the old one has none: no regression can follow the projection there."""
    return ((batch.dist_new.with_rest() > -math.inf) & (batch.dist_old.with_rest() == -math.inf)).any(-1)[0]


def without(batch: TokenBatch, tokens: Tensor) -> TokenBatch:
    def pick(x: Tensor) -> Tensor:
        return x[:, ~tokens]

    fields = (batch.logp_new, batch.logp_old, batch.advantages, batch.mask)
    return TokenBatch(*(pick(x) for x in fields), batch.dist_new.map(pick), batch.dist_old.map(pick))


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{name} {list(x.values())}" for name, x in CASES])
def test_the_kernel_does_what_the_reference_does(name, settings):
    objective = corral.make_objective(name, **settings)
    rule, needs = objective.kernel, objective.needs
    projects = isinstance(rule, ProjectionRule)
    batch = every_pair(support="dist_old" in needs, few=projects, sampler="logp_rollout" in needs)
    if projects and settings["regression"] and settings["bound"] < math.inf:
        batch = without(batch, out_of_reach(batch))
    found, metrics = kernel(rule, batch)
    leaves = [batch.dist_new.logp, batch.dist_new.rest] if projects else [batch.logp_new]
    for leaf in leaves:
        leaf.requires_grad_()
    exact = objective(batch)
    wanted = torch.autograd.grad(exact.loss.sum(), leaves)
    assert not found.field(FLAWED).any()
    assert torch.equal(found.field(ACTED) > 0, exact.acted[0])
    loss = exact.loss[0].detach()
    assert_close(found.field(LOSS), loss)
    # A gradient is rounded at the size of the loss it belongs to: a token's own share of a certain row is u − p u, p being 1.
    for actual, gradient in zip([found.kept, found.rest] if projects else [found.logp], wanted, strict=True):
        size = (1 + loss.abs()).view(-1, *[1] * (actual.ndim - 1))
        assert_close(actual / size, gradient[0] / size)
    if projects:
        assert_close(found.field(KL_AFTER), exact.kl_after[0])
    assert metrics.keys() == exact.metrics.keys()
    for key, value in exact.metrics.items():
        assert metrics[key].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), key


def test_troll_s_kernel_flags_what_its_reference_refuses():
    objective, batch = corral.make_objective("troll", bound=0.1), every_pair(support=True, few=True)
    flawed = kernel(objective.kernel, batch)[0].field(FLAWED) > 0
    assert torch.equal(flawed, out_of_reach(batch))
    with pytest.raises(ValueError, match=f"rules out tokens that the new one allows, at {int(flawed.sum())} unmasked"):
        objective(batch)
