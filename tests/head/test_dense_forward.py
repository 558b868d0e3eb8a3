"""Gradients of dense rows, as stored logits times one factor per row, against float64 autograd on full logits."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from corral.head import dispatch
from corral.head.logits import LogitSpec
from corral.head.packed import LossTerms
from corral.head.rows import Gradients, HeadInput, HeadRows, blank_gradients
from interpreted import DEVICE, small_tiles

from corral.head.triton import gemm_stats  # isort: skip  # after `interpreted`
from corral.head.triton import backward as module  # isort: skip
from corral.head.triton import backward as row_factor  # isort: skip
from corral.head.triton.backward import DenseRows, dense_forward  # isort: skip
from corral.head.triton.backward import RowGradient  # isort: skip
from corral.head.triton.loss import LOSS, LossRows, row_losses  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernel computes with inf

ROWS, VOCABULARY, WIDTH = 7, 90, 16
ROUNDING = 2**-8 if DEVICE == "cuda" else 2**-7
"""Of bfloat16: the interpreter cuts off."""
OBJECTIVES = {
    "troll": ("troll", {}),
    "troll, tight": ("troll", {"bound": 1e-3}),
    "clip": ("ppo_clip", {}),
    "clip, dual": ("dual_clip", {"dual_clip": 1.5}),
    "mask by binary tv": ("dppo", {}),
    "mask by kl of the support": ("dppo", {"divergence": "kl", "estimator": "topk"}),
    "no region": ("reinforce", {}),
    "weight": ("cispo", {"cap_low": 0.8, "cap_high": 1.2}),
    "gate": ("sapo", {}),
    "penalty": ("spo", {}),
}
TOPS = [
    pytest.param(0.5, id="flat"),
    pytest.param(3.0, id="medium", marks=pytest.mark.slow),  # as in every other test here
    pytest.param(8.0, id="peaked"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


@dataclass
class Problem:
    """A policy that has moved, in float64, with all that a loss takes."""

    hidden: Tensor
    moved: Tensor
    """The new policy's hidden states."""
    weight: Tensor
    tokens: Tensor
    bias: Tensor | None = None
    spec: LogitSpec = LogitSpec()  # noqa: RUF009 (frozen)
    k: int = 5
    support: bool = True

    def __post_init__(self) -> None:
        count = len(self.tokens)
        self.advantages, self.weights = torch.randn(count, dtype=torch.float64), 0.5 + torch.rand(count, dtype=torch.float64)

    def logp(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        z = hidden @ weight.T
        return (self.spec.slope * (z if bias is None else z + bias)).log_softmax(-1)

    def old(self) -> SparseDist:
        return corral.top_k_support(self.logp(self.hidden, self.weight, self.bias), self.tokens, self.k)

    def exact(self, objective: object, without: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Losses, and dH, dW and db of their weighted sum."""
        leaves = [x.clone().requires_grad_() for x in (self.moved, self.weight, self.bias) if x is not None]
        logp, old = self.logp(*leaves, *[None] * (3 - len(leaves))), self.old()
        sampled = logp.gather(-1, self.tokens[:, None]).squeeze(-1)
        new = corral.gather_support(logp, old.ids) if self.support else None
        new, old_dist = (None if x is None else SparseDist(x.ids[None], x.logp[None], x.rest[None]) for x in (new, old))
        mask = torch.ones(1, len(sampled)).bool()
        batch = TokenBatch(
            sampled[None], old.logp[None, :, 0], self.advantages[None], mask, new, old_dist if self.support else None
        )
        loss = objective(batch).loss[0]
        weights = self.weights if without is None else torch.where(without.cpu(), 0.0, self.weights)
        return loss.detach(), list(torch.autograd.grad((loss * weights).sum(), leaves))

    def inputs(self, objective: object, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
        """What `dense_forward` takes of it."""
        hidden, weight = (x.to(DEVICE, dtype) for x in (self.moved, self.weight))
        bias = None if self.bias is None else self.bias.to(DEVICE, dtype)
        old, tokens = self.old(), self.tokens.to(DEVICE)
        ids = old.ids.to(DEVICE) if self.support else None
        logp, kept, rest, advantages = (x.float().to(DEVICE) for x in (old.logp[:, 0], old.logp, old.rest, self.advantages))
        old = SparseDist(ids, kept, rest)[None] if self.support else None
        mask = torch.ones(1, len(logp), dtype=torch.bool, device=DEVICE)
        batch = TokenBatch(logp[None], logp[None], advantages[None], mask, None, old)
        terms = LossTerms(objective, batch, self.weights.float().to(DEVICE)[None], None, False)
        source = HeadInput(hidden, weight, bias, tokens, ids, self.spec)

        def loss_of(rows: HeadRows, some: LossTerms) -> LossRows:
            new = rows.dist[None] if self.support else None
            return row_losses(objective.kernel, some.with_new(rows.logp[None], new, some.batch.dist_old))

        return source, terms, loss_of, blank_gradients(source, (True, True, bias is not None))


def draw(top: float = 3.0, rows: int = ROWS, **options: object) -> Problem:
    """Logits of about ± `top`; tokens are sampled from the old policy."""
    hidden = torch.randn(rows, WIDTH, dtype=torch.float64)
    weight = (top / math.sqrt(WIDTH)) * torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    problem = Problem(hidden, hidden + 0.2 * torch.randn_like(hidden), weight, torch.zeros(rows, dtype=torch.int64), **options)
    problem.tokens = problem.logp(hidden, weight, problem.bias).exp().multinomial(1).squeeze(-1)
    return problem


def run(problem: Problem, objective: object, dtype: torch.dtype = torch.float32) -> tuple[DenseRows, Gradients]:
    """Losses of dense rows, and their gradients."""
    source, terms, loss_of, out = problem.inputs(objective, dtype)
    found = dense_forward(source, terms, loss_of, out)
    found.finish()
    return found, out


def check(problem: Problem, name: str = "troll", lost: tuple[int, ...] = (), **settings: object) -> None:
    """Losses and gradients are those of float64 but for the rows expected to be left out, which add nothing."""
    objective = corral.make_objective(name, **settings)
    found, gradients = run(problem, objective)
    loss, left_out = found.loss, found.left_out
    assert tuple(left_out.nonzero().flatten().tolist()) == lost
    wanted, exact = problem.exact(objective, left_out)
    assert (loss.field(LOSS).cpu() - wanted).norm() <= 2e-5 * wanted.norm()
    assert gradients.hidden[left_out].abs().sum() == 0
    for actual, expected in zip(vars(gradients).values(), exact, strict=False):
        assert (actual.cpu() - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize(("name", "settings"), OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("top", TOPS)
def test_every_objective_on_every_policy(name, settings, top):
    check(draw(top), name, **settings)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("troll", 2), ("ppo_clip", 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("troll", 1), ("ppo_clip", 2)))],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"rows": 1}, {"k": 1}, {"k": 63}, {"spec": LogitSpec(1.3, None, 0.7)}, {"spec": LogitSpec(-0.8, None, 1.0)}],
)
def test_supports_scales_and_parts(name, parts, options, monkeypatch):
    if parts == 2 and DEVICE == "cpu":
        monkeypatch.setitem(dispatch.TILES, torch.float32, dispatch.Tile(4, 16, 16, warps=4, stages=1))
        monkeypatch.setattr(module, "BYTES_AT_ONCE", 0)  # as few rows as a tile has
    check(draw(**options), name)


def test_without_a_support_the_sampled_token_is_it():
    check(draw(support=False), "ppo_clip")


@pytest.mark.parametrize("name", ["troll", "ppo_clip"])
@pytest.mark.parametrize("kind", ["bias", "few allowed", "one token holds all", "uniform", "ties", "no credit"])
def test_awkward_rows(name, kind):
    problem = draw()
    if kind == "bias":
        problem.bias = torch.randn(VOCABULARY, dtype=torch.float64)
    elif kind == "few allowed":  # as many as the support holds: there is nothing off it
        problem.bias = torch.full((VOCABULARY,), -math.inf, dtype=torch.float64)
        problem.bias[10:15] = 0.0
        problem.tokens = 10 + problem.tokens % 5
    elif kind == "one token holds all":
        problem.bias = torch.zeros(VOCABULARY, dtype=torch.float64)
        problem.bias[3], problem.tokens[:] = 50.0, 3
    elif kind == "uniform":
        problem.hidden = problem.moved = torch.zeros_like(problem.hidden)
    elif kind == "ties":
        problem.hidden, problem.moved, problem.weight = (
            x.round() for x in (problem.hidden, problem.hidden + 0.3, problem.weight)
        )
    elif kind == "no credit":
        problem.advantages[2:4], problem.weights[5] = 0.0, 0.0
    if kind == "one token holds all" and name == "ppo_clip":
        # 1 − p_a is taken from p_a in float32: nothing is left of 10⁻²⁰, neither here nor in any other head.
        problem.bias[3] = 8.0
    check(problem, name)


def test_a_token_next_to_impossible_is_left_out():
    # log p_a < −70 in row 1 and > −50 in row 2: the second is still in reach. Row 4 has no advantage, and no gradient.
    problem = draw(support=False)
    problem.bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    problem.bias[88], problem.bias[89] = -70.0, -45.0
    problem.weight[88:] = 0.0
    problem.hidden = problem.moved = problem.hidden * 0.1
    problem.tokens[1], problem.tokens[2], problem.tokens[4], problem.advantages[4] = 88, 89, 88, 0.0
    check(problem, "reinforce", lost=(1,))


def test_a_token_next_to_impossible_may_be_in_the_support():
    problem = draw()
    problem.bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    problem.bias[88] = -75.0
    problem.weight[88] = 0.0
    problem.tokens[3] = 88
    check(problem, "reinforce", lost=(3,))


def scattered(
    factor: list[float],
    above: list[float],
    log_rest: list[float],
    single: list[list[float]],
    kind: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """s, what is left out and E after the single entries at tokens 0 and 2 were put into rows of ones; lse is 0."""
    count = len(factor)
    numbers = [torch.tensor(x, device=DEVICE) for x in (factor, above, log_rest, single)]
    ids = torch.tensor([[0, 2]] * count, dtype=torch.int32, device=DEVICE)
    rest, zero = numbers[2], torch.zeros(count, device=DEVICE)
    reference = numbers[1] + torch.where(rest == -math.inf, 0.0, rest)
    gradient = RowGradient(ids=ids, value=numbers[3], factor=numbers[0], off=zero, size=zero, route=ids)
    stored, left_out = (
        torch.ones(count, 4, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(count, dtype=torch.bool, device=DEVICE),
    )
    rows = HeadRows(zero, zero, ids, zero, rest, zero, rest)
    got = row_factor.write_entries(stored, reference, rows, gradient, LogitSpec(), left_out)
    # What was rounded away is known: with it, entries are exact.
    real = got.likely >= 0
    entries = got.factor[:, None] * stored.float().gather(1, got.likely.clamp(min=0).long()) + got.lost
    wanted = torch.nn.functional.pad(numbers[3], (0, row_factor.LIKELY - numbers[3].shape[1]))
    torch.testing.assert_close(entries[real], wanted[real], rtol=1e-6, atol=0)
    assert not got.lost[~real].any()
    return got.factor.cpu(), left_out.cpu(), stored.float().cpu()


def test_golden_factors_and_entries():
    # s = c e^above: 2 e^1, −1 e^−2; entries are divided by it. Without any gradient s is 0 and nothing is written.
    s, left_out, stored = scattered(
        [2.0, -1.0, 0.0], [1.0, -2.0, 0.0], [-3.0, -1.0, -1.0], [[4.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    )
    torch.testing.assert_close(s, torch.tensor([2 * math.e, -math.exp(-2), 0.0]))
    assert left_out.tolist() == [False, False, False]
    expected = torch.tensor([[2 / math.e, 1, 0.5 / math.e, 1], [-math.exp(2), 1, 0, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(stored, expected, rtol=ROUNDING, atol=0)


def test_where_the_rest_has_no_gradient_what_is_stored_of_it_counts_as_nothing():
    # c = 0, then a c far too small for float32 beside the entries, then nothing off the support, whatever c is.
    s, left_out, stored = scattered([0.0, 1e-30, 5.0], [0.0, 0.0, 3.0], [-3.0, -3.0, -math.inf], [[4.0, -1.0]] * 3)
    assert not left_out.any()
    assert (s.abs() < 1e-20).all()
    assert (s > 0).all()
    torch.testing.assert_close(s[:, None] * stored[:, [0, 2]], torch.tensor([[4.0, -1.0]] * 3), rtol=ROUNDING, atol=0)


def test_what_is_out_of_reach_is_left_out():
    # A rest e^70 below the reference that has a gradient of its own; the same with one as small as the rest; a reference below
    # −50; and a rest without a gradient that is far above the reference, so that no s is small enough.
    s, left_out, stored = scattered(
        [1.0, 1e-30, 1.0, 0.0], [70.0, 70.0, -55.0, -40.0], [-70.0, -70.0, -1.0, 0.0], [[1.0, 1.0]] * 4
    )
    assert left_out.tolist() == [True, False, True, True]
    assert s[left_out].tolist() == [0.0, 0.0, 0.0]
    assert (stored[left_out] == 1).all()
    torch.testing.assert_close(s[1] * stored[1, [0, 2]], torch.ones(2), rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1e-35, 1e30])
def test_no_gradient_is_too_small_or_too_large_to_be_finite(size):
    s, _, stored = scattered([size, 0.0], [0.0, 0.0], [-1.0, -1.0], [[size, 0.5 * size]] * 2)
    assert stored.isfinite().all()
    torch.testing.assert_close(s[:, None] * stored[:, [0, 2]], torch.tensor([[size, 0.5 * size]] * 2), rtol=ROUNDING, atol=0)


def test_the_reference_is_the_sampled_token_s_logit():
    problem = draw(spec=LogitSpec(1.5, None, 0.8))
    problem.bias = torch.randn(VOCABULARY, dtype=torch.float64)
    hidden, weight, bias = (x.float().to(DEVICE) for x in (problem.moved, problem.weight, problem.bias))
    tokens = problem.tokens.to(DEVICE)
    tokens[2] = VOCABULARY + 5  # refused elsewhere: the nearest stands for it
    picked = problem.tokens.clone()
    picked[2] = VOCABULARY - 1
    z = problem.spec.slope * ((problem.moved * problem.weight[picked]).sum(-1) + problem.bias[picked])
    got = row_factor.sampled_logits(hidden, weight, bias, problem.spec, tokens)
    torch.testing.assert_close(got.cpu(), z.float(), rtol=1e-5, atol=1e-5)
    bias[picked[0]] = -math.inf
    assert row_factor.sampled_logits(hidden, weight, bias, problem.spec, tokens)[0] == 0


@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_what_is_stored_reaches_far_below_the_reference(kind):
    # z = −0.3 · token: one tile after the other lies further below token 0; e^−80 is just above the smallest normal number.
    hidden = torch.eye(1, WIDTH, device=DEVICE).expand(3, -1).contiguous()
    weight = torch.zeros(300, WIDTH, device=DEVICE)
    weight[:, 0] = -0.3 * torch.arange(300, device=DEVICE)
    bias = torch.zeros(300, device=DEVICE) if kind == "biased" else None
    how = hidden, weight, bias, LogitSpec()
    reference = row_factor.sampled_logits(*how, torch.tensor([0, 70, 200], device=DEVICE))
    width = dispatch.tile_of(hidden).columns
    stored = torch.empty(3, -(-300 // width) * width, device=DEVICE)
    source = HeadInput(*how[:3], torch.zeros(3, dtype=torch.long, device=DEVICE), None, how[3])
    gemm_stats.gemm_stats(source, store=stored, reference=reference)
    expected = (weight[:266, 0].double() - reference[:, None].double()).exp()
    torch.testing.assert_close(stored[:, :266].double(), expected, rtol=2e-5, atol=0)


@pytest.fixture
def stored_bfloat16(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The dtype to compute in: the interpreter multiplies no bfloat16, and there only what is stored of the logits is."""
    if DEVICE == "cuda":
        return torch.bfloat16
    inner = module.write_entries
    monkeypatch.setattr(module, "write_entries", lambda stored, *rest: inner(stored.bfloat16(), *rest))
    return torch.float32


@pytest.mark.parametrize("name", ["troll", "ppo_clip"])
@pytest.mark.parametrize("top", TOPS)
def test_bfloat16_costs_no_more_than_its_rounding(name, top, stored_bfloat16):
    problem, objective = draw(top, rows=12), corral.make_objective(name)
    problem.moved, problem.weight = (x.bfloat16().double() for x in (problem.moved, problem.weight))
    found, gradients = run(problem, objective, stored_bfloat16)
    assert not found.left_out.any()
    for actual, expected in zip(vars(gradients).values(), problem.exact(objective)[1], strict=False):
        assert (actual.cpu() - expected).norm() <= (4e-3 if DEVICE == "cuda" else ROUNDING) * expected.norm()


def test_gradients_that_nearly_cancel_are_not_lost_in_rounding(stored_bfloat16):
    # Two likely tokens have all the mass and nearly the same weights: dH = g p (1 − p) (w₀ − w₁), a hundredth of either part.
    problem, objective = draw(0.1, rows=12), corral.make_objective("troll")
    problem.weight[:2] = 3.0 + 0.02 * torch.randn(2, WIDTH, dtype=torch.float64)
    problem.hidden = 0.5 + 0.1 * torch.randn(12, WIDTH, dtype=torch.float64)
    problem.moved = problem.hidden + 0.01 * torch.randn(12, WIDTH, dtype=torch.float64)
    problem.moved, problem.weight = (x.bfloat16().double() for x in (problem.moved, problem.weight))
    problem.tokens = torch.arange(12).remainder(2)
    actual = run(problem, objective, stored_bfloat16)[1].hidden
    expected = problem.exact(objective)[1][0]
    assert (actual.cpu() - expected).norm() <= (4e-3 if DEVICE == "cuda" else 1e-4) * expected.norm()


def test_every_time_the_same():
    problem, objective = draw(), corral.make_objective("troll")
    first, second = (run(problem, objective)[1] for _ in range(2))
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.weight, second.weight)


def test_float16_and_a_soft_cap_cannot_be_stored():
    half, single = (torch.zeros(1, dtype=dtype, device=DEVICE) for dtype in (torch.float16, torch.float32))
    assert row_factor.can_store(single, LogitSpec())
    assert not row_factor.can_store(half, LogitSpec())
    assert not row_factor.can_store(single, LogitSpec(1.2, 6.0, 0.9))
