"""Which sequences the deployed region measures under verl, and their KLs; test_deployed.py has two ranks."""

import math
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl (make test-verl)")

import torch
import verl_fixture as fixture
from torch import nn

import corral
from corral.engines.verl import deployed
from corral.engines.verl.deployed import DeployedRegion
from corral.head.logits import LogitSpec

pytestmark = pytest.mark.verl


class OneRank:
    """An engine of one process: hidden states are a row of the module's weight for every token."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.module = nn.Embedding(60, 4)
        self.head = torch.randn(7, 4, generator=draw)
        self.witness: Any = None

    def get_data_parallel_size(self) -> int:
        return 1

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> None:
        assert forward_only
        assert not torch.is_grad_enabled()
        assert not self.module.training
        self.witness.see(self.module(micro_batch["input_ids"].values()), self.head, None, LogitSpec(1.0, None, 1.0))

    def policy(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.module(tokens) @ self.head.T).log_softmax(-1).detach()


def masked(*rows: int) -> Any:
    """verl's batch with these sequences' responses masked out."""
    batch = fixture.batch_of()
    masks = [torch.zeros_like(x) if index in rows else x for index, x in enumerate(batch["response_mask"].unbind())]
    batch["response_mask"] = fixture.jagged(masks)
    return batch


def test_the_kl_is_of_response_tokens_at_the_positions_that_predict_them() -> None:
    engine, batch = OneRank(), masked(0)
    engine.module.train()
    region = DeployedRegion(engine)
    region.choose(batch)
    _, responses, _ = fixture.sequences()
    assert region.tokens == sum(map(len, responses[1:]))
    inputs = [x[-len(response) - 1 : -1] for x, response in zip(batch["input_ids"].unbind(), responses, strict=True)][1:]
    old = engine.policy(torch.cat(inputs))
    with torch.no_grad():
        engine.module.weight.add_(0.3 * torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))
    expected = corral.categorical_kl(engine.policy(torch.cat(inputs)), old)
    found = region._measure()
    torch.testing.assert_close(found.new_old, expected.double(), atol=1e-6, rtol=1e-5)
    assert found.sequence.bincount().tolist() == [len(response) for response in responses[1:]]
    certificate = region.hold(float(expected.mean()) / 4, "mean")
    assert certificate.share == pytest.approx(0.5, abs=0.05)  # KL grows as the square of the step
    assert engine.module.training


def moved(engine: OneRank) -> None:
    with torch.no_grad():
        engine.module.weight.add_(0.3 * torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def test_a_later_mini_batch_is_measured_from_the_same_old_weights_where_the_first_is_masked_out() -> None:
    engine = OneRank()
    old = engine.module.weight.detach().clone()
    region = DeployedRegion(engine)
    region.choose(masked(0, 1, 2, 3))
    assert region.tokens == 0
    moved(engine)  # optimizers have momentum, and weight decay
    new = engine.module.weight.detach().clone()
    region.choose(masked(0))
    assert region.tokens > 0
    assert torch.equal(engine.module.weight, new)
    kl = float(region._measure().new_old.mean())
    assert kl > 0
    certificate = region.hold(kl / 4, "mean")
    assert certificate is not None
    assert 0 < certificate.share < 1
    assert certificate.value_before == pytest.approx(kl)
    torch.testing.assert_close(engine.module.weight.detach(), torch.lerp(old, new, certificate.share))


@pytest.mark.parametrize("bound", [0.02, math.inf])
def test_where_every_sequence_is_masked_out_the_old_weights_come_back(bound: float, caplog: pytest.LogCaptureFixture) -> None:
    engine = OneRank()
    old = engine.module.weight.detach().clone()
    region = DeployedRegion(engine)
    region.choose(masked(0, 1, 2, 3))
    moved(engine)
    assert region.hold(bound, "mean") is None
    assert torch.equal(engine.module.weight, old) == (bound < math.inf)
    assert ("nothing can be measured" in caplog.text) == (bound < math.inf)


def test_sequences_fit_into_a_ranks_share_and_one_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(x) for x in masked()["input_ids"].unbind()]
    monkeypatch.setattr(deployed, "TOKENS", 2 * (lengths[1] + lengths[2]))
    assert deployed._choose(masked(0), 2) == [1, 2]
    monkeypatch.setattr(deployed, "TOKENS", 1)
    assert deployed._choose(masked(0), 2) == [1]
