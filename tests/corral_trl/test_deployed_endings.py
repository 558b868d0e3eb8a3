"""A run that ends inside a step: its last network is measured and bounded before it is logged and saved, or undone."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed_witness import WILD, Witness, certificates, half_logp
from peft import LoraConfig
from safetensors.torch import load_file
from test_deployed import run_of
from test_deployed_choice import weights_of
from tiny_models import even_words, make_trainer, prompts, tiny_model
from torch import Tensor
from transformers import TrainerCallback

from corral.lab.jobs.llm.train import resume, train
from corral.lab.jobs.llm.trainer import RunTrainer
from corral.trl.api import FUSED
from small_runs import save_model, small
from tolerance import assert_close
from two_processes import run_two

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")

BOUND = 1e-3
HELD = {"deployed_bound": BOUND, **WILD}


class At(TrainerCallback):
    """Calls `act(control)` at one event, once so many updates are done."""

    def __init__(self, event: str, update: int, act: Any) -> None:
        def on_event(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == update:
                act(control)

        setattr(self, event, on_event)


def stop(control: Any) -> None:
    control.should_training_stop = True


def interrupt(control: Any) -> None:
    raise KeyboardInterrupt


def check_last(trainer: Any, witness: Witness, steps: int, bound: float = BOUND, **tolerance: float) -> None:
    """The last certificate is the true KL of the network that is left, and within the bound."""
    found = certificates(trainer)
    assert len(found) == steps
    kl = witness.measure()
    assert 0 < kl.mean() <= 1.01 * bound + tolerance.get("atol", 0.0)
    assert found[-1]["tr/deployed_kl_mean"] <= bound
    if steps > 1 or trainer.args.logging_steps == 1:  # else one line has the mean of all certificates
        assert_close(torch.tensor(found[-1]["tr/deployed_kl_mean"]), kl.mean(), **{"rtol": 1e-2, "atol": 1e-6, **tolerance})


@pytest.mark.supports("other: deployed network, a run that ends inside a step", door="TRL")
@pytest.mark.parametrize(
    "kind", ["plain", "checkpointing", "adapter", "bfloat16 autocast", "dropout", "several passes", "up to eight passes"]
)
def test_a_run_of_too_few_updates_is_bounded_and_saved_so(tmp_path, kind):
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "plain": {},
        "checkpointing": {"gradient_checkpointing": True},
        "adapter": {"trainer_kwargs": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}},
        "bfloat16 autocast": {"bf16": True},
        "dropout": {"model": tiny_model(attention_dropout=0.5), "disable_dropout": False},
        "several passes": {"num_iterations": 2},
        "up to eight passes": {"reuse": "auto", "learning_rate": 1e-3},
    }[kind]
    half, steps = kind.startswith("bf"), 1 if "passes" in kind else 2
    tolerance, bound = ({"rtol": 0.1, "atol": 1e-3}, 0.05) if half else ({}, BOUND)
    given = {**HELD, "deployed_bound": bound, "max_steps": 3, "save_strategy": "steps", "save_steps": 100, **given}
    trainer = make_trainer(tmp_path, **given)
    per_step = trainer.deployed.per_step
    witness = Witness(trainer, per_step, **({"logp": half_logp} if half else {}))
    seen: list[dict[str, Tensor]] = []
    trainer.add_callback(At("on_step_end", 3, lambda control: seen.append(weights_of(trainer))))
    trainer.train()
    check_last(trainer, witness, steps, bound, **tolerance)
    weights = weights_of(trainer)
    assert all(torch.equal(x, weights[name]) for name, x in seen[0].items()), "other callbacks see the bounded network"
    (name,) = [path.name for path in (tmp_path / "checkpoint-3").glob("*model.safetensors")]
    saved = load_file(tmp_path / "checkpoint-3" / name)
    if kind != "adapter":
        assert all(torch.equal(x.cpu(), weights[key].cpu()) for key, x in saved.items())
    else:
        ours = sorted(float(x.double().norm()) for key, x in weights.items() if "lora" in key)
        assert ours == pytest.approx(sorted(float(x.double().norm()) for x in saved.values()))
    if kind == "up to eight passes":
        assert certificates(trainer)[-1]["tr/passes"] == 1.5  # three of its sixteen updates


@pytest.mark.parametrize(
    ("event", "logging_steps"),
    [
        ("on_log", 1),
        *(
            (event, every)
            for event in ("on_step_end", "on_substep_end", "on_evaluate", "on_optimizer_step")
            for every in (1, 100)
        ),
    ],
)
def test_a_callback_that_stops_a_run_is_followed_by_a_certificate(tmp_path, event, logging_steps):
    given = {"eval_strategy": "steps", "eval_steps": 3} if event == "on_evaluate" else {}
    given |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4} if event == "on_substep_end" else {}
    trainer = make_trainer(
        tmp_path, **HELD, max_steps=20, logging_steps=logging_steps, save_strategy="steps", save_steps=20, **given,
        trainer_kwargs={"eval_dataset": prompts(4)} if "eval_steps" in given else None,
    )  # fmt: skip
    witness = Witness(trainer, 2)

    def act(control: Any) -> None:
        control.should_training_stop = control.should_save = True

    trainer.add_callback(At(event, 2 if event == "on_optimizer_step" else 3, act))
    trainer.train()
    check_last(trainer, witness, 2 if logging_steps == 1 else 1)
    assert trainer.state.global_step == 3
    if event in ("on_step_end", "on_optimizer_step") and logging_steps == 1:
        assert "loss" in [line for line in trainer.state.log_history if "tr/step_share" in line][-1], (
            "the last update's own line"
        )
    if event != "on_substep_end":
        saved, weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors"), weights_of(trainer)
        assert all(torch.equal(x.cpu(), weights[key].cpu()) for key, x in saved.items())


@pytest.mark.parametrize("how", ["the last epoch", "no further epoch"])
def test_the_end_of_the_epochs_inside_a_step(tmp_path, how):
    # 30 micro-batches an epoch are 8 updates, and a step has three.
    shape = {"steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4}
    trainer = make_trainer(tmp_path, **HELD, max_steps=-1, num_train_epochs=1, **shape)
    witness, updates = Witness(trainer, 3), 8
    if how == "no further epoch":
        updates = 5

        def end_epoch(control: Any) -> None:
            control.should_epoch_stop = True

        trainer.add_callback(At("on_step_end", updates, end_epoch))
    trainer.train()
    assert trainer.state.global_step == updates
    check_last(trainer, witness, math.ceil(updates / 3))


class Failing:
    """A reward that raises at its second batch."""

    __name__ = "failing"

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, completions: list[str], **given: Any) -> list[float]:
        self.batches += 1
        if self.batches == 2:
            raise RuntimeError("no verifier")
        return even_words(completions)


@pytest.mark.supports("other: deployed network, a run that an exception ends", door="TRL")
@pytest.mark.parametrize("kind", ["reward", "Ctrl-C after an update", "Ctrl-C while measuring held-out success"])
def test_an_exception_is_followed_by_a_certificate(tmp_path, kind):
    if kind == "reward":  # two batches a step, the second is drawn inside the second update
        shape = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "rewards": Failing()}
    else:
        shape = {"steps_per_generation": 2}
    trainer = make_trainer(tmp_path, **HELD, max_steps=20, **shape)
    witness = Witness(trainer, 3 if kind == "reward" else 2)
    if kind == "Ctrl-C after an update":
        trainer.add_callback(At("on_step_end", 3, interrupt))
    elif kind.startswith("Ctrl-C"):
        trainer.add_callback(At("on_step_end", 3, lambda control: (trainer.model.eval(), interrupt(control))))
    with pytest.raises(RuntimeError if kind == "reward" else KeyboardInterrupt):
        trainer.train()
    check_last(trainer, witness, 1 if kind == "reward" else 2)


def test_an_exception_before_any_update_changes_and_says_nothing(tmp_path, caplog):
    trainer = make_trainer(tmp_path, **HELD, max_steps=20, rewards=Failing())
    before: list[dict[str, Tensor]] = []
    trainer.add_callback(At("on_step_begin", 2, lambda control: before.append(weights_of(trainer))))
    with pytest.raises(RuntimeError, match="no verifier"):
        trainer.train()
    assert all(torch.equal(x, before[0][name]) for name, x in weights_of(trainer).items())
    assert len(certificates(trainer)) == 1
    assert "The weights from before the step are back" not in caplog.text


def test_an_update_that_was_torn_is_undone(tmp_path):
    trainer = make_trainer(tmp_path, **HELD, max_steps=20)
    before = weights_of(trainer)

    def tear(control: Any) -> None:
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(2)
        raise KeyboardInterrupt

    trainer.add_callback(At("on_pre_optimizer_step", 0, tear))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in weights_of(trainer).items())


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "Ctrl-C again"])
@pytest.mark.parametrize("ending", ["exception", "stop", "end of a step"])
def test_where_nothing_can_be_measured_the_step_is_undone(tmp_path, caplog, failure, ending):
    trainer = make_trainer(tmp_path, **HELD, max_steps=20)
    before: list[dict[str, Tensor]] = []
    update = 4 if ending == "end of a step" else 3

    def fail_to_measure(control: Any) -> None:
        def measure() -> Any:
            with torch.no_grad():
                trainer.model.lm_head.weight.zero_()  # as in the middle of a retraction
            raise failure

        trainer.deployed.probe.measure = measure

    trainer.add_callback(At("on_step_begin", 2, lambda control: before.append(weights_of(trainer))))
    trainer.add_callback(At("on_optimizer_step", update - 1, fail_to_measure))
    if ending != "end of a step":
        trainer.add_callback(At("on_step_end", update, interrupt if ending == "exception" else stop))
    with pytest.raises((KeyboardInterrupt, torch.OutOfMemoryError)):
        trainer.train()
    assert all(torch.equal(x, before[0][name]) for name, x in weights_of(trainer).items())
    assert f"Update {update}: measuring the network failed ({type(failure).__name__}" in caplog.text
    assert caplog.text.count("The weights from before the step are back.") == 1
    assert len(certificates(trainer)) == 1


def test_a_network_that_is_no_number_at_the_end_is_undone(tmp_path):
    trainer = make_trainer(tmp_path, **HELD, max_steps=3)
    before: list[dict[str, Tensor]] = []

    def poison(control: Any) -> None:
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(math.nan)

    trainer.add_callback(At("on_step_begin", 2, lambda control: before.append(weights_of(trainer))))
    trainer.add_callback(At("on_optimizer_step", 2, poison))
    trainer.train()
    assert all(torch.equal(x, before[0][name]) for name, x in weights_of(trainer).items())
    assert certificates(trainer)[-1]["tr/step_share"] == 0.0


def test_measuring_alone_measures_the_last_network_too(tmp_path):
    states = []
    for bound in (None, math.inf):
        trainer = make_trainer(tmp_path, **{**HELD, "deployed_bound": bound}, max_steps=3)
        witness = Witness(trainer, 2)
        trainer.train()
        states.append(weights_of(trainer))
    found = certificates(trainer)
    assert len(found) == 2
    assert_close(torch.tensor(found[-1]["tr/deployed_kl_mean"]), witness.measure().mean(), rtol=1e-2, atol=1e-6)
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_partial_step_is_no_reason_for_a_larger_rate(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=3, steps_per_generation=4, learning_rate=1e-6)
    trainer.train()
    assert trainer.deployed.controller.scale == 1.0


@pytest.mark.refuses("other: deployed network, checkpoints inside a step", door="TRL")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"save_strategy": "steps", "save_steps": 3}, "`save_steps` is 3, .* Use save_steps=4."),
        ({"save_strategy": "steps", "save_steps": 0.3}, "`save_steps` is 3, .* Use save_steps=4."),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 5}, "`eval_steps` is 5, .* Use eval_steps=6."),
        (
            {"save_strategy": "epoch", "steps_per_generation": 3, "num_iterations": 2, "gradient_accumulation_steps": 4},
            "an epoch has 8 updates, .* Use save_strategy='steps' and save_steps=9.",
        ),
        (
            {
                "save_strategy": "best", "eval_strategy": "epoch", "steps_per_generation": 3, "num_iterations": 2,
                "gradient_accumulation_steps": 4,
            },
            "an epoch has 8 updates, .* Use eval_strategy='steps' and eval_steps=9.",
        ),
    ],
)  # fmt: skip
def test_checkpoints_inside_a_step_are_refused_at_the_start(tmp_path, given, words):
    given = {"metric_for_best_model": "reward", **given} if given["save_strategy"] == "best" else given
    kwargs = {"eval_dataset": prompts()} if "eval_strategy" in given else None
    trainer = make_trainer(tmp_path, **HELD, max_steps=10, trainer_kwargs=kwargs, **given)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "given",
    [
        {"save_strategy": "steps", "save_steps": 2},
        {"save_strategy": "steps", "save_steps": 3, "max_steps": 3},  # that is the end, where the network is bounded
        {"save_strategy": "steps", "save_steps": 500},
        {"save_strategy": "epoch"},
        {"save_strategy": "steps", "save_steps": 1, "deployed_bound": math.inf},  # nothing is bounded
    ],
)
def test_other_checkpoints_are_written(tmp_path, given):
    trainer = make_trainer(tmp_path, **{**HELD, "max_steps": 4, **given})
    trainer.train()
    names = {path.name for path in tmp_path.glob("checkpoint-*")}
    last, every = trainer.args.max_steps, {2: 2, 1: 1}.get(given.get("save_steps"), 100)
    assert names == {f"checkpoint-{update}" for update in range(1, last + 1) if update % every == 0 or update == last}


def test_a_callback_may_not_save_inside_a_step(tmp_path):
    trainer = make_trainer(tmp_path, **HELD, max_steps=20)

    def save(control: Any) -> None:
        control.should_save = True

    trainer.add_callback(At("on_step_end", 2, save))
    trainer.add_callback(At("on_step_end", 3, save))
    witness = Witness(trainer, 2)
    with pytest.raises(ValueError, match="after update 3, inside a step of 2 updates"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    check_last(trainer, witness, 2)


def test_what_a_callback_saves_before_the_last_update_is_what_stays(tmp_path):
    trainer = make_trainer(tmp_path, **HELD, max_steps=20)

    def save_and_stop(control: Any) -> None:  # as transformers does for SIGTERM, with `enable_jit_checkpoint`
        control.should_training_stop = True
        trainer._save_checkpoint(trainer.model, trial=None)

    trainer.add_callback(At("on_pre_optimizer_step", 3, save_and_stop))
    trainer.train()
    assert trainer.state.global_step == 4
    saved, weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors"), weights_of(trainer)
    assert all(torch.equal(x.cpu(), weights[key].cpu()) for key, x in saved.items())
    assert len(certificates(trainer)) == 2


def test_a_second_run_begins_with_the_weights_that_it_finds(tmp_path):
    trainer = make_trainer(tmp_path, **HELD, max_steps=3)
    trainer.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.5)
    found, before = weights_of(trainer), []
    trainer.add_callback(At("on_step_begin", 0, lambda control: before.append(weights_of(trainer))))
    trainer.train()
    assert all(torch.equal(x, before[0][name]) for name, x in found.items())


def test_a_run_resumed_inside_a_step_is_bounded(tmp_path):
    given = {**HELD, "save_strategy": "steps", "save_steps": 100}
    make_trainer(tmp_path, **given, max_steps=3).train()
    trainer = make_trainer(tmp_path, **given, max_steps=6)
    witness = Witness(trainer, 2)
    witness.old = trainer.model  # it sees no beginning of the step that is resumed
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    lines = [line for line in certificates(trainer) if line["tr/deployed_kl_mean"] <= BOUND]
    assert len(lines) == 4, "two of the first run, the rest of its second step, a third step"
    assert witness.kl[-1].mean() <= 1.01 * BOUND


@pytest.mark.supports("other: deployed network, a run that is killed inside a step", door="command line")
def test_a_run_that_is_killed_inside_a_step_resumes_bit_for_bit(tmp_path, monkeypatch):
    settings = small(save_model(tmp_path / "model"), objective="ppo_clip", deployed_bound=BOUND, steps=3, keep_checkpoints=9)
    train(settings, out=tmp_path / "whole", quiet=True)
    training_step = RunTrainer.training_step

    def interrupted(self: Any, *args: Any) -> Tensor:
        if self.state.global_step == 5:  # of six, two a step
            raise KeyboardInterrupt
        return training_step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", interrupted)
        outcome = train(settings, out=tmp_path / "cut", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("interrupted", 2)
    lines, _ = run_of(tmp_path / "cut")
    assert [line["step"] for line in lines] == [0, 1, 2], "of whole steps alone"
    resume(tmp_path / "cut", quiet=True)
    (whole, weights), (again, weights_again) = run_of(tmp_path / "whole"), run_of(tmp_path / "cut")
    assert whole == again
    assert all(torch.equal(x, weights_again[name]) for name, x in weights.items())
    assert all(line["tr/deployed_kl_mean"] <= BOUND for line in whole[1:])


def work(rank: int, folder: Path) -> None:
    """One of two processes, whose runs end inside their second step."""
    found: dict[str, Any] = {}
    for case in ("max_steps", "exception"):
        trainer = make_trainer(folder, **HELD, max_steps=3 if case == "max_steps" else 20, use_cpu=True)
        before: list[dict[str, Tensor]] = []
        trainer.add_callback(At("on_step_begin", 2, lambda _, t=trainer, b=before: b.append(weights_of(t))))
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())
        logging.getLogger("corral.trl.deployed").addHandler(handler)
        if case == "exception":
            trainer.add_callback(At("on_step_end", 3, interrupt))
        witness = Witness(trainer, 2)
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert case == "exception"
        found[case] = certificates(trainer), before[0], weights_of(trainer), witness.measure(), said
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.supports("other: deployed network, a run of two processes that ends inside a step", door="TRL")
def test_two_processes_end_alike(tmp_path):
    run_two(work, tmp_path)
    two = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    (found, _, weights, kl, _), (also, _, weights_also, kl_also, _) = (one["max_steps"] for one in two)
    assert len(found) == 2
    assert found == also
    assert all(torch.equal(x, weights_also[name]) for name, x in weights.items())
    assert found[-1]["tr/deployed_kl_mean"] <= BOUND
    assert_close(torch.tensor(found[-1]["tr/deployed_kl_mean"]), torch.cat([kl, kl_also]).mean(), rtol=1e-2, atol=1e-6)
    for _, before, after, _, said in (one["exception"] for one in two):
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        assert (
            "Update 3: an exception ended the run, and the other processes may be elsewhere. The weights from before"
            in said[-1]
        )
