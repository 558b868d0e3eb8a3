"""Loss and gradient in one pass on the Triton path: whatever was planned of each row, the gradients of float64."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from mixed_rows import F64, Problem, assert_gradients, check_fused, run_fused

import corral
from corral import SparseDist, TokenBatch
from corral.head import dispatch, policy_loss
from corral.head.packed import LossTerms
from corral.support import LogpTolerance
from interpreted import DEVICE, small_tiles
from tolerance import assert_close

from corral.head.triton import fused, fused as plan_batch  # isort: skip  # after `interpreted`
from corral.head.triton import backward as dense_forward  # isort: skip
from corral.head.triton import support as select  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

TOLERANCE = 1e-6
"""Little enough that nothing of a row that is sparse is missed in float32, and enough that rows of one token are."""
OBJECTIVES = {
    "troll": {"bound": 1e-3}, "dppo": {"estimator": "topk"}, "ppo_clip": {}, "dual_clip": {}, "reinforce": {}, "cispo": {},
    "sapo": {}, "spo": {}, "drpo": {}, "aspo": {}, "ripo": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, and a single row is worth GEMMs of its own."""
    small_tiles(monkeypatch)
    for name, value in (("FEWEST", 1), ("SMALLEST_SHARE", 0.0), ("SMALL", 0)):
        monkeypatch.setattr(plan_batch, name, value)
    monkeypatch.setattr(policy_loss, "TOLERANCE", TOLERANCE)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows had their logits stored, in each call that stored any."""
    seen: list[int] = []
    inner = fused.dense_forward
    monkeypatch.setattr(fused, "dense_forward", lambda source, *more: seen.append(len(source.tokens)) or inner(source, *more))
    return seen


def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense rows in parts of at most a tile, of 4 rows where there is no GPU."""
    monkeypatch.setattr(dense_forward, "BYTES_AT_ONCE", 0)
    if DEVICE == "cpu":
        monkeypatch.setitem(dispatch.TILES, torch.float32, dispatch.Tile(4, 16, 16, warps=4, stages=1))


def make(name: str, **settings: Any) -> Any:
    return corral.make_objective(name, **OBJECTIVES[name], **settings)


def test_golden_order():
    # Σ |dz| = 2 g (1 − p_a) with g = |Â| w c, of which g p_rest is dropped; the mean row's is (1 + 2 + 2e-6 + 0 + 0 + 0) / 6.
    #   p_a      p_rest   |Â| w c    size    dropped    of max(size, 0.5)    at 1e-3
    #   0.5      1e-4     1          1       1e-4       1e-4                 sparse
    #   0.5      1e-2     1 · 1 · 2  2       2e-2       1e-2                 dense
    #   1 − 1e-6 5e-7     1          2e-6    5e-7       1e-6 (own: 0.25)     sparse
    #   masked
    #   0.5      1e-2     0          0       0          0                    sparse
    #   0.5      1e-2     1 · 0      0       0          0                    sparse
    #   0.5      1e-2     1 · 1 · 0  0       0          0                    sparse
    p_a = torch.tensor([[0.5, 0.5, 1 - 1e-6, 0.5, 0.5, 0.5, 0.5]], device=DEVICE)
    p_rest = torch.tensor([[1e-4, 1e-2, 5e-7, 1e-2, 1e-2, 1e-2, 1e-2]], device=DEVICE)
    mask = torch.tensor([[True, True, True, False, True, True, True]], device=DEVICE)
    advantages = torch.tensor([[1.0, -1.0, 1.0, math.nan, 0.0, 1.0, 1.0]], device=DEVICE)
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]], device=DEVICE)
    policy = torch.tensor([[1.0, 2.0, 1.0, math.nan, 1.0, 1.0, 0.0]], device=DEVICE)
    tokens = torch.zeros(1, 7, dtype=torch.long, device=DEVICE)
    old = SparseDist(tokens[..., None], p_a.log()[..., None], p_rest.log())
    batch = TokenBatch(p_a.log(), p_a.log(), advantages, mask, None, old)
    terms, head = LossTerms(make("ppo_clip"), batch, weights, policy, False), torch.zeros(10, 8, device=DEVICE)

    def plan(terms: LossTerms = terms, tokens: torch.Tensor = tokens, **how: Any) -> tuple[list[int], int] | None:
        given = {"own": None, "dense": True, "tolerance": 1e-3, "limits": LogpTolerance(), **how}
        order, counts = plan_batch.plan_rows(terms, tokens, head, **given)
        streamed, count, invalid = counts.tolist()
        return None if invalid or not count else (order[:count].tolist(), streamed)

    assert plan() == ([0, 2, 4, 5, 6, 1], 5)
    assert plan(tolerance=0.0) == ([4, 5, 6, 0, 1, 2], 3)  # nothing may be dropped: all with a gradient are dense
    assert plan(dense=False) == ([0, 1, 2, 4, 5, 6], 6)
    assert plan(tokens=tokens + 10) is None  # outside the vocabulary
    assert plan(tokens=tokens + 1) is None  # not slot 0 of the support
    assert plan(terms=dataclasses.replace(terms, policy_weights=policy.roll(1))) is None  # NaN at an unmasked token
    assert plan(terms=dataclasses.replace(terms, batch=dataclasses.replace(batch, mask=~mask & mask))) is None


