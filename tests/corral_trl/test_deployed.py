"""The trainer's hold on the network it deploys: the certificate is true, the bound holds, and all processes decide alike."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from deployed_witness import NAMES, WILD, Witness, certificates
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import dense_logp, make_trainer, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from corral import categorical_kl, retract, snapshot
from corral.lab.jobs.llm.settings import resolve
from corral.lab.jobs.llm.train import resume, train
from corral.llm import CorralConfig
from corral.trl import deployed
from corral.trl import deployed as deployed_probe
from corral.trl.api import FUSED
from corral.trl.scoring import ScoringPass
from policy_objectives import one_of_each_kind
from small_runs import save_model, small
from tolerance import assert_close
from two_processes import run_two

pytestmark = pytest.mark.skipif(not FUSED, reason="TRL hands over no hidden states")


@pytest.mark.supports("other: deployed network, distance measured after every step", door="TRL")
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_certificate_is_the_kl_of_every_token(tmp_path, family, updates):
    trainer = make_trainer(
        tmp_path, model=tiny_model(family), deployed_bound=math.inf, max_steps=2 * updates, steps_per_generation=updates
    )
    witness, passes = Witness(trainer, updates), count_passes(trainer)
    trainer.train()
    found = certificates(trainer)
    assert len(found) == len(witness.kl) == 2
    # TRL's own old-policy pass is read where it makes one: where updates follow.
    assert len(passes) == (4 if updates == 1 else 2)
    for line, kl, sums in zip(found, witness.kl, witness.sums, strict=True):
        assert line["tr/deployed_kl_mean"] > 1e-4
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=1e-3)
        assert_close(torch.tensor(line["tr/deployed_kl_max"]), kl.max(), rtol=1e-3)
        assert_close(torch.tensor(line["tr/deployed_seq_kl_mean"]), sums.mean(), rtol=1e-3)
        assert_close(torch.tensor(line["tr/deployed_seq_kl_max"]), sums.max(), rtol=1e-3)
        assert 0 < line["tr/deployed_kl_se"] < line["tr/deployed_kl_mean"]
        assert (line["tr/step_share"], line["tr/deployed_probes"]) == (1.0, 1.0)


@pytest.mark.supports("other: deployed network, distance on held-out prompts", door="TRL")
def test_the_certificate_of_held_out_prompts_is_the_kl_of_every_token(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=math.inf, max_steps=4, steps_per_generation=2)
    assert trainer.deployed.certify_held_out([([3], [4, 5])]) == {}  # before any step
    witness = Witness(trainer, updates=2)
    trainer.train()
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    drawn = [([3, 4, 5], [6, 7]), ([8], [9, 10, 11, 12]), ([5, 5], [1])]
    found = trainer.deployed.certify_held_out(drawn)
    per_row = []
    for row in drawn:  # one at a time, without padding, from all logits
        ids = {f"{part}_ids": torch.tensor([tokens]) for part, tokens in zip(("prompt", "completion"), row, strict=True)}
        inputs = ids | {f"{part}_mask": torch.ones_like(ids[f"{part}_ids"]) for part in ("prompt", "completion")}
        with torch.no_grad():
            new, old = (dense_logp(model.eval(), inputs, 0.9) for model in (trainer.model, witness.old))
        per_row.append(categorical_kl(new, old)[0])
    assert_close(torch.tensor(found["tr/deployed_heldout_kl_mean"]), torch.cat(per_row).mean(), rtol=1e-3)
    assert_close(
        torch.tensor(found["tr/deployed_heldout_seq_kl_mean"]), torch.stack([x.sum() for x in per_row]).mean(), rtol=1e-3
    )
    assert 0 < found["tr/deployed_heldout_kl_se"] < found["tr/deployed_heldout_kl_mean"]
    assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())


def count_passes(trainer: Any) -> list[int]:
    """Grows by one for every scoring pass that the certificate asks for."""
    passes: list[int] = []
    score = trainer.deployed.probe._score
    trainer.deployed.probe._score = lambda some: (passes.append(len(some.ids)), score(some))[1]
    return passes


@pytest.mark.supports("other: deployed network, dropout", door="TRL")
@pytest.mark.parametrize("kind", ["attention", "adapter"])
def test_dropout_is_no_distance(tmp_path, kind):
    # TRL's old-policy pass drops out, a measurement does not: it takes an old pass of its own.
    torch.manual_seed(0)
    if kind == "attention":
        how = {"model": tiny_model(attention_dropout=0.5)}
    else:
        how = {"trainer_kwargs": {"peft_config": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5)}}
    trainer = make_trainer(tmp_path, deployed_bound=math.inf, max_steps=2, disable_dropout=False, **how)
    witness, passes = Witness(trainer, updates=2), count_passes(trainer)
    trainer.train()
    ((line,), (kl,)) = certificates(trainer), witness.kl
    assert len(passes) == 2
    assert kl.mean() > 1e-6
    assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=5e-3)


def test_measuring_changes_no_weight(tmp_path):
    states = []
    for bound in (None, math.inf):
        trainer = make_trainer(tmp_path, deployed_bound=bound, max_steps=6)
        trainer.train()
        states.append(trainer.model.state_dict())
        assert bool(certificates(trainer)) == (bound is not None)
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.supports("other: deployed network, bound held after every step", door="TRL")
@pytest.mark.parametrize(
    "shape",
    [
        {"steps_per_generation": 2},
        {"steps_per_generation": 2, "num_iterations": 2},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    ],
    ids=["two updates", "two passes", "two batches, one update", "two batches, three updates"],
)
def test_the_bound_holds_after_every_step(tmp_path, shape):
    every, batch = shape.get("gradient_accumulation_steps", 1), shape["steps_per_generation"] * shape.get("num_iterations", 1)
    updates = math.lcm(every, batch) // every
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=3 * updates, **WILD, **shape)
    witness = Witness(trainer, updates)
    trainer.train()
    found = certificates(trainer)
    assert len(found) == len(witness.kl) == 3
    assert 0 < found[0]["tr/step_share"] < 1
    for line, kl in zip(found, witness.kl, strict=True):
        assert line["tr/deployed_kl_mean"] <= 0.02
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=5e-3, atol=1e-6)
    assert witness.rates[-1] < witness.rates[0]  # a quarter at most for every wild step


class Adversary(TrainerCallback):
    """After each update it does to the weights what no optimizer should: noise, a thousand times their size, no numbers."""

    def __init__(self, model: Any) -> None:
        self.weights, self.update = [*model.parameters()], 0

    @torch.no_grad()
    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        kind, self.update = self.update % 3, self.update + 1
        for weight in self.weights:
            if kind == 0:
                weight.add_(torch.randn_like(weight))
            elif kind == 1:
                weight.mul_(1e3)
            else:
                weight.view(-1)[0] = math.nan


def test_the_bound_holds_whatever_the_updates_did(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=6, steps_per_generation=1, learning_rate=1e-3)
    witness = Witness(trainer, updates=1)
    trainer.add_callback(Adversary(trainer.model))
    trainer.train()
    found = certificates(trainer)
    assert len(found) == len(witness.kl) == 6
    for line, kl in zip(found, witness.kl, strict=True):
        assert line["tr/deployed_kl_mean"] <= 0.02
        assert line["tr/step_share"] < 1
        assert float(kl.mean()) <= 0.02 + 1e-4
    assert [line["tr/step_share"] for line in found[2::3]] == [0.0, 0.0]  # of what is no number nothing is kept
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


class Remember(TrainerCallback):
    """After each update, once the network is held: its rate and its scale, and how many weights have moments."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.rates, self.scales, self.moments = trainer, [], [], []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        optimizer = self.trainer.optimizer.optimizer
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.scales.append(self.trainer.deployed.controller.scale)
        self.moments.append(len(optimizer.state))


