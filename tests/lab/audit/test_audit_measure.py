"""True divergences and verdicts of single tokens: by hand, for any policies, and against the objectives themselves."""

import math

import pytest
import torch
from audit.four_tokens import ADVANTAGES, EXPECTED, NEW, OLD, RULES, TOKENS
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.audit.measure import measure
from corral.lab.audit.rules import Rules
from corral.objective import make_objective


@pytest.mark.parametrize("name", EXPECTED)
def test_golden(name: str) -> None:
    found = measure(TOKENS, OLD, NEW, ADVANTAGES, RULES)[name]
    if found.dtype == torch.bool:
        assert found.tolist() == EXPECTED[name]
    else:
        torch.testing.assert_close(found, torch.tensor(EXPECTED[name]), atol=2e-6, rtol=0)


def test_golden_rest() -> None:
    found = measure(TOKENS, OLD, NEW, ADVANTAGES, RULES)
    # −.005 ln .005 − .595 ln .595 − .4 ln .4 = .026492 + .308920 + .366516
    assert found["entropy"][0] == pytest.approx(0.701928, abs=2e-6)
    assert found["logp_old"].tolist() == pytest.approx([math.log(0.005)] + 3 * [math.log(0.4)], abs=1e-6)
    assert found["logp_rollout"].isnan().all()
    # The projection of C lies between the policies, at KL .05 of .136: it moves, but less than all the way back.
    assert found["troll_tv"][0] == 0
    assert 0 < found["troll_tv"][2] < 0.24


def test_dppo_is_anchored_on_the_sampler_where_it_reported() -> None:
    # B: the sampler said .2, so |.47 − .2| = .27 > .2 and rising. C: it had none, so .4 stands. Clipping reads the old policy.
    reported = torch.tensor([0.005, 0.2, math.nan, 0.4]).log()
    found = measure(TOKENS, OLD, NEW, ADVANTAGES, RULES, reported)
    assert found["dppo_binary"].tolist() == [False, True, True, False]
    assert found["tv_binary"].tolist() == pytest.approx([0.005, 0.27, 0.24, 0.24], abs=1e-6)
    assert found["clipped"].tolist() == EXPECTED["clipped"]
    assert found["logp_rollout"].isnan().tolist() == [False, False, True, False]


@st.composite
def policies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    seed, vocabulary, count = draw(st.integers(0, 10**6)), draw(st.integers(2, 30)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(seed)
    logits = draw(st.sampled_from([0.5, 3.0, 12.0])) * torch.randn(count, vocabulary, generator=generator)
    moved = draw(st.sampled_from([0.0, 0.05, 0.5, 3.0])) * torch.randn(count, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, (count,), generator=generator)
    advantages = torch.randn(count, generator=generator).round(decimals=0)
    return tokens, logits.log_softmax(-1), (logits + moved).log_softmax(-1), advantages


@given(policies(), st.integers(1, 8))
def test_properties(drawn: tuple[torch.Tensor, ...], top_k: int) -> None:
    tokens, old, new, advantages = drawn
    rules = Rules(top_k=top_k)
    found = measure(tokens, old, new, advantages, rules)
    p, q = old.double().exp(), new.double().exp()
    # Whole softmax, in float64, by the textbook.
    torch.testing.assert_close(found["kl"].double(), (q * (new.double() - old.double())).sum(-1), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found["tv"].double(), (p - q).abs().sum(-1) / 2, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found["entropy"].double(), -(p * old.double()).sum(-1), atol=1e-5, rtol=1e-4)
    slack = 1e-6
    assert bool((found["tv_binary"] <= found["tv_topk"] + slack).all())
    assert bool((found["tv_topk"] <= found["tv"] + slack).all())
    assert bool((found["troll_kl"] <= rules.kl_bound * (1 + 1e-4)).all())
    assert bool((found["kl"][found["troll"]] > rules.kl_bound * (1 - 1e-4)).all()), "a support's KL is never above the true one"
    outward = (found["logp_new"] - found["logp_old"]) * advantages > 0
    for name in ("clipped", "dppo_binary", "dppo_topk"):
        assert bool((outward | ~found[name]).all()), f"{name} blocks no way back"
    assert bool((found["dppo_topk"] | ~found["dppo_binary"]).all()), "a finer look masks a superset"
    ratio = (found["logp_new"] - found["logp_old"]).exp()
    sure = (ratio - 1).abs().sub(0.2).abs() > 1e-5
    assert torch.equal(found["clipped"][sure], (outward & ((ratio - 1).abs() > 0.2))[sure])


@given(policies())
def test_pieces_make_no_difference(drawn: tuple[torch.Tensor, ...]) -> None:
    tokens, old, new, advantages = drawn
    whole = measure(tokens, old, new, advantages, RULES)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr("corral.lab.audit.measure._AT_ONCE", 2 * old.shape[-1])
        pieces = measure(tokens, old, new, advantages, RULES)
    for name, column in whole.items():
        torch.testing.assert_close(pieces[name], column, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_equal_policies_are_left_alone() -> None:
    found = measure(TOKENS, OLD, OLD, ADVANTAGES, RULES)
    assert found["kl"].tolist() == found["tv"].tolist() == [0.0] * 4
    assert not any(found[name].any() for name in ("clipped", "dppo_binary", "dppo_topk", "troll"))


def test_a_whole_completion_is_clipped_at_once_under_gspo() -> None:
    # Of C and B as one completion with Â = −1: mean log-ratio ½ (ln .4 + ln 1.175) < ln(1 − 3e-4), so both are blocked.
    rules = Rules(clip=make_objective("gspo"), own=True)
    assert rules.whole_sequences
    found = measure(TOKENS[:2], OLD[1:3], NEW[1:3], torch.tensor([-1.0, -1.0]), rules)
    assert found["clipped"].tolist() == [True, True]


@pytest.mark.parametrize(
    "given",
    [
        {"kl_bound": 0.0},
        {"tv_bound": math.nan},
        {"top_k": 0},
        {"support_size": -1},
        {"support_mass": 0.0},
        {"support_mass": 1.5},
    ],
)
def test_bad_rules(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Rules(**given)


def test_only_clipping_is_clipping() -> None:
    with pytest.raises(ValueError, match=r"`clip` is one of ppo_clip.*got 'reinforce'"):
        Rules(clip=make_objective("reinforce"))


def test_a_completion_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="one token or more"):
        measure(TOKENS[:0], OLD[:0], NEW[:0], ADVANTAGES[:0], RULES)


def test_a_policy_that_is_not_finite_is_refused() -> None:
    bad = NEW.clone()
    bad[2] = math.nan
    with pytest.raises(ValueError, match=r"not finite|NaN"):
        measure(TOKENS, OLD, bad, ADVANTAGES, RULES)


def test_the_support_is_the_published_one():
    # Becker et al. 2025: 64 tokens, and none after 1 − 1e-5 of the mass.
    assert (Rules().support_size, Rules().support_mass) == (64, 1 - 1e-5)
