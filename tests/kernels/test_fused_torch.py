"""Gradients formed in the forward pass: the same as those of the backward pass, whatever was expected."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import corral
from corral.kernels import foreseen, head, head_backward, head_rows, lm_head, logits
from corral.kernels.foreseen import foresee
from tolerance import assert_close

F64 = torch.float64
ROWS, VOCABULARY, WIDTH, SLOTS = 11, 33, 4, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 vocabulary entries and 4 rows at a time, so that every test crosses their borders."""
    monkeypatch.setitem(logits.BLOCK, "cpu", (3, 7))
    monkeypatch.setitem(head_rows.HELD, "cpu", 1)
    monkeypatch.setattr(head_rows, "ROWS", 4)


@pytest.fixture
def backward_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows took the usual way back."""
    seen: list[int] = []

    def counted(spec: Any, state: Any, grads: Any, needed: Any) -> Any:
        seen.append(len(grads.live()))
        return head_backward.head_backward(spec, state, grads, needed)

    for module in (foreseen, head):
        monkeypatch.setattr(module, "head_backward", counted)
    return seen


class Problem:
    """Rows, some of the support padded, one row whose support is everything that is possible."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = F64, support: bool = True) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(ROWS, WIDTH, generator=draw, dtype=F64).to(dtype).requires_grad_()
        self.weight = (2 * torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=F64)).to(dtype).requires_grad_()
        bias = torch.randn(VOCABULARY, generator=draw, dtype=F64)
        bias[5] = -math.inf
        self.bias = bias.to(dtype).requires_grad_()
        self.tokens = torch.randint(6, VOCABULARY, (ROWS,), generator=draw)
        self.ids = None
        if support:
            order = torch.rand(ROWS, VOCABULARY, generator=draw).scatter(-1, self.tokens[:, None], 2.0)
            self.ids = order.argsort(-1)[:, :SLOTS]
            self.ids[2, 1:] = -1
            self.ids[::2, 0] = self.tokens[::2]
        self.draw = draw

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]

    def head(self, **more: Any) -> corral.HeadOutput:
        return lm_head(self.hidden, self.weight, self.tokens, bias=self.bias, scale=0.7, temperature=1.3, ids=self.ids, **more)


def weighted(weights: Tensor) -> Callable[[Tensor, corral.SparseDist | None, slice], Tensor]:
    """A loss that is linear in everything, with other weights for every row."""

    def loss(logp: Tensor, dist: corral.SparseDist | None, rows: slice) -> Tensor:
        total = logp
        if dist is not None:
            kept, rest = (torch.where(x > -math.inf, x, 0.0) for x in (dist.logp, dist.rest))
            total = logp + 0.3 * kept.sum(-1) - 0.2 * rest
        return (weights[rows].to(logp.dtype) * total).sum()

    return loss


def loss_of(out: corral.HeadOutput, loss: Any) -> Tensor:
    return loss(out.logp, out.dist, slice(None))


@pytest.mark.parametrize("support", [True, False], ids=["support", "sampled token alone"])
@pytest.mark.parametrize("entropy", [True, False], ids=["with entropy", "without"])
def test_what_was_expected_is_formed_on_the_way(support, entropy, backward_rows):
    problem = Problem(support=support)
    weights = torch.randn(ROWS, generator=problem.draw, dtype=F64)
    weights[[1, 7]] = 0.0  # rows without a gradient
    out, plain = problem.head(expect=weighted(weights), entropy=entropy), problem.head(entropy=entropy)
    assert_close(out.logp, plain.logp)
    if entropy:
        assert_close(out.entropy, plain.entropy)
    if support:
        assert_close(out.dist.logp, plain.dist.logp)
        assert_close(out.dist.rest, plain.dist.rest)
    got = torch.autograd.grad(-3.0 * loss_of(out, weighted(weights)), problem.leaves)
    assert backward_rows == []
    wanted = torch.autograd.grad(-3.0 * loss_of(plain, weighted(weights)), problem.leaves)
    assert max(float(x.abs().max()) for x in wanted) > 0.1
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


@given(st.integers(0, 1000), st.integers(1, 13), st.sampled_from(["other rows", "all", "nothing expected", "entropy"]))
def test_a_wrong_guess_costs_time_and_nothing_else(seed, most, wrong):
    head_rows.ROWS = most
    problem = Problem(seed)
    real = torch.randn(ROWS, generator=problem.draw, dtype=F64)
    guess = {"all": torch.randn(ROWS, generator=problem.draw, dtype=F64), "nothing expected": torch.zeros(ROWS)}.get(
        wrong, real
    )
    if wrong == "other rows":
        guess = torch.where(torch.arange(ROWS) < 9, real, 0.0)
    out, plain = problem.head(expect=weighted(guess), entropy=True), problem.head(entropy=True)
    got, wanted = (
        torch.autograd.grad(loss_of(x, weighted(real)) + (x.entropy.sum() if wrong == "entropy" else 0.0), problem.leaves)
        for x in (out, plain)
    )
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


def test_only_the_rows_that_differ_go_back_again(backward_rows):
    problem = Problem()
    real = 1 + torch.rand(ROWS, dtype=F64)
    guess = real.clone()
    guess[4] = 0.0  # the other rows fix the scale to 1 but for what this one adds: nothing
    loss_of(problem.head(expect=weighted(guess)), weighted(real)).backward()
    assert backward_rows == [1]


