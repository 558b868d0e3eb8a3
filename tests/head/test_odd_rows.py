"""Every objective on odd rows, from hidden states to gradients, on both paths: against full logits and autograd in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch, policy_loss_from_hidden
from interpreted import DEVICE, HALF, small_tiles
from policy_objectives import POLICY_OBJECTIVES, one_of_each_kind

from corral.head.triton import fused as plan_batch  # isort: skip  # after `interpreted`

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
VOCABULARY, WIDTH = 90, 8
ROUNDING = {F64: 1e-9, F32: 5e-5, F16: 2e-3, BF16: 6e-3}
"""Of a row's gradient: what GEMMs in float32 leave, and what half precision does to the result."""
SETTINGS = {"dppo": {"estimator": "topk"}, "m2po": {"bound": 0.05}, "troll": {"bound": 0.01}}
# One log-ratio is 4e-11, which in float32 may be 0: m2po's bound lies where nothing hangs on whether it counts.
SAME_WAY = ("bapo", "clip_cov", "cppo", "kl_cov", "topr", "vespo")
"""Objectives without a kernel, which go the way of gspo and m2po."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, and a single row is worth GEMMs of its own."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(plan_batch, "FEWEST", 1)
    monkeypatch.setattr(plan_batch, "SMALL", 0)


class Problem:
    """Two completions, three tokens of which nothing allows; every kind of row, and padding that holds NaN."""

    def __init__(self, k: int, dtype: torch.dtype, rows: slice = slice(None)) -> None:
        draw = torch.Generator().manual_seed(11)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=F64)

        weight = (2 * randn(VOCABULARY, WIDTH)).round()  # whole numbers: logits of whole-numbered rows are often equal
        bias = randn(VOCABULARY).round()
        bias[[0, 40, 89]] = -math.inf
        tokens = torch.randint(1, 40, (10,), generator=draw)
        hidden = randn(10, WIDTH)
        hidden[1] = 0.0  # uniform but for the bias
        hidden[2] = hidden[2].round()  # ties
        likely = int((weight @ weight[7] + bias).argmax())
        hidden[3] = hidden[4] = 3 * weight[7]  # one token carries all mass
        tokens[3], tokens[4] = likely, (likely + 1) % 39 + 1  # and it is sampled, or one that is next to impossible
        shape = (2, 5) if rows == slice(None) else (1, len(range(10)[rows]))
        moved = (hidden + 0.1 * randn(10, WIDTH) * (torch.arange(10) != 3)[:, None]).to(dtype)
        self.leaves = [x.to(dtype) for x in (moved[rows].view(*shape, WIDTH), weight, bias)]
        self.tokens = tokens[rows].view(shape)
        old = corral.top_k_support((hidden @ weight.T + bias).log_softmax(-1)[rows].view(*shape, -1), self.tokens, k)
        kind = F64 if dtype == F64 else F32
        old = SparseDist(old.ids, old.logp.to(kind), old.rest.to(kind))
        mask, advantages = torch.ones(10, dtype=torch.bool), randn(10)
        mask[6], advantages[5] = False, 0.0
        self.mask = mask[rows].view(shape)
        logp_old = torch.where(self.mask, old.logp[..., 0], math.nan)
        self.batch = TokenBatch(logp_old, logp_old, advantages[rows].view(shape).to(kind), self.mask, None, old, logp_old)
        self.weights = (0.5 + torch.rand(10, generator=draw, dtype=F64))[rows].view(shape).to(kind)

    def exact(self, objective: Any) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients of Σ w L from full logits, of the very numbers that the head is given."""
        hidden, weight, bias = leaves = [x.double().requires_grad_() for x in self.leaves]
        logp, b = (hidden @ weight.T + bias).log_softmax(-1), self.batch
        old = SparseDist(b.dist_old.ids, b.dist_old.logp.double(), b.dist_old.rest.double())
        new, own = corral.gather_support(logp, old.ids), logp.gather(-1, self.tokens[..., None])[..., 0]
        anchor = b.logp_old.double()
        loss = objective(TokenBatch(own, anchor, b.advantages.double(), self.mask, new, old, anchor)).loss
        loss = torch.where(self.mask, loss * self.weights, 0.0)
        return loss.detach(), list(torch.autograd.grad(loss.sum(), leaves))

    def found(self, objective: Any, impl: str, *, exact: bool) -> tuple[Tensor, list[Tensor]]:
        """The same from `policy_loss_from_hidden`."""
        device = DEVICE if impl == "triton" else "cpu"
        leaves = [x.to(device).requires_grad_() for x in self.leaves]
        b, old = self.batch, self.batch.dist_old
        dist = SparseDist(*(x.to(device) for x in (old.ids, old.logp, old.rest)))
        logp_old, advantages, mask = (x.to(device) for x in (b.logp_old, b.advantages, b.mask))
        batch = TokenBatch(logp_old, logp_old, advantages, mask, None, dist, logp_old)
        batch_weights = self.weights.to(device)
        out = policy_loss_from_hidden(
            leaves[0], leaves[1], self.tokens.to(device), batch, objective, exact=exact, weights=batch_weights,
            bias=leaves[2], impl=impl,
        )  # fmt: skip
        return (out.per_token * batch_weights).cpu(), [x.cpu() for x in torch.autograd.grad(out.loss, leaves)]


