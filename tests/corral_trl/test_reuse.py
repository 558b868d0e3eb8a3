"""`reuse="auto"`: passes over a batch are made while the network stays in reach, and skipped after that."""

import math
from typing import Any

import pytest
import torch
from deployed_witness import WILD, Witness, certificates
from tiny_models import make_trainer
from transformers import TrainerCallback

from corral.llm import CorralConfig
from corral.trl.api import FUSED
from policy_objectives import one_of_each_kind
from tolerance import assert_close

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")

PASSES = {"reuse": "auto", "num_iterations": 3, "steps_per_generation": 2}
"""At most three passes of two updates."""


class Trace(TrainerCallback):
    """The weights after every update, and how many micro-batches the network was trained on until then."""

    def __init__(self, trainer: Any) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.losses: list[int] = []
        self.generated = 0
        self.trainer, self.count = trainer, 0
        loss, generate = trainer._compute_loss, trainer._generate_and_score_completions

        def compute_loss(*args: Any) -> Any:
            self.count += 1
            return loss(*args)

        def generate_and_score(*args: Any) -> Any:
            self.generated += 1
            return generate(*args)

        trainer._compute_loss, trainer._generate_and_score_completions = compute_loss, generate_and_score
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self.trainer.model.named_parameters()})
        self.losses.append(self.count)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.supports("other: deployed network, several passes over a batch", door="TRL")
@pytest.mark.parametrize("objective", one_of_each_kind(without=("decoupled_ppo",)))
def test_every_objective_reuses_its_batch(tmp_path, objective):
    given = {"loss_type": "auto", "max_steps": 6, "deployed_bound": 0.02, "learning_rate": 0.01}
    trainer = make_trainer(tmp_path, objective, **given, **PASSES)
    trace, witness = Trace(trainer), Witness(trainer, updates=6)
    trainer.train()
    ((line,), (kl,)) = certificates(trainer), witness.kl
    passes = line["tr/passes"]
    assert passes in (1, 2, 3)
    assert trace.losses[-1] == 2 * passes
    assert line["tr/deployed_kl_mean"] <= 0.02
    assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=5e-3, atol=1e-6)


def test_once_it_is_out_of_reach_nothing_runs_and_nothing_moves(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.001, max_steps=12, **WILD, **PASSES)
    trace = Trace(trainer)
    trainer.train()
    assert [line["tr/passes"] for line in certificates(trainer)] == [1.0, 1.0]
    assert trace.losses == [1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4]
    assert trace.generated == 2  # when TRL's own count says so
    first, second = trace.weights[1], trace.weights[7]
    assert all(equal(first, weights) for weights in trace.weights[1:6])
    assert all(equal(second, weights) for weights in trace.weights[7:])
    assert not equal(first, second)
    assert trainer.state.global_step == 12
    # The schedule has gone on, and the rate came down by a thirtieth and then by √(.0005 / D).
    scale = trainer.deployed.controller.scale
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * scale)
    assert scale < 1 / 30


def test_a_pass_may_be_one_update(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.001, max_steps=6, gradient_accumulation_steps=2, **WILD, **PASSES)
    trace = Trace(trainer)
    trainer.train()
    assert trace.losses == [2, 2, 2, 4, 4, 4]
    assert trace.generated == 2
    assert equal(trace.weights[0], trace.weights[2])
    assert equal(trace.weights[3], trace.weights[5])


@pytest.mark.parametrize(("bound", "share"), [(math.inf, 1.0), (0.02, 0.9)])
def test_a_step_that_stays_near_has_all_its_passes_and_is_then_retracted(tmp_path, bound, share):
    # The bound is exceeded in the second pass, and fifty times it never: what is kept is a share of three passes.
    found = []
    for reuse in ("fixed", "auto"):
        given = {"deployed_bound": bound, "max_steps": 6, "learning_rate": 0.001, **PASSES, "reuse": reuse}
        trainer = make_trainer(tmp_path, "ppo_clip", **given)
        trainer.train()
        (line,) = certificates(trainer)
        assert line.get("tr/passes") == (3.0 if reuse == "auto" else None)
        assert line["tr/step_share"] <= share
        found.append({**dict(trainer.model.named_parameters()), "rate": torch.tensor(trainer.deployed.controller.scale)})
    assert equal(*found)


def test_a_batch_whose_ratios_are_spread_is_used_up(tmp_path):
    # No bound, so that the effective sample size alone decides; or one that is never reached, and no reason for a larger rate.
    for bound in (math.inf, 100.0):
        trainer = make_trainer(tmp_path, deployed_bound=bound, max_steps=6, **WILD, **PASSES)
        trainer.train()
        (line,) = certificates(trainer)
        assert line["tr/passes"] < 3
        assert line["tr/step_share"] == trainer.deployed.controller.scale == 1.0


@pytest.mark.parametrize(("rate", "least", "most"), [(0.3, 1 / 30, 0.25), (1e-6, 1.5, 1.5)])
def test_the_rate_moves_where_no_number_of_passes_helps(tmp_path, rate, least, most):
    trainer = make_trainer(tmp_path, "ppo_clip", deployed_bound=0.02, max_steps=6, learning_rate=rate, **PASSES)
    trainer.train()
    assert least <= trainer.deployed.controller.scale <= most  # the most that a step changes it by


def test_defaults(tmp_path):
    config = CorralConfig(output_dir=str(tmp_path), reuse="auto", use_cpu=True, bf16=False)
    assert (config.num_iterations, config.deployed_bound) == (8, 0.02)
    config = CorralConfig(
        output_dir=str(tmp_path), reuse="auto", num_iterations=4, deployed_bound=0.1, use_cpu=True, bf16=False
    )
    assert (config.num_iterations, config.deployed_bound) == (4, 0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reuse": "sometimes"}, "`reuse` is one of fixed, auto"),
        ({"reuse": "auto", "steps_per_generation": 2, "gradient_accumulation_steps": 4}, "must end with an update"),
        ({"reuse": "auto", "fp16": True}, "loss scaling of fp16"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_settings_that_cannot_work_are_refused(tmp_path, given, words):
    with pytest.raises(ValueError, match=words):
        CorralConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
