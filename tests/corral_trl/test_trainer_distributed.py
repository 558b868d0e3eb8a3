"""Two processes on gloo, on the CPU: data parallelism and FSDP give the gradient of one process, and none waits for ever."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import split_vocabulary, train_served, train_sharded
from tiny_models import gradients, loss_and_gradient, make_trainer, measured, nudge, prompts, rollouts, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import corral.trl.trainer
from corral import group_advantages
from corral.llm import CorralTrainer
from corral.trl import scoring as policy_head
from two_processes import run_two

CASES: dict[str, dict[str, Any]] = {
    "troll": {"objective": "troll", "objective_config": {"bound": 0.01}},
    "troll, sequence by sequence": {"objective": "troll", "loss_type": "grpo"},
    "dppo on a support": {"objective": "dppo", "objective_config": {"estimator": "topk", "bound": 0.01}},
    "ppo_clip": {"objective": "ppo_clip"},
    "top entropy": {"objective": "troll", "top_entropy_quantile": 0.5},
    "one process has nothing to train on": {"objective": "troll", "top_entropy_quantile": 0.5},
}
KERNELS = "troll, Triton kernels"
"""In Triton's interpreter."""
CASES[KERNELS] = CASES["troll"]
WRAPPERS = ("data parallel", "data parallel, looking for unused weights", "FSDP2")
PAIRS = [(case, wrapper) for case in CASES for wrapper in WRAPPERS if case != KERNELS or "unused" not in wrapper]
GROUPS = {"num_generations": 4, "per_device_train_batch_size": 2, "steps_per_generation": 1, "num_iterations": 2}


def prepared(folder: Path, case: str) -> CorralTrainer:
    """The policy after an update, the same in every process."""
    trainer = make_trainer(folder, use_cpu=True, **CASES[case])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    nudge(trainer.model)
    return trainer


def wrapped(trainer: CorralTrainer, wrapper: str) -> Any:
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in trainer.model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(trainer.model, mesh=mesh)
    return torch.nn.parallel.DistributedDataParallel(trainer.model, find_unused_parameters="unused" in wrapper)


@contextmanager
def kernels() -> Iterator[None]:
    """Head and loss by Triton, with nothing left out of the gradient; its tiles as small as the model."""
    from corral.head import dispatch
    from interpreted import DEVICE

    assert DEVICE == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        for dtype in dispatch.TILES:
            patch.setitem(dispatch.TILES, dtype, dispatch.Tile(16, 16, 16, warps=4, stages=1))
        fused = partial(policy_head.policy_loss_from_hidden, impl="triton", exact=True)
        patch.setattr(policy_head, "lm_head", partial(policy_head.lm_head, impl="triton"))
        patch.setattr(policy_head, "policy_loss_from_hidden", fused)
        patch.setattr(corral.trl.trainer, "batch_loss", partial(corral.trl.trainer.batch_loss, kernels=True))
        patch.setattr(corral.trl.trainer, "TOLERANCE", 0.0)
        yield


def work(rank: int, folder: Path) -> None:
    """One of two processes: its half of every case, under every wrapper; then a whole training run."""
    results: dict[str, Any] = {}
    for case in CASES:
        inputs = torch.load(folder / f"{case}.pt")
        half = {key: value if value.ndim == 0 else value[2 * rank : 2 * rank + 2] for key, value in inputs.items()}
        results[case, "half"] = half["completion_ids"]
        for wrapper in (wrapper for name, wrapper in PAIRS if name == case):
            trainer = prepared(folder, case)
            assert trainer.accelerator.num_processes == 2
            model = wrapped(trainer, wrapper)
            with kernels() if case == KERNELS else nullcontext():
                trainer.compute_loss(model, half).backward()
            del model  # not before: gradients are averaged by hooks that die with the wrapper
            found = gradients(trainer.model)
            results[case, wrapper] = {
                name: gradient.full_tensor() if wrapper == "FSDP2" else gradient for name, gradient in found.items()
            }
            results[case, wrapper, "metrics"] = {name: v for name, v in measured(trainer).items() if name[:3] == "tr/"}
    results["advantages"], results["rewards"], results["weights"] = trained(folder)
    results["whole runs"] = {config: train_sharded(config, folder) for config in ("ddp", "fsdp1", "fsdp2")}
    results["served"] = train_served(folder)
    results["split"] = split_vocabulary(folder)
    torch.save(results, folder / f"rank {rank}.pt")


