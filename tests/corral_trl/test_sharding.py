"""What is refused of several processes before training begins, how weights are read that are split, and how processes end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import make_trainer, tiny_model
from transformers import Trainer

from corral.head.logits import LogitSpec
from corral.head.packed import Packing
from corral.trl.processes import (
    check_processes,
    check_teacher,
    is_alone_by_mistake,
    is_sharded,
    lost_process,
    root_weights,
    run_together,
    vocabulary_size,
)
from corral.trl.scoring import HeadWeights, ScoringPass
from corral.validate import RunError

COMPLETIONS = "every process would need the same completions, and TRL's GRPO has each draw its own"
SPLIT = "prompts would be split before there are completions"


class TestParallelism:
    @pytest.mark.parametrize(
        ("name", "title", "sentence"),
        [
            pytest.param(
                "tp_size", "tensor parallelism", r"tensor parallelism \(tp_size=2\).*FSDP2 or ZeRO-3.*lm_head\(group=…\)",
                marks=pytest.mark.refuses("scale: tensor parallelism", door="TRL", why=COMPLETIONS),
            ),
            pytest.param(
                "cp_size", "context parallelism", r"context parallelism \(cp_size=2\).*Set cp_size to 1",
                marks=pytest.mark.refuses("scale: context parallelism", door="TRL", why=SPLIT),
            ),
            pytest.param(
                "sp_size", "sequence parallelism", r"sequence parallelism \(sp_size=2\).*Set sp_size to 1",
                marks=pytest.mark.refuses("scale: sequence parallelism (Ulysses)", door="TRL", why=SPLIT),
            ),
        ],
    )  # fmt: skip
    def test_of_a_launchers_file_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, title: str, sentence: str
    ) -> None:
        sizes = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, "sp_backend": None} | {name: 2})
        create = Trainer.create_accelerator_and_postprocess

        def create_with_parallelism(trainer: Trainer) -> None:
            create(trainer)
            monkeypatch.setattr(Accelerator, "parallelism_config", property(lambda self: sizes))

        monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_with_parallelism)
        with pytest.raises(ValueError, match=f"CorralTrainer: {sentence}"):
            make_trainer(tmp_path)

    def test_none_is_not(self, tmp_path: Path) -> None:
        check_processes(make_trainer(tmp_path))


class TestWeights:
    def test_the_vocabulary_of_a_partitioned_head_is_that_of_the_whole(self) -> None:
        model = tiny_model()
        assert vocabulary_size(model) == 40
        model.lm_head.weight.ds_shape, model.lm_head.weight.data = model.lm_head.weight.shape, torch.empty(0)
        assert vocabulary_size(model) == 40

    def test_a_kept_head_is_copied_once_among_several_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        weight, spec = torch.zeros(3, 2), LogitSpec(1.0, None, 1.0)  # no gradient, as gathered weights without autograd
        scoring, packing = ScoringPass(keep_hidden=True), Packing(torch.ones(1, 2, dtype=torch.bool))
        scoring._keep(torch.zeros(2, 2), packing, HeadWeights(weight, None, spec))
        weight.fill_(1.0)  # by the next update
        scoring._keep(torch.zeros(2, 2), packing, HeadWeights(weight, None, spec))
        first, second = scoring.kept
        assert float(first.head.weight.sum()) == 0.0
        assert second.head is first.head

    def test_a_model_that_is_whole_needs_nothing(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        assert not is_sharded(trainer)
        with root_weights(trainer.model):
            pass


class TestTeacher:
    @staticmethod
    def trainer(stage: int | None = None, efficient: bool | None = None) -> Any:
        plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
        state = SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_ram_efficient_loading=efficient))
        return SimpleNamespace(
            args=SimpleNamespace(deepspeed_plugin=plugin), accelerator=SimpleNamespace(state=state),
            is_fsdp_enabled=efficient is not None, objective=SimpleNamespace(name="distill"),
        )  # fmt: skip

    @pytest.mark.refuses("scale: a teacher with ZeRO-3", door="TRL", why="each process scores with a whole teacher")
    def test_zero_3_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"whole teacher in every process.*ZeRO-3.*Use ZeRO-2 or FSDP2"):
            check_teacher(self.trainer(stage=3))
        check_teacher(self.trainer(stage=2))

    @pytest.mark.refuses(
        "scale: a teacher with `fsdp_cpu_ram_efficient_loading`", door="TRL", why="the first process alone would load it"
    )
    def test_a_model_that_one_process_loads_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"fsdp_cpu_ram_efficient_loading only the first one loads weights. Set it to"):
            check_teacher(self.trainer(efficient=True))
        check_teacher(self.trainer(efficient=False))


class TestProcesses:
    @pytest.mark.parametrize(("rank", "expected"), [(0, "process 1: no disk"), (1, None)])
    def test_an_error_of_one_ends_all_and_is_said_by_the_first(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, expected: str | None
    ) -> None:
        def job() -> str:
            if rank == 1:
                raise RunError("no disk")
            return "parts"

        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("corral.trl.processes.PartialState", lambda cpu: None)
        monkeypatch.setattr("corral.trl.processes.gather_object", lambda mine: [None, "no disk"])
        with pytest.raises(SystemExit if expected is None else RunError) as caught:
            run_together(job, cpu=True)
        assert str(caught.value) == (expected or "1")

    def test_where_none_fails_each_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert run_together(lambda: "parts", cpu=True) == "parts"
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr("corral.trl.processes.PartialState", lambda cpu: None)
        monkeypatch.setattr("corral.trl.processes.gather_object", lambda mine: [*mine, None])
        assert run_together(lambda: "parts", cpu=True) == "parts"

    def test_a_lost_connection_is_known_from_other_errors(self) -> None:
        assert lost_process(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
        assert lost_process(torch.distributed.DistBackendError("NCCL error"))
        assert not lost_process(RuntimeError("CUDA out of memory"))
        assert not lost_process(ValueError("Connection closed by peer"))

    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, True),
            ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}, False),
            ({"ACCELERATE_USE_CPU": "True"}, False),
            ({}, False),
        ],
    )
    def test_accelerates_one_process_on_cpus_is_noticed(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
    ) -> None:
        for name in ("ACCELERATE_USE_CPU", "MASTER_PORT", "WORLD_SIZE", "RANK", "PMI_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert is_alone_by_mistake() == expected
