"""`learning_rate="auto"`: the rate is found on the first batch, nothing of the search is left behind, and it costs no rollouts."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed_witness import Witness, certificates
from peft import LoraConfig
from test_deployed import let_accelerate_shard_on_cpus, run_of
from tiny_models import even_words, make_trainer, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from corral.llm import CorralConfig
from corral.llm.find_rate import LOST, MOST, NEAR, TRIALS, RateSearch, Trial, next_scale
from corral.llm.train import resume, train
from corral.llm.trl_api import FUSED
from policy_objectives import one_of_each_kind
from small_runs import save_model, small
from two_processes import run_two

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")

AUTO: dict[str, Any] = {"learning_rate": "auto", "lr_scheduler_type": "constant"}
CASES: dict[str, dict[str, Any]] = {
    "two updates": {},
    "one update": {"steps_per_generation": 1},
    "two passes": {"num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    "linear": {"lr_scheduler_type": "linear", "max_steps": 6},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reused": {"reuse": "auto", "num_iterations": 3},
    "union": {"support": "union", "support_size": 4},
    "uncertain tokens": {"top_entropy_quantile": 0.5},
    "bfloat16": {"bf16": True},
    "upwards": {"objective": "ppo_clip", "deployed_bound": 1.0},
}


class Trace(TrainerCallback):
    """Everything that a training loop does, at every update: batches drawn, rewards, weights, moments, rates, random state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.drawn, self.states = trainer, 0, list[dict[str, Tensor]]()
        self.start: float | None = None
        """The peak rate of the first update."""
        generate = trainer._generate_and_score_completions

        def generate_and_score(*args: Any) -> Any:
            self.drawn += 1
            return generate(*args)

        trainer._generate_and_score_completions = generate_and_score
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = self.start or self.trainer.deployed._scheduler().base_lrs[0]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer, optimizer = self.trainer, self.trainer.optimizer.optimizer
        state = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        state |= {f"buffer {name}": x.clone() for name, x in trainer.model.named_buffers()}
        for index, moments in enumerate(optimizer.state.values()):
            state |= {f"{name} {index}": torch.as_tensor(x).clone() for name, x in moments.items()}
        state |= {"rate": torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)}
        self.states.append(state | {"random": torch.get_rng_state(), "step": torch.tensor(trainer._step)})


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    """The log without times, and without what only a search writes."""
    gone = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "tr/rate_trials")
    return [{key: value for key, value in line.items() if key not in gone} for line in trainer.state.log_history]


def same(one: Trace, other: Trace) -> bool:
    return len(one.states) == len(other.states) and all(
        mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())
        for mine, theirs in zip(one.states, other.states, strict=True)
    )


def calls(rewards: list[int]) -> Any:
    """A reward function that writes down how often it is called."""

    def counted(completions: list[str], **given: Any) -> list[float]:
        rewards.append(len(completions))
        return even_words(completions, **given)

    return counted


def both(tmp_path: Path, **given: Any) -> tuple[Any, Any, Trace, Trace]:
    """A run at "auto", and one that starts at the rate which that has found."""
    model, extra = given.pop("model", tiny_model), given.pop("extra", dict)
    found = make_trainer(tmp_path, model=model(), trainer_kwargs=extra(), **{"max_steps": 4, **AUTO, **given})
    traces = [Trace(found)]
    found.train()
    (trials,) = (line["tr/rate_trials"] for line in found.state.log_history if "tr/rate_trials" in line)
    assert 1 <= trials <= TRIALS
    rate = traces[0].start
    given = {"max_steps": 4, **AUTO, "deployed_bound": found.args.deployed_bound, **given, "learning_rate": rate}
    given["lr_scheduler_type"] = found.args.lr_scheduler_type
    fixed = make_trainer(tmp_path, model=model(), trainer_kwargs=extra(), **given)
    traces.append(Trace(fixed))
    fixed.train()
    return found, fixed, *traces


@pytest.mark.supports("other: learning rate found on the first batch", door="TRL")
@pytest.mark.parametrize("case", CASES)
def test_the_first_steps_are_those_of_a_run_that_starts_at_the_rate_found(tmp_path, case):
    found, fixed, one, other = both(tmp_path, **CASES[case])
    assert same(one, other)
    assert lines_of(found) == lines_of(fixed)
    assert one.drawn == other.drawn
    assert found.deployed.searches is fixed.deployed.searches is False
