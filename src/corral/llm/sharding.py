"""Models spread over processes: what is refused, and how weights are read that no process holds whole.

Data parallelism, FSDP 1, FSDP2 and ZeRO 1 to 3 give every process completions of its own, which is how TRL's GRPO samples,
scores and averages. Whatever has several processes work on the same completions does not fit, and is refused here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer


def check_processes(trainer: "CorralTrainer") -> None:
    """Refuse parallelism in which TRL's GRPO is wrong, wherever it was configured: TRL itself reads its own arguments alone."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)  # not every release of accelerate has one
    sizes = {"tp_size": trainer.get_tp_size()}
    if parallelism is not None:
        sizes |= {"cp_size": parallelism.cp_size, "sp_size": parallelism.sp_size}
    for sentence in parallelism_refusals(**sizes):
        raise ValueError(f"CorralTrainer: {sentence}")


def parallelism_refusals(tp_size: int = 1, cp_size: int = 1, sp_size: int = 1) -> Iterator[str]:
    """One sentence for each kind of parallelism that splits a sequence's work between processes."""
    if tp_size > 1:
        yield (
            f"tensor parallelism (tp_size={tp_size}) needs the same completions in every process of a group, and TRL's GRPO "
            f"has each process draw its own. Split the weights by FSDP2 or ZeRO-3; vllm_tensor_parallel_size is free. A loop "
            f"of your own can use corral.lm_head(group=…)."
        )
    for name, size in (("cp_size", cp_size), ("sp_size", sp_size)):
        if size > 1:
            kind = "context" if name == "cp_size" else "sequence"
            yield (
                f"{kind} parallelism ({name}={size}) splits prompts before TRL's GRPO has drawn the completions that would "
                f"have to be split. Set {name} to 1; for long completions use gradient_checkpointing, FSDP2 or ZeRO-3 with "
                f"offloading, or verl with Ulysses (docs/verl.md)."
            )


def check_teacher(trainer: "CorralTrainer") -> None:
    """Refuse a teacher where models are loaded in parts: each process scores with a whole one."""
    if is_zero3(trainer):
        raise ValueError(
            f"CorralTrainer: objective={trainer.objective.name!r} has a whole teacher in every process, and with DeepSpeed "
            f"ZeRO-3 models are loaded in parts. Use ZeRO-2 or FSDP2."
        )
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            f"CorralTrainer: objective={trainer.objective.name!r} has a whole teacher in every process, and with "
            f"fsdp_cpu_ram_efficient_loading only the first one loads weights. Set it to false."
        )


def is_zero3(trainer: "CorralTrainer") -> bool:
    """Whether DeepSpeed partitions the weights themselves."""
    plugin = trainer.args.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(trainer: "CorralTrainer") -> bool:
    """Whether a forward pass talks to the other processes, so that all of them have to make one."""
    return trainer.is_fsdp_enabled or is_zero3(trainer)


@contextmanager
def root_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the weights that FSDP 1 keeps outside its layers are whole, for calls that are no forward pass of its root."""
    if not isinstance(model, FullyShardedDataParallel):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
        yield


def vocabulary_size(model: Any) -> int:
    """Rows of a model's head, whole or partitioned. `Any`: torch types whatever a module holds as a tensor or a module."""
    weight = model.get_output_embeddings().weight
    shape = getattr(weight, "ds_shape", weight.shape)  # of the whole weight, under ZeRO-3, which leaves an empty one
    return int(shape[0])