def test_golden_plan_without_a_support():
    # The mean of −log p_a is (1 + 3 + 1) / 3 · log 2 = log 3.17: flatter than the uniform policy on 3 tokens, not on 4.
    p_a = torch.tensor([[0.5, 0.125, 0.1, 0.5]], device=DEVICE)
    mask = torch.tensor([[True, True, False, True]], device=DEVICE)
    batch = TokenBatch(p_a.log(), p_a.log(), torch.ones_like(p_a), mask, None, None)
    terms = LossTerms(make("ppo_clip"), batch, torch.ones_like(p_a), None, False)
    tokens, head = torch.zeros(1, 4, dtype=torch.long, device=DEVICE), torch.zeros(10, 8, device=DEVICE)

    def streamed(own: int | None, terms: LossTerms = terms) -> tuple[int, int] | None:
        how = {"own": own, "dense": False, "tolerance": 1e-3, "limits": LogpTolerance()}
        streamed, count, invalid = plan_batch.plan_rows(terms, tokens, head, **how)[1].tolist()
        return None if invalid else (streamed, count)

    assert (streamed(3), streamed(4), streamed(None)) == ((0, 3), (3, 3), (3, 3))
    assert streamed(3, dataclasses.replace(terms, on_policy=True)) == (3, 3)  # its log-probs are not read


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_on_peaked_and_flat_rows(name, stored):
    """With policy weights, one of them 0: of TROLL's loss the regression is left there, and is not multiplied elsewhere."""
    problem, c = Problem(), torch.rand(2, 3, device=DEVICE) + 0.5
    c[0, 1] = 0.0
    out, got = check_fused(problem, make(name), policy_weights=c)
    assert stored == [2]  # nothing is planned of the row without a policy term
    assert out.metrics["head/dropped_max"] < TOLERANCE
    assert bool(got[0][0, 1].any()) is (name == "troll")
    assert (out.regression is None) is (name != "troll")


MIXTURES = {
    "none planned": ({"rows": "ppp."}, []),
    "all planned": ({"rows": "fff."}, [3]),
    "one of one": ({"rows": "f"}, [1]),
    "none of one": ({"rows": "p"}, []),
    "one only": ({"rows": "pppfp"}, [1]),
    "flat ones are missed": ({"rows": "pffp.f", "lies": "15"}, [1]),
    "all flat ones are missed": ({"rows": "pfpf", "lies": "13"}, []),
    "peaked ones are taken for flat": ({"rows": "pffp.f", "lies": "03"}, [5]),
    "wrong both ways": ({"rows": "pffp.f", "lies": "1250"}, [1]),
    "bias": ({"rows": "pf.f", "biased": True}, [2]),
    "soft cap, under which none can be stored": ({"rows": "pf.f", "cap": True}, []),
}


@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_and_wrong_plans(case, stored):
    options, planned = case
    check_fused(Problem(**options), make("troll", check=False))  # some lie
    assert stored == planned


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("surest", "how", "flat"), [(1.7, {}, False), (9e9, {}, True), (9e9, {"on_policy": True}, False)])
def test_without_a_support(exact, surest, how, flat, stored):
    """The policy's own carries a sparse gradient, unless the old one was flat; the new policy may be its own anchor."""
    problem = Problem("pf.f", support=False)
    problem.batch = dataclasses.replace(problem.batch, logp_old=problem.batch.logp_old.clamp(min=-surest))
    check_fused(problem, make("ppo_clip"), exact=exact, **how)
    flat = flat or (DEVICE != "cpu" and not how)  # of one tile, one token carries the gradient, and every policy is flatter
    assert stored == ([3] if exact or flat else [])


@pytest.mark.parametrize("rows", ["pff.pf", "ffff"])
def test_the_gradient_is_handed_over_once_and_times_one_number(rows):
    problem, objective = Problem(rows), make("ppo_clip")
    leaves, wanted = problem.leaves(), problem.exact(objective)[2]
    out = run_fused(problem, objective, leaves=leaves)
    for factor in (-3.0, 0.5):  # the second adds to what the first has left, as in accumulation
        (factor * run_fused(problem, objective, leaves=leaves).loss).backward()
    assert_gradients([x.grad for x in leaves], [-2.5 * x for x in wanted])
    assert not any(x.requires_grad for x in (out.per_token, out.logp, out.dist.logp, *out.metrics.values()))
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its gradients were handed over by the first backward pass"):
        out.loss.backward()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_has_no_gradient(exact, frozen):
    problem, objective = Problem("pf.f"), make("troll")
    leaves = problem.leaves()
    leaves[frozen].requires_grad_(False)
    run_fused(problem, objective, leaves=leaves, exact=exact).loss.backward()
    assert leaves[frozen].grad is None
    assert_gradients([leaves[1 - frozen].grad], [problem.exact(objective)[2][1 - frozen]])


