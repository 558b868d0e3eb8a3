"""Distillation regresses onto the policy nearest to the teacher inside the old policy's ball, on a support and its tail."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import as_batch, leaf_gradients, poison_padding, random_batch, row, with_leaves
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor
from torch.autograd import gradcheck

import corral
from corral import SparseDist, TokenBatch, categorical_kl, gather_support, make_objective, top_k_support
from tolerance import assert_close

INF = math.inf
SEEDS = st.integers(0, 2**20)

# With p = (¼, ½, ¼) and d = ln 4 · (1, 0, −1):   p eᵈ ∝ (.64, .32, .04) = teacher,   p e^{d/2} ∝ (4/9, 4/9, 1/9) = target.
# So with the bound KL(target‖p) the teacher's projection is the target, at t = ½, η = 1.
OLD, TEACHER, TARGET = [0.25, 0.5, 0.25], [0.64, 0.32, 0.04], [4 / 9, 4 / 9, 1 / 9]
BOUND = 4 / 9 * math.log(16 / 9) + 4 / 9 * math.log(8 / 9) + 1 / 9 * math.log(4 / 9)
TEACHER_KL = 0.64 * math.log(2.56) + 0.32 * math.log(0.64) + 0.04 * math.log(0.16)


def policies(new: list[float], old: list[float], teacher: list[float], k: int) -> tuple[TokenBatch, Tensor]:
    """One token from whole distributions [V], token 0 sampled, and the new policy's logits [1 1 V], the leaf."""
    logits, logp_old, logp_teacher = (torch.tensor([[p]], dtype=torch.float64).log() for p in (new, old, teacher))
    dist_old = top_k_support(logp_old, torch.zeros(1, 1, dtype=torch.int64), k)
    sampled = dist_old.logp[..., 0]
    like = TokenBatch(sampled, sampled, torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool), None, dist_old)
    like = replace(like, dist_teacher=gather_support(logp_teacher, dist_old.ids))
    return as_batch(logits.requires_grad_(), like), logits


def taught(
    B: int = 4, T: int = 5, V: int = 7, k: int = 3, *, seed: int = 0, step: float = 0.5, away: float = 1.5
) -> tuple[TokenBatch, Tensor]:
    """A random batch with a teacher that is some noise away from the new policy, and the new policy's logits."""
    batch, logits = random_batch(B, T, V, k, seed=seed, step=step)
    noise = away * torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assert batch.dist_old is not None
    return replace(batch, dist_teacher=gather_support((logits + noise).detach().log_softmax(-1), batch.dist_old.ids)), logits


def gradient(batch: TokenBatch, logits: Tensor, **config: object) -> Tensor:
    return torch.autograd.grad(make_objective("distill", **config)(batch).loss.sum(), logits, retain_graph=True)[0]


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("k", [1, 3])  # token 2 is the tail, or there is none
def test_golden_loss_and_gradient_before_any_update(k):
    # KL(old‖target) = ¼ ln 9/16 + ½ ln 9/8 + ¼ ln 9/4.  log old − log target = ln 9/8 + ln 2 · (−1, 0, 1), so the gradient
    # old_j (g_j − E g) is ln 2 · (−¼, 0, ¼): t = ½ of that of KL(old‖teacher), whose g is ln 25/16 + ln 4 · (−1, 0, 1).
    batch, logits = policies(OLD, OLD, TEACHER, k)
    out = make_objective("distill", bound=BOUND)(batch)
    assert_close(out.loss, row([0.25 * math.log(9 / 16) + 0.5 * math.log(9 / 8) + 0.25 * math.log(9 / 4)]))
    expected = math.log(2) * row([-0.25, 0.0, 0.25])[None]
    assert_close(gradient(batch, logits, bound=BOUND), expected)
    assert_close(gradient(batch, logits, bound=INF), 2 * expected)
    assert out.acted is not None
    assert out.acted.tolist() == [[True]]
    found = {name: float(value) for name, value in out.metrics.items()}
    expected_metrics = {
        "tr/teacher_kl": TEACHER_KL,
        "tr/kl_after": BOUND,
        "tr/dual": 1.0,
        "tr/kl_before": 0.0,
        "tr/ratio_max": 1.0,
    }
    assert {name: found[name] for name in expected_metrics} == pytest.approx(expected_metrics, abs=1e-9)


