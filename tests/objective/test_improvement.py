"""DPPO's improvement bound, checked against every sequence of a small decision process."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from batches import inputs, poison_padding, random_batch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral import SparseDist, TokenBatch, gather_support, improvement_bound, top_k_support
from tolerance import assert_close

SEEDS = st.integers(0, 2**20)
STEPS = st.sampled_from([1e-3, 0.1, 1.0, 4.0])
VOCABULARY, HORIZON = 3, 3


@dataclass
class Process:
    """Every sequence of three tokens out of three, two tabular policies, and a reward for each sequence."""

    sequences: list[tuple[int, ...]]
    rewards: list[float]
    old: dict[tuple[int, ...], np.ndarray]
    """Next-token probabilities after each prefix."""
    new: dict[tuple[int, ...], np.ndarray]

    def probability(self, policy: dict[tuple[int, ...], np.ndarray], sequence: tuple[int, ...]) -> float:
        return math.prod(policy[sequence[:t]][a] for t, a in enumerate(sequence))

    def ratios(self, sequence: tuple[int, ...]) -> list[float]:
        return [self.new[sequence[:t]][a] / self.old[sequence[:t]][a] for t, a in enumerate(sequence)]

    def tv(self, prefix: tuple[int, ...]) -> float:
        return 0.5 * float(np.abs(self.new[prefix] - self.old[prefix]).sum())

    def improvement(self) -> float:
        """J(π) − J(π_old)."""
        return sum(
            (self.probability(self.new, y) - self.probability(self.old, y)) * r
            for y, r in zip(self.sequences, self.rewards, strict=True)
        )

    def weights(self) -> Tensor:
        return torch.tensor([self.probability(self.old, y) for y in self.sequences], dtype=torch.float64)


def process(seed: int, step: float, *, eos: bool = False) -> Process:
    """Random policies, the new one `step` away in logits; with `eos`, token 0 ends a sequence."""
    generator = np.random.default_rng(seed)
    finished, growing, old, new = [], [()], {}, {}
    while growing:
        prefix = growing.pop()
        logits = 1.5 * generator.normal(size=VOCABULARY)
        for policy, z in ((old, logits), (new, logits + step * generator.normal(size=VOCABULARY))):
            policy[prefix] = np.exp(z) / np.exp(z).sum()
        for a in range(VOCABULARY):
            ended = len(prefix) + 1 == HORIZON or (eos and a == 0)
            (finished if ended else growing).append((*prefix, a))
    return Process(finished, list(generator.normal(size=len(finished))), old, new)


def every_sequence(world: Process, *, with_dists: bool = True) -> TokenBatch:
    """Every sequence once, with the whole vocabulary as support; padding repeats the last state and is masked out."""

    def table(policy: dict[tuple[int, ...], np.ndarray]) -> Tensor:
        rows = [[policy[y[: min(t, len(y) - 1)]] for t in range(HORIZON)] for y in world.sequences]
        return torch.from_numpy(np.array(rows)).log()

    tokens = torch.tensor([[y[min(t, len(y) - 1)] for t in range(HORIZON)] for y in world.sequences])
    dist_old = top_k_support(table(world.old), tokens, VOCABULARY)
    dist_new = gather_support(table(world.new), dist_old.ids)
    return TokenBatch(
        logp_new=dist_new.logp[..., 0],
        logp_old=dist_old.logp[..., 0],
        advantages=torch.tensor(world.rewards, dtype=torch.float64),
        mask=torch.tensor([[t < len(y) for t in range(HORIZON)] for y in world.sequences]),
        dist_new=dist_new if with_dists else None,
        dist_old=dist_old if with_dists else None,
    )


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_one_step():
    # ½ → .8 of a token with reward 1, the other has 0:  L′ = ½ · 1 · (1.6 − 1) = .3 = J(π) − J(π_old), all of it.
    # TV = .3 in the one state: mean penalty 4 · 1 · .3 = 1.2; T − 1 = 0, so the other is 0 and the bound is exact.
    batch = TokenBatch(
        logp_new=torch.tensor([[0.8], [0.2]], dtype=torch.float64).log(),
        logp_old=torch.tensor([[0.5], [0.5]], dtype=torch.float64).log(),
        advantages=torch.tensor([1.0, 0.0], dtype=torch.float64),
        mask=torch.tensor([[True], [True]]),
    )
    result = improvement_bound(batch)
    for value, expected in zip(
        (result.surrogate, result.penalty_max, result.penalty_mean, result.bound), (0.3, 0.0, 1.2, 0.3), strict=True
    ):
        assert_close(value, torch.tensor(expected, dtype=torch.float64))


def test_golden_sampled_tokens():
    # Sequences of 2 and 1 tokens, weights ¼ and ¾, rewards −2 and 1: ξ = 2, T = 2.
    # ρ − 1 = .2/.4 − 1, .6/.5 − 1 = −.5, .2 and .9/.6 − 1 = .5:  L′ = ¼ · −2 · −.3 + ¾ · 1 · .5 = .525.
    # |Δp| = .2, .1 and .3:  max 2 · 2 · 2 · 1 · .09 = .72,  mean 4 · 2 · (¼ · .3 + ¾ · .3) = 2.4,  bound .525 − .72.
    p_new, p_old = [[0.2, 0.6], [0.9, 1.0]], [[0.4, 0.5], [0.6, 1e-9]]
    batch = TokenBatch(
        logp_new=torch.tensor(p_new, dtype=torch.float64).log(),
        logp_old=torch.tensor(p_old, dtype=torch.float64).log(),
        advantages=torch.tensor([-2.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False]]),
    )
    result = improvement_bound(batch, weights=torch.tensor([0.25, 0.75], dtype=torch.float64))
    for value, expected in zip(
        (result.surrogate, result.penalty_max, result.penalty_mean, result.bound), (0.525, 0.72, 2.4, -0.195), strict=True
    ):
        assert_close(value, torch.tensor(expected, dtype=torch.float64))
    # ξ = 4 instead of 2 doubles both penalties; T = 3 instead of 2 makes the first 3 · 2 / (2 · 1) times as large.
    wider = improvement_bound(batch, reward_max=4.0, horizon=3, weights=torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert_close(wider.surrogate, result.surrogate)
    assert_close(wider.penalty_max, 6 * result.penalty_max)
    assert_close(wider.penalty_mean, 2 * result.penalty_mean)


def test_golden_without_weights_sequences_count_alike():
    # As above with weights ½: L′ = ½ (.6 + .5) = .55.
    batch = TokenBatch(
        logp_new=torch.tensor([[0.2, 0.6], [0.9, 1.0]], dtype=torch.float64).log(),
        logp_old=torch.tensor([[0.4, 0.5], [0.6, 1.0]], dtype=torch.float64).log(),
        advantages=torch.tensor([-2.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False]]),
    )
    assert_close(improvement_bound(batch).surrogate, torch.tensor(0.55, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------- theorems


@given(SEEDS, STEPS, st.booleans())
def test_the_identity_is_exact(seed, step, eos):
    # J(π) − J(π_old) = L′ − Δ,   Δ = E[R Σ_t (ρ_t − 1)(1 − ∏_{j>t} ρ_j)].
    world = process(seed, step, eos=eos)
    first_order = remainder = 0.0
    for y, reward in zip(world.sequences, world.rewards, strict=True):
        ratios, weight = world.ratios(y), world.probability(world.old, y)
        first_order += weight * reward * sum(r - 1 for r in ratios)
        remainder += weight * reward * sum((r - 1) * (1 - math.prod(ratios[t + 1 :])) for t, r in enumerate(ratios))
    surrogate = improvement_bound(every_sequence(world), weights=world.weights()).surrogate
    assert_close(surrogate, torch.tensor(first_order))
    assert_close(surrogate - remainder, torch.tensor(world.improvement()))


@given(SEEDS, STEPS, st.booleans())
def test_both_bounds_hold(seed, step, eos):
    world = process(seed, step, eos=eos)
    result = improvement_bound(every_sequence(world), weights=world.weights())
    rounding = 1e-12
    assert result.surrogate - result.penalty_max <= world.improvement() + rounding
    assert result.surrogate - result.penalty_mean <= world.improvement() + rounding
    assert result.bound == max(result.surrogate - result.penalty_max, result.surrogate - result.penalty_mean)


@given(SEEDS, STEPS, st.booleans())
def test_penalties_agree_with_enumeration(seed, step, eos):
    world = process(seed, step, eos=eos)
    result = improvement_bound(every_sequence(world), weights=world.weights())
    largest = max(abs(r) for r in world.rewards)
    drift = sum(world.probability(world.old, y) * sum(world.tv(y[:t]) for t in range(len(y))) for y in world.sequences)
    worst = max(world.tv(prefix) for prefix in world.old)
    assert_close(result.penalty_max, torch.tensor(2 * largest * HORIZON * (HORIZON - 1) * worst**2))
    assert_close(result.penalty_mean, torch.tensor(4 * largest * drift))


@given(SEEDS, STEPS, st.booleans())
def test_sequences_drift_no_further_than_their_tokens_together(seed, step, eos):
    # The lemma behind the mean penalty: TV of whole sequences ≤ Σ_t E[TV_t].
    world = process(seed, step, eos=eos)
    apart = 0.5 * sum(abs(world.probability(world.new, y) - world.probability(world.old, y)) for y in world.sequences)
    result = improvement_bound(every_sequence(world), weights=world.weights())
    assert apart <= result.penalty_mean / (4 * max(abs(r) for r in world.rewards)) + 1e-12


@given(SEEDS, st.booleans())
def test_the_bound_touches_at_the_old_policy(seed, with_dists):
    world = process(seed, 0.0)
    result = improvement_bound(every_sequence(world, with_dists=with_dists), weights=world.weights())
    assert (result.surrogate, result.penalty_max, result.penalty_mean, result.bound) == (0, 0, 0, 0)


@given(SEEDS)
def test_a_small_step_improves_surely_through_the_quadratic_penalty(seed):
    # Along the surrogate's own gradient the gain is of first order and the penalty of second, so a short step must pay.
    world = process(seed, 0.0)
    advantage = {}
    for prefix in world.old:
        inside = [(y, r) for y, r in zip(world.sequences, world.rewards, strict=True) if y[: len(prefix)] == prefix]
        value = np.zeros(VOCABULARY)
        for y, r in inside:
            value[y[len(prefix)]] += r * world.probability(world.old, y)
        reach = sum(world.probability(world.old, y) for y, _ in inside)
        advantage[prefix] = value / (reach * world.old[prefix])
    tilted = {prefix: p * np.exp(1e-4 * advantage[prefix]) for prefix, p in world.old.items()}
    world = replace(world, new={prefix: p / p.sum() for prefix, p in tilted.items()})
    result = improvement_bound(every_sequence(world), weights=world.weights())
    assert 0 < result.bound <= world.improvement() + 1e-12


@given(SEEDS, STEPS)
def test_coarser_views_see_smaller_penalties(seed, step):
    world = process(seed, step)
    full, sampled = (improvement_bound(every_sequence(world, with_dists=x), weights=world.weights()) for x in (True, False))
    assert sampled.penalty_mean <= full.penalty_mean + 1e-12
    assert sampled.penalty_max <= full.penalty_max + 1e-12
    assert_close(sampled.surrogate, full.surrogate)


def test_long_horizons_make_the_bound_vacuous():
    # T = 10⁴ and TV = .1: both penalties exceed 2ξ, the most that J can change, by far: 4 · 10³ ξ and 2 · 10⁶ ξ.
    length = 10_000
    batch = replace(inputs([0.6] * length, [0.5] * length, [1.0] * length), advantages=torch.ones(1, dtype=torch.float64))
    result = improvement_bound(batch)
    assert result.penalty_mean.item() == pytest.approx(4 * 0.1 * length)
    assert result.penalty_max.item() == pytest.approx(2 * length * (length - 1) * 0.1**2)
    assert min(result.penalty_mean, result.penalty_max) > 2


# ---------------------------------------------------------------------------------------------------- gradient, edges


def test_the_surrogate_has_the_policy_gradient():
    # At π = π_old, ∂L′/∂log π(a_t) = w R.
    world = process(0, 0.0)
    batch = every_sequence(world)
    batch = replace(batch, logp_new=batch.logp_new.clone().requires_grad_())
    (grad,) = torch.autograd.grad(improvement_bound(batch, weights=world.weights()).surrogate, batch.logp_new)
    assert_close(grad, (world.weights() * batch.advantages)[:, None].expand_as(grad))


def test_gradcheck():
    batch = every_sequence(process(0, 0.5))

    def bound(logp_new: Tensor) -> Tensor:
        return improvement_bound(replace(batch, logp_new=logp_new)).surrogate

    assert gradcheck(bound, batch.logp_new.clone().requires_grad_())


@pytest.mark.parametrize("with_dists", [True, False])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_padding_may_hold_anything(with_dists, garbage):
    world = process(1, 0.5, eos=True)
    batch = every_sequence(world, with_dists=with_dists)
    assert not batch.mask.all()
    poisoned = poison_padding(batch, garbage)
    ours, theirs = (improvement_bound(x, weights=world.weights()) for x in (batch, poisoned))
    for field in ("surrogate", "penalty_max", "penalty_mean"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    leaves = [poisoned.logp_new, poisoned.dist_new.logp] if with_dists else [poisoned.logp_new]
    for grad in torch.autograd.grad(theirs.surrogate - theirs.penalty_max - theirs.penalty_mean, leaves):
        assert grad.isfinite().all()
        assert not grad[~batch.mask].any()


@pytest.mark.parametrize("with_dists", [True, False])
def test_a_sequence_without_a_live_token_is_as_if_it_were_not_there(with_dists):
    batch = every_sequence(process(1, 0.5), with_dists=with_dists)
    mask = batch.mask.clone()
    mask[3] = False
    others = [b for b in range(len(mask)) if b != 3]

    def pick(x: Tensor | SparseDist | None) -> Tensor | SparseDist | None:
        if isinstance(x, SparseDist):
            return SparseDist(x.ids[others], x.logp[others], x.rest[others])
        return None if x is None else x[others]

    ours = improvement_bound(replace(batch, mask=mask))
    alike = torch.full((len(others),), 1 / len(others), dtype=torch.float64)
    theirs = improvement_bound(TokenBatch(**{name: pick(x) for name, x in vars(batch).items()}), weights=alike)
    for field in ("surrogate", "penalty_max", "penalty_mean"):
        assert_close(getattr(ours, field), getattr(theirs, field))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_max": 1.9}, "`reward_max` must be at least the batch's own, 2, and finite, or None for that; got 1.9"),
        ({"reward_max": math.inf}, "`reward_max` must be at least the batch's own, 2, and finite, or None for that; got inf"),
        ({"reward_max": math.nan}, "`reward_max` must be at least the batch's own, 2, and finite, or None for that; got nan"),
        ({"horizon": 1}, "`horizon` must be at least the batch's own, 2, and finite, or None for that; got 1"),
        ({"horizon": True}, "`horizon` must be at least the batch's own, 2, and finite, or None for that; got True"),
        ({"weights": torch.ones(3) / 3}, r"`weights` has one probability per sequence, \[2\]; got \[3\]"),
        ({"weights": torch.tensor([1, 0])}, r"are probabilities of the sequences and sum to 1; got tensor\(\[1, 0\]\)"),
        ({"weights": torch.tensor([1.5, -0.5])}, "are probabilities of the sequences and sum to 1; got"),
        ({"weights": torch.tensor([math.nan, 1.0])}, "are probabilities of the sequences and sum to 1; got"),
        ({"weights": torch.tensor([1.0, 1.0])}, "are probabilities of the sequences and sum to 1; got"),
    ],
)
def test_what_would_be_no_bound_is_refused(options, message, unchecked_shapes):
    # ξ and T below the batch's own, or an expectation that is none, would give a number that nothing is above.
    batch = TokenBatch(torch.zeros(2, 2) - 1, torch.zeros(2, 2) - 1, torch.tensor([-2.0, 1.0]), torch.ones(2, 2).bool())
    with pytest.raises(ValueError, match=f"improvement_bound: .*{message}"):
        improvement_bound(batch, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batchs_own_reward_is_enough_however_it_was_rounded(dtype):
    # 0.1 is 0.10000000149 in float32 and 0.10009765625 in bfloat16.
    batch = TokenBatch(torch.zeros(1, 1) - 1, torch.zeros(1, 1) - 1, torch.tensor([0.1], dtype=dtype), torch.ones(1, 1).bool())
    assert improvement_bound(batch, reward_max=0.1).bound == 0


def test_rewards_per_token_are_refused():
    batch, _ = random_batch(2, 3, 6, 3, per_token=True)
    with pytest.raises(ValueError, match=r"`advantages` must be \[B\]; got \[2, 3\]"):
        improvement_bound(batch)


@pytest.mark.parametrize("field", ["dist_new", "dist_old"])
def test_one_policys_distribution_alone_is_refused(field):
    batch, _ = random_batch(2, 3, 6, 3)
    with pytest.raises(ValueError, match=f"improvement_bound: needs `{field}`"):
        improvement_bound(replace(batch, **{field: None}))


def test_a_batch_without_a_live_token_is_refused():
    batch, _ = random_batch(2, 3, 6, 3)
    with pytest.raises(ValueError, match="improvement_bound: mask has no unmasked token"):
        improvement_bound(replace(batch, mask=torch.zeros_like(batch.mask)))
