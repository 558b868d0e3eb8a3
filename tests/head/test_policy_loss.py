"""From hidden states to the loss: the head and the objective one by one, on every implementation there is."""

import dataclasses
import math

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import corral
from corral import TokenBatch, policy_loss_from_hidden
from corral.head.policy_loss import PolicyLoss
from interpreted import DEVICE, HALF, small_tiles
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

from corral.head.triton import fused, fused as plan_batch  # isort: skip  # after `interpreted`
from corral.head.triton import backward as dense_forward  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

VOCABULARY, WIDTH = 90, 8
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(plan_batch, "SMALL", 0)  # no GEMM is


class Problem:
    """Two completions whose policy has moved since; padding holds NaN."""

    def __init__(self, device: str, support: bool = True, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(3)
        hidden = torch.randn(2, 4, WIDTH, generator=draw, dtype=torch.float64)
        self.weight = (2 * torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)).to(device, dtype)
        self.tokens = torch.randint(VOCABULARY, (2, 4), generator=draw).to(device)
        old = corral.top_k_support((hidden.to(device) @ self.weight.double().T).log_softmax(-1), self.tokens, 5, 0.999)
        self.hidden = (hidden + 0.3 * torch.randn(2, 4, WIDTH, generator=draw, dtype=torch.float64)).to(device, dtype)
        self.mask = MASK.to(device)
        logp_old = torch.where(self.mask, old.logp[..., 0], math.nan).to(dtype)
        nothing = torch.full_like(logp_old, math.nan)
        advantages = torch.tensor([1.0, -1.0], device=device, dtype=dtype)
        old = corral.SparseDist(old.ids, old.logp.to(dtype), old.rest.to(dtype))
        self.batch = TokenBatch(nothing, logp_old, advantages, self.mask, None, old if support else None, logp_old)
        self.leaves = [self.hidden.requires_grad_(), self.weight.requires_grad_()]

        self.weights = torch.arange(1.0, 9.0, device=device).view(2, 4)

    def loss(self, objective: object, **options: object) -> PolicyLoss:
        given = {"weights": self.weights, **options}
        return policy_loss_from_hidden(self.hidden, self.weight, self.tokens, self.batch, objective, **given)

    def run(self, objective: object, **options: object) -> tuple[PolicyLoss, tuple[Tensor, ...]]:
        out = self.loss(objective, **options)
        return out, torch.autograd.grad(out.loss, self.leaves)


def one_by_one(problem: Problem, objective: object, **options: object) -> tuple[corral.ObjectiveOutput, tuple[Tensor, ...]]:
    """`lm_head` on every token, then the objective."""
    old = problem.batch.dist_old
    head = corral.lm_head(
        problem.hidden, problem.weight, problem.tokens, ids=None if old is None else old.ids, impl="torch", **options
    )
    b = problem.batch
    out = objective(TokenBatch(head.logp, b.logp_old, b.advantages, b.mask, head.dist, b.dist_old, b.logp_rollout))
    return out, torch.autograd.grad((out.loss * problem.weights).sum(), problem.leaves)


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_with_a_soft_cap_the_torch_path_is_the_head_and_the_objective_one_by_one(name):
    problem, objective = Problem("cpu", dtype=torch.float64), corral.make_objective(name)
    got, gradients = problem.run(objective, impl="torch", temperature=0.9, softcap=20.0)
    wanted, expected = one_by_one(problem, objective, temperature=0.9, softcap=20.0)
    assert_close(got.loss, (wanted.loss * problem.weights).sum())
    assert_close(got.per_token, wanted.loss)
    for actual, gradient in zip(gradients, expected, strict=True):
        assert_close(actual, gradient)
    assert set(got.metrics) == {*wanted.metrics, "head/dense_share", "head/dropped_max"}
    assert got.metrics["head/dense_share"] == 1
    assert got.metrics["head/dropped_max"] == 0


TRITON = [("troll", True), ("dppo", True), ("ppo_clip", False), ("gspo", False)]


