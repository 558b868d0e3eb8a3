"""Some rows' gradients formed in the forward pass, the others' made in the backward: whatever was foreseen, the gradient."""

import math
from typing import Any

import pytest
import torch
from mixed_rows import F64, Problem, assert_gradients, fused
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch, policy_loss_from_hidden
from interpreted import DEVICE, small_tiles
from tolerance import assert_close

from corral.kernels import formed, inspect_batch, policy_loss, select, stream, triton_head  # isort: skip  # after `interpreted`
from corral.kernels.foreseen import foresee

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

TOLERANCE = 1e-6
"""Little enough that nothing of a row that is sparse is missed in float32, and enough that rows of one token are."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, and a single row is worth a product of its own."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(inspect_batch, "FEWEST", 1)
    monkeypatch.setattr(inspect_batch, "SMALLEST_SHARE", 0.0)
    monkeypatch.setattr(inspect_batch, "SMALL", 0)
    monkeypatch.setattr(policy_loss, "TOLERANCE", TOLERANCE)


@pytest.fixture
def formed_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows' gradients were formed in each forward pass that formed any."""
    seen: list[int] = []
    inner = formed.dense_forward
    monkeypatch.setattr(formed, "dense_forward", lambda source, *more: seen.append(len(source.tokens)) or inner(source, *more))
    return seen


def test_golden_order():
    # Σ |dz| = 2 |Â| w (1 − p_a), of which |Â| w p_rest is dropped; the mean row's is (1 + 2 + 2e-6 + 0 + 0) / 5 = 0.6.
    #   p_a      p_rest   |Â| w   size    dropped    of max(size, 0.6)    at 1e-3
    #   0.5      1e-4     1       1       1e-4       1e-4                 sparse
    #   0.5      1e-2     2       2       2e-2       1e-2                 dense
    #   1 − 1e-6 5e-7     1       2e-6    5e-7       8e-7 (own: 0.25)     sparse
    #   masked
    #   0.5      1e-2     0       0       0          0                    sparse
    #   0.5      1e-2     1 · 0   0       0          0                    sparse
    p_a = torch.tensor([[0.5, 0.5, 1 - 1e-6, 0.5, 0.5, 0.5]], device=DEVICE)
    p_rest = torch.tensor([[1e-4, 1e-2, 5e-7, 1e-2, 1e-2, 1e-2]], device=DEVICE)
    mask = torch.tensor([[True, True, True, False, True, True]], device=DEVICE)
    advantages = torch.tensor([[1.0, -1.0, 1.0, math.nan, 0.0, 1.0]], device=DEVICE)
    weights = torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0, 0.0]], device=DEVICE)
    tokens = torch.zeros(1, 6, dtype=torch.long, device=DEVICE)
    old = SparseDist(tokens[..., None], p_a.log()[..., None], p_rest.log())
    batch = TokenBatch(p_a.log(), p_a.log(), advantages, mask, None, old)
    head = torch.zeros(10, 8, device=DEVICE)
    routed = inspect_batch.inspect_batch(batch, tokens, weights, head, form=True, tolerance=1e-3)
    assert routed.counts.tolist() == [4, 5, 0]  # first part, live, refused
    assert routed.position.tolist() == [0, 4, 1, -1, 2, 3]
    assert routed.formed(4, 5) == slice(4, 5)
    every = inspect_batch.inspect_batch(batch, tokens, weights, head, form=True, tolerance=0.0)
    assert every.counts.tolist() == [3, 5, 0]
    assert every.position.tolist() == [0, 1, 2, -1, 3, 4]
    assert every.formed(3, 5) == slice(0, 3)
    assert inspect_batch.inspect_batch(batch, tokens, weights, head, form=False, tolerance=1e-3).counts.tolist() == [5, 5, 0]
    refused = inspect_batch.inspect_batch(batch, tokens + 10, weights, head, form=True, tolerance=1e-3)
    assert refused.counts.tolist()[1:] == [5, 5]


