"""Loss and gradient in one pass on the torch path: those of `lm_head`, the objective and autograd one by one."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import corral
from corral import TokenBatch, lm_head, policy_loss_from_hidden
from corral.head import logits
from corral.head.torch import stream as online
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

F64 = torch.float64
MASK = torch.tensor([[True] * 6 + [False], [False, True, True, True, False, True, True]])
SHAPE, VOCABULARY, WIDTH = MASK.shape, 33, 4
SPEC = {"scale": 0.7, "temperature": 1.3}
SETTINGS = {"dppo": {"estimator": "topk"}, "troll": {"bound": 0.05}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 vocabulary entries and 4 rows at a time: the 11 unmasked tokens are three parts."""
    monkeypatch.setitem(logits.BLOCK, "cpu", (3, 7))
    monkeypatch.setitem(online.HELD, "cpu", 1)
    monkeypatch.setattr(online, "ROWS", 4)


def make(name: str, **more: Any) -> Any:
    return corral.make_objective(name, **SETTINGS.get(name, {}), **more)


class Problem:
    """A policy that has moved since; with `ruled_out` it gives up token 5, which the old one thought likely here and there."""

    def __init__(self, dtype: torch.dtype = F64, *, support: bool = True, weights: float = 1.0, ruled_out: bool = True) -> None:
        draw = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=F64)

        hidden, weight, bias = randn(*SHAPE, WIDTH), 2 * randn(VOCABULARY, WIDTH), randn(VOCABULARY)
        self.tokens = torch.randint(6, VOCABULARY, SHAPE, generator=draw)
        old = lm_head(hidden, weight, self.tokens, bias=bias, top_k=5, **SPEC)
        bias[5] = -math.inf if ruled_out else bias[5]
        self.leaves = [x.to(dtype).requires_grad_() for x in (hidden + 0.3 * randn(*hidden.shape), weight, bias)]
        logp_old = torch.where(MASK, old.logp, math.nan)
        dist = old.dist.map(lambda x: x) if support else None
        self.batch = TokenBatch(logp_old, logp_old, randn(*SHAPE), MASK, None, dist, logp_old)
        self.weights = weights * torch.rand(SHAPE, generator=draw, dtype=F64)
        self.policy_weights = torch.rand(SHAPE, generator=draw, dtype=F64)
        self.policy_weights[0, 2] = 0.0

    def run(self, objective: Any, **options: Any) -> Any:
        hidden, weight, bias = self.leaves
        how = {"weights": self.weights, "policy_weights": self.policy_weights, "impl": "torch", "bias": bias, **SPEC, **options}
        return policy_loss_from_hidden(hidden, weight, self.tokens, self.batch, objective, **how)

    def one_by_one(self, objective: Any) -> tuple[corral.ObjectiveOutput, Tensor, list[Tensor]]:
        """The objective's output of the whole batch, the sum, and gradients, in float64."""
        hidden, weight, bias = leaves = [x.detach().to(F64).requires_grad_() for x in self.leaves]
        ids = None if self.batch.dist_old is None else self.batch.dist_old.ids
        head = lm_head(hidden, weight, self.tokens, bias=bias, ids=ids, impl="torch", **SPEC)
        out = objective(dataclasses.replace(self.batch, logp_new=head.logp, dist_new=head.dist))
        regression = 0.0 if out.regression is None else out.regression
        loss = self.policy_weights * (out.loss - regression) + regression
        total = torch.where(MASK, self.weights * loss, 0.0).sum()
        return out, total, list(torch.autograd.grad(total, leaves))


BOTH = [(name, support) for name in POLICY_OBJECTIVES for support in (True, False) if support or name not in SETTINGS]


@pytest.mark.parametrize(("name", "support"), BOTH)
def test_every_objective_in_parts(name, support):
    problem, objective = Problem(support=support), make(name)
    wanted, total, gradients = problem.one_by_one(objective)
    out = problem.run(objective)
    assert_close(out.loss, total)
    assert_close(out.per_token, wanted.loss)
    for actual, expected in zip(torch.autograd.grad(out.loss, problem.leaves), gradients, strict=True):
        assert_close(actual, expected)
    for field in ("acted", "kl_after", "regression"):
        got, known = getattr(out, field), getattr(wanted, field)
        assert (got is None) == (known is None)
        assert known is None or torch.equal(torch.where(MASK, got, 0), got)
        assert known is None or torch.allclose(got.double(), torch.where(MASK, known, 0).double())
    assert out.metrics.keys() == {*wanted.metrics, "head/dense_share", "head/dropped_max"}
    for key, value in wanted.metrics.items():  # shares are float32
        assert out.metrics[key].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-9), key


