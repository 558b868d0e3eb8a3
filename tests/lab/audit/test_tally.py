"""Statistics of a stream: by hand, in pieces as at once, and the step at which a collapse announces itself."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit.dumps import LINE, audit_dump, drawn_line, write_exports, write_lines

from corral.lab.audit.tally import Audit
from corral.lab.audit.words import sentences
from corral.validate import RunError


def audit(path: Path) -> Audit:
    return audit_dump(path)


class TestGolden:
    """LINE: p_old = e⁻¹, e⁻², e^−½ and log ρ = ½, 0, −1, with Â = 1."""

    @pytest.fixture
    def three(self, tmp_path: Path) -> Audit:
        return audit(write_lines(tmp_path / "run.jsonl", [LINE]))

    def test_effective_samples(self, three: Audit) -> None:
        weights = [math.exp(0.5), 1.0, math.exp(-1)]
        assert three.ess == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))

    def test_estimates(self, three: Audit) -> None:
        # k1 = −½, 0, 1; k2 = ⅛, 0, ½; k3 = e^½ − 1 − ½, 0, e⁻¹ − 1 + 1.
        assert three.k1 == pytest.approx(0.5 / 3)
        assert three.distances["k1"]["mean"] == pytest.approx(0.5), "of the absolute values"
        assert three.distances["k2"]["mean"] == pytest.approx(0.625 / 3)
        assert three.distances["k3"]["mean"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 3)
        assert three.distances["tv"]["max"] == pytest.approx(math.exp(-0.5) - math.exp(-1.5))

    def test_divergences_are_lower_bounds_and_said_to_be(self, three: Audit) -> None:
        p, q = math.exp(-0.5), math.exp(-1.0)  # of the first token, new and old
        kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        assert three.distances["kl"]["max"] >= kl
        assert three.measure == "sampled"
        said = sentences(three)
        compared = "3 tokens of 1 completion in 1 step, compared under the old and the new policy as logged"
        assert said[0] == f"{compared}; shares of so few tokens are rough."
        assert "a lower bound of the true one" in said[1]
        # ρ = e^½ > 1.2 with Â > 0 is blocked; e⁻¹ is on its way against its advantage.
        assert "would block 33 % of tokens; 0 % of these are inside the KL ball" in said[2]
        assert "passes" not in said[2]

    def test_no_mismatch_without_a_sampler(self, three: Audit) -> None:
        assert "mismatch" not in three.distances
        assert any("The sampler reported no log-probs" in sentence for sentence in sentences(three))


def test_mismatch_and_behaviour(tmp_path: Path) -> None:
    # The weight is new over sampler: ρ = (e^−½ / e⁻¹) as before, but the sampler had e^−½ too: weight 1.
    line = {"tokens": [1], "advantages": 1, "logp_old": [-1.0], "logp_new": [-0.5], "logp_rollout": [-0.5], "sampled_at": -2}
    found = audit(write_lines(tmp_path / "run.jsonl", [line, line]))
    assert found.ess == pytest.approx(1.0)
    assert found.distances["mismatch"]["mean"] == pytest.approx(math.exp(-0.5) - math.exp(-1))
    assert [(row["age"], row["tokens"]) for row in found.by_age] == [(2, 2)]


def test_ratios_that_underflow_leave_no_samples(tmp_path: Path) -> None:
    line = {"tokens": [1, 2], "advantages": 1, "logp_old": [-1.0, -1.0], "logp_new": [-2000.0, -3000.0]}
    found = audit(write_lines(tmp_path / "run.jsonl", [line]))
    assert (found.ess, found.by_step[0]["ess"], found.tokens) == (0.0, 0.0, 2)


def test_pieces_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "run.jsonl", [drawn_line(seed, step=1 + seed // 3) for seed in range(12)])
    whole = audit(path)
    monkeypatch.setattr("corral.lab.audit.tally._AT_ONCE", 1)
    pieces = audit(path)
    assert pieces.thresholds == whole.thresholds
    assert pieces.ess == pytest.approx(whole.ess)
    rows, expected = ([*one.by_step, *one.by_age, *one.by_probability] for one in (pieces, whole))
    for one, other in zip(rows, expected, strict=True):
        name = one.pop("name", None)
        assert name == other.pop("name", None)
        assert one == pytest.approx(other)


def test_against_numpy(tmp_path: Path) -> None:
    lines = [drawn_line(seed, length=300, step=1 + seed % 2) for seed in range(8)]
    found = audit(write_lines(tmp_path / "run.jsonl", lines))
    old, new, rollout = (np.concatenate([line[name] for line in lines]) for name in ("logp_old", "logp_new", "logp_rollout"))
    tv = np.abs(np.exp(new) - np.exp(old))
    assert found.distances["tv"]["mean"] == pytest.approx(tv.mean())
    assert found.distances["tv"]["p999"] == pytest.approx(np.quantile(tv, 0.999, method="higher"), rel=0.011)
    assert found.distances["mismatch"]["max"] == pytest.approx(np.abs(np.exp(rollout) - np.exp(old)).max())
    weight = np.exp(new - rollout)
    assert found.ess == pytest.approx(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
    assert sum(row["tokens"] for row in found.by_probability) == found.tokens == 2400
    assert [row["reward"] for row in found.by_step] == [0.0, 1.0]


def collapsing(step: int) -> dict[str, Any]:
    """Ratios explode from step 6 on."""
    return drawn_line(step, length=200, step=step, size=0.05 if step < 6 else 4.0, logp_rollout=None)


def test_the_step_at_which_a_collapse_announces_itself(tmp_path: Path) -> None:
    found = audit(write_lines(tmp_path / "run.jsonl", [collapsing(step) for step in range(1, 12)]))
    assert found.alarms[0]["step"] == 6
    said = sentences(found)
    assert any(sentence.startswith("At step 6 it announces itself: tr/ess is") for sentence in said)
    calm = audit(write_lines(tmp_path / "calm.jsonl", [collapsing(step) for step in range(1, 6)]))
    assert calm.alarms == []
    assert "No step shows a sign of collapse in KL, effective samples, entropy or reward." in sentences(calm)


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    write_exports(tmp_path, [1, 2], lines=2)
    found = audit(tmp_path)
    assert found.left_out == {
        "tokens with a log-prob that is null or not finite": 4,
        "trained tokens without an advantage": 4,
    }
    assert sentences(found)[-1].startswith("Left out: 4 tokens with a log-prob that is null")


@pytest.mark.parametrize("at_once", [1, 1 << 16])
def test_a_support_in_some_lines_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("corral.lab.audit.tally._AT_ONCE", at_once)
    top = {"top_ids": [[1]] * 4, "top_logp_old": [[-3.0]] * 4, "top_logp_new": [[-3.0]] * 4}
    with pytest.raises(RunError, match="log them for all or for none"):
        audit(write_lines(tmp_path / "run.jsonl", [{**LINE, **top}, LINE]))


def test_a_support_brings_the_rules_that_need_it(tmp_path: Path) -> None:
    top = {"top_ids": [[1]] * 4, "top_logp_old": [[-3.0]] * 4, "top_logp_new": [[-2.5]] * 4}
    found = audit(write_lines(tmp_path / "run.jsonl", [{**LINE, **top}]))
    assert found.measure == "support"
    assert {"dppo_topk_tv", "dppo_topk_kl", "troll"} <= {row.rule.name for row in found.thresholds}


def test_steps_are_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lab.audit.tally._MOST_STEPS", 3)
    with pytest.raises(RunError, match="more than 3 steps"):
        audit(write_lines(tmp_path / "run.jsonl", [{**LINE, "step": step} for step in range(5)]))


def test_nothing_to_audit(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no token to audit"):
        audit(write_lines(tmp_path / "run.jsonl", [{**LINE, "mask": [0] * 4}]))
