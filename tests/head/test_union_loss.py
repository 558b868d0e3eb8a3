"""A region on the union of both supports, head and loss in one call, against the objective on full logits in float64."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch, policy_loss_from_hidden
from corral.head import policy_loss
from corral.head.policy_loss import PolicyLoss
from corral.head.union import UnionSupport
from corral.tensors import ObjectiveOutput
from interpreted import DEVICE, HALF, small_tiles
from tolerance import assert_close

from corral.head.triton import fused, fused as plan_batch  # isort: skip  # after `interpreted`
from corral.head.triton import support as select  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

F64 = torch.float64
VOCABULARY, WIDTH, SLOTS = (90, 8, 4) if DEVICE == "cpu" else (1500, 8, 4)
CAPPED = {"scale": 1.1, "softcap": 30.0, "temperature": 0.9}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


@dataclass(eq=False)
class Case:
    """A policy that has moved: in the odd rows towards a token far down the old policy's tail."""

    hidden: Tensor
    hidden_old: Tensor
    weight: Tensor
    weight_old: Tensor
    bias: Tensor | None
    how: dict[str, Any]
    batch: TokenBatch
    tokens: Tensor
    place: Tensor

    @classmethod
    def make(cls, *, biased: bool = False, steep: float = 1.0, **how: Any) -> "Case":
        draw = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=F64)

        old, weight = 3 * steep * normal(2, 4, WIDTH), normal(VOCABULARY, WIDTH)
        bias = normal(VOCABULARY) if biased else None
        logp = _log_softmax(old, weight, bias, how)
        token = logp.topk(3).indices[..., 2]
        dist = corral.top_k_support(logp, token, SLOTS, mass=0.99)
        towards = weight[logp.topk(12).indices[..., 11]]
        odd = (torch.arange(8).view(2, 4) % 2 == 1)[..., None]
        new = old + torch.where(odd, 0.6 * steep * towards, 0.05 * normal(2, 4, WIDTH))
        mask = torch.tensor([[True, True, True, False], [True] * 4])
        place = torch.tensor([[4, 1, 2, 0], [-1, -1, 3, 0]])  # of hidden states kept in another order, and not of every token
        kept = torch.cat([old[1, 3:], old[0, 1:3], old[1, 2:3], old[0, :1]])
        batch = TokenBatch(dist.logp[..., 0], dist.logp[..., 0], normal(2, 4), mask, None, dist)
        return cls(new, kept, weight + 0.01 * normal(VOCABULARY, WIDTH), weight, bias, how, batch, token, place)

    def old_logp(self) -> Tensor:
        """Of the old policy at every token; at those without a hidden state, anything."""
        return _log_softmax(self.hidden_old[self.place.clamp(min=0)], self.weight_old, self.bias, self.how)

    def reference(
        self, objective: Any, top_k: int = SLOTS, mass: float = 1.0
    ) -> tuple[ObjectiveOutput, SparseDist, list[Tensor]]:
        """Output, union and gradients of Σ loss, from full logits."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight)]
        logp, old = _log_softmax(*leaves, self.bias, self.how), self.batch.dist_old
        union = corral.top_k_support(logp, self.tokens, top_k, mass, ids=old.ids).ids
        width = union.shape[-1] - old.ids.shape[-1]
        alone = torch.nn.functional.pad(old.ids, (0, width), value=-1)
        union = torch.where((self.place >= 0)[..., None], union, alone)
        new = corral.gather_support(logp, union)
        exact = corral.gather_support(self.old_logp(), union)
        kept = torch.nn.functional.pad(old.logp, (0, width), value=-torch.inf)
        joined = self.place >= 0
        anchor = SparseDist(
            union, torch.where(joined[..., None], exact.logp, kept), torch.where(joined, exact.rest, old.rest), old.rest_max
        )
        batch = replace(self.batch, logp_new=new.logp[..., 0], dist_new=new, dist_old=anchor)
        out = objective(batch)
        return out, new, list(torch.autograd.grad(out.loss.sum(), leaves))

    def fused(
        self, objective: Any, dtype: torch.dtype, top_k: int = SLOTS, mass: float = 1.0, **how: Any
    ) -> tuple[PolicyLoss, list]:
        """The same in one call, and its gradients."""
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (self.hidden, self.weight)]
        old = self.batch.dist_old.map(lambda x: x.to(DEVICE, dtype if x.is_floating_point() and dtype == F64 else None))
        old = old if dtype == F64 else SparseDist(old.ids, old.logp.float(), old.rest.float(), old.rest_max.float())
        b = self.batch
        batch = TokenBatch(*(x.to(DEVICE) for x in (old.logp[..., 0], old.logp[..., 0], b.advantages, b.mask)), None, old)
        bias = None if self.bias is None else self.bias.to(DEVICE, dtype)
        kept, weight = (x.to(DEVICE, dtype) for x in (self.hidden_old, self.weight_old))
        union = UnionSupport(top_k=top_k, mass=mass, hidden=kept, weight=weight, bias=bias, place=self.place.to(DEVICE))
        weights = torch.ones(b.mask.shape, device=DEVICE)
        out = policy_loss_from_hidden(
            *leaves, self.tokens.to(DEVICE), batch, objective, weights=weights, bias=bias, union=union, **self.how, **how
        )
        return out, list(torch.autograd.grad(out.loss, leaves))


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, how: dict[str, Any]) -> Tensor:
    z = how.get("scale", 1.0) * (hidden @ weight.T + (0.0 if bias is None else bias))
    cap = how.get("softcap")
    return ((z if cap is None else cap * torch.tanh(z / cap)) / how.get("temperature", 1.0)).log_softmax(-1)


def assert_same(
    case: Case, objective: Any, dtype: torch.dtype, *, near: float, top_k: int = SLOTS, mass: float = 1.0, **how: Any
):
    wanted, union, gradients = case.reference(objective, top_k, mass)
    out, got = case.fused(objective, dtype, top_k, mass, **how)
    mask = case.batch.mask
    assert torch.equal(out.dist.ids.cpu()[mask], union.ids[mask])
    assert_close(out.per_token.cpu()[mask], wanted.loss[mask], dtype if dtype == F64 else torch.float32, atol=near, rtol=near)
    for key in ("tr/kl_before", "tr/kl_max", "tr/rest_mass", "tr/active_frac"):
        assert_close(out.metrics[key].cpu(), wanted.metrics[key], torch.float32, atol=near, rtol=near)
    for actual, expected in zip(got, gradients, strict=True):
        assert (actual.cpu().double() - expected).norm() / expected.norm() < near
    return out


CASES = {
    "plain": {},
    "steep": {"steep": 3.0},
    "bias, cap, scale and temperature": {"biased": True, **CAPPED},
    "temperature": {"temperature": 0.7, "biased": True},
}
INTERPRETED = [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name == "temperature")) for name, case in CASES.items()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_torch_path_in_float64(case):
    assert_same(Case.make(**case), corral.make_objective("troll"), F64, near=1e-9, impl="torch")


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", INTERPRETED)
def test_the_kernels(case, exact):
    near = 2e-5 if exact else 2e-3
    assert_same(Case.make(**case), corral.make_objective("troll"), torch.float32, near=near, exact=exact, impl="triton")


def test_planned_dense_rows_beside_streamed_ones(monkeypatch):
    seen, inner = [], fused.dense_forward
    monkeypatch.setattr(fused, "dense_forward", lambda source, *more: seen.append(len(source.tokens)) or inner(source, *more))
    for name, value in (("FEWEST", 1), ("SMALLEST_SHARE", 0.0), ("SMALL", 0)):
        monkeypatch.setattr(plan_batch, name, value)
    monkeypatch.setattr(policy_loss, "TOLERANCE", 0.01)
    assert_same(Case.make(), corral.make_objective("troll"), torch.float32, near=0.02, impl="triton")
    assert 0 < seen[0] < 7


@pytest.mark.parametrize("exact", [True, False])
def test_rows_with_more_candidates_than_there_is_room_for(exact, monkeypatch):
    """The first attempt takes no token of these rows; the second waits, and finds room."""
    seen, inner = [], fused.fused_loss
    monkeypatch.setattr(fused, "fused_loss", lambda *args, **how: seen.append(how) or inner(*args, **how))
    monkeypatch.setattr(select, "UNION_ROOM", 1)
    near = 2e-5 if exact else 2e-3
    assert_same(Case.make(), corral.make_objective("troll"), torch.float32, near=near, exact=exact, impl="triton")
    assert seen == [{}, {"wait": True}]


@given(seed=st.integers(0, 999), top_k=st.integers(1, 12))
def test_a_union_sees_no_less_than_the_old_support_and_no_more_than_there_is(seed, top_k):
    torch.manual_seed(seed)
    old, new, weight = 2 * torch.randn(1, 1, 6, dtype=F64), 2 * torch.randn(1, 1, 6, dtype=F64), torch.randn(30, 6, dtype=F64)
    tokens, one = torch.randint(30, (1, 1)), torch.ones(1, 1, dtype=F64)
    dist = corral.top_k_support((old @ weight.T).log_softmax(-1), tokens, 4)
    batch = TokenBatch(dist.logp[..., 0], dist.logp[..., 0], one, tokens >= 0, None, dist)
    small, large = (
        policy_loss_from_hidden(
            new, weight, tokens, batch, corral.make_objective("troll"), weights=one, union=union, impl="torch"
        ).metrics["tr/kl_max"]
        for union in (None, UnionSupport.of_batch(old, weight, top_k=top_k))
    )  # fmt: skip
    true = corral.categorical_kl((new @ weight.T).log_softmax(-1), (old @ weight.T).log_softmax(-1))
    assert small <= large * (1 + 1e-9) + 1e-12
    assert large <= true.item() * (1 + 1e-9) + 1e-12


def test_part_of_the_mass_and_a_larger_union():
    case = Case.make()
    for top_k, mass in ((1, 1.0), (6, 0.9)):
        for impl, dtype, near in (("torch", F64, 1e-9), ("triton", torch.float32, 2e-5)):
            assert_same(case, corral.make_objective("troll"), dtype, near=near, top_k=top_k, mass=mass, exact=True, impl=impl)


@pytest.mark.parametrize("objective", ["dppo", "ppo_clip", "gspo"])  # on a support, of the ratio, and without a kernel
def test_other_objectives(objective):
    config = {"estimator": "topk"} if objective == "dppo" else {}
    made = corral.make_objective(objective, **config)
    case = Case.make()
    for impl, dtype, near in (("torch", F64, 1e-9), ("triton", torch.float32, 2e-5)):
        wanted, _, gradients = case.reference(made)
        out, got = case.fused(made, dtype, exact=True, impl=impl)
        assert_close(out.per_token.cpu()[case.batch.mask], wanted.loss[case.batch.mask], torch.float32, atol=near)
        for actual, expected in zip(got, gradients, strict=True):
            assert (actual.cpu().double() - expected).norm() / expected.norm() < near


def test_half_precision():
    case = Case.make()
    case.hidden, case.weight, case.hidden_old, case.weight_old = (
        x.to(HALF).double() for x in (case.hidden, case.weight, case.hidden_old, case.weight_old)
    )
    logp = case.old_logp()
    old = case.batch.dist_old
    joined = case.place >= 0
    exact = corral.gather_support(logp, old.ids)
    old = SparseDist(
        old.ids, torch.where(joined[..., None], exact.logp, old.logp), torch.where(joined, exact.rest, old.rest), old.rest_max
    )
    case.batch = replace(case.batch, logp_old=old.logp[..., 0], dist_old=old)
    wanted, _, gradients = case.reference(corral.make_objective("troll"))
    out, got = case.fused(corral.make_objective("troll"), HALF, impl="triton")
    assert_close(out.per_token.cpu()[case.batch.mask], wanted.loss[case.batch.mask], torch.float32, atol=1e-4)
    for actual, expected in zip(got, gradients, strict=True):
        assert (actual.cpu().double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_golden_a_tail_that_gathers_on_one_token(impl):
    # Old: token 0 holds ½, the others ½ in equal parts. New: that ½ is all on token 7. The old support {0} and its tail see
    # nothing: KL = 0. On the union {0, 7}: KL = ½ log (V − 1), and 0 old mass of 7 is ½ / (V − 1).
    vocabulary = VOCABULARY
    weight = torch.zeros(vocabulary, WIDTH)
    weight[0, 0], weight[7, 1] = 1.0, 1.0
    level = torch.log(torch.tensor(vocabulary - 1.0))
    old, new = torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH)
    old[..., 0], new[..., 0], new[..., 1] = level, 30.0, 30.0
    old, new, weight = (x.to(DEVICE) for x in (old, new, weight))
    tokens = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    dist = corral.lm_head(old, weight, tokens, top_k=1, impl="torch").dist
    mask, one = tokens == 0, torch.ones(1, 1, device=DEVICE)
    batch = TokenBatch(dist.logp[..., 0], dist.logp[..., 0], one, mask, None, dist)
    seen = []
    for union in (None, UnionSupport.of_batch(old, weight, top_k=2)):
        out = policy_loss_from_hidden(
            new, weight, tokens, batch, corral.make_objective("troll"), weights=one, union=union, impl=impl
        )
        seen.append(out.metrics["tr/kl_max"].item())
    assert seen[0] == pytest.approx(0.0, abs=1e-5)
    assert seen[1] == pytest.approx(0.5 * level.item(), rel=1e-4)
    assert out.dist.ids.flatten().tolist() == [0, 7, -1, -1]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_tail_by_zipfs_law_that_gathers_on_one_token(impl):
    """The row of docs/data-flow.md: the old support sees none of its KL, the union all of it, and the region acts."""
    vocabulary, k, far = (50_000, 64, 9_000) if DEVICE == "cuda" else (400, 8, 300)
    old = 1 / torch.arange(1, vocabulary + 1, dtype=F64)
    old = old / old.sum()
    new = old.clone()
    new[k:] = 1e-12
    new[far] = 1 - new.sum() + 1e-12
    weight = torch.zeros(vocabulary, WIDTH, dtype=F64)
    weight[:, 0] = (new / new.sum()).log() - old.log()
    bias, weight = old.log().float().to(DEVICE), weight.float().to(DEVICE)
    before, after = torch.zeros(1, 1, WIDTH, device=DEVICE), torch.zeros(1, 1, WIDTH, device=DEVICE)
    after[..., 0] = 1.0
    tokens, one = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    dist = corral.lm_head(before, weight, tokens, bias=bias, top_k=k, impl=impl).dist
    batch = TokenBatch(dist.logp[..., 0], dist.logp[..., 0], one, tokens == 0, None, dist)
    missed, seen = (
        policy_loss_from_hidden(
            after, weight, tokens, batch, corral.make_objective("troll"), weights=one, bias=bias, union=union, impl=impl
        ).metrics
        for union in (None, UnionSupport.of_batch(before, weight, bias=bias, top_k=k))
    )  # fmt: skip
    assert missed["tr/kl_max"].item() < 1e-5
    assert missed["tr/active_frac"].item() == 0
    true = corral.categorical_kl((new / new.sum()).log(), old.log()).item()
    assert seen["tr/kl_max"].item() == pytest.approx(true, rel=1e-3)
    assert seen["tr/active_frac"].item() == 1


def test_on_policy_every_ratio_is_1():
    """New = old: the union is the old support and its own ranking, KL is 0, and the ratio 1 to the last bit."""
    case = Case.make()
    leaves = [x.to(DEVICE, torch.float32) for x in (case.hidden, case.weight)]
    with torch.no_grad():
        old = corral.lm_head(*leaves, case.tokens.to(DEVICE), top_k=2, impl="triton")
    mask = case.batch.mask.to(DEVICE)
    batch = TokenBatch(old.logp, old.logp, case.batch.advantages.float().to(DEVICE), mask, None, old.dist)
    union = UnionSupport.of_batch(*leaves, top_k=5)
    weights = torch.ones(mask.shape, device=DEVICE)
    out = policy_loss_from_hidden(
        *leaves, case.tokens.to(DEVICE), batch, corral.make_objective("troll"), weights=weights, union=union, impl="triton"
    )
    assert torch.equal(out.per_token[mask], -batch.advantages[mask])
    assert out.metrics["tr/kl_max"].item() < 1e-6
    assert out.metrics["tr/active_frac"].item() == 0


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_refused():
    case = Case.make()
    hidden, weight = case.hidden_old, case.weight_old
    union = UnionSupport(top_k=8, hidden=hidden, weight=weight, place=case.place)
    troll, weights = corral.make_objective("troll"), torch.ones(2, 4, dtype=F64)

    def call(batch: TokenBatch, union: UnionSupport) -> None:
        policy_loss_from_hidden(case.hidden, case.weight, case.tokens, batch, troll, weights=weights, union=union)

    with pytest.raises(ValueError, match="joins the support of `dist_old`, and there is none"):
        call(replace(case.batch, dist_old=None), union)
    with pytest.raises(ValueError, match=r"union.place \[B T\] like the mask"):
        call(case.batch, replace(union, place=case.place[:1]))
    with pytest.raises(ValueError, match="`place` counts through 5 hidden states; got 7"):
        call(case.batch, replace(union, place=torch.full((2, 4), 7)))
    with pytest.raises(ValueError, match="the tensors of a union lie where the weight does, on 'cpu'; got one on 'meta'"):
        call(case.batch, replace(union, hidden=hidden.to("meta")))
    with pytest.raises(ValueError, match="`top_k` is a number of tokens"):
        replace(union, top_k=0)
    with pytest.raises(ValueError, match="`mass` is a probability"):
        replace(union, mass=0.0)
    with pytest.raises(ValueError, match=r"UnionSupport.of_batch makes one"):
        replace(union, hidden=case.hidden)
    with pytest.raises(ValueError, match="int64 or int32"):
        replace(union, place=weights)


def test_a_place_beyond_the_hidden_states_is_refused_by_the_kernels_too():
    case = Case.make()
    case.place[0, 1] = 7
    with pytest.raises(ValueError, match="not finite at 1 unmasked tokens"):
        case.fused(corral.make_objective("troll"), torch.float32, impl="triton")