def trained(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """A run through `train` itself, with groups that lie across both processes."""
    trainer = make_trainer(folder, "troll", advantage="rloo", max_steps=2, **GROUPS)
    trainer.train()
    (inputs,) = trainer._buffered_inputs
    return inputs["advantages"], trainer._rewards[:, 0], trainer.model.lm_head.weight.detach().clone()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process makes of each whole micro-batch, and what two make of its halves."""
    folder = tmp_path_factory.mktemp("distributed")
    alone = {}
    for case, given in CASES.items():
        inputs = dict(rollouts(make_trainer(folder, use_cpu=True, **given))[0])
        if "nothing" in case:
            inputs["completion_mask"] = inputs["completion_mask"].clone()
            inputs["completion_mask"][2:] = 0
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum() * 2  # of a batch of two micro-batches
        torch.save(inputs, folder / f"{case}.pt")
        trainer = prepared(folder, case)
        alone[case] = loss_and_gradient(trainer, inputs)[1]
        alone[case, "metrics"] = {name: v for name, v in measured(trainer).items() if name[:3] == "tr/"}
    tiny_model("gemma2").save_pretrained(folder / "model")
    tiny_model(num_key_value_heads=2).save_pretrained(folder / "whole heads")  # one for each process
    run_two(work, folder)
    return alone, [torch.load(folder / f"rank {rank}.pt") for rank in range(2)]


Results = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.mark.supports("scale: {wrapper}", door="TRL")
@pytest.mark.parametrize(("case", "wrapper"), PAIRS)
def test_two_processes_have_the_gradient_of_one(results: Results, case: str, wrapper: str) -> None:
    alone, ranks = results
    assert max(float(g.abs().max()) for g in alone[case].values()) > 1e-3
    halves = ranks[0][case, "half"], ranks[1][case, "half"]
    assert not torch.equal(*halves), "each process must have had rows of its own"
    for rank in ranks:
        assert rank[case, wrapper].keys() == alone[case].keys()
        for name, gradient in alone[case].items():
            exact = {"atol": 2e-5, "rtol": 1e-4} if case == KERNELS else {"atol": 1e-6, "rtol": 1e-5}
            torch.testing.assert_close(rank[case, wrapper][name], gradient, **exact)


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_of_all_live_tokens(results: Results, case: str) -> None:
    alone, ranks = results
    for rank in ranks:
        found = rank[case, "FSDP2", "metrics"]
        assert {"tr/active_frac", "tr/kl_max"} <= found.keys() == alone[case, "metrics"].keys()
        for name, (value,) in alone[case, "metrics"].items():
            if name != "tr/dual":  # a mean over the projected tokens alone
                assert found[name] == [pytest.approx(value, abs=1e-5)], name


@pytest.mark.supports("scale: groups across processes", door="TRL")
def test_groups_may_lie_across_processes(results: Results) -> None:
    _, ranks = results
    rewards = ranks[0]["rewards"]
    assert torch.equal(rewards, ranks[1]["rewards"])
    expected = group_advantages(rewards, torch.zeros(4, dtype=torch.long), "rloo")
    assert expected.abs().max() > 0.01
    shuffled = torch.cat([rank["advantages"] for rank in ranks])
    torch.testing.assert_close(shuffled.sort().values, expected.sort().values)


def test_both_processes_end_with_one_policy(results: Results) -> None:
    _, (first, second) = results
    assert torch.equal(first["weights"], second["weights"])
    assert not torch.equal(first["weights"], tiny_model().lm_head.weight)
    assert len(prompts()) > 4


@pytest.mark.supports("scale: {title}", door="TRL")
@pytest.mark.parametrize(("config", "title"), [("fsdp1", "FSDP 1"), ("fsdp2", "FSDP2")])
def test_a_sharded_run_ends_with_the_weights_of_data_parallelism(results: Results, config: str, title: str) -> None:
    runs = results[1][0]["whole runs"]
    for case, expected in runs["ddp"].items():
        assert runs[config][case].keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(runs[config][case][name], weight, atol=1e-5, rtol=1e-4)
    start = tiny_model("gemma2").state_dict()
    assert max(float((weight - start[name]).abs().max()) for name, weight in runs["ddp"]["kl to a reference"].items()) > 1e-3


@pytest.mark.supports("scale: a vLLM server, faked, beside FSDP2", door="TRL")
def test_a_server_samples_with_the_weights_that_were_trained(results: Results) -> None:
    first, second = (rank["served"] for rank in results[1])
    assert [len(first["requests"]), len(second["requests"])] == [2, 0], "the main process asks for all"
    assert [(asked["n"], asked["logprobs"]) for asked in first["requests"]] == [(4, 30)] * 2
    (start, later), trained = first["sent"], first["trained"][1]  # two updates lie between
    assert later.keys() == trained.keys()
    for name, weight in later.items():
        torch.testing.assert_close(weight, trained[name], atol=1e-6, rtol=1e-5)
    assert max(float((weight - start[name]).abs().max()) for name, weight in later.items()) > 1e-3
    for rank in (first, second):
        live = rank["mask"].bool()
        assert torch.equal(rank["ids"][..., 0][live], rank["tokens"][live]), "slot 0 is the sampled token"
        assert int((rank["ids"] >= 0).sum(-1).max()) > 20
        assert any(line.get("tr/kl_max", 0) > 0 for line in rank["log"])


@pytest.mark.supports("scale: a head that transformers' tensor parallelism has split, `lm_head(group=…)`", door="import corral")
def test_a_split_vocabulary_has_the_log_probs_and_gradients_of_the_whole(results: Results) -> None:
    for rank in results[1]:
        assert len(rank["split"]["weight"][0]) == 20, "half of the vocabulary"
        assert float(rank["split"]["weight"][0].abs().max()) > 1e-3
        for found, expected in rank["split"].values():
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