def test_the_duals_of_three_parts_count_by_projected_tokens():
    problem, objective = Problem(ruled_out=False), make("troll")
    wanted, out = problem.one_by_one(objective)[0].metrics, problem.run(objective)
    assert out.metrics["tr/dual"].item() == pytest.approx(wanted["tr/dual"].item(), rel=1e-6) != 0
    assert 0 < out.metrics["tr/active_frac"] < 1
    assert Problem().run(objective).metrics["tr/unconverged"] > 0  # the other tests' policy


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_each_token_passes_the_objective_once(name):
    problem, objective, seen = Problem(), make(name), []

    def counted(batch: TokenBatch, config: Any) -> corral.ObjectiveOutput:
        seen.append(batch.logp_new[batch.mask].tolist())
        return objective.function(batch, config)

    out = problem.run(dataclasses.replace(objective, function=counted))
    out.loss.backward()
    assert len(seen) == (3 if objective.config.tokenwise else 1)
    assert sum(seen, []) == out.logp[MASK].tolist()  # noqa: RUF017 (three parts)


@pytest.mark.parametrize(("name", "settings"), [("troll", {"regression": 0.0}), ("ppo_clip", {})])
def test_gradcheck(name, settings):
    """Without the regression, whose gradient stops at the projection."""
    problem, objective = Problem(), make(name, **settings)
    bias = problem.leaves[2].detach()
    finite = bias.isfinite()

    def loss(hidden: Tensor, weight: Tensor, some: Tensor) -> Tensor:
        problem.leaves = [hidden, weight, bias.masked_scatter(finite, some)]
        return problem.run(objective).loss

    class Again(torch.autograd.Function):
        """The same, computed again for every backward pass: gradcheck asks for several."""

        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            ctx.save_for_backward(*given)
            return loss(*given)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return torch.autograd.grad(loss(*given), given, upstream)

    assert torch.autograd.gradcheck(Again.apply, (*problem.leaves[:2], bias[finite].requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    """And in float16 weights of 1e-7 are not lost, times a gradient scaler's 65536."""
    problem, objective = Problem(dtype, weights=1e-7), make("reinforce")
    got = torch.autograd.grad(65536 * problem.run(objective).loss, problem.leaves)
    for actual, expected in zip(got, problem.one_by_one(objective)[2], strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - 65536 * expected).norm() < 2 * torch.finfo(dtype).eps * (65536 * expected).norm()


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}], ids=str)
def test_what_is_frozen_gets_no_gradient(frozen):
    problem, objective = Problem(), make("troll")
    _, total, gradients = problem.one_by_one(objective)
    for i in frozen:
        problem.leaves[i].requires_grad_(False)
    out = problem.run(objective)
    assert_close(out.loss, total)
    assert out.loss.requires_grad is (len(frozen) < 3)
    if len(frozen) < 3:
        out.loss.backward()
    for i, (leaf, expected) in enumerate(zip(problem.leaves, gradients, strict=True)):
        assert (leaf.grad is None) == (i in frozen)
        assert i in frozen or torch.allclose(leaf.grad, expected)


def test_without_a_gradient_and_with_the_entropy():
    problem, objective = Problem(), make("troll")
    with torch.no_grad():
        out = problem.run(objective, entropy=True)
    logp = (0.7 * (problem.leaves[0] @ problem.leaves[1].T + problem.leaves[2]) / 1.3).log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
    assert_close(out.entropy, torch.where(MASK, entropy, 0.0))
    assert_close(out.logp, torch.where(MASK, logp.gather(-1, problem.tokens[..., None])[..., 0], 0.0))
    assert_close(out.loss, problem.one_by_one(objective)[1])
    assert not out.loss.requires_grad
    assert_close(problem.run(objective, entropy=True).loss, out.loss)


def test_the_gradient_is_handed_over_once_and_times_one_number():
    problem, objective = Problem(), make("troll")
    out, gradients = problem.run(objective), problem.one_by_one(objective)[2]
    (-3 * out.loss).backward(retain_graph=True)
    (0.5 * problem.run(objective).loss).backward()  # as in accumulation
    for leaf, expected in zip(problem.leaves, gradients, strict=True):
        assert_close(leaf.grad, -2.5 * expected)
    with pytest.raises(RuntimeError, match="its gradients were handed over by the first backward pass"):
        out.loss.backward()


def test_on_policy_the_anchor_is_the_new_policy():
    """Every ratio is 1, and the gradient is that of − Σ w c Â log π."""
    problem, objective = Problem(support=False), make("ppo_clip")
    problem.batch.logp_old.fill_(math.nan)  # not read
    problem.batch = dataclasses.replace(problem.batch, logp_rollout=None)
    got = torch.autograd.grad(problem.run(objective, on_policy=True).loss, problem.leaves)
    hidden, weight, bias = problem.leaves
    logp = lm_head(hidden, weight, problem.tokens, bias=bias, impl="torch", **SPEC).logp
    credit = problem.weights * problem.policy_weights * problem.batch.advantages
    wanted = torch.autograd.grad(-torch.where(MASK, credit * logp, 0.0).sum(), problem.leaves)
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


def test_tokens_without_a_weight_may_be_anything():
    problem, objective = Problem(support=False), make("reinforce")
    problem.weights[0, 1], problem.batch.advantages[0, 1] = 0.0, 1e308
    problem.batch.logp_old[0, 1] -= 9.0  # with that advantage the loss is infinite
    out = problem.run(objective)
    assert out.per_token[0, 1].isinf()
    assert out.loss.isfinite()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.loss, problem.leaves))
