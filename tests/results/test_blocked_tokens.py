"""Blocked tokens by old probability: what is counted, and that a batch of the real model goes through."""

import pytest
import torch

from results.evidence.blocked_tokens import RULES, by_bucket, measure


def test_golden_buckets() -> None:
    # Old probabilities .005, .005, .95; TV .1, .3, .3. Clipping blocks the first two, of which one had moved by less than .2.
    columns = {"p_old": torch.tensor([0.005, 0.005, 0.95]), "tv": torch.tensor([0.1, 0.3, 0.3])}
    columns |= dict.fromkeys(RULES, torch.zeros(3)) | {"clip .2": torch.tensor([1.0, 1.0, 0.0])}
    rare, likely = by_bucket(columns)
    assert (rare["bucket"], rare["tokens"], rare["far"]) == ("below .01", 2, 0.5)
    assert (rare["tv"], rare["blocked"]["clip .2"], rare["near"]["clip .2"]) == (pytest.approx(0.2), 1.0, 0.5)
    assert (likely["bucket"], likely["blocked"]["clip .2"], likely["blocked"]["TV 0.2"]) == ("above .9", 0.0, 0.0)


def test_a_batch_of_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("results.evidence.blocked_tokens.PROMPTS", 4)
    rows = measure(1e-3, batches=1, seed=1)
    assert sum(row["tokens"] for row in rows) > 100
    assert all(row["near"][rule] <= row["blocked"][rule] for row in rows for rule in RULES)
    assert any(row["tv"] > 0.001 for row in rows), "the updates changed nothing"
