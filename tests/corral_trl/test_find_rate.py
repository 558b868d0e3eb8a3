"""`learning_rate="auto"`: the rate is found on the first batch, the search leaves nothing behind, and it costs no rollouts."""

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed_witness import certificates
from peft import LoraConfig
from test_deployed import let_accelerate_shard_on_cpus, run_of
from tiny_models import even_words, make_trainer, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from corral.lab.jobs.llm.train import resume, train
from corral.lab.jobs.llm.trainer import GuardCallback
from corral.llm import CorralConfig
from corral.trl import deployed
from corral.trl.api import FUSED
from corral.trl.deployed import LOST, MOST, NEAR, TRIALS, RateSearch, Trial, next_scale, schedule_of
from small_runs import save_model, small
from two_processes import run_two

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")

AUTO: dict[str, Any] = {"learning_rate": "auto", "lr_scheduler_type": "constant"}
CASES: dict[str, dict[str, Any]] = {
    "two updates": {},
    "one update": {"steps_per_generation": 1},
    "two passes": {"num_iterations": 2, "max_steps": 8},
    "accumulation": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    "linear": {"lr_scheduler_type": "linear", "max_steps": 6},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reused": {"reuse": "auto", "num_iterations": 3, "lr_scheduler_type": "linear", "max_steps": 12},
    "union": {"support": "union", "support_size": 4},
    "uncertain tokens": {"top_entropy_quantile": 0.5},
    "bfloat16": {"bf16": True},
    "adaptive entropy bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0},
    "dropout": {"disable_dropout": False, "model": lambda: tiny_model(attention_dropout=0.5)},
    "adapter": {"disable_dropout": False, "extra": lambda: {"peft_config": lora()}},
    "buffer": {"model": lambda: counting(tiny_model())},
    "upwards": {"objective": "ppo_clip", "deployed_bound": 1.0},
}


def lora() -> LoraConfig:
    """An adapter with dropout, whose first weights are those of seed 0."""
    torch.manual_seed(0)
    return LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")


def counting(model: Any) -> Any:
    """The model with a buffer that counts its forward passes in training, as the running mean of a BatchNorm would change."""
    model.register_buffer("passes", torch.zeros(()))

    def count(module: Any, _: Any) -> None:
        if module.training:
            module.passes.add_(1)

    model.register_forward_pre_hook(count)
    return model


class Trace(TrainerCallback):
    """Everything that a training loop does, at every update: batches drawn, rewards, weights, moments, rates, random state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.drawn, self.states = trainer, 0, list[dict[str, Tensor]]()
        self.peaks = list[float]()
        """The schedule's peak rate, at every update."""
        generate = trainer._generate_and_score_completions

        def generate_and_score(*args: Any) -> Any:
            self.drawn += 1
            return generate(*args)

        trainer._generate_and_score_completions = generate_and_score
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.peaks.append(schedule_of(self.trainer).base_lrs[0])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer, optimizer = self.trainer, self.trainer.optimizer.optimizer
        state = {name: p.detach() for name, p in trainer.model.named_parameters()}
        state |= {f"buffer {name}": x for name, x in trainer.model.named_buffers()}
        for index, moments in enumerate(optimizer.state.values()):
            state |= {f"{name} {index}": torch.as_tensor(x) for name, x in moments.items()}
        state = {name: (x.to_local() if isinstance(x, DTensor) else x).clone() for name, x in state.items()}
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


def assert_aimed(trainer: Any, trace: Trace) -> None:
    """The first step after a search moved the network by 2 bounds, as its controller tells."""
    searched = next(i for i, line in enumerate(trainer.state.log_history) if "tr/rate_trials" in line)
    first = next(line for line in trainer.state.log_history[searched:] if "tr/step_share" in line)
    updates = trainer.deployed.per_step
    factor = trace.peaks[searched + updates] / trace.peaks[searched]  # (½ δ / D)^.35
    bounds = 0.5 * factor ** (-1 / 0.35)
    assert 2 / NEAR <= bounds <= 2 * NEAR
    assert 0 < first["tr/step_share"] < 1
    assert first["tr/deployed_kl_mean"] <= trainer.args.deployed_bound