def test_golden_forward():
    # KL(target‖new) with new = old: 4/9 ln 16/9 + 4/9 ln 8/9 + 1/9 ln 4/9, which is the bound itself; gradient new − target.
    batch, logits = policies(OLD, OLD, TEACHER, 3)
    assert_close(make_objective("distill", bound=BOUND, direction="forward")(batch).loss, row([BOUND]))
    assert_close(
        gradient(batch, logits, bound=BOUND, direction="forward"), row([1 / 4 - 4 / 9, 1 / 2 - 4 / 9, 1 / 4 - 1 / 9])[None]
    )


def test_golden_a_policy_that_has_arrived_stays():
    batch, logits = policies(TARGET, OLD, TEACHER, 3)
    for direction in ("reverse", "forward"):
        out = make_objective("distill", bound=BOUND, direction=direction)(batch)
        assert_close(out.loss, row([0.0]), atol=1e-15)
        assert_close(gradient(batch, logits, bound=BOUND, direction=direction), torch.zeros(1, 1, 3, dtype=torch.float64))


def test_golden_without_its_tail_the_loss_would_be_no_kl():
    # Teacher and student agree on how token 0 compares with 1; the student has put .3 of the teacher's tail on them.
    # Truncated: Σ_{0,1} p log(p/q) = .4 ln .4/.55 + .2 ln .2/.35 < 0, though the two differ by .3 of all mass.
    teacher, new = [0.4, 0.2, 0.4], [0.55, 0.35, 0.1]
    assert 0.4 * math.log(0.4 / 0.55) + 0.2 * math.log(0.2 / 0.35) < -0.2
    batch, logits = policies(new, new, teacher, k=1)
    batch = replace(
        batch, dist_old=top_k_support(torch.tensor([[new]], dtype=torch.float64).log(), torch.zeros(1, 1).long(), 2)
    )
    assert batch.dist_old is not None
    batch = as_batch(
        logits, replace(batch, dist_teacher=gather_support(torch.tensor([[teacher]]).double().log(), batch.dist_old.ids))
    )
    out = make_objective("distill", bound=INF, direction="forward")(batch)
    assert_close(out.loss, row([0.4 * math.log(0.4 / 0.55) + 0.2 * math.log(0.2 / 0.35) + 0.4 * math.log(4)]))
    assert gradient(batch, logits, bound=INF, direction="forward")[0, 0, 2] < 0, "mass flows back to the tail"


# -------------------------------------------------------------------------------------------------- properties


@given(seed=SEEDS, bound=st.sampled_from([0.0, 0.01, 0.05, 0.5, INF]))
def test_the_target_is_inside_the_ball_and_between_old_and_teacher(seed, bound):
    batch, _ = taught(seed=seed)
    old, teacher = batch.dist_old.with_rest(), batch.dist_teacher.with_rest()
    projection = corral.project_categorical_kl(teacher, old, bound)
    target = projection.logp
    out = make_objective("distill", bound=bound)(batch)
    mask = batch.mask
    assert bool((out.kl_after[mask] <= bound * (1 + 1e-6) + 1e-12).all())
    assert bool((categorical_kl(target, teacher) <= categorical_kl(old, teacher) + 1e-12)[mask].all())
    assert bool((categorical_kl(target, old) <= categorical_kl(teacher, old) + 1e-12)[mask].all())
    # On the geodesic: log target − log old is t (log teacher − log old), up to the normaliser.
    off = (target - old - (teacher - old) / (1 + projection.dual[..., None]))[mask]
    there = off.isfinite()
    spread = torch.where(there, off, -INF).amax(-1) - torch.where(there, off, INF).amin(-1)
    assert bool((spread < 1e-6).all())
    assert_close(out.loss[mask], categorical_kl(batch.dist_new.with_rest(), target)[mask], atol=1e-9)
    assert bool((out.loss >= 0).all())
    assert torch.equal(out.loss, out.regression)
    inside = mask & (categorical_kl(teacher, old) <= bound)
    assert_close(out.loss[inside], categorical_kl(batch.dist_new.with_rest(), teacher)[inside], atol=1e-9)
    assert not (out.acted & inside).any()