def test_a_row_that_went_wrong_spoils_no_other():
    problem = Problem()
    weights = torch.ones(ROWS, dtype=F64)
    out = problem.head(expect=weighted(weights))
    weights[3] = math.nan
    (got,) = torch.autograd.grad(loss_of(out, weighted(weights)), problem.hidden)
    (wanted,) = torch.autograd.grad(loss_of(problem.head(), weighted(weights)), problem.hidden)
    assert got[3].isnan().all()
    others = torch.arange(ROWS) != 3
    assert_close(got[others], wanted[others])


def test_gradients_may_be_taken_twice():
    problem = Problem()
    weights = torch.randn(ROWS, dtype=F64)
    loss = loss_of(problem.head(expect=weighted(weights)), weighted(weights))
    first = torch.autograd.grad(loss, problem.leaves, retain_graph=True)
    for again, once in zip(torch.autograd.grad(loss, problem.leaves), first, strict=True):
        assert_close(again, once)


def test_a_frozen_head_gets_no_gradient_and_neither_does_a_frozen_trunk():
    problem = Problem()
    weights = torch.randn(ROWS, dtype=F64)
    wanted = torch.autograd.grad(loss_of(problem.head(), weighted(weights)), problem.leaves)
    for frozen in range(2):
        problem.leaves[frozen].requires_grad_(False)
        other = problem.leaves[1 - frozen]
        (got,) = torch.autograd.grad(loss_of(problem.head(expect=weighted(weights)), weighted(weights)), other)
        assert_close(got, wanted[1 - frozen])
        problem.leaves[frozen].requires_grad_(True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    problem, exact = Problem(dtype=dtype), Problem()
    for half, whole in zip(problem.leaves, exact.leaves, strict=True):
        whole.data = half.detach().double()
    weights = torch.randn(ROWS, dtype=F64)
    got = torch.autograd.grad(2.0 * loss_of(problem.head(expect=weighted(weights)), weighted(weights)), problem.leaves)
    wanted = torch.autograd.grad(2.0 * loss_of(exact.head(), weighted(weights)), exact.leaves)
    for actual, expected in zip(got, wanted, strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("more", [{"softcap": 5.0}, {"top_k": 4}], ids=["soft cap", "own support"])
def test_where_nothing_is_formed_on_the_way_the_gradient_is_the_same(more, backward_rows):
    problem = Problem(support=False)
    weights = torch.randn(ROWS, dtype=F64)
    out, plain = problem.head(expect=weighted(weights), **more), problem.head(**more)
    got, wanted = (torch.autograd.grad((weights * x.logp).sum(), problem.leaves) for x in (out, plain))
    assert backward_rows == [ROWS, ROWS]
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


def objective_batch(problem: Problem) -> corral.TokenBatch:
    """The rows as one sequence, under a policy that has moved since."""
    with torch.no_grad():
        old = lm_head(
            problem.hidden + 0.3 * torch.randn(ROWS, WIDTH, generator=problem.draw, dtype=F64), problem.weight,
            problem.tokens, bias=problem.bias, top_k=5,
        )  # fmt: skip
    problem.ids = old.dist.ids
    mask = torch.ones(1, ROWS, dtype=torch.bool)
    mask[0, :5] = False  # all of the first four rows, which are taken together
    dist = corral.SparseDist(old.dist.ids[None], old.dist.logp[None], old.dist.rest[None])
    advantages = torch.randn(1, generator=problem.draw, dtype=F64)
    return corral.TokenBatch(old.logp[None], old.logp[None], advantages, mask, None, dist, old.logp[None])


@pytest.mark.parametrize("name", corral.objective_names())
def test_what_an_objective_will_ask_for_is_known(name, backward_rows):
    """Token by token it is; of a sequence nothing is foreseen, and nothing is wrong."""
    problem = Problem()
    batch, weights = objective_batch(problem), torch.rand(1, ROWS, dtype=F64)
    objective = corral.make_objective(name, **({"estimator": "topk"} if name == "dppo" else {}))

    def gradients(expect: Any) -> tuple[Tensor, ...]:
        out = problem.head(expect=expect)
        dist = corral.SparseDist(batch.dist_old.ids, out.dist.logp[None], out.dist.rest[None])
        b = batch
        full = corral.TokenBatch(out.logp[None], b.logp_old, b.advantages, b.mask, dist, b.dist_old, b.logp_rollout)
        return torch.autograd.grad((objective(full).loss * weights).sum(), problem.leaves)

    expect = foresee(objective, batch, lambda x: x.flatten(0, 1), weights)
    assert (expect is not None) is (name not in ("gspo", "gmpo"))
    got = gradients(expect)
    assert len(backward_rows) == (expect is None)
    for actual, expected in zip(got, gradients(None), strict=True):
        assert_close(actual, expected)


def test_of_a_function_and_of_sequences_nothing_is_foreseen():
    batch = objective_batch(Problem())
    for objective in (lambda batch: batch, corral.make_objective("troll", level="sequence")):
        assert foresee(objective, batch, lambda x: x.flatten(0, 1)) is None