def check(name: str, problem: Problem, impl: str, *, exact: bool = True) -> None:
    """Losses token by token and, where nothing may be left out, dH row by row; the others as a whole."""
    objective, rounding = corral.make_objective(name, **SETTINGS.get(name, {})), ROUNDING[problem.leaves[0].dtype]
    loss, gradients = problem.found(objective, impl, exact=exact)
    wanted, expected = problem.exact(objective)
    torch.testing.assert_close(loss.double(), wanted, rtol=min(rounding, 1e-4), atol=min(rounding, 1e-4))
    assert wanted.abs().max() > 0.1
    for actual, gradient, leaf in zip(gradients, expected, problem.leaves, strict=True):
        assert actual.dtype == leaf.dtype
        error, size = (actual.double() - gradient).flatten(0, -2 if gradient.ndim > 1 else 0), gradient
        assert error.norm() <= (rounding if exact else max(rounding, 2e-3)) * size.norm()
    if exact:
        error, rows = (gradients[0].double() - expected[0]).norm(dim=-1), expected[0].norm(dim=-1)
        assert (error <= 2 * rounding * rows + 1e-2 * rounding * rows.max()).all()
    assert gradients[0][~problem.mask].count_nonzero() == 0
    assert gradients[2][[0, 40, 89]].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("k", [1, 63])
@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_the_torch_path(name, k, dtype):
    check(name, Problem(k, dtype), "torch")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SAME_WAY else name for name in POLICY_OBJECTIVES]
)
def test_the_triton_path(name):
    check(name, Problem(4, F32), "triton", exact=True)


@pytest.mark.parametrize("name", one_of_each_kind())
def test_the_triton_path_is_sparse_where_it_may_be(name):
    check(name, Problem(1, F32), "triton", exact=False)


@pytest.mark.parametrize(("name", "exact"), [("troll", True), pytest.param("ppo_clip", False, marks=pytest.mark.slow)])
def test_the_triton_path_on_a_wide_support(name, exact):
    check(name, Problem(63, F32), "triton", exact=exact)


@pytest.mark.parametrize("name", ["troll", "gspo"])
def test_the_triton_path_in_half_precision(name):
    check(name, Problem(4, HALF), "triton")


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("row", [0, 1, 2, 4], ids=["ordinary", "uniform", "ties", "next to impossible"])
def test_one_row_alone(row, impl):
    check("troll", Problem(4, F32, slice(row, row + 1)), impl)
