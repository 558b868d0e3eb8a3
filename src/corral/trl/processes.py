"""Training on multiple processes: which process prints, how an error ends all processes, and which parallelism is refused."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, is_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from corral.validate import RunError

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

_Result = TypeVar("_Result")

LOST = "another process of this run has ended, or cannot be reached any more. Why is in what it printed itself."
ALONE = "accelerate launch --cpu starts one process, whatever --num_processes says. On CPUs use torchrun --nproc-per-node N."
_OF_GLOO = ("Connection closed by peer", "Connection reset by peer", "gloo")


def is_main() -> bool:
    """True in the process with rank 0, which writes files and prints. The rank comes from the environment variable RANK."""
    return int(os.environ.get("RANK", "0")) == 0


def run_together(job: Callable[[], _Result], *, cpu: bool) -> _Result:
    """Run `job` in every process of a launcher. A RunError in one process ends all, and rank 0 prints the first error."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return job()
    PartialState(cpu=cpu)  # joins the processes, as the trainer would
    result, failed = None, None
    try:
        result = job()
    except RunError as error:
        failed = error
    for rank, sentence in enumerate(gather_object([None if failed is None else str(failed)])):
        if sentence is not None:
            if not is_main():
                raise SystemExit(1)
            raise failed or RunError(f"process {rank}: {sentence}")
    return cast(_Result, result)


def lost_process(error: BaseException) -> bool:
    """True if an error only reports that another process of the run has ended."""
    known = isinstance(error, torch.distributed.DistError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_GLOO))


def is_alone_by_mistake() -> bool:
    """True if `accelerate launch --cpu --num_processes N` started only one process, for lack of MPI."""
    environment = os.environ
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_PORT" in environment and not {"WORLD_SIZE", "RANK", "PMI_SIZE"} & environment.keys()


def base_model(model: Any) -> PreTrainedModel:
    """Return the model inside a PEFT adapter, or the model itself if it has no adapter.

    `Any`: torch types submodules as tensor or module.
    """
    return model.get_base_model() if is_peft_model(model) else model


def check_processes(trainer: "CorralTrainer") -> None:
    """Refuse kinds of parallelism under which TRL's GRPO computes wrong results. TRL itself does not refuse all of them."""
    tp_size = trainer.get_tp_size()
    if tp_size > 1:
        raise ValueError(
            f"CorralTrainer: tensor parallelism (tp_size={tp_size}) needs the same completions in every process of a group, "
            f"and TRL's GRPO has each process draw its own. Split the weights by FSDP2 or ZeRO-3; vllm_tensor_parallel_size is "
            f"free. A loop of your own can use corral.lm_head(group=…)."
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)  # not every release of accelerate has one
    for kind, name in (("context", "cp_size"), ("sequence", "sp_size")):
        size = getattr(parallelism, name, 1)
        if size > 1:
            raise ValueError(
                f"CorralTrainer: {kind} parallelism ({name}={size}) splits prompts before TRL's GRPO has drawn the completions "
                f"that would have to be split. Set {name} to 1; for long completions use gradient_checkpointing, FSDP2 or "
                f"ZeRO-3 with offloading, or verl with Ulysses (docs/verl.md)."
            )


def check_teacher(trainer: "CorralTrainer") -> None:
    """Refuse a teacher if each process loads only part of a model, because every process scores with the whole teacher."""
    plugin, why = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None, ""
    if is_zero3(trainer):
        why = "with DeepSpeed ZeRO-3 models are loaded in parts. Use ZeRO-2 or FSDP2."
    elif plugin is not None and plugin.cpu_ram_efficient_loading:
        why = "with fsdp_cpu_ram_efficient_loading only the first one loads weights. Set it to false."
    if why:
        raise ValueError(f"CorralTrainer: objective={trainer.objective.name!r} has a whole teacher in every process, and {why}")


def is_zero3(trainer: "CorralTrainer") -> bool:
    """True if DeepSpeed ZeRO-3 splits the weights over processes."""
    plugin = trainer.args.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(trainer: "CorralTrainer") -> bool:
    """True if FSDP or ZeRO-3 splits the weights over processes. Every process must then take part in every forward pass."""
    return trainer.is_fsdp_enabled or is_zero3(trainer)


def root_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Context that gathers the weights that FSDP 1 keeps outside its layers, for code outside the forward pass."""
    sharded = isinstance(model, FullyShardedDataParallel)
    return FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False) if sharded else nullcontext()


def vocabulary_size(model: Any) -> int:
    """Return the vocabulary size of a model's LM head, also if the head is split over processes.

    `Any`: torch types submodules as tensor or module.
    """
    weight = model.get_output_embeddings().weight
    shape = getattr(weight, "ds_shape", weight.shape)  # of the whole weight, under ZeRO-3, which leaves an empty one
    return int(shape[0])


def one_autocast(trainer: "CorralTrainer") -> AbstractContextManager[None]:
    """Context with a single autocast for a whole generation. Autocast then rounds each weight once, instead of at every token.

    Accelerate puts an autocast around each forward pass, which rounds every weight anew for every token, and which peft's
    generation goes past. Tokens are the same bit for bit. Rounding the weights themselves would not be the same: embeddings
    and norms are used in float32 in training, and steps too small for half precision would never reach the sampler. Memory: a
    copy of the trained weights in half precision, so nothing is kept where they are sharded. Frozen weights are rounded for
    every token as before. A sampler of the user's own sees no autocast.
    """
    kept = trainer.draws_itself and not is_sharded(trainer)
    return trainer.accelerator.autocast() if kept else nullcontext()
