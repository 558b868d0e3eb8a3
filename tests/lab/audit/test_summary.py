"""From rows to numbers and sentences: by hand on four tokens, and as a partition on any."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from audit.four_tokens import EXPECTED, RULES, completion
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.audit.folder import SCHEMA, AuditFolder, read_audit
from corral.lab.audit.tally import PROBABILITY, PROBABILITY_NAMES, Audit, audit_table
from corral.lab.audit.tokens import VERDICTS, kinds
from corral.lab.audit.words import clip_range, number, percent, sentences

INFO = {"what": "compared after one update", "rules": {**RULES.as_dict(), "own": True}}


@pytest.fixture
def four(tmp_path: Path) -> Audit:
    folder = AuditFolder(tmp_path / "audit")
    folder.begin(INFO)
    folder.add(1, [completion()])
    folder.close()
    return audit_table(*read_audit(tmp_path / "audit"))


class TestGolden:
    """The four tokens of four_tokens.py: A false alarm, B missed, C right, D on its way back."""

    def test_totals(self, four: Audit) -> None:
        assert (four.tokens, four.sequences, four.steps, four.measure) == (4, 1, 1, "whole")
        assert four.distances["kl"]["mean"] == pytest.approx(sum(EXPECTED["kl"]) / 4, abs=1e-5)
        assert four.distances["tv"]["max"] == pytest.approx(0.24, abs=1e-6)
        assert "mismatch" not in four.distances

    @pytest.mark.parametrize("ball", ["kl", "tv"])
    def test_clipping_against_both_balls(self, four: Audit, ball: str) -> None:
        found = four.verdicts["clipped"][ball]
        assert (found.blocked_inside, found.blocked_outside, found.passed_inside) == (1, 1, 0)
        assert (found.passed_outside, found.passed_outward) == (2, 1)

    def test_the_others(self, four: Audit) -> None:
        shares = {name: four.verdicts[name]["kl"].share for name in VERDICTS}
        assert shares == {"clipped": 0.5, "dppo_binary": 0.25, "dppo_topk": 0.5, "troll": 0.75}
        # DPPO on the sampled token misses B; on its support it misses nothing.
        assert four.verdicts["dppo_binary"]["tv"].passed_outward == 1
        assert four.verdicts["dppo_topk"]["tv"].passed_outward == 0

    def test_buckets(self, four: Audit) -> None:
        # p_old is .005 for A and .4 for the others, of which C alone is clipped; all but A are projected.
        rare, likely = four.by_probability
        assert (rare["name"], rare["tokens"], rare["clipped"], rare["troll"]) == ("1e-3 … .01", 1, 1.0, 0.0)
        assert rare["tv"] == pytest.approx(0.005, abs=1e-6)
        assert (likely["name"], likely["tokens"], likely["clipped"]) == (".1 … .5", 3, pytest.approx(1 / 3))
        assert likely["tv"] == pytest.approx((0.22 + 0.24 + 0.24) / 3, abs=1e-6)
        assert [(row["name"], row["tokens"]) for row in four.by_sign] == [("negative", 1), ("positive", 3)]

    def test_rare_tokens(self, four: Audit) -> None:
        assert four.rare == {"tokens": 1, "blocked": 1, "tv": pytest.approx(0.005, abs=1e-6)}

    def test_blocked_tokens(self, four: Audit) -> None:
        (row,) = four.blocked_tokens
        assert (row["token"], row["seen"], row["blocked"], row["inside"]) == (0, 4, 2, 1)
        assert row["p_old"] == pytest.approx((0.005 + 0.4) / 2, abs=1e-6)

    def test_sentences(self, four: Audit) -> None:
        said = sentences(replace(four, info=INFO))
        assert said[0] == "4 tokens of 1 completion, compared after one update; shares of so few tokens are rough."
        assert sentences(replace(four, info=INFO, tokens=1000))[0] == "1,000 tokens of 1 completion, compared after one update."
        assert said[2] == (
            "On one more update on these completions, clipping (ratio 0.8 … 1.2) would block 50 % of tokens; 50 % of these are "
            "inside the KL ball of 0.05. It would pass 25 % that are outside and pushed further out."
        )
        assert "Rare tokens, with an old probability of 0.01 or less, are 25 % of all and 50 % of the blocked ones" in said[4]
        assert "DPPO would mask 25 %" in said[5]
        assert "TROLL would project 75 %" in said[5]
        assert said[6].startswith("The sampler reported no log-probs")

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (
                {"updates_made": {"updates": 8, "blocked": 0.023, "trl": 0.0231}},
                "In the 8 updates that were made, clipping (ratio 0.8 … 1.2) blocked 2.3 % of tokens; TRL's own clip ratio is "
                "2.3 %.",
            ),
            (
                {"updates_made": {"updates": 1, "blocked": 0.5, "trl": None}},
                "In the 1 update that was made, clipping (ratio 0.8 … 1.2) blocked 50 % of tokens.",
            ),
            (
                {"updates_made": {"updates": 8, "blocked": 0.0, "trl": 0.0}, "one_update_per_batch": True},
                "With one update per batch of rollouts every ratio is 1, so no clip ever acts in this run: in the 8 updates "
                "that were made, clipping (ratio 0.8 … 1.2) blocked 0 % of tokens; TRL's own clip ratio is 0 %.",
            ),
            (  # a sampler for an anchor, say
                {"updates_made": {"updates": 8, "blocked": 0.01, "trl": None}, "one_update_per_batch": True},
                "In the 8 updates that were made, clipping (ratio 0.8 … 1.2) blocked 1.0 % of tokens.",
            ),
            ({"updates_made": None}, "What clipping did in the updates that were made was not recorded."),
            ({"rules": {**INFO["rules"], "own": False}, "loss": "cispo"}, "The run's own loss, cispo, does not clip."),
        ],
        ids=["several", "one", "one per batch", "one per batch, off-policy", "not recorded", "another loss"],
    )
    def test_what_clipping_did_is_told_apart_from_what_it_would_do(
        self, four: Audit, given: dict[str, Any], expected: str
    ) -> None:
        said = sentences(replace(four, info={**INFO, "kind": "trainer", **given}))
        assert said[2] == expected
        assert said[3].startswith("On one more update on these completions, clipping (ratio 0.8 … 1.2) would block 50 %")

    def test_a_ratio_of_completions_is_trls_of_completions(self, four: Audit) -> None:
        clip = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
        made = {"updates": 2, "blocked": 0.1, "trl": 0.2}
        info = {"kind": "trainer", "updates_made": made, "rules": {**INFO["rules"], "clip": clip}}
        said = sentences(replace(four, info=info))
        assert said[2].endswith("blocked 10 % of tokens; TRL's own clip ratio, of completions, is 20 %.")


def test_bucket_edges() -> None:
    """≤ at the low edges, ≥ at .99."""
    p = np.array([1e-4, 1.01e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.9001, 0.9899, 0.99, 1.0])
    places = np.digitize(p, PROBABILITY, right=True)
    assert [PROBABILITY_NAMES[place] for place in places] == [
        *("≤ 1e-4", "1e-4 … 1e-3", "1e-4 … 1e-3", "1e-3 … .01", ".01 … .1", ".1 … .5", ".5 … .9", ".9 … .99", ".9 … .99"),
        *("≥ .99", "≥ .99"),
    ]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1))
def test_every_token_is_of_exactly_one_kind(drawn: list[tuple[bool, bool, bool]]) -> None:
    blocked, outside, outward = (np.array(column) for column in zip(*drawn, strict=True))
    tokens = pd.DataFrame({"clipped": blocked, "kl": np.where(outside, 0.3, 0.2), "outward": outward})
    found = kinds(tokens, "kl", 0.2).tolist()
    assert [kind in ("false", "right") for kind in found] == blocked.tolist()
    assert [kind in ("right", "missed", "back") for kind in found] == outside.tolist()
    assert [kind == "missed" for kind in found] == [not a and b and c for a, b, c in drawn]


def test_infinities_are_written_as_such() -> None:
    assert number(np.inf) == "∞"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (1.0, "100 %"), (0.712, "71 %"), (0.0123, "1.2 %"), (0.004, "0.40 %"), (1e-5, "under 0.01 %"),
        (0.99999, "over 99.99 %"), (0.9876, "98.8 %"), (0.9996, "99.96 %"), (0.0996, "10.0 %"),
    ],
)  # fmt: skip
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_clip_ranges() -> None:
    assert clip_range({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}) == "ratio 0.8 … 1.28"
    assert clip_range({"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}) == "completion's ratio 0.9997 … 1.0004"
    assert clip_range({"name": "gmpo", "clip": 0.4}) == "log-ratio within ±0.4"
    assert "3 where the advantage is negative" in clip_range(
        {"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    )


class TestMismatch:
    def test_where_the_sampler_reported(self) -> None:
        rows: dict[str, Any] = {name: [0] * 4 for name in SCHEMA.names}
        columns = {name: [float(value) for value in np.log(column)] for name, column in (
            ("logp_old", [0.5, 0.5, 0.5, 0.5]), ("logp_rollout", [0.5, 0.6, 0.4, 0.9]))}  # fmt: skip
        rows |= {**columns, "text": ["x"] * 4, **{name: [False] * 4 for name in VERDICTS}}
        found = audit_table({"rules": {"kl_bound": 0.05, "tv_bound": 0.2}}, pd.DataFrame(rows)).distances["mismatch"]
        assert found["mean"] == pytest.approx((0 + 0.1 + 0.1 + 0.4) / 4, abs=1e-6)
        assert found["max"] == pytest.approx(0.4, abs=1e-6)