@pytest.mark.parametrize(("name", "support"), TRITON, ids=[name for name, _ in TRITON])
@pytest.mark.parametrize("exact", [True, False])
def test_the_triton_path_is_the_torch_path(name, support, exact):
    options = {"estimator": "topk"} if name == "dppo" else {}
    problem, objective = Problem(DEVICE, support), corral.make_objective(name, **options)
    got, gradients = problem.run(objective, impl="triton", exact=exact, temperature=0.9)
    wanted, expected = problem.run(objective, impl="torch", temperature=0.9)
    assert_close(got.loss, wanted.loss, atol=2e-5)
    for field in ("per_token", "logp", "kl_after", "regression"):
        fast, slow = getattr(got, field), getattr(wanted, field)
        assert (fast is None) == (slow is None)
        assert fast is None or (fast - slow).abs().max() < 2e-5, field
        assert fast is None or fast[~problem.mask].count_nonzero() == 0
    if name != "gspo":
        assert torch.equal(got.acted, wanted.acted)
    for actual, gradient in zip(gradients, expected, strict=True):
        assert (actual - gradient).norm() < (2e-5 if exact else 2e-3) * gradient.norm()
    assert gradients[0][~problem.mask].abs().sum() == 0
    report = {} if got.report is None else dict(zip(("head/dense_share", "head/dropped_max"), got.report, strict=True))
    metrics = got.metrics | report
    assert set(metrics) == set(wanted.metrics)
    for key in wanted.metrics:
        if key.startswith("tr/"):
            assert metrics[key].item() == pytest.approx(wanted.metrics[key].item(), rel=1e-3, abs=1e-4), key
    assert metrics["head/dropped_max"].item() <= (0 if exact else 1e-3)
    assert metrics["head/dense_share"].item() == 1 if exact else metrics["head/dense_share"].item() <= 1


WEIGHTED = {
    "plain": {},
    "capped": {"softcap": 6.0, "scale": 1.2, "temperature": 0.9},
    "biased": {"bias": True},
    "without a support": {"support": False, "name": "ppo_clip"},
    "half precision": {"dtype": HALF},
}


@pytest.mark.parametrize("case", WEIGHTED.values(), ids=WEIGHTED)
def test_an_exact_gradient_in_two_parts(case, monkeypatch):
    case = dict(case)
    dtype, name = case.pop("dtype", torch.float32), case.pop("name", "troll")
    problem = Problem(DEVICE, case.pop("support", True))
    bias = torch.randn(VOCABULARY, device=DEVICE) if case.pop("bias", False) else None
    leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.hidden, problem.weight)]
    leaves += [] if bias is None else [bias.to(dtype).requires_grad_()]
    problem.weights[0, 0] = 0.0
    monkeypatch.setattr(dense_forward, "BYTES_AT_ONCE", 3 * 96 * leaves[0].element_size())
    seen = []
    inner = fused.dense_forward
    monkeypatch.setattr(fused, "dense_forward", lambda *inputs: seen.append(1) or inner(*inputs))

    def loss(impl: str, dtype: torch.dtype) -> Tensor:
        problem.hidden, problem.weight, *rest = (x.to(dtype) for x in leaves)
        return problem.loss(corral.make_objective(name), bias=rest[0] if rest else None, exact=True, impl=impl, **case).loss

    got = torch.autograd.grad(loss("triton", dtype), leaves)
    assert len(seen) == ("softcap" not in case and dtype != torch.float16)
    wanted = torch.autograd.grad(loss("torch", torch.float32), leaves)
    for actual, expected in zip(got, wanted, strict=True):
        assert (actual.float() - expected.float()).norm() < (2e-5 if dtype == torch.float32 else 6e-3) * expected.float().norm()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_loss_that_is_not_finite_is_refused(impl):
    problem, objective = Problem(DEVICE), corral.make_objective("troll")
    problem.hidden = problem.hidden.detach().clone()
    problem.hidden[0, 0, 0] = math.nan
    says = {"torch": "troll: logp_new is not finite", "triton": "the loss is not finite at 1 unmasked tokens"}[impl]
    for trained in (False, True):
        problem.hidden.requires_grad_(trained)
        problem.weight.requires_grad_(trained)
        with pytest.raises(ValueError, match=says):  # on a GPU by the backward pass, where there is one
            problem.loss(objective, impl=impl).loss.backward()


