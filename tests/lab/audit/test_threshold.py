"""Which threshold? By hand on the four tokens, and every rule against the objective that it stands for."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from audit.dumps import logged
from audit.four_tokens import ADVANTAGES, NEW, OLD, RULES, TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.lab.audit.measure import measure
from corral.lab.audit.threshold import FAMILIES, Ball, Threshold, ThresholdTally, fewest_errors, range_rule
from corral.lab.audit.tokens import make_tokens
from corral.objective import make_objective
from corral.tensors import TokenBatch

BY_NAME = {family.name: family for family in FAMILIES}


def four_tokens() -> pd.DataFrame:
    found = {name: column.numpy() for name, column in measure(TOKENS, OLD, NEW, ADVANTAGES, RULES).items()}
    fixed = dict.fromkeys(("step", "sequence", "position", "token"), 1)
    return make_tokens(pd.DataFrame({**found, **fixed, "support_tv": found["tv_topk"], "advantage": ADVANTAGES.numpy()}))


def rows_of(tokens: pd.DataFrame) -> dict[tuple[str, float], Threshold]:
    tally = ThresholdTally(kl_bound=0.05, tv_bound=0.2)
    tally.add(tokens)
    return {(row.rule.name, row.bound): row for row in tally.rows()}


class TestGolden:
    """ρ = 2, 1.175, .4, .4 with Â = +, +, −, +; true KL .002, .135, .136, .136; true TV .005, .22, .24, .24."""

    @pytest.mark.parametrize(
        ("family", "bound", "blocked_inside", "blocked_outside", "missed"),
        [
            ("clip", 0.2, 1, 1, 1),  # A false, C right, B missed; D is on its way back
            ("clip", 0.1, 1, 2, 0),  # B's 1.175 is beyond 1.1 too
            ("clip", 0.5, 1, 1, 1),  # 2 > 1.5 and .4 < .5
            ("clip_higher", 0.28, 1, 1, 1),
            ("dual_clip", 3.0, 1, 1, 1),
            ("gmpo", 0.4, 1, 1, 1),  # ln 2 = .69, ln 1.175 = .16, −ln .4 = .92
            ("dppo_tv", 0.2, 0, 1, 1),  # |Δp| = .005, .07, .24, .24
            ("dppo_tv", 0.05, 0, 2, 0),
            ("dppo_tv_symmetric", 0.2, 0, 2, 1),  # D too
            ("dppo_topk_tv", 0.2, 0, 2, 0),
            ("troll", 0.05, 0, 3, 0),
            ("troll", 0.2, 0, 0, 2),
        ],
    )
    def test_cells(self, family: str, bound: float, blocked_inside: int, blocked_outside: int, missed: int) -> None:
        ball = rows_of(four_tokens())[family, bound].kl
        assert (ball.blocked_inside, ball.blocked_outside, ball.passed_outward) == (blocked_inside, blocked_outside, missed)
        assert ball.tokens == 4

    def test_what_a_table_cannot_say_is_left_out(self) -> None:
        # Rows of an audit may be some tokens of a completion, and do not hold KL(old‖new) on the support.
        families = {family for family, _ in rows_of(four_tokens())}
        assert families == BY_NAME.keys() - {"gspo", "dppo_topk_kl"}

    def test_fewest_errors(self) -> None:
        best = {row.rule.name: row for row in fewest_errors(list(rows_of(four_tokens()).values()))}
        assert best["clip"].bound == 0.1, "one error; .05 has as many and is tighter"
        assert best["dppo_tv"].kl.errors == 0


@st.composite
def drawn(draw: st.DrawFn) -> list[pd.DataFrame]:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    completions = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 12))
        old = -rng.exponential(draw(st.sampled_from([0.05, 1.0, 6.0])), length)
        new = np.minimum(old + draw(st.sampled_from([0.0, 0.2, 1.5])) * rng.standard_normal(length), -1e-6)
        rollout = np.minimum(old + 0.05 * rng.standard_normal(length), -1e-6) if draw(st.booleans()) else None
        advantage = np.full(length, draw(st.sampled_from([-1.0, 0.0, 2.0])))
        completions.append(logged(advantage, old, new, rollout))
    return completions


def objective_of(family: str, bound: float) -> tuple[str, dict[str, Any]]:
    """The objective whose `acted` a rule of the table stands for."""
    mask = "symmetric" if "symmetric" in family else "outward"
    if family.startswith("dppo"):
        return "dppo", {"divergence": "tv" if "tv" in family else "kl", "bound": bound, "mask": mask}
    return {
        "clip": ("ppo_clip", {"clip_low": bound, "clip_high": bound}),
        "clip_higher": ("clip_higher", {"clip_high": bound}),
        "dual_clip": ("dual_clip", {"dual_clip": bound}),
        "gspo": ("gspo", {"clip_low": bound, "clip_high": bound}),
        "ripo": ("ripo", {"bound_low": bound, "bound_high": bound}),
        "gmpo": ("gmpo", {"clip": bound}),
    }[family]


def padded(columns: list[np.ndarray]) -> torch.Tensor:
    """[B T], NaN at padding."""
    longest = max(map(len, columns))
    rows = [np.concatenate([column, np.full(longest - len(column), np.nan)]) for column in columns]
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("family", [name for name in BY_NAME if "topk" not in name and name != "troll"])
@given(completions=drawn(), data=st.data())
@settings(max_examples=15)
def test_rules_are_the_objectives(family: str, completions: list[pd.DataFrame], data: st.DataObject) -> None:
    bound = data.draw(st.sampled_from(BY_NAME[family].bounds))
    name, config = objective_of(family, bound)
    # DPPO is anchored on the sampler where it reported, everything else on the old policy.
    anchors = [one.anchor if name == "dppo" else one.logp_old for one in completions]
    old, new, advantages = (
        padded(columns) for columns in (anchors, [one.logp_new for one in completions], [one.advantage for one in completions])
    )
    mask = ~old.isnan()
    acted = make_objective(name, **config)(TokenBatch(new, old, advantages, mask)).acted
    assert acted is not None
    score = BY_NAME[family].score(pd.concat(completions, ignore_index=True))
    sure = np.abs(score - bound) > 1e-9
    assert ((score > bound) == acted[mask].numpy())[sure].all()


@given(completions=drawn())
@settings(max_examples=20)
def test_every_row_is_a_partition(completions: list[pd.DataFrame]) -> None:
    tokens = pd.concat(completions, ignore_index=True)
    outward = (tokens.logp_new - tokens.logp_old) * tokens.advantage > 0
    rows = rows_of(tokens)
    for (family, bound), row in rows.items():
        score = BY_NAME[family].score(tokens)
        for ball, outside in ((row.kl, tokens.kl > 0.05), (row.tv, tokens.tv > 0.2)):
            blocked = score > bound
            assert ball == Ball(
                blocked_inside=int((blocked & ~outside).sum()),
                blocked_outside=int((blocked & outside).sum()),
                passed_inside=int((~blocked & ~outside).sum()),
                passed_outside=int((~blocked & outside).sum()),
                passed_outward=int((~blocked & outside & outward).sum()),
            )
            assert ball.tokens == len(tokens)
    for family in {family for family, _ in rows}:
        shares = [row.kl.share for row in rows.values() if row.rule.name == family]
        assert shares == sorted(shares, reverse=True), "a wider bound blocks no more"


@given(completions=drawn())
@settings(max_examples=10)
def test_the_audited_range_is_clipping(completions: list[pd.DataFrame]) -> None:
    tokens = pd.concat(completions, ignore_index=True)
    tally = ThresholdTally(0.05, 0.2)
    tally.add(tokens.assign(clipped=range_rule(0.2, 0.2).score(tokens) > 0))
    clip = next(row for row in tally.rows() if (row.rule.name, row.bound) == ("clip", 0.2))
    assert tally.balls("clipped acts") == {"kl": clip.kl, "tv": clip.tv}
