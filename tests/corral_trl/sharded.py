"""Training as `accelerate launch` would start it, in a process that runs already: for tests of weights that are split.

accelerate shards on GPUs alone. Here it is told that the CPU is one: gloo carries what NCCL would.

- `CONFIGS`: the files that docs/distributed.md hands out.
- `launched(config)`: inside, accelerate reads this file's settings.
- `train_sharded(config, folder)`: the weights that runs end with under it.
- `train_served(folder)`: an FSDP2 run that samples from a fake of vLLM's server: weights that it was sent, and the true ones.
- `split_vocabulary(folder)`: corral's head on a model that transformers has split by tensor parallelism, beside the whole one.
- `command_line(config, out)`: `corral train` of two steps, and of a third one that resumes it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from fake_server import serving
from peft import LoraConfig
from tiny_models import make_trainer, tiny_model
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from corral import lm_head
from corral.lab.cli import main
from corral.llm import CorralConfig, CorralTrainer

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate"

_ON_A_CPU = {
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_MIXED_PRECISION": "no",  # results are compared in float32
    "FSDP_SYNC_MODULE_STATES": "false",  # accelerate looks for a GPU to put them on
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",  # likewise
}
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def environment(config: str) -> dict[str, str]:
    """Environment variables of accelerate's that `accelerate launch --config_file` would start its processes with."""
    argv = ["--config_file", str(CONFIGS / f"{config}.yaml"), "train.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        found = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in found.items() if name.startswith(_PREFIXES)}


@contextmanager
def launched(config: str, **more: str) -> Iterator[None]:
    """Inside, accelerate reads the settings of `config`, on a CPU. Environment variables of `more` come on top."""
    settings = environment(config) | _ON_A_CPU | more
    splits = any(settings.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))
    kind = DistributedType.MULTI_GPU if splits else DistributedType.MULTI_CPU
    backend = mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", kind))
    with mock.patch.dict(os.environ, settings), backend:
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """accelerate keeps one state for each process, and a trainer made later would have it too."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()  # else models would be loaded in parts


CASES: dict[str, dict[str, Any]] = {
    "union": {"objective": "troll", "support": "union", "objective_config": {"bound": 0.01}},  # keeps the old head
    "kl to a reference": {"objective": "ppo_clip", "beta": 0.1},  # and the head's results go through TRL's loss
}
_GROUPS = {"num_generations": 4, "per_device_train_batch_size": 2, "steps_per_generation": 1, "num_iterations": 2}


LORA: dict[str, dict[str, Any]] = {
    "LoRA": {**CASES["union"], "trainer_kwargs": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])}}
}
"""A head that is not trained is split like any other weight."""


def train_sharded(config: str, folder: Path, cases: dict[str, dict[str, Any]] = CASES) -> dict[str, dict[str, Tensor]]:
    """By case, the weights after two batches of rollouts and four updates of the model in `folder`, whose head is tied.

    TRL loads a reference of such runs from there too.
    """
    found = {}
    for case, given in cases.items():
        with launched(config):
            model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
            trainer = make_trainer(folder, model=model, use_cpu=False, max_steps=4, **_GROUPS, **given)
            if (plugin := trainer.args.deepspeed_plugin) is not None:  # weights as small as these would stay whole
                plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            trainer.train()
            found[case] = _whole_weights(trainer)
    return found


def train_served(folder: Path) -> dict[str, Any]:
    """DPPO at the sampler's top-K, of more tokens than vLLM reports in a trainer's process, over two batches of rollouts."""
    sizes = {**_GROUPS, "max_steps": 4, "support_size": 30, "objective_config": {"estimator": "topk"}, "anchor": "rollout"}
    with launched("fsdp2"), serving(tiny_model()) as server:
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = make_trainer(folder, "dppo", use_cpu=False, vllm_importance_sampling_correction=False, **vllm, **sizes)
        after = WeightsOfUpdates(trainer)
        trainer.add_callback(after)
        trainer.train()
        (inputs,) = trainer._buffered_inputs
        return {
            "sent": server.weights, "trained": after.found, "requests": server.requests, "ids": inputs["corral_ids"],
            "tokens": inputs["completion_ids"], "mask": inputs["completion_mask"], "log": trainer.state.log_history,
        }  # fmt: skip


def split_vocabulary(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, what this process finds with its rows of the head, and what the whole head gives in their place."""
    model = AutoModelForCausalLM.from_pretrained(folder / "whole heads", tp_plan="auto")
    shard, ids = model.lm_head.weight, torch.tensor([[5, 6, 7, 8]])
    states = model.model(input_ids=ids).last_hidden_state.detach()
    whole = shard.full_tensor().detach()
    ours, theirs = ((states.clone().requires_grad_(), weight.detach().requires_grad_()) for weight in (shard.to_local(), whole))
    found = lm_head(*ours, ids, top_k=4, entropy=True, group=shard.device_mesh.get_group())
    expected = lm_head(*theirs, ids, top_k=4, entropy=True)
    for head in (found, expected):
        (head.logp.sum() + head.dist.rest.sum() + head.entropy.sum()).backward()
    rows = slice(len(ours[1]) * shard.device_mesh.get_local_rank(), None)
    return {
        "logp": (found.logp, expected.logp), "ids": (found.dist.ids, expected.dist.ids),
        "entropy": (found.entropy, expected.entropy), "rest": (found.dist.rest, expected.dist.rest),
        "hidden": (ours[0].grad, theirs[0].grad), "weight": (ours[1].grad, theirs[1].grad[rows][: len(ours[1])]),
    }  # fmt: skip


def command_line(config: str, out: Path) -> list[int]:
    """Statuses of both. With three held-out problems, one process has one to answer and the other two, one after another."""
    sizes = "--steps 2 --eval-size 3 --eval-batch-size 1 --num-generations 2 --per-device-train-batch-size 2 --device cpu"
    # accelerate has no DeepSpeed for trainers that ask for a CPU themselves.
    on_any_device = mock.patch(
        "corral.lab.jobs.llm.prepare.CorralConfig", lambda **given: CorralConfig(**given | {"use_cpu": False})
    )
    with launched(config), on_any_device:
        first = main(["train", "--model", "smoke", *sizes.split(), "--out", str(out)])
    with launched(config), on_any_device:
        return [first, main(["train", "--resume", str(out), "--steps", "3"])]


class WeightsOfUpdates(TrainerCallback):
    """Keeps the whole weights after every update."""

    def __init__(self, trainer: CorralTrainer) -> None:
        self.trainer, self.found = trainer, list[dict[str, Tensor]]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append(_whole_weights(self.trainer))


def _whole_weights(trainer: CorralTrainer) -> dict[str, Tensor]:
    """Gathered by all processes. accelerate's `get_state_dict` would do on a GPU; of FSDP 1 on a CPU it reads freed memory."""
    model: Any = trainer.model_wrapped
    with FullyShardedDataParallel.summon_full_params(model), trainer._dist.gather_params(list(model.parameters())):
        return {
            re.sub(r"_fsdp_wrapped_module\.|^(module\.)+", "", name): _full(weight).detach().clone()
            for name, weight in model.named_parameters()
        }


def _full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
