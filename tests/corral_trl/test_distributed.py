"""DeepSpeed, and runs that a launcher starts, stops and resumes: two processes on a CPU, in an environment that has DeepSpeed.

    make test-distributed        installs DeepSpeed into an environment of its own and runs this; some minutes

FSDP and data parallelism are in test_trainer_distributed.py, in every `make test`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import CASES, CONFIGS, LORA, command_line, train_sharded
from tiny_models import tiny_model

from two_processes import run_two

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed's own are many
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make test-distributed"),
]


def work(rank: int, folder: Path) -> None:
    runs = {config: train_sharded(config, folder, CASES | LORA) for config in ("ddp", "zero2", "zero3")}
    runs |= {config: train_sharded(config, folder, LORA) for config in ("fsdp1", "fsdp2")}
    torch.save(runs, folder / f"runs {rank}.pt")
    statuses = {config: command_line(config, folder / config) for config in ("fsdp2", "zero2", "zero3")}
    (folder / f"statuses {rank}.json").write_text(json.dumps(statuses))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that needs two processes and no launcher, once."""
    folder = tmp_path_factory.mktemp("deepspeed")
    tiny_model("gemma2").save_pretrained(folder / "model")
    run_two(work, folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"runs {rank}.pt") for rank in range(2)]


def check_weights(runs: list[dict[str, Any]], config: str, case: str) -> None:
    """Those of data parallelism, in every process."""
    expected = runs[0]["ddp"][case]
    for rank in runs:
        assert rank[config][case].keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(rank[config][case][name], weight, atol=1e-5, rtol=1e-4)


TITLES = {"fsdp1": "FSDP 1", "fsdp2": "FSDP2", "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3"}


@pytest.mark.supports("scale: {title}", door="TRL")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("config", "title"), [(config, TITLES[config]) for config in ("zero2", "zero3")])
def test_deepspeed_ends_with_the_weights_of_data_parallelism(
    runs: list[dict[str, Any]], config: str, title: str, case: str
) -> None:
    start = tiny_model("gemma2").state_dict()
    assert max(float((weight - start[name]).abs().max()) for name, weight in runs[0]["ddp"][case].items()) > 1e-3
    check_weights(runs, config, case)


@pytest.mark.supports("scale: LoRA with {title}", door="TRL")
@pytest.mark.parametrize(("config", "title"), TITLES.items())
def test_adapters_end_with_the_weights_of_data_parallelism(runs: list[dict[str, Any]], config: str, title: str) -> None:
    trained = runs[0]["ddp"]["LoRA"]
    assert max(float(weight.abs().max()) for name, weight in trained.items() if "lora_B" in name) > 1e-3  # 0 at the start
    check_weights(runs, config, "LoRA")


@pytest.mark.supports("scale: {title}", door="command line")
@pytest.mark.parametrize(("config", "title"), [(config, TITLES[config]) for config in ("fsdp2", "zero2", "zero3")])
def test_a_sharded_run_writes_its_folder_and_is_resumed(folder: Path, config: str, title: str) -> None:
    for rank in range(2):
        assert json.loads((folder / f"statuses {rank}.json").read_text())[config] == [0, 0]
    lines = [json.loads(line) for line in (folder / config / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["success"] is not None for line in (lines[0], lines[-1]))
    assert json.loads((folder / config / "summary.json").read_text())["stopped"] == "finished"
    assert list((folder / config / "checkpoints").glob("*/*.safetensors")), "an ordinary model folder"


TRAIN = "-m corral.lab.cli train --device cpu --model smoke --eval-size 3 --num-generations 2 --per-device-train-batch-size 2"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    printed, complaints = process.communicate(timeout=600)
    return process.returncode, printed, complaints


def free_port() -> str:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return str(some.getsockname()[1])


@pytest.mark.supports("scale: several machines (two of one process each, on one host)", door="command line")
def test_two_machines_make_one_run(tmp_path: Path) -> None:
    meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    machines = [
        start(
            tmp_path, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "two_machines.yaml"),
            "--machine_rank", str(rank), *meeting, *TRAIN.split(), "--steps", "2", "--out", "run",
        )
        for rank in range(2)
    ]  # fmt: skip
    (first, printed, complaints), (second, silence, others) = map(finish, machines)
    assert (first, second) == (0, 0), complaints + others
    assert printed.count("finished after 2 steps") == 1
    assert "2 processes" in printed
    assert not silence
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "finished"


@pytest.mark.supports("scale: Ctrl-C and `--resume` under a launcher", door="command line")
def test_a_run_of_two_processes_is_stopped_and_resumed(tmp_path: Path) -> None:
    process = start(tmp_path, *TORCHRUN, *TRAIN.split(), "--steps", "200", "--out", "run")
    log = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 500
    while not (log.is_file() and len(log.read_text().splitlines()) > 2) and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    status, printed, complaints = finish(process)
    assert status != 0
    assert printed.count("interrupted after") == 1, complaints
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"] == "interrupted"
    done = summary["steps"]
    lines = log.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(done + 1)), "each line was written once"
    onwards = [*TORCHRUN, "-m", "corral.lab.cli", "train", "--resume", "run", "--steps", str(done + 1)]
    status, printed, complaints = finish(start(tmp_path, *onwards))
    assert status == 0, complaints
    assert printed.count(f"going on after step {done}") == 1
    assert log.read_text().splitlines()[: done + 1] == lines
    assert len(log.read_text().splitlines()) == done + 2


REWARD = """
import os

def reward(completions, **_):
    if os.environ["RANK"] == "1":
        raise KeyError("no such word")
    return [0.0] * len(completions)
"""


@pytest.mark.refuses("scale: a reward that raises in one process", door="command line", why="all processes end; it says why")
def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    (tmp_path / "pay.py").write_text(REWARD)
    command = [*TORCHRUN, *TRAIN.split(), "--steps", "2", "--out", "run", "--reward", "pay.py:reward"]
    status, printed, complaints = finish(start(tmp_path, *command))
    assert status != 0
    assert "finished" not in printed
    assert complaints.count("no such word") >= 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "failed"


@pytest.mark.refuses("scale: a folder that is not empty, under a launcher", door="command line", why="one process says so")
def test_what_is_refused_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    status, _, complaints = finish(start(tmp_path, *TORCHRUN, *TRAIN.split(), "--steps", "1", "--out", "run"))
    assert status != 0
    assert sum(line.startswith("corral: ") for line in complaints.splitlines()) == 1, complaints