@given(seed=SEEDS, bound=st.sampled_from([0.01, 0.1, 1.0, INF]))
def test_before_any_update_the_gradient_is_the_teachers_scaled_down(seed, bound):
    # t = 1 / (1 + η) at every token: far teachers count less, and none is clipped away.
    batch, logits = taught(seed=seed, step=0.0)
    projection = corral.project_categorical_kl(batch.dist_teacher.with_rest(), batch.dist_old.with_rest(), bound)
    share = (1 / (1 + projection.dual))[..., None]
    assert_close(gradient(batch, logits, bound=bound), share * gradient(batch, logits, bound=INF), atol=1e-9)


@given(seed=SEEDS)
def test_a_larger_support_sees_more(seed):
    batch, logits = taught(k=7, seed=seed)
    whole = make_objective("distill", bound=INF)(batch)
    logp_teacher = torch.full((4, 5, 8), -INF, dtype=torch.float64).scatter(
        -1, batch.dist_teacher.ids % 8, batch.dist_teacher.logp
    )
    logp_teacher = logp_teacher[..., :7]
    ids = batch.dist_old.ids[..., :3]
    fewer = replace(batch, dist_old=_on(batch.dist_old, ids), dist_teacher=gather_support(logp_teacher, ids))
    part = make_objective("distill", bound=INF)(as_batch(logits, fewer))
    assert bool((part.loss <= whole.loss + 1e-12).all())


def _on(dist: SparseDist, ids: Tensor) -> SparseDist:
    """A policy on the first slots of its own support."""
    n = ids.shape[-1]
    left = torch.cat([dist.logp[..., n:], dist.rest[..., None]], -1).logsumexp(-1)
    return SparseDist(ids, dist.logp[..., :n], left)


# ---------------------------------------------------------------------------------------------- oracle, gradients


@pytest.mark.parametrize("seed", range(3))
def test_a_solver_finds_the_same_target(seed):
    batch, _ = taught(1, 2, 5, 4, seed=seed, away=2.0)
    mask, bound = batch.mask[0], 0.05
    out = make_objective("distill", bound=bound)(batch)
    for t in range(2):
        if not mask[t]:
            continue
        new, old, teacher = (
            dist.with_rest()[0, t].detach().exp().numpy() for dist in (batch.dist_new, batch.dist_old, batch.dist_teacher)
        )
        kept = old > 0
        new, old, teacher = new[kept], old[kept], teacher[kept]

        def kl(p: np.ndarray, q: np.ndarray) -> float:
            return float(np.sum(p * np.log(p / q)))

        found = minimize(
            lambda r, teacher=teacher: kl(r, teacher), old, method="SLSQP", bounds=[(1e-9, 1)] * len(old),
            constraints=[
                {"type": "eq", "fun": lambda r: r.sum() - 1},
                {"type": "ineq", "fun": lambda r, old=old: bound - kl(r, old)},
            ],
            options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        assert float(out.loss.detach()[0, t]) == pytest.approx(kl(new, found.x), abs=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("bound", [0.05, INF])
def test_gradcheck(bound, direction):
    batch, logits = taught(2, 3, 5, 2, seed=3)
    objective = make_objective("distill", bound=bound, direction=direction)
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits.detach().requires_grad_())


def test_teacher_and_anchor_are_constants():
    batch, _ = taught()
    leaves = []

    def leaf(dist: SparseDist) -> SparseDist:
        leaves.append(dist.logp.detach().requires_grad_())
        return SparseDist(dist.ids, leaves[-1], dist.rest, dist.rest_max)

    batch = replace(batch, dist_old=leaf(batch.dist_old), dist_teacher=leaf(batch.dist_teacher))
    make_objective("distill")(batch).loss.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in leaves)


