"""The trainer's hold on the network it deploys: in half precision, under autocast, with tied weights."""

import math

import pytest
import torch
from deployed_witness import WILD, Witness, certificates, half_logp
from tiny_models import make_trainer, tiny_model

from corral.trl.api import FUSED
from tolerance import assert_close

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")


@pytest.mark.supports("other: deployed network, {precision}", door="TRL")
@pytest.mark.parametrize("precision", ["bfloat16 weights", "bfloat16 autocast"])
@pytest.mark.parametrize("objective", ["ppo_clip", "troll"])
def test_half_precision_is_held_as_it_is_stored(tmp_path, precision, objective):
    weights = precision == "bfloat16 weights"
    model = tiny_model().bfloat16() if weights else tiny_model()
    trainer = make_trainer(
        tmp_path, objective, model=model, bf16=not weights, deployed_bound=0.05, max_steps=4, learning_rate=0.3
    )
    witness = Witness(trainer, updates=2, logp=half_logp)
    trainer.train()
    found = certificates(trainer)
    assert len(found) == 2
    assert 0 < found[0]["tr/step_share"] < 1
    assert all(p.dtype == (torch.bfloat16 if weights else torch.float32) for p in trainer.model.parameters())
    for line, kl in zip(found, witness.kl, strict=True):
        assert line["tr/deployed_kl_mean"] <= 0.05
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=0.05, atol=2e-4)


def test_a_tied_head_is_held_with_its_embedding(tmp_path):
    model = tiny_model("gemma2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trainer = make_trainer(tmp_path, model=model, deployed_bound=0.02, max_steps=4, **WILD)
    witness = Witness(trainer, updates=2)
    trainer.train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = certificates(trainer)
    assert found[0]["tr/step_share"] < 1
    for line, kl in zip(found, witness.kl, strict=True):
        assert line["tr/deployed_kl_mean"] <= 0.02
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=5e-3, atol=1e-6)


def test_rounding_is_a_small_distance(tmp_path):
    # The weights move by next to nothing; activations in half precision are rounded to their neighbours here and there.
    trainer = make_trainer(tmp_path, bf16=True, deployed_bound=math.inf, max_steps=2, learning_rate=1e-6)
    trainer.train()
    (line,) = certificates(trainer)
    assert 0 < line["tr/deployed_kl_mean"] < 1e-3