def test_a_token_twice_in_a_support_is_refused():
    problem, objective = Problem(DEVICE), corral.make_objective("troll", check=False)  # or its mass would tell
    old = problem.batch.dist_old
    ids, logp = old.ids.clone(), old.logp.clone()
    ids[1, 1, -1], logp[1, 1, -1] = ids[1, 1, 1], logp[1, 1, 1]
    problem.batch = dataclasses.replace(problem.batch, dist_old=corral.SparseDist(ids, logp, old.rest))
    with pytest.raises(ValueError, match=r"loss is not finite at 1 unmasked tokens.* or from a support with a token twice"):
        problem.run(objective, impl="triton")
    with pytest.raises(ValueError, match="policy_loss_from_hidden: `ids` has a token twice in one row"):
        problem.run(objective, impl="torch")


@pytest.mark.parametrize("way", ["tied embedding", "adapter on the head", "checkpointing", "frozen head"])
def test_gradients_reach_what_is_behind_the_weight(way):
    """Autograd carries them on: to an embedding that is the head's weight too, to low-rank factors, through a recomputation."""

    def loss(parameters: list[Tensor], impl: str) -> Tensor:
        hidden, weight = hidden_states.detach(), head.detach()
        if way == "tied embedding":
            (weight,) = parameters
            hidden = hidden + 0.1 * weight[problem.tokens.roll(1, -1)]
        elif way == "adapter on the head":
            weight = weight + parameters[0] @ parameters[1]
        else:
            hidden = hidden + parameters[0]
        problem.hidden, problem.weight = hidden, weight
        return problem.loss(corral.make_objective("troll"), exact=True, impl=impl).loss

    problem = Problem(DEVICE)
    hidden_states, head = problem.hidden, problem.weight
    parameters = {
        "tied embedding": [problem.weight.detach().clone()],
        "adapter on the head": [torch.randn(VOCABULARY, 2, device=DEVICE), 0.1 * torch.randn(2, WIDTH, device=DEVICE)],
    }.get(way, [torch.zeros(WIDTH, device=DEVICE)])
    parameters = [x.requires_grad_() for x in parameters]
    if way == "checkpointing":
        total = torch.utils.checkpoint.checkpoint(loss, parameters, "triton", use_reentrant=False)
    else:
        total = loss(parameters, "triton")
    got = torch.autograd.grad(total, parameters)
    wanted = torch.autograd.grad(loss(parameters, "torch"), parameters)
    for actual, expected in zip(got, wanted, strict=True):
        assert (actual - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_weights_that_change_between_forward_and_backward_are_refused(impl):
    problem = Problem(DEVICE)
    out = problem.loss(corral.make_objective("troll"), impl=impl)
    with torch.no_grad():
        problem.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_what_a_backward_pass_leaves_out_is_known_before_it_unless_autograd_runs_it():
    problem = Problem(DEVICE)
    assert problem.loss(corral.make_objective("troll"), impl="triton").metrics["head/dense_share"].isfinite()
    out = problem.loss(corral.make_objective("gspo"), impl="triton")  # of sequences: no kernel
    assert "head/dense_share" not in out.metrics
    assert out.report.isnan().all()
    out.loss.backward()
    assert out.report.isfinite().all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_objective_says_what_is_wrong_with_a_batch(impl):
    problem = Problem(DEVICE)
    problem.batch.logp_old[0, 1] += 1.0
    with pytest.raises(ValueError, match=r"troll: dist_old.logp\[..., 0\] and logp_old differ by more than 0.001 nats"):
        problem.run(corral.make_objective("troll"), impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_objective_says_where_it_is_wrong(impl, unchecked_shapes):
    problem = Problem(DEVICE)
    problem.batch.logp_old[1, 1] = math.nan
    with pytest.raises(ValueError, match=r"logp_old is not finite .* at 1 of 8 tokens, first at \[b t\] = \[1, 1\]"):
        problem.run(corral.make_objective("troll"), impl=impl)
    problem = Problem(DEVICE)
    problem.batch = dataclasses.replace(problem.batch, advantages=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"troll: advantages is \[3\] but logp_new is \[2, 4\]"):
        problem.run(corral.make_objective("troll"), impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["troll", "ppo_clip"])
def test_log_probs_that_are_none_are_refused_unless_told_otherwise(impl, name):
    problem = Problem(DEVICE)
    problem.batch.dist_old.rest[1, 1] = 0.2
    with pytest.raises(ValueError, match=rf"{name}: dist_old is no distribution.* first at \[b t\] = \[1, 1\]"):
        problem.run(corral.make_objective(name), impl=impl)
    out, gradients = problem.run(corral.make_objective(name, check=False), impl=impl)
    assert out.loss.isfinite()
    assert all(x.isfinite().all() for x in gradients)
    problem = Problem(DEVICE)
    problem.batch = dataclasses.replace(problem.batch, logp_rollout=problem.batch.logp_old.clone())
    problem.batch.logp_rollout[1, 1] = 0.002
    with pytest.raises(ValueError, match=rf"{name}: logp_rollout is above 0 .* at 1 of 8 tokens, first at \[b t\] = \[1, 1\]"):
        problem.run(corral.make_objective(name), impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["troll", "ppo_clip"])
def test_a_support_of_other_tokens_is_refused(impl, name):
    problem = Problem(DEVICE)
    problem.tokens = problem.tokens.roll(1, -1)  # as if one of the two had been shifted once more
    with pytest.raises(ValueError, match=r"slot 0 of dist_old.ids is not the sampled token at 5 of 5 unmasked tokens"):
        problem.run(corral.make_objective(name), impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_a_live_token_both_gradients_are_zero(impl):
    problem = Problem(DEVICE)
    problem.mask[:] = False
    out, gradients = problem.run(lambda b: corral.ObjectiveOutput(torch.where(b.mask, -b.logp_new, 0.0), {}), impl=impl)
    assert out.loss.count_nonzero() == 0
    assert [x.count_nonzero().item() for x in gradients] == [0, 0]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_nothing_to_train_on_is_refused_by_the_objective(impl):
    problem = Problem(DEVICE)
    problem.mask[:] = False
    with pytest.raises(ValueError, match="mask has no unmasked token"):
        problem.run(corral.make_objective("troll"), impl=impl)


def test_shapes_that_do_not_fit_are_refused(unchecked_shapes):
    problem, objective = Problem("cpu"), corral.make_objective("ppo_clip")
    hidden, weight, tokens = problem.hidden, problem.weight, problem.tokens
    for given in ((hidden[:, :3], weight, tokens), (hidden, weight, tokens[:, 1:]), (hidden, weight[0], tokens)):
        with pytest.raises(ValueError, match=r"policy_loss_from_hidden: hidden is \[B T H\]"):
            policy_loss_from_hidden(*given, problem.batch, objective, weights=problem.weights)


@pytest.mark.parametrize("name", ["weights", "policy_weights"])
def test_weights_that_are_no_constants_of_the_batch_are_refused(name, unchecked_shapes):
    problem, objective = Problem("cpu"), corral.make_objective("ppo_clip")
    for bad in (problem.weights[0], problem.weights.long(), problem.weights.clone().requires_grad_()):
        with pytest.raises(ValueError, match=rf"policy_loss_from_hidden: {name} are constants \[B T\] like the mask, \[2, 4\]"):
            problem.loss(objective, **{name: bad})


def test_on_policy_there_is_no_other_anchor():
    with pytest.raises(ValueError, match="on_policy=True takes the new policy for the anchor, and a dist_old was given"):
        Problem("cpu").loss(corral.make_objective("ppo_clip"), on_policy=True)
