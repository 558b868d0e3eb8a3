"""Corrections weigh tokens by how far the sampler was from the old policy, and by nothing else."""

import math
import re
from dataclasses import replace

import pytest
import torch
from batches import inputs, poison_padding, random_batch
from hypothesis import given
from hypothesis import strategies as st

from corral import TokenBatch, make_correction, make_objective
from corral.objective import correction as correction_module
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

SEEDS = st.integers(0, 2**20)
NAMES = ["icepop", "seq_tis", "tis", "trm"]


def sampled(p_old: list[list[float]], p_rollout: list[list[float]], mask: list[list[bool]] | None = None) -> TokenBatch:
    """A batch [B T] of which only the old policy and the sampler matter."""
    logp_old = torch.tensor(p_old, dtype=torch.float64).log()
    return TokenBatch(
        logp_new=torch.zeros_like(logp_old),
        logp_old=logp_old,
        advantages=torch.ones_like(logp_old),
        mask=torch.ones_like(logp_old, dtype=torch.bool) if mask is None else torch.tensor(mask),
        logp_rollout=torch.tensor(p_rollout, dtype=torch.float64).log(),
    )


def mismatched(seed: int, size: float, tokens: int = 5) -> TokenBatch:
    """Random policies on a ragged mask, with a sampler that is off by `size` in log-probability."""
    batch, _ = random_batch(4, tokens, 6, 3, seed=seed)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(batch, logp_rollout=(batch.logp_old + size * noise).clamp(max=0))


# ρ = .5/.25, .4/.5, .3/.1 = 2, .8, 3, product 4.8;   ρ = .12/.2, .3/.3 = .6, 1, product .6, and one token of padding.
EXAMPLE = sampled(
    p_old=[[0.5, 0.4, 0.3], [0.12, 0.3, 0.9]],
    p_rollout=[[0.25, 0.5, 0.1], [0.2, 0.3, 0.1]],
    mask=[[True, True, True], [True, True, False]],
)


