"""Tinker's own data through corral's loss; no server is called. `make test-engines` brings Tinker's client."""

import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="needs tinker (make test-engines)")

import tinker
import torch
from tinker.lib.public_interfaces.training_client import TrainingClient

from corral.engines.tinker import make_loss, support_targets
from tolerance import assert_close

RECORD = json.loads((Path(__file__).parent / "signatures" / "tinker.json").read_text())


def test_its_custom_loss_is_called_as_committed() -> None:
    name = "tinker:TrainingClient.forward_backward_custom"
    assert list(inspect.signature(TrainingClient.forward_backward_custom).parameters) == RECORD["signatures"][name]


@pytest.mark.parametrize("support", [True, False])
def test_its_datum_carries_what_the_loss_reads(support: bool) -> None:
    tokens, logp = torch.tensor([3, 1, 2]), torch.tensor([-1.0, -2.5, -0.5])
    top_ids, top_logp = torch.tensor([[3, 5], [7, 8], [2, 4]]), torch.tensor([[-1.0, -1.5], [-0.7, -1.2], [-0.5, -2.0]])
    fields = support_targets(tokens, top_ids, top_logp, logp) if support else {"target_tokens": tokens, "logprobs": logp}
    fields |= {"advantages": torch.tensor([1.0, -1.0, 0.5]), "mask": torch.tensor([1.0, 1.0, 0.0])}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([9, 3, 1]), loss_fn_inputs=fields)
    new = (
        fields["logprobs"].clamp(min=-20.0) + 0.1 * torch.tensor([1.0, -1.0, 1.0])[(...,) + (None,) * support]
    ).requires_grad_()
    loss_fn = make_loss("troll" if support else "ppo_clip")
    loss, metrics = loss_fn([datum], [new])
    loss.backward()
    assert new.grad is not None
    assert (new.grad[2] == 0).all()
    assert (new.grad[:2] != 0).any()
    assert metrics["tr/kl_before"] > 0

    # Tinker's client sends the gradient as the weights of a sum of log-probs.
    reported = tinker.ForwardBackwardOutput(
        loss_fn_output_type="", loss_fn_outputs=[{"logprobs": tinker.TensorData.from_torch(new.detach())}]
    )
    sent = TrainingClient._compute_custom_loss([datum], loss_fn, reported)
    weights = sent.data[0].loss_fn_inputs["weights"].to_torch()
    assert_close(weights, -new.grad)
    assert sent.metrics == metrics