# ------------------------------------------------------------------------------------------- padding, dtypes, refusals


@pytest.mark.parametrize("garbage", [torch.nan, INF, -INF])
def test_padding_reaches_nothing(garbage):
    batch, _ = taught()
    objective = make_objective("distill")
    clean, dirty = (leaf_gradients(objective, x) for x in (with_leaves(batch), poison_padding(batch, garbage)))
    for found, expected in zip(dirty, clean, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(dtype):
    batch, _ = taught()
    objective = make_objective("distill")
    low = {
        name: getattr(batch, name).map(lambda x: x.to(dtype) if x.is_floating_point() else x)
        for name in ("dist_new", "dist_old", "dist_teacher")
    }
    out = objective(replace(batch, logp_new=low["dist_new"].logp[..., 0], logp_old=low["dist_old"].logp[..., 0], **low))
    assert out.loss.dtype == torch.float32
    assert_close(out.loss.double(), objective(batch).loss, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


def test_one_token_and_no_teacher():
    batch, logits = taught(1, 1, 5, 2)
    assert gradient(batch, logits).isfinite().all()
    with pytest.raises(ValueError, match=r"distill: needs `dist_teacher`.* the teacher, or the frozen reference, on the"):
        make_objective("distill")(replace(batch, dist_teacher=None))


def test_a_teacher_on_another_support_is_refused():
    batch, _ = taught()
    teacher = batch.dist_teacher
    with pytest.raises(
        ValueError, match=r"dist_teacher has 2 slots and dist_old 4. Both .* gather the teacher or reference at dist_old.ids"
    ):
        make_objective("distill")(
            replace(batch, dist_teacher=SparseDist(teacher.ids[..., :2], teacher.logp[..., :2], teacher.rest))
        )
    with pytest.raises(ValueError, match="dist_teacher and dist_old stand on different token ids"):
        make_objective("distill")(replace(batch, dist_teacher=replace(teacher, ids=teacher.ids.flip(-1))))
    with pytest.raises(ValueError, match="dist_teacher is no distribution"):
        make_objective("distill")(replace(batch, dist_teacher=replace(teacher, logp=teacher.logp - 1)))


def test_tokens_that_only_one_policy_allows_are_refused():
    batch, _ = policies([0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.5, 0.0], 3)
    with pytest.raises(ValueError, match="rules out tokens that the other allows, at 1 unmasked positions"):
        make_objective("distill", bound=INF)(batch)


# ------------------------------------------------------------------------------------------------ from hidden states


def test_from_hidden_states_it_is_the_same():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 4, 6), (11, 6)))
    tokens, mask = torch.randint(11, (2, 4), generator=generator), torch.tensor([[True] * 4, [True, True, False, False]])
    logp_old, logp_teacher = (torch.randn(2, 4, 11, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    old = top_k_support(logp_old, tokens, 4)
    batch = TokenBatch(
        old.logp[..., 0], old.logp[..., 0], torch.zeros(2, dtype=torch.float64), mask, None, old,
        dist_teacher=gather_support(logp_teacher, old.ids),
    )  # fmt: skip
    objective, weights = make_objective("distill"), mask.double() / mask.sum()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    found = corral.policy_loss_from_hidden(*leaves, tokens, batch, objective, weights=weights)
    found.loss.backward()
    others = [x.clone().requires_grad_() for x in (hidden, weight)]
    new = gather_support((others[0] @ others[1].T).log_softmax(-1), old.ids)
    out = objective(replace(batch, logp_new=new.logp[..., 0], dist_new=new))
    loss = corral.reduce_loss(out.loss, mask, how="token-mean")
    loss.backward()
    assert_close(found.loss, loss)
    assert_close(found.metrics["tr/teacher_kl"], out.metrics["tr/teacher_kl"])
    for x, y in zip(leaves, others, strict=True):
        assert_close(x.grad, y.grad)