@pytest.mark.supports("correction: {name}", door="import corral")
@pytest.mark.parametrize(
    ("name", "config", "weights"),
    [
        ("tis", {"cap": 2.5}, [[2.0, 0.8, 2.5], [0.6, 1.0, 0.0]]),
        ("seq_tis", {"cap": 2.5}, [[2.5, 2.5, 2.5], [0.6, 0.6, 0.0]]),
        ("seq_tis", {"cap": 5.0}, [[4.8, 4.8, 4.8], [0.6, 0.6, 0.0]]),
        ("icepop", {}, [[2.0, 0.8, 3.0], [0.6, 1.0, 0.0]]),
        ("icepop", {"low": 0.7, "high": 2.9}, [[2.0, 0.8, 0.0], [0.0, 1.0, 0.0]]),
        # ½ ln² ρ: at most ½ ln² 3 = .603 in the first, ½ ln² .6 = .130 in the second.
        ("trm", {"bound": 0.61}, [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        ("trm", {"bound": 0.14}, [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        ("trm", {"bound": 0.12}, [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_golden_weights(name, config, weights):
    assert_close(make_correction(name, **config)(EXAMPLE), torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "ratios", "weights"),
    [
        ("tis", [1.9, 2.1], [1.9, 2.0]),  # C = 2
        ("seq_tis", [1.9, 2.1], [2.0, 2.0]),  # product 3.99
        ("icepop", [0.49, 0.51, 4.9, 5.1], [0.0, 0.51, 4.9, 0.0]),  # .5 … 5
        ("trm", [1.0, 1.37], [1.0, 1.0]),  # ½ ln² 1.37 = .0496 ≤ .05
        ("trm", [1.0, 1.38], [0.0, 0.0]),  # ½ ln² 1.38 = .0519
        ("trm", [1.0, 1 / 1.38], [0.0, 0.0]),  # either way
    ],
)
def test_golden_defaults(name, ratios, weights):
    batch = sampled(p_old=[[0.1 * r for r in ratios]], p_rollout=[[0.1] * len(ratios)])
    assert_close(make_correction(name)(batch), torch.tensor([weights], dtype=torch.float64))


def test_the_ends_of_a_range_are_kept():
    # ρ = 1 exactly.
    batch = sampled(p_old=[[0.3]], p_rollout=[[0.3]])
    assert make_correction("icepop", low=1.0, high=1.0)(batch) == 1
    assert make_correction("trm", bound=0.0)(batch) == 1


# ---------------------------------------------------------------------------------------------------- oracle


def weight_by_hand(name: str, config: dict[str, float], ratio: float, sequence: list[float]) -> float:
    """The weight of a token with this ratio, in a sequence with these."""
    if name == "tis":
        return min(ratio, config["cap"])
    if name == "seq_tis":
        return min(math.prod(sequence), config["cap"])
    if name == "icepop":
        return ratio if config["low"] <= ratio <= config["high"] else 0.0
    return float(max(0.5 * math.log(r) ** 2 for r in sequence) <= config["bound"])


@st.composite
def corrections(draw) -> tuple[str, dict[str, float]]:
    name = draw(st.sampled_from(NAMES))
    if name == "icepop":
        return name, {"low": draw(st.floats(0.0, 1.0)), "high": draw(st.floats(1.0, 4.0))}
    if name == "trm":
        return name, {"bound": draw(st.floats(0.0, 1.0))}
    return name, {"cap": draw(st.floats(0.1, 5.0))}


@given(SEEDS, st.sampled_from([0.02, 0.3, 1.5]), corrections())
def test_weights_agree_with_loops(seed, size, correction):
    name, config = correction
    batch = mismatched(seed, size)
    weights = make_correction(name, **config)(batch)
    expected = torch.zeros_like(weights)
    for b, live in enumerate(batch.mask):
        sequence = (batch.logp_old - batch.logp_rollout)[b, live].exp().tolist()
        expected[b, live] = torch.tensor([weight_by_hand(name, config, r, sequence) for r in sequence], dtype=torch.float64)
    assert_close(weights, expected)
    assert (weights >= 0).all()
    assert (weights[~batch.mask] == 0).all()


# ---------------------------------------------------------------------------------------------------- properties


@given(SEEDS, st.sampled_from(NAMES))
def test_a_sampler_that_agrees_needs_no_correction(seed, name):
    batch, _ = random_batch(4, 5, 6, 3, seed=seed)
    batch = replace(batch, logp_rollout=batch.logp_old)
    assert torch.equal(make_correction(name)(batch), batch.mask.double())


@given(SEEDS, st.floats(0.1, 5.0))
def test_on_one_token_sequences_seq_tis_is_tis(seed, cap):
    batch = mismatched(seed, 1.0, tokens=1)
    assert_close(make_correction("seq_tis", cap=cap)(batch), make_correction("tis", cap=cap)(batch))


@pytest.mark.parametrize("name", NAMES)
def test_weights_carry_no_gradient(name):
    batch = mismatched(0, 0.1)
    logp_old, logp_rollout = (x.clone().requires_grad_() for x in (batch.logp_old, batch.logp_rollout))
    assert not make_correction(name)(replace(batch, logp_old=logp_old, logp_rollout=logp_rollout)).requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_padding_may_hold_anything(name, garbage):
    batch = mismatched(0, 0.2)
    assert torch.equal(make_correction(name)(poison_padding(batch, garbage)), make_correction(name)(batch))


@pytest.mark.parametrize("name", NAMES)
def test_the_new_policy_and_the_advantages_do_not_matter(name):
    batch = mismatched(0, 0.2)
    other = replace(batch, logp_new=batch.logp_new.detach() - 1, advantages=batch.advantages * -3)
    assert torch.equal(make_correction(name)(batch), make_correction(name)(other))


@pytest.mark.parametrize(("name", "weight"), [("tis", 2.0), ("seq_tis", 2.0), ("icepop", 0.0), ("trm", 0.0)])
def test_a_ratio_beyond_all_bounds_stays_finite(name, weight):
    logp_old, logp_rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2000.0, -2000.0]])
    batch = TokenBatch(logp_old, logp_old, torch.ones(1), torch.tensor([[True, True]]), logp_rollout=logp_rollout)
    assert make_correction(name)(batch).tolist() == [[weight, weight]]


def test_ratios_beyond_all_bounds_cancel_in_a_sequence():
    # e^30 · e^−30 = 1: tokens are multiplied before anything is cut off.
    logp_old, logp_rollout = torch.tensor([[-1.0, -31.0]]), torch.tensor([[-31.0, -1.0]])
    batch = TokenBatch(logp_old, logp_old, torch.ones(1), torch.tensor([[True, True]]), logp_rollout=logp_rollout)
    assert make_correction("seq_tis")(batch).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objective", POLICY_OBJECTIVES)
def test_weights_scale_the_gradient_of_every_objective(objective, name):
    # Every objective's loss at a token has a gradient at that token alone, so each token's gradient is scaled by its weight.
    batch, logits = random_batch(4, 5, 6, 3, seed=2)
    batch = replace(batch, logp_rollout=mismatched(2, 0.2).logp_rollout)
    loss, weights = make_objective(objective)(batch).loss, make_correction(name)(batch)
    (plain,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (corrected,) = torch.autograd.grad((loss * weights).sum(), logits)
    assert plain.any()
    assert_close(corrected, weights[..., None] * plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_documented_line_leaves_the_regression_alone(name):
    """The first line of code in the module's docstring, run as it stands: c · policy + regression, token by token."""
    batch, _ = random_batch(4, 5, 6, 3, seed=2)
    batch = replace(batch, logp_rollout=mismatched(2, 0.8).logp_rollout)
    objective, correction = make_objective("troll", bound=0.01), make_correction(name)
    found = {"objective": objective, "correction": correction, "batch": batch}
    line = re.search(r"^ +loss = .*$", str(correction_module.__doc__), re.MULTILINE)
    assert line is not None
    exec(line[0].strip(), found)
    out, weights = objective(batch), correction(batch)
    assert (out.regression[batch.mask & (weights != 1)] > 0).any(), "else the two rules are one"
    assert_close(found["loss"], weights * (out.loss - out.regression) + out.regression)


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_the_samplers_log_probs_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: needs `logp_rollout`.*the log-probs that the sampler reported"):
        make_correction(name)(inputs(p_new=[0.5], p_old=[0.5], adv=[1.0]))


@pytest.mark.parametrize("name", NAMES)
def test_an_impossible_sampled_token_is_refused(name):
    batch = inputs(p_new=[0.5], p_old=[0.5], adv=[1.0], p_rollout=[0.0])
    with pytest.raises(ValueError, match=f"{name}: logp_rollout is not finite at an unmasked token"):
        make_correction(name)(batch)


def test_an_unknown_correction_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no correction 'seqtis'. Did you mean 'seq_tis'\?.*icepop, seq_tis, tis, trm"):
        make_correction("seqtis")
