"""Routing of a mixture of experts under rounded weights: what counts as a flip, and that both networks read the same tokens."""

import pytest
import torch
from warm_start import build

from results.evidence.routing_flips import describe, experts_of, measure, read, summary
from results.evidence.words import routing

MOE = build("moe", 1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch, and a mixture of experts that nobody has trained."""
    monkeypatch.setattr("results.evidence.blocked_tokens.PROMPTS", 4)
    monkeypatch.setattr("results.evidence.routing_flips.load_model", lambda _: MOE)


def test_golden_experts_are_a_set() -> None:
    # The two largest of (1, 3, 2) and of (1, 2, 3) are the last two, in another order; of (3, 1, 2) the outer ones.
    sets = experts_of(torch.tensor([[1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]]), 2)
    assert sets.tolist() == [[False, True, True], [False, True, True], [True, False, True]]


def test_golden_description() -> None:
    # Three tokens and two layers; the second token flips in one of them: 1 of 6 places, 1 of 3 tokens.
    found = describe(torch.tensor([0.1, 0.6, 0.3]), torch.tensor([[False, False], [True, False], [False, False]]))
    assert (found["tokens"], found["layers"], found["flipped_places"], found["flipped_tokens"]) == (3, 2, 0.1667, 0.3333)
    assert found["flipped"] == {"mean": 0.6, "p999": 0.6, "max": 0.6}
    assert found["same"] == {"mean": 0.2, "p999": 0.2998, "max": 0.3}
    assert found["all"]["mean"] == 0.3333
    assert summary(torch.zeros(0)) is None


def test_a_dense_model_routes_nothing() -> None:
    model, tokenizer = build("llama", 1)
    ids = tokenizer(["3 7 12>22:"], return_tensors="pt")["input_ids"]
    logp, routes = read(model, ids, 4)
    assert (logp.shape, routes.shape) == (torch.Size([1, ids.shape[1] - 4]), torch.Size([1, ids.shape[1] - 4, 0, 1]))
    assert "flipped_places" not in describe(logp[0].abs(), (routes != routes).any(-1)[0])


def test_places_are_those_that_predict() -> None:
    # Completions that differ in their first token: the place that predicts it has not seen it, the next one has.
    model, tokenizer = MOE
    ids = tokenizer(["3 7 12>22:3+7"] * 50, return_tensors="pt")["input_ids"]
    ids[:, 11] = torch.arange(20, 70)
    _, routes = read(model, ids, 11)
    assert routes.shape == (50, ids.shape[1] - 11, 4, 4)
    assert (routes.sum(-1) == 2).all(), "two of four experts"
    assert (routes[:, 0] == routes[:1, 0]).all()
    assert (routes[:, 1] != routes[:1, 1]).any()


@pytest.mark.usefixtures("few")
def test_only_rounding_flips() -> None:
    exact, coarse = (measure("runs/starts/moe-1", precision, batches=1, seed=1) for precision in ("float32", "fp8"))
    assert (exact["model"], exact["layers"], exact["flipped_places"], exact["flipped"]) == ("moe-1", 4, 0.0, None)
    assert exact["all"]["max"] == 0.0
    assert 0 < coarse["flipped_places"] <= coarse["flipped_tokens"] < 1
    assert coarse["all"]["max"] == max(coarse[part]["max"] for part in ("flipped", "same"))


def test_the_page_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = {"mean": 0.01, "p999": 0.2, "max": 1.5}
    dense = {"model": "tiny", "precision": "fp8", "tokens": 1000, "all": gap, "same": gap}
    moe = {**dense, "model": "moe-1", "flipped": gap, "flipped_places": 0.05, "flipped_tokens": 0.125}
    monkeypatch.setattr("results.evidence.words.raw", lambda _: [dense, moe])
    lines = routing().splitlines()
    assert lines[2] == "| tiny | fp8 | 1,000 | – | – | .01 / .2 / 1.5 | – | .01 / .2 / 1.5 |"
    assert lines[3] == "| moe-1 | fp8 | 1,000 | 5.0 % | 12.5 % | .01 / .2 / 1.5 | .01 / .2 / 1.5 | .01 / .2 / 1.5 |"
