"""Dense rows in any number among sparse ones: none, some, all; against dense float64."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import corral
from corral.head.forward import HeadFunction
from corral.head.logits import LogitSpec
from corral.head.rows import HeadInput
from interpreted import DEVICE, HALF, small_tiles

from corral.head.triton import backward as gradients  # isort: skip  # after `interpreted`
from corral.head.triton.support import lm_head_forward  # isort: skip
from corral.head.triton import backward as dense, backward as sparse  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

F64 = torch.float64
ROWS, VOCABULARY, WIDTH, SLOTS = 14, 150, 16, 4
DEAD = 2
"""Rows without a gradient, the last of them."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 64)
    monkeypatch.setattr(dense, "LOGITS_AT_ONCE", 2**9)
    monkeypatch.setattr(dense, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(sparse, "PIECE", 4)  # the three tokens' lists are longer


class Problem:
    """Every second row is flat until there are enough of them; the others are sure of one of the same three tokens."""

    def __init__(self, flat: int, *, biased=False, entropy=False, spec=None, dtype=torch.float32) -> None:
        draw = torch.Generator().manual_seed(flat)
        self.spec, self.entropy = spec or LogitSpec(), entropy
        weight = torch.nn.functional.normalize(torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=F64))
        order = [*range(1, ROWS - DEAD, 2), *range(0, ROWS - DEAD, 2)][:flat]
        strength = torch.full((ROWS, 1), 64.0, dtype=F64)
        strength[order] = 2.0
        hidden = strength * weight[torch.arange(ROWS) % 3 + 7] + 0.1 * torch.randn(ROWS, WIDTH, generator=draw, dtype=F64)
        bias = [torch.randn(VOCABULARY, generator=draw)] if biased else []
        self.leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight, *bias)]
        self.tokens = (torch.arange(ROWS) % 3 + 7).to(DEVICE)
        full = self.dense_logp([x.detach().to(F64) for x in self.leaves])
        self.ids = full.topk(SLOTS).indices
        self.tokens[3::4] = self.ids[3::4, -1]  # a member that is not the likeliest
        self.tokens[5] = full[5].argmin()  # none at all
        self.ids[4, -1] = -1
        draws = [torch.randn(shape, generator=draw) for shape in ((ROWS,), (ROWS,), (ROWS, SLOTS), (ROWS,))]
        for g in (draws[1], draws[3]):  # the entropy and the rest have their gradients on every token
            g[[row for row in range(ROWS) if row not in order]] = 0.0
        for g in draws:
            g[-DEAD:] = 0.0
        self.draws = [g.to(DEVICE) for g in draws]

    def dense_logp(self, leaves: list[Tensor]) -> Tensor:
        z = self.spec.scale * (leaves[0] @ leaves[1].T + (leaves[2] if len(leaves) > 2 else 0.0))
        if self.spec.softcap is not None:
            z = self.spec.softcap * torch.tanh(z / self.spec.softcap)
        return (z / self.spec.temperature).log_softmax(-1)

    def total(self, logp: Tensor, entropy: Tensor, kept: Tensor, rest: Tensor) -> Tensor:
        outputs = (logp, entropy if self.entropy else 0 * entropy, kept, rest)
        return sum((torch.where(x > -math.inf, x, 0.0) * g).sum() for x, g in zip(outputs, self.draws, strict=True))

    def gradients(self, needed: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(self.leaves)]
        report = torch.full((2,), math.nan, device=DEVICE)
        bias = leaves[2] if len(leaves) > 2 else None
        source = HeadInput(*leaves[:2], bias, self.tokens, self.ids, self.spec, entropy=self.entropy)
        rows = HeadFunction.on(source, lm_head_forward, partial(gradients.lm_head_backward, tolerance=1e-3, report=report))
        total = self.total(rows.logp, rows.entropy, rows.kept, rows.rest)
        return torch.autograd.grad(total, [leaves[i] for i in needed]), report

    def reference(self, needed: list[int]) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(F64).requires_grad_() for x in self.leaves]
        full = self.dense_logp(leaves)
        dist = corral.gather_support(full, self.ids)
        own = full.gather(1, self.tokens[:, None])[:, 0]
        total = self.total(own, -(full.exp() * full).sum(-1), dist.logp, dist.rest)
        return torch.autograd.grad(total, [leaves[i] for i in needed])


CASES = {
    "plain": {},
    "bias, cap and entropy": {"biased": True, "entropy": True, "spec": LogitSpec(scale=1.1, softcap=90.0, temperature=0.9)},
    "half precision": {"dtype": HALF},
}
NUMBERS = [*(("plain", n) for n in (0, 1, 7, ROWS - DEAD)), *(("bias, cap and entropy", n) for n in (0, 7))]


@pytest.mark.parametrize(("name", "flat"), [*NUMBERS, ("half precision", 7)])
def test_gradients_whatever_the_number_of_dense_rows(name, flat, monkeypatch):
    asked = []
    usual = gradients.dense_rows
    monkeypatch.setattr(gradients, "dense_rows", lambda *rest, **add: asked.append(usual(*rest, **add)))
    problem = Problem(flat, **CASES[name])
    needed = list(range(len(problem.leaves)))
    got, report = problem.gradients(needed)
    assert report[0].item() == pytest.approx(flat / (ROWS - DEAD))
    assert report[1].item() < 1e-3
    assert len(asked) == (flat > 0)
    for actual, expected in zip(got, problem.reference(needed), strict=True):
        error = (actual.to(F64) - expected).norm() / expected.norm()
        assert error < (2e-5 if actual.dtype == torch.float32 else 4e-3), error
    assert got[0][-DEAD:].abs().sum() == 0


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 2]])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(needed):
    problem = Problem(6, biased=True)
    got, _ = problem.gradients(needed)
    for actual, expected in zip(got, problem.reference(needed), strict=True):
        assert (actual.to(F64) - expected).norm() < 2e-5 * expected.norm()


def test_the_same_every_time():
    first, second = (Problem(6, biased=True).gradients([0, 1, 2])[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_nan_of_one_row_spreads():
    problem = Problem(1)
    problem.draws[0][0] = math.nan  # an upstream gradient that went wrong in one row
    got, _ = problem.gradients([0, 1])
    assert got[0][0].isnan().all()
    assert got[0][1:].isfinite().all()
    assert got[1].isnan().all()