OBJECTIVES = {
    "troll": {"bound": 0.01}, "dppo": {"estimator": "topk"}, "ppo_clip": {}, "dual_clip": {}, "reinforce": {}, "cispo": {},
    "sapo": {}, "spo": {},
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_on_peaked_and_flat_rows(name, formed_rows):
    problem, objective = Problem(), corral.make_objective(name, **OBJECTIVES[name])
    out, got, factor = fused(problem, objective, "summed")
    loss, wanted = problem.exact(objective, factor)
    assert formed_rows == [3]
    assert_close(out.loss.cpu(), loss, torch.float32, atol=2e-5)
    assert_gradients(got, wanted)
    assert out.metrics["head/dropped"] < TOLERANCE


MIXTURES = {
    "none predicted": ({"rows": "ppp."}, []),
    "all predicted": ({"rows": "fff."}, [3]),
    "one of one": ({"rows": "f"}, [1]),
    "none of one": ({"rows": "p"}, []),
    "one only": ({"rows": "pppfp"}, [1]),
    "flat ones are missed": ({"rows": "pffp.f", "lies": "15"}, [1]),
    "all flat ones are missed": ({"rows": "pfpf", "lies": "13"}, []),
    "peaked ones are taken for flat": ({"rows": "pffp.f", "lies": "03"}, [5]),
    "wrong both ways": ({"rows": "pffp.f", "lies": "1250"}, [1]),
    "bias": ({"rows": "pf.f", "biased": True}, [2]),
    "soft cap, under which no row is sure": ({"rows": "pf.f", "cap": True}, [3]),
}


@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_and_wrong_predictions(case, formed_rows):
    options, predicted = case
    problem, objective = Problem(**options), corral.make_objective("troll", check=False, bound=0.01)  # some lie
    out, got, factor = fused(problem, objective, "summed")
    loss, wanted = problem.exact(objective, factor)
    assert formed_rows == predicted
    assert_close(out.loss.cpu(), loss, torch.float32, atol=2e-5)
    assert_gradients(got, wanted)
    assert got[0][~problem.mask.to(DEVICE)].abs().sum() == 0


@pytest.mark.parametrize("how", ["scaled", "masked", "each its own"])
@pytest.mark.parametrize("rows", ["pff.pf", "ffff"])
def test_any_upstream(how, rows, formed_rows):
    problem, objective = Problem(rows), corral.make_objective("ppo_clip")
    _, got, factor = fused(problem, objective, how)
    assert len(formed_rows) == 1
    assert_gradients(got, problem.exact(objective, factor)[1])


def test_only_what_was_not_expected_goes_back_again(monkeypatch):
    """Of four flat rows one is weighted otherwise than the others."""
    counts = []
    inner = formed.route_rows
    monkeypatch.setattr(formed, "route_rows", lambda *given: counts.append(inner(*given)) or counts[-1])
    problem, objective = Problem("pfffpf"), corral.make_objective("reinforce")
    leaves, (batch, tokens, weights) = problem.leaves(), problem.on()
    out = policy_loss_from_hidden(*leaves, tokens, batch, objective, weights=weights, impl="triton", **problem.spec)
    factor = torch.full_like(out.loss, 2.0)
    factor[0, 1] = 5.0
    got = torch.autograd.grad((out.loss * factor).sum(), leaves)
    assert_gradients(got, problem.exact(objective, factor.cpu().to(F64))[1])
    assert counts[0].counts.tolist() == [3, 1]  # two peaked rows and the odd one, which is dense
    assert out.metrics["head/dense_share"].item() == pytest.approx(4 / 6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_has_no_gradient(exact, frozen):
    problem, objective = Problem("pf.f"), corral.make_objective("troll", bound=0.01)
    leaves, (batch, tokens, weights) = problem.leaves(), problem.on()
    leaves[frozen] = leaves[frozen].detach()
    out = policy_loss_from_hidden(
        *leaves, tokens, batch, objective, weights=weights, exact=exact, impl="triton", **problem.spec
    )
    (got,) = torch.autograd.grad(out.loss.sum(), leaves[1 - frozen])
    assert_gradients([got], [problem.exact(objective, torch.ones(problem.mask.shape, dtype=F64))[1][1 - frozen]])


def test_rows_without_an_advantage_are_not_formed_and_cost_no_product(formed_rows):
    problem, objective = Problem("ffff"), corral.make_objective("ppo_clip")
    problem.batch.advantages[0] = 0.0
    _, got, factor = fused(problem, objective, "summed", exact=True)
    assert formed_rows == [2]
    assert_gradients(got, problem.exact(objective, factor)[1])


def test_more_rows_than_are_streamed_at_once(monkeypatch, formed_rows):
    monkeypatch.setattr(select, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(formed, "ROWS_AT_ONCE", 3)
    problem, objective = Problem("pfpf.f"), corral.make_objective("troll", bound=0.01)
    _, got, factor = fused(problem, objective, "summed")
    assert formed_rows == [3]
    assert_gradients(got, problem.exact(objective, factor)[1])


def test_few_rows_are_not_worth_it(monkeypatch, formed_rows):
    problem, objective = Problem("pf.f"), corral.make_objective("ppo_clip")
    for name, value in (("FEWEST", 3), ("SMALLEST_SHARE", 0.7)):
        with monkeypatch.context() as patch:
            patch.setattr(inspect_batch, name, value)
            _, got, factor = fused(problem, objective, "summed")
        assert formed_rows == []
        assert_gradients(got, problem.exact(objective, factor)[1])


def test_where_nearly_all_rows_are_dense_all_are_formed(monkeypatch, formed_rows):
    monkeypatch.setattr(inspect_batch, "SMALLEST_SHARE", 0.3)
    problem, objective = Problem("ff.fpf"), corral.make_objective("ppo_clip")
    _, got, factor = fused(problem, objective, "summed")
    assert formed_rows == [5]
    assert_gradients(got, problem.exact(objective, factor)[1])


def test_of_a_small_product_all_rows_are_formed_or_none(monkeypatch, formed_rows):
    monkeypatch.setattr(inspect_batch, "SMALL", 10**12)
    objective = corral.make_objective("ppo_clip")
    for rows, count in (("pfpp.p", [5]), ("pppp", [])):
        formed_rows.clear()
        problem = Problem(rows)
        _, got, factor = fused(problem, objective, "summed")
        assert formed_rows == count
        assert_gradients(got, problem.exact(objective, factor)[1])


def test_rows_that_were_not_foreseen_are_refused():
    problem = Problem("pf.f")
    (batch, tokens, _), leaves = problem.on(), problem.leaves()
    expect = foresee(corral.make_objective("ppo_clip"), batch, lambda x: x[0])
    with pytest.raises(ValueError, match="`expect` foresees the loss of 2 rows and there are 4"):
        corral.lm_head(*leaves, tokens, ids=batch.dist_old.ids, expect=expect, tolerance=1e-3, impl="triton")


def test_the_same_every_time():
    problem, objective = Problem(), corral.make_objective("troll", bound=0.01)
    first, second = (fused(problem, objective, "masked")[1] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_rows_that_could_not_be_formed_take_the_usual_way(monkeypatch):
    """As where a row's numbers are out of range: its part of the sums is missing, and it says so."""
    inner = formed.dense_forward

    def without_first(source, old, weights, rule, needed, begun, known):
        alive = torch.ones(len(source.tokens), device=DEVICE)
        alive[0] = 0.0

        def told(rows, loss, left_out):
            left_out[0] = True
            known(rows, loss, left_out)

        return inner(source, old, weights * alive, rule, needed, begun, told)

    monkeypatch.setattr(formed, "dense_forward", without_first)
    for rows in ("pfpf", "ffff"):
        problem, objective = Problem(rows), corral.make_objective("ppo_clip")
        _, got, factor = fused(problem, objective, "summed")
        assert_gradients(got, problem.exact(objective, factor)[1])


# The head alone, told what will follow.


def headed(
    problem: Problem,
    objective: Any,
    *,
    tolerance: float = TOLERANCE,
    impl: str = "triton",
    how: str = "as expected",
    **more: Any,
) -> tuple[corral.HeadOutput, list[Tensor], Tensor]:
    """`lm_head` on every row, then the objective; the head expects the weighted sum of its losses."""
    leaves, (batch, tokens, weights) = problem.leaves(), problem.on()
    at_rest = more.pop("at_rest", False)
    expect = foresee(objective, batch, lambda x: x.flatten(0, 1), weights, at_rest=at_rest)
    old = batch.dist_old
    head = corral.lm_head(
        leaves[0].flatten(0, 1), leaves[1], tokens.flatten(), bias=leaves[2] if len(leaves) > 2 else None,
        ids=None if old is None else old.ids.flatten(0, 1), impl=impl, expect=expect, tolerance=tolerance,
        **problem.spec, **more,
    )  # fmt: skip
    shape = batch.mask.shape
    logp = head.logp.view(shape)
    new = None if head.dist is None else SparseDist(old.ids, head.dist.logp.view(*shape, -1), head.dist.rest.view(shape))
    logp_old = logp.detach() if at_rest else batch.logp_old
    out = objective(TokenBatch(logp, logp_old, batch.advantages, batch.mask, new, old, batch.logp_rollout))
    loss = torch.where(batch.mask, out.loss * weights, 0.0)
    factor = {"as expected": 1.0, "scaled": 0.25}.get(how)
    factor = torch.arange(1.0, shape.numel() + 1).view(shape).to(DEVICE) if factor is None else torch.full_like(loss, factor)
    total = (loss * factor).sum() + (head.entropy.sum() if how == "entropy" else 0.0)
    return head, list(torch.autograd.grad(total, leaves)), factor.cpu().to(F64)


@pytest.mark.parametrize("name", ["troll", "dppo", "ppo_clip", "cispo"])
@pytest.mark.parametrize("how", ["as expected", "scaled", "each its own"])
def test_the_head_forms_what_it_is_told(name, how, formed_rows):
    problem, objective = Problem(), corral.make_objective(name, **OBJECTIVES[name])
    head, got, factor = headed(problem, objective, how=how)
    assert formed_rows == [3]
    slow, _, _ = headed(problem, objective, impl="torch")
    live = problem.mask.flatten().to(DEVICE)
    assert_close(head.logp[live], slow.logp[live], atol=2e-5)
    assert_close(head.dist.logp[live], slow.dist.logp[live], atol=2e-5)
    assert_close(head.dist.rest[live], slow.dist.rest[live], atol=2e-5)
    assert torch.equal(head.dist.ids, slow.dist.ids)
    assert_gradients(got, problem.exact(objective, factor)[1])
    assert 0 < head.report[0].item() <= 1
    assert head.report[1].item() < TOLERANCE


HEADED = {
    "nothing left out": {"tolerance": 0.0},
    "nothing left out, without a support": {"problem": {"support": False}, "tolerance": 0.0},
    "without a support": {"problem": {"support": False}},
    "bias": {"problem": {"rows": "pf.f", "biased": True}},
    "soft cap": {"problem": {"rows": "pf.f", "cap": True}},
    "all flat": {"problem": {"rows": "ffff"}},
    "all peaked": {"problem": {"rows": "pppp"}},
    "one row": {"problem": {"rows": "f"}},
    "wrong both ways": {"problem": {"rows": "pf.fpf", "lies": "10"}},
}


@pytest.mark.parametrize("case", HEADED.values(), ids=HEADED)
def test_the_head_told_what_follows_in_other_cases(case):
    case = dict(case)
    problem, objective = Problem(**case.pop("problem", {})), corral.make_objective("ppo_clip", check=False)
    _, got, factor = headed(problem, objective, **case)
    assert_gradients(got, problem.exact(objective, factor)[1])


@pytest.mark.parametrize("tolerance", [TOLERANCE, 0.0])
def test_the_entropy_is_a_value_with_or_without_a_gradient(tolerance, formed_rows):
    problem, objective = Problem("pfpf"), corral.make_objective("reinforce")
    for how in ("as expected", "entropy"):
        fast, got, _ = headed(problem, objective, entropy=True, how=how, tolerance=tolerance)
        slow, wanted, _ = headed(problem, objective, entropy=True, how=how, impl="torch")
        assert_close(fast.entropy, slow.entropy, atol=2e-5)
        assert_gradients(got, [x.cpu().to(F64) for x in wanted])
    assert formed_rows == [2 if tolerance else 4] * 2


def test_a_policy_that_is_its_own_anchor(formed_rows):
    problem, objective = Problem("pf.f", support=False), corral.make_objective("ppo_clip")
    _, got, _ = headed(problem, objective, at_rest=True, tolerance=0.0)
    with_torch = headed(problem, objective, at_rest=True, impl="torch")[1]
    assert formed_rows == [3]
    assert_gradients(got, [x.cpu().to(F64) for x in with_torch])


def test_gradients_formed_beforehand_are_there_once_and_then_made_again():
    problem, objective = Problem("pf.f"), corral.make_objective("ppo_clip")
    leaves, (batch, tokens, weights) = problem.leaves(), problem.on()
    out = policy_loss_from_hidden(*leaves, tokens, batch, objective, weights=weights, impl="triton", **problem.spec)
    first = torch.autograd.grad(out.loss.sum(), leaves, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(out.loss.sum(), leaves), strict=True):
        assert_close(once, again, atol=1e-5)


def test_any_function_may_be_expected_and_is_not_formed_by_kernels(formed_rows):
    problem = Problem("pf.f")
    leaves, (_, tokens, _) = problem.leaves(), problem.on()

    def run(expect: Any) -> list[Tensor]:
        plan = triton_head.Plan(stream.LogitSpec(), select.HeadRequest(), 0.0, None, expect)
        head = triton_head.TritonHead.apply(leaves[0].flatten(0, 1), leaves[1], None, tokens.flatten(), None, plan)
        return list(torch.autograd.grad(head[0].sum(), leaves[:2]))

    for told, untold in zip(run(lambda logp, _dist, _rows: logp.sum()), run(None), strict=True):
        assert torch.equal(told, untold)
    assert formed_rows == []
