"""The processes of one run: which one speaks, how all of them fail together, and what a lost one looks like to the others."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, is_peft_model
from transformers import PreTrainedModel

from corral.validate import RunError

_Result = TypeVar("_Result")

LOST = "another process of this run has ended, or cannot be reached any more. Why is in what it printed itself."
ALONE = "accelerate launch --cpu starts one process, whatever --num_processes says. On CPUs use torchrun --nproc-per-node N."
_OF_GLOO = ("Connection closed by peer", "Connection reset by peer", "gloo")


def is_main() -> bool:
    """Whether this process writes files and prints: rank 0, which launchers set in RANK."""
    return int(os.environ.get("RANK", "0")) == 0


def run_together(job: Callable[[], _Result], *, cpu: bool) -> _Result:
    """`job` in every process of a launcher. Where it raised a RunError in some, all end, and rank 0 says the first one's."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return job()
    PartialState(cpu=cpu)  # joins the processes, as the trainer would
    result: _Result | RunError
    try:
        result = job()
    except RunError as error:
        result = error
    for rank, sentence in enumerate(gather_object([str(result) if isinstance(result, RunError) else None])):
        if sentence is not None:
            if not is_main():
                raise SystemExit(1)
            raise result if isinstance(result, RunError) else RunError(f"process {rank}: {sentence}")
    assert not isinstance(result, RunError)
    return result


def lost_process(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone."""
    known = isinstance(error, torch.distributed.DistError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_GLOO))


def is_alone_by_mistake() -> bool:
    """Whether `accelerate launch --cpu --num_processes N` has started one process: on CPUs it leaves the others to MPI."""
    environment = os.environ
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_PORT" in environment and not {"WORLD_SIZE", "RANK", "PMI_SIZE"} & environment.keys()


def base_model(model: Any) -> PreTrainedModel:
    """The model inside an adapter, or the model itself. `Any`: torch types whatever a module holds as a tensor or a module."""
    return model.get_base_model() if is_peft_model(model) else model