def test_without_a_gradient_nothing_is_stored(stored):
    problem, objective = Problem(), make("troll")
    with torch.no_grad():
        out = run_fused(problem, objective, exact=True)
    assert stored == []
    assert not out.loss.requires_grad
    assert_close(out.loss, problem.exact(objective)[1], atol=2e-5)


def test_rows_without_an_advantage_cost_no_gemm(stored):
    problem = Problem("ffff")
    problem.batch.advantages[0] = 0.0
    check_fused(problem, make("ppo_clip"), exact=True)
    assert stored == [2]


def test_more_rows_than_are_held_at_once(monkeypatch, stored):
    monkeypatch.setattr(select, "ROWS_AT_ONCE", 2)
    few_at_once(monkeypatch)
    check_fused(Problem("pfpfpfpf.f"), make("reinforce"))
    assert stored == [5]


@pytest.mark.parametrize(
    ("rows", "least", "planned"),
    [
        ("pf.f", {"FEWEST": 3}, []),
        ("pf.f", {"SMALLEST_SHARE": 0.7}, []),
        ("ff.fpf", {"SMALLEST_SHARE": 0.3}, [5]),  # nearly all: the others are not worth GEMMs of their own
        ("pfpp.p", {"SMALL": 10**12}, [5]),  # a small GEMM: all or none
        ("pppp", {"SMALL": 10**12}, []),
    ],
)
def test_few_rows_are_not_worth_gemms_of_their_own(rows, least, planned, monkeypatch, stored):
    for name, value in least.items():
        monkeypatch.setattr(plan_batch, name, value)
    check_fused(Problem(rows), make("ppo_clip"))
    assert stored == planned


def test_the_same_every_time():
    first, second = (check_fused(Problem(), make("troll"))[1] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", ["pfpf", "ffff"])
def test_rows_that_could_not_be_stored_are_recomputed(rows, monkeypatch):
    """As where a row's numbers are out of range: its part of the sums is missing, and it says so."""
    inner = fused.dense_forward

    def without_first(source: Any, terms: LossTerms, *more: Any) -> Any:
        first = torch.arange(terms.weights.numel(), device=DEVICE) == 0
        terms = dataclasses.replace(terms, weights=torch.where(first, 0.0, terms.weights))
        return dataclasses.replace(inner(source, terms, *more), left_out=first)

    monkeypatch.setattr(fused, "dense_forward", without_first)
    check_fused(Problem(rows, biased=True), make("ppo_clip"))


@pytest.mark.parametrize("exact", [True, False])
def test_the_entropy_is_a_constant_besides(exact):
    problem = Problem("pf.f")
    out, _ = check_fused(problem, make("troll"), entropy=True, exact=exact)
    logp = problem.logp(problem.hidden).view(2, 2, -1)
    assert_close(out.entropy, torch.where(problem.mask, -(logp.exp() * logp).sum(-1), 0.0), atol=2e-5)
    assert not out.entropy.requires_grad


def test_each_token_passes_the_kernel_once_and_the_function_never(monkeypatch):
    seen, inner = [], fused.row_losses
    monkeypatch.setattr(
        fused, "row_losses", lambda rule, batch, *more: seen.extend(batch.logp_new[0].tolist()) or inner(rule, batch, *more)
    )
    few_at_once(monkeypatch)
    objective = dataclasses.replace(make("troll"), function=lambda *_: pytest.fail("not in the kernel"))
    problem = Problem("pffp.fff.f")
    out = run_fused(problem, objective)
    out.loss.backward()
    assert sorted(seen) == sorted(out.logp[problem.mask.to(DEVICE)].tolist())


def test_float16_loses_no_small_weights():
    """A loss of weights of 1e-7 times a gradient scaler's 65536: below float16's range before, and not after."""
    problem, objective = Problem("pff."), make("reinforce")
    problem.weights = problem.weights * 1e-7
    leaves = problem.leaves(torch.float16)
    problem.hidden, problem.weight = leaves[0].detach().cpu().to(F64).flatten(0, 1), leaves[1].detach().cpu().to(F64)
    (65536 * run_fused(problem, objective, leaves=leaves).loss).backward()
    assert_gradients([x.grad for x in leaves], [65536 * x for x in problem.exact(objective)[2]], 4e-3)