def test_after_a_step_of_which_nothing_is_left_the_optimizer_starts_over(tmp_path, caplog):
    trainer = make_trainer(
        tmp_path, deployed_bound=1e-3, max_steps=3, steps_per_generation=1, learning_rate=3.0, lr_scheduler_type="constant"
    )
    seen = Remember(trainer)
    trainer.add_callback(seen)
    trainer.train()
    first, *others = certificates(trainer)
    assert first["tr/step_share"] < 0.05
    # D is some 3.7 nats, so that √(.0005 / D) is .012: a thirtieth is the least.
    assert seen.rates[0] == pytest.approx(3.0 / 30)
    assert "Update 1: the step moved the network by" in caplog.text
    assert seen.moments[0] == 0 < seen.moments[-1]
    assert others[-1]["tr/step_share"] > 0.05
    assert all(line["tr/deployed_kl_mean"] <= 1e-3 for line in (first, *others))


class Poison(TrainerCallback):
    """Moments that are no numbers after the first update: every later one would be lost."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            for moments in self.trainer.optimizer.optimizer.state.values():
                moments["exp_avg"].fill_(math.nan)


def test_moments_that_are_no_numbers_do_not_last(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=4, steps_per_generation=1, learning_rate=1e-3)
    trainer.add_callback(Poison(trainer))
    trainer.train()
    shares = [line["tr/step_share"] for line in certificates(trainer)]
    assert shares[0] > 0 == shares[1] < shares[2]
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def test_the_bound_follows_the_schedule(tmp_path):
    # Linear over 8 updates: factors 1, 7/8 | 6/8, 5/8 | 4/8, 3/8 | 2/8, 1/8, so δ_k = .02 · (15, 11, 7, 3)² / 16².
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=8, lr_scheduler_type="linear", **WILD)
    witness, seen = Witness(trainer, updates=2), Remember(trainer)
    trainer.add_callback(seen)
    trainer.train()
    bounds = [0.02 * (top / 16) ** 2 for top in (15, 11, 7, 3)]
    found = [line["tr/deployed_kl_mean"] for line in certificates(trainer)]
    assert all(mean <= bound for mean, bound in zip(found, bounds, strict=True))
    assert found[0] > 0.2 * bounds[0]  # and not because nothing was kept
    callback = trainer.callback_handler.callbacks[0]
    # Rates: the schedule's, times all factors until then; the peak is the rate that was asked for times the scale.
    assert deployed.schedule_of(trainer).base_lrs[0] == pytest.approx(0.3 * callback.controller.scale)
    assert witness.rates[2] == pytest.approx(0.3 * seen.scales[1] * 6 / 8)
    assert seen.scales[1] <= 0.25


def test_a_step_at_rate_0_moves_nothing_and_asks_for_nothing(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=4, lr_scheduler_type="constant_with_warmup",
                           warmup_steps=4, **WILD)  # fmt: skip
    trainer.train()
    assert all(line["tr/deployed_kl_mean"] <= 0.02 for line in certificates(trainer))


@pytest.mark.supports("other: deployed network, LoRA", door="TRL")
def test_an_adapter_is_held_and_its_base_left_alone(tmp_path):
    torch.manual_seed(0)
    lora = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = make_trainer(tmp_path, deployed_bound=0.01, max_steps=4, trainer_kwargs=lora, **WILD)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora" not in name}
    witness = Witness(trainer, updates=2)
    trainer.train()
    found = certificates(trainer)
    assert min(line["tr/step_share"] for line in found) < 1
    for line, kl in zip(found, witness.kl, strict=True):
        assert line["tr/deployed_kl_mean"] <= 0.01
        assert_close(torch.tensor(line["tr/deployed_kl_mean"]), kl.mean(), rtol=5e-3, atol=1e-6)
    assert all(torch.equal(p, base[name]) for name, p in trainer.model.named_parameters() if "lora" not in name)


def test_it_acts_before_every_other_callback(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02)
    assert isinstance(trainer.callback_handler.callbacks[0], deployed.DeployedCallback)


def test_many_tokens_are_thinned_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(deployed_probe, "TOKENS", 12)
    monkeypatch.setattr(deployed_probe, "COMPLETIONS", 1)
    trainer = make_trainer(tmp_path, deployed_bound=math.inf)
    probe = trainer.deployed.probe
    batch = {name: torch.arange(8)[:, None].expand(8, 6) for name in ("prompt_ids", "completion_ids")}
    batch |= {name: torch.ones(8, 6, dtype=torch.long) for name in ("prompt_mask", "completion_mask")}
    batch["tool_mask"] = torch.zeros(8, 6, dtype=torch.long)
    batch["tool_mask"][:, :3] = 1  # half of them are a tool's
    # Each completion has three tokens, and twelve are wanted: the four whose golden fractions are least, 0, .09, .24 and .33.
    probe.add(batch, ScoringPass())
    (some,) = probe._rollouts
    assert (some.ids[:, 0].tolist(), some.live.sum().item()) == ([0, 2, 5, 7], 12)
    with pytest.raises(ValueError, match="measures text alone"):
        probe.add(batch | {"pixel_values": torch.zeros(1)}, ScoringPass())


def run_of(path: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Lines without times, and the last weights."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "tokens_per_second", "step_time"):
            line.pop(name, None)
    last = max((path / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("checkpoint-")))
    return lines, load_file(last / "model.safetensors")


@pytest.mark.supports("other: deployed network, resumed bit for bit", door="command line")
@pytest.mark.parametrize("passes", [1, 3])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, passes):
    reuse = {"reuse": "auto", "num_iterations": passes} if passes > 1 else {}
    bound = 0.01 if passes == 1 else 1e-4  # of which fifty times is soon reached
    settings = small(
        save_model(tmp_path / "model"), objective="ppo_clip", deployed_bound=bound, steps=4, keep_checkpoints=9, **reuse
    )
    train(settings, out=tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for late in (6, 8):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"checkpoint-{late * passes}")
    (tmp_path / "cut" / "summary.json").unlink()
    resume(tmp_path / "cut", quiet=True)
    (whole, weights), (again, weights_again) = run_of(tmp_path / "whole"), run_of(tmp_path / "cut")
    assert whole == again
    assert all(torch.equal(x, weights_again[name]) for name, x in weights.items())
    assert all(line["tr/deployed_kl_mean"] <= bound for line in whole[1:])
    assert min(line["tr/step_share"] for line in whole[1:]) < 1
    measured = [line["success"] is not None for line in whole]
    assert [line.get("tr/deployed_heldout_kl_mean") is not None for line in whole[1:]] == measured[1:]
    assert any(measured[1:])
    assert "tr/deployed_heldout_kl_mean" not in whole[0]
    rates = [line["learning_rate"] for line in whole[1:]]
    assert rates[1] < 0.5 * settings.trainer["learning_rate"]  # the controller was at work before the cut
    if passes > 1:
        assert min(line["tr/passes"] for line in whole[1:]) < 3
        tokens = pq.read_table(tmp_path / "whole" / "tokens.parquet")["step"].to_pylist()
        assert {*tokens} == {1, 2, 3, 4}  # of the last update that was made


def test_a_resumed_run_knows_its_scale(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.02, max_steps=4, save_strategy="steps", save_steps=2, **WILD)
    trainer.train()
    again = make_trainer(tmp_path, deployed_bound=0.02, max_steps=4, save_strategy="steps", save_steps=2, **WILD)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    scales = [t.callback_handler.callbacks[0].controller.scale for t in (trainer, again)]
    assert scales[1] == pytest.approx(scales[0], rel=1e-9)
    assert scales[0] < 0.5


@pytest.mark.parametrize("objective", one_of_each_kind(without=("decoupled_ppo",)))
def test_a_rate_of_auto_works_for_every_objective(tmp_path, objective):
    trainer = make_trainer(tmp_path, objective, learning_rate="auto", loss_type="auto", max_steps=2)
    trainer.train()
    (line,) = certificates(trainer)
    assert line["tr/deployed_kl_mean"] <= trainer.args.deployed_bound == 0.03


def test_auto_is_a_rate_and_a_bound_and_a_word_in_settings(tmp_path):
    config = CorralConfig(output_dir=str(tmp_path), learning_rate="auto", use_cpu=True, bf16=False)
    assert (config.learning_rate, config.deployed_bound) == (1e-3, 0.03)
    auto = {"learning_rate": "auto"}
    made = [
        CorralConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
        for given in ({}, auto, auto | {"lr_scheduler_type": "linear"}, auto | {"num_iterations": 4}, auto | {"reuse": "auto"})
    ]
    assert [config.lr_scheduler_type for config in made] == ["linear", "constant", "linear", "constant", "linear"]
    assert [config.deployed_bound for config in made] == [None, 0.03, 0.03, 0.02, 0.02]
    config = CorralConfig(output_dir=str(tmp_path), learning_rate="auto", deployed_bound=0.1, use_cpu=True, bf16=False)
    assert config.deployed_bound == 0.1
    both = CorralConfig(output_dir=str(tmp_path), learning_rate="auto", reuse="auto", use_cpu=True, bf16=False)
    assert both.deployed_bound == 0.02  # eight passes were measured at this one
    assert resolve([{"learning_rate": "auto"}]).flat()["learning_rate"] == "auto"
    assert resolve([{"learning_rate": "2e-4"}]).flat()["learning_rate"] == 2e-4
    train(small(save_model(tmp_path / "model"), learning_rate="auto", steps=1), out=tmp_path / "run", quiet=True)
    lines, _ = run_of(tmp_path / "run")
    assert set(NAMES) <= set(lines[-1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deployed_bound": 0.0}, "`deployed_bound` is a divergence and must be > 0"),
        ({"deployed_bound": math.nan}, "`deployed_bound` is a divergence and must be > 0"),
        ({"deployed_bound": 0.1, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "no"}, "reduce_lr_on_plateau"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, given, words):
    with pytest.raises(ValueError, match=words):
        CorralConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)


@pytest.mark.refuses("other: deployed network, DeepSpeed", door="TRL")
@pytest.mark.parametrize(("kind", "why"), [("DEEPSPEED", "master weights"), ("FSDP", "version 1 flattens")])
def test_weights_that_live_elsewhere_are_refused(tmp_path, monkeypatch, kind, why):
    trainer = make_trainer(tmp_path)
    trainer.args.deployed_bound = 0.1
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", DistributedType[kind])
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", False)
    with pytest.raises(ValueError, match=why):
        deployed.DeployedCallback(trainer)


def test_a_schedule_that_is_no_multiple_of_its_peak_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, deployed_bound=0.1)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    with pytest.raises(ValueError, match="OneCycleLR is none"):
        trainer.callback_handler.callbacks[0].on_train_begin(trainer.args, trainer.state, trainer.control)


def work(rank: int, folder: Path) -> None:
    """One of two processes."""
    found: dict[str, Any] = {"sharded": retract_sharded()}
    for case, given in {"fixed": {}, "auto": {"reuse": "auto"}, "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2}}}.items():
        if case == "FSDP2":
            let_accelerate_shard_on_cpus()
        trainer = make_trainer(
            folder, deployed_bound=0.01, max_steps=4, use_cpu=True, num_iterations=2, steps_per_generation=1, **given, **WILD
        )
        trainer.train()
        assert isinstance(trainer.model.lm_head.weight, DTensor) == (case == "FSDP2")
        weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trainer.model.named_parameters()}
        weights["rate"] = torch.tensor(trainer.optimizer.param_groups[0]["lr"])
        found[case] = certificates(trainer), {name: p.detach() for name, p in weights.items()}
    torch.save(found, folder / f"{rank}.pt")


def let_accelerate_shard_on_cpus() -> None:
    """Have accelerate take processes on CPUs for ones that FSDP2 may shard over; it knows GPUs alone, torch knows both."""
    AcceleratorState._reset_state(reset_partial_state=False)
    begin = AcceleratorState.__init__

    def init(self: AcceleratorState, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def retract_sharded() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """A sharded network, moved and retracted, beside the same one on one process."""
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 7)).eval()
    inputs = torch.randn(20, 6)
    sharded = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
    lines, weights = [], {}
    for name, network in (("alone", alone), ("sharded", sharded)):
        with torch.no_grad():
            was, old = network(inputs).log_softmax(-1), snapshot(network)
            if name == "sharded":
                network.reshard()  # as after a backward pass; a forward pass alone leaves its root gathered
            for p in (*network.parameters(), network[1].running_var):
                p.mul_(3.0)
        done = retract(network, old, lambda: categorical_kl(network(inputs).log_softmax(-1), was), bound=0.01)  # noqa: B023
        lines.append(done.metrics())
        final = snapshot(network).items()
        whole = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in final}
        weights |= {f"{name} {key}": x if x.is_floating_point() else x.double() for key, x in whole.items()}  # or a counter
    return lines, weights


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    run_two(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.supports("other: deployed network, two processes", door="TRL")
@pytest.mark.parametrize("reuse", ["fixed", "auto"])
def test_two_processes_decide_alike(two, reuse):
    (found, weights), (also, weights_also) = (one[reuse] for one in two)
    assert found == also
    assert all(torch.equal(x, weights_also[name]) for name, x in weights.items())
    assert all(line["tr/deployed_kl_mean"] <= 0.01 for line in found)
    assert found[0]["tr/step_share"] < 1
    assert [line.get("tr/passes") for line in found] == ([None, None] if reuse == "fixed" else [1.0, 1.0])


@pytest.mark.supports("other: deployed network, FSDP2", door="TRL")
def test_a_network_that_accelerate_shards_is_held_as_a_whole_one(two):
    (found, weights), (also, _) = (one["FSDP2"] for one in two)
    (whole, whole_weights), _ = (one["fixed"] for one in two)
    assert found == also
    assert 0 < found[0]["tr/step_share"] < 1
    assert all(line["tr/deployed_kl_mean"] <= 0.01 for line in found)
    assert found == [pytest.approx(line, rel=1e-3) for line in whole]
    assert whole_weights.keys() == weights.keys()
    for name, x in weights.items():
        assert_close(x, whole_weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.supports("other: retraction of a network sharded by FSDP2", door="import corral")
def test_a_sharded_network_is_retracted_as_a_whole_one(two):
    for lines, weights in (one["sharded"] for one in two):
        alone, sharded = lines
        assert 0 < alone["tr/step_share"] < 1
        assert sharded == pytest.approx(alone, rel=1e-5)
        for name, x in weights.items():
            assert_close(x, weights[name.replace("sharded", "alone")])