def both(tmp_path: Path, **given: Any) -> tuple[Any, Any, Trace, Trace]:
    """A run at "auto", and one that starts at the rate which that has found."""
    model, extra = given.pop("model", tiny_model), given.pop("extra", dict)
    found = make_trainer(tmp_path, model=model(), trainer_kwargs=extra(), **{"max_steps": 4, **AUTO, **given})
    traces = [Trace(found)]
    found.train()
    (trials,) = (line["tr/rate_trials"] for line in found.state.log_history if "tr/rate_trials" in line)
    assert 1 <= trials <= TRIALS
    rate = traces[0].peaks[0]
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
    assert_aimed(found, one)


def test_the_search_spends_no_rollouts_and_calls_no_reward_or_observer_twice(tmp_path):
    counts = []
    for rate in ("auto", 1e-3):
        rewards, observed = list[int](), list[int]()
        trainer = make_trainer(
            tmp_path, rewards=calls(rewards), **{**AUTO, "learning_rate": rate}, deployed_bound=0.03, max_steps=4
        )
        trainer.token_observer = lambda inputs, *_: observed.append(len(inputs["completion_ids"]))  # noqa: B023
        trace = Trace(trainer)
        trainer.train()
        tokens = trainer.state.log_history[0]["num_tokens"]  # of the first batch; later ones are other policies'
        counts.append((rewards, observed, trace.drawn, tokens))
    assert counts[0] == counts[1]
    assert counts[0][:3] == ([8, 8], [4] * 4, 2)


def test_a_number_is_no_search(tmp_path, monkeypatch):
    monkeypatch.setattr(RateSearch, "find", None)
    trainer = make_trainer(tmp_path, deployed_bound=0.03, learning_rate=1e-3)
    trainer.train()
    assert not any("tr/rate_trials" in line for line in trainer.state.log_history)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_default_bound_falls_where_completions_are_long(tmp_path, monkeypatch, passes):
    # 0.05 nats per completion of n tokens are 0.05 / n nats per token, below the default of .03 or .02 from 3 tokens on.
    monkeypatch.setattr(deployed, "PER_COMPLETION", 0.05)
    trainer = make_trainer(tmp_path, **AUTO, num_iterations=passes, max_steps=4 * passes)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "tr/step_share" in line]
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line]
    for line, length in zip(lines, lengths, strict=True):
        assert line["tr/deployed_bound"] == pytest.approx(0.05 / length, rel=1e-6)
        assert 0 < line["tr/deployed_kl_mean"] <= line["tr/deployed_bound"] < 0.02
    given = make_trainer(tmp_path, **AUTO, num_iterations=passes, max_steps=4 * passes, deployed_bound=0.03)
    given.train()
    assert not any("tr/deployed_bound" in line for line in given.state.log_history)
    assert max(line["tr/deployed_kl_mean"] for line in given.state.log_history if "tr/step_share" in line) > 0.02


def test_what_was_tried_is_said_in_one_sentence(tmp_path, caplog):
    caplog.set_level(logging.INFO, "corral")
    trainer = make_trainer(tmp_path, **AUTO)
    trainer.train()
    (said,) = (one.getMessage() for one in caplog.records if "learning rate" in one.getMessage())
    (trials,) = (int(line["tr/rate_trials"]) for line in trainer.state.log_history if "tr/rate_trials" in line)
    rate = trainer.state.log_history[0]["learning_rate"]
    assert said.startswith(f"The learning rate starts at {rate:.2g}: before it is retracted, the first step moves the network")
    assert f"{trials} trials on its rollouts, each undone: " in said
    assert " at 0.001" in said


class Silent:
    """A reward that is the same for every completion of the first batch, so that the first batch has no gradient."""

    __name__ = "silent"

    def __init__(self) -> None:
        self.called = 0

    def __call__(self, completions: list[str], **given: Any) -> list[float]:
        self.called += 1
        return [0.5] * len(completions) if self.called == 1 else even_words(completions, **given)


def test_a_batch_without_a_gradient_leaves_the_search_to_the_next(tmp_path, caplog):
    caplog.set_level(logging.INFO, "corral")
    given = {**AUTO, "objective": "ppo_clip", "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path, rewards=Silent(), **given)
    trace = Trace(trainer)
    trainer.train()
    assert "Update 1: no completion of this batch has a gradient" in caplog.text
    assert [("tr/rate_trials" in line) for line in trainer.state.log_history[:6]] == [False, False, True, False, False, False]
    assert (trace.drawn, trace.states[1]["rate"][0]) == (3, 1e-3)
    assert certificates(trainer)[0]["tr/deployed_kl_mean"] < 1e-6
    assert_aimed(trainer, trace)
    assert [int(state["step 0"]) for state in trace.states] == [1, 2, 3, 4, 5, 6]  # Adam's own count
    # Resumed after the silent batch, the run searches as the uninterrupted one did.
    rewards = Silent()
    rewards.called = 1
    again = make_trainer(tmp_path, rewards=rewards, **given)
    resumed = Trace(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trace.states = trace.states[2:]
    for state in trace.states + resumed.states:
        del state["step"]  # TRL counts micro-batches from 0 again
    assert same(trace, resumed)


def test_a_resumed_run_searches_no_more_and_is_the_uninterrupted_one(tmp_path, monkeypatch):
    settings = small(save_model(tmp_path / "model"), objective="ppo_clip", learning_rate="auto", steps=3, keep_checkpoints=9)
    train(settings, out=tmp_path / "run", quiet=True)
    whole, weights = run_of(tmp_path / "run")
    assert ["tr/rate_trials" in line for line in whole] == [False, True, False, False]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-6")
    (tmp_path / "run" / "summary.json").unlink()
    monkeypatch.setattr(RateSearch, "find", None)
    resume(tmp_path / "run", quiet=True)
    again, weights_again = run_of(tmp_path / "run")
    assert whole == again
    assert all(torch.equal(x, weights_again[name]) for name, x in weights.items())


def lose(trainer: Any, count: int) -> None:
    """The first measurements of the deployed network are no numbers."""
    measure, left = trainer.deployed.probe.measure, [None] * count

    def measured() -> Any:
        found = measure()
        return replace(found, new_old=found.new_old * math.nan) if left and left.pop() is None else found

    trainer.deployed.probe.measure = measured


def test_a_rate_at_which_nothing_is_a_number_is_divided_by_thirty(tmp_path):
    trainer = make_trainer(tmp_path, **AUTO, deployed_bound=1e-4, max_steps=4)
    lose(trainer, 1)
    trace = Trace(trainer)
    trainer.train()
    assert trace.peaks[0] < 1e-3
    assert_aimed(trainer, trace)


def test_a_search_in_which_nothing_is_a_number_starts_at_the_first_rate_and_says_so(tmp_path, caplog):
    trainer = make_trainer(tmp_path, **AUTO)
    lose(trainer, TRIALS)
    trace = Trace(trainer)
    trainer.train()
    assert trace.peaks[0] == 1e-3
    assert f"the KL of the first step was no number in any of {TRIALS} trials" in caplog.text
    assert certificates(trainer)[0]["tr/deployed_kl_mean"] <= 0.03


def test_gradients_that_are_no_numbers_are_skipped_in_a_trial_as_the_guard_skips_them(tmp_path):
    trainer = make_trainer(tmp_path, **AUTO, max_steps=4)
    trainer.add_callback(GuardCallback())
    # The first micro-batch of the first step, in every trial and in the step that is kept.
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * (math.nan if trainer._step == 0 else 1.0))
    trace = Trace(trainer)
    trainer.train()
    assert all(x.isfinite().all() for state in trace.states for x in state.values())
    assert_aimed(trainer, trace)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("most", [1.0, 10.0, math.inf])
@pytest.mark.parametrize("at", [1e-5, 1e-3, 0.03, 1.0, 30.0])
def test_a_search_finds_the_aim_wherever_it_is(power, most, at):
    # D(rate) = aim · (rate / at)^p near the old weights, and never more than `most`.
    aim, tried, scale = 0.01, list[Trial](), 1.0
    while scale is not None:
        grown = aim * (scale / at) ** power
        tried.append(Trial(scale, grown if most == math.inf else most * grown / (most + grown)))
        scale = next_scale(tried, aim)
    assert len(tried) <= TRIALS
    assert tried[-1].is_near(aim)


def test_golden_next_rates():
    # One trial: 1 · √(.01 / .16) = ¼. None is a number: 1 / 30. Too little: √(.01 / .0001) = 10, and 100 is the most.
    assert next_scale([Trial(1.0, 0.16)], 0.01) == pytest.approx(0.25)
    assert next_scale([Trial(1.0, math.nan)], 0.01) == next_scale([Trial(1.0, math.inf)], 0.01) == LOST
    assert next_scale([Trial(1.0, 1e-4)], 0.01) == pytest.approx(10)
    assert next_scale([Trial(1.0, 1e-12)], 0.01) == next_scale([Trial(1.0, 0.0)], 0.01) == MOST
    assert next_scale([Trial(1.0, 0.0), Trial(MOST, 1e-9)], 0.01) is None
    # Two too far, of slope 1: p = 3/2, so .01 · (.01 / .08)^(2/3) = .0025.
    assert next_scale([Trial(1.0, 8.0), Trial(0.01, 0.08)], 0.01) == pytest.approx(0.0025)
    # A third trial relies on the slope: .0025 · (.01 / .04) for the slope of ½ between .0025 and .01 is .0025 / 16.
    far = [Trial(1.0, 8.0), Trial(0.01, 0.08), Trial(0.0025, 0.04)]
    assert next_scale(far, 0.01) == pytest.approx(0.0025 / 16)
    # Between .1 (a hundredth of the aim) and 1 (a hundred times): halfway in logarithms, also where one side is no number.
    assert next_scale([Trial(1.0, 1.0), Trial(0.1, 1e-4)], 0.01) == pytest.approx(math.sqrt(0.1))
    assert next_scale([Trial(1.0, math.nan), Trial(0.1, 1e-4)], 0.01) == pytest.approx(math.sqrt(0.1))
    # Never next to an end: a tenth of the way from .1 to 1 at least.
    assert next_scale([Trial(1.0, 9e9), Trial(0.1, 6.6e-3)], 0.01) == pytest.approx(0.1 * 10**0.1)
    assert next_scale([Trial(1.0, 0.0149)], 0.01) is next_scale([Trial(1.0, 0.0067)], 0.01) is None
    assert next_scale([Trial(1.0, 1.0)] * TRIALS, 0.01) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deployed_bound": math.inf}, "follows `deployed_bound`, which must be finite"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "on the first batch of rollouts, which must end"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "is 3, no multiple of `gradient_accumulation_steps`"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, given, words):
    with pytest.raises(ValueError, match=words):
        CorralConfig(output_dir=str(tmp_path), learning_rate="auto", use_cpu=True, bf16=False, **given)


def work(rank: int, folder: Path) -> None:
    """One of two processes."""
    found: dict[str, Any] = {}
    shape = {"use_cpu": True, "num_iterations": 2, "gradient_accumulation_steps": 2}
    for case, given in {"DDP": {}, "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2}}}.items():
        if case == "FSDP2":
            let_accelerate_shard_on_cpus()
        auto, fixed, one, other = both(folder, **shape, **given)
        assert isinstance(auto.model.lm_head.weight, DTensor) == (case == "FSDP2")
        assert_aimed(auto, one)
        found[case] = one.peaks, same(one, other), lines_of(auto) == lines_of(fixed), certificates(auto), one.drawn
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    run_two(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.supports("other: learning rate found on the first batch, two processes", door="TRL")
@pytest.mark.parametrize("case", ["DDP", "FSDP2"])
def test_two_processes_find_the_same_rate(two, case):
    (peaks, equal, lines, found, drawn), also = (one[case] for one in two)
    assert (peaks, found) == (also[0], also[3])
    assert equal
    assert lines
    assert drawn == 2
