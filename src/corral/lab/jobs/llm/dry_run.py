"""`corral train --dry-run`: a run's settings resolved and checked, what it would fetch, and the memory that it takes."""

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from peft import get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corral.lab.jobs.llm.prepare import lora_config, pin_model, prepare, trainer_config
from corral.lab.jobs.llm.settings import Settings, missing_packages
from corral.lab.models.load import is_local, load_skeleton
from corral.lab.models.packaged import PACKAGED, is_installed
from corral.lab.run.settings import toml_lines
from corral.lab.tasks import find_task
from corral.lab.tasks.dataset import FiniteTask
from corral.trl.config import CorralConfig
from corral.validate import RunError

_WEIGHTS = (".safetensors", ".bin")


def rehearse(settings: Settings) -> list[str]:
    """Lines of a TOML file with these settings; comments say what a run would fetch and hold. No weights are loaded."""
    settings = pin_model(settings)
    data, skeleton = data_to_fetch(settings), _skeleton(settings.model)
    missing = list(missing_packages(settings.flat()))
    if not data and not missing and skeleton is not None:
        parts = prepare(settings, lambda name: skeleton)
        config = parts.config
        about = [f"{len(parts.dataset):,} prompts to train on, {len(parts.held_out):,} to measure success on", *parts.notes]
    else:  # without the data there are no prompts to check, without a tokenizer no lengths
        config, about = _config(settings), missing
    weights = model_to_fetch(settings.model, reachable=skeleton is not None)
    about += [f"would fetch {line}" for line in ([weights] if weights else []) + data or ["nothing"]]
    about += memory(settings, config, skeleton[0]) if skeleton is not None else memory_by_name(settings)
    return [*(f"# {line}" for line in about), *toml_lines(settings.flat())]


def _skeleton(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """The model without its weights; None where the hub does not answer, or a packaged model is not installed."""
    if name in PACKAGED and not is_installed(name):
        return None
    try:
        return load_skeleton(name)
    except RunError:
        if is_local(name):
            raise
        return None


def _config(settings: Settings) -> CorralConfig:
    try:
        return trainer_config(settings, 1024)
    except ValueError as error:
        raise RunError(str(error)) from error


def data_to_fetch(settings: Settings) -> list[str]:
    """The data sets that the task would ask the hub for."""
    try:
        task_cls = find_task(settings.task)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not issubclass(task_cls, FiniteTask) or settings.task_config.get("path") is not None:
        return []
    names, where = task_cls.hub_names(), "FILE reads a file"
    if len(names) > 1:
        where = "FOLDER reads files"
    return [f"the data set {name}, unless it is cached; --set task_config.path={where} instead" for name in names]


def model_to_fetch(name: str, *, reachable: bool = True) -> str | None:
    """The weights that transformers would fetch from the hub, with their size where it can be asked; None for none."""
    if name in PACKAGED and not reachable:
        about = PACKAGED[name]
        return f"{about.title}, which is not installed: `{about.make}`, {about.megabytes} MB"
    try:
        cached = [try_to_load_from_cache(name, file) for file in ("model.safetensors", "model.safetensors.index.json")]
    except HFValidationError:  # no name that the hub could have; loading it says so
        cached = []
    if is_local(name) or any(isinstance(file, str) for file in cached):
        return None
    unknown = f"the weights of {name}; their size is unknown, as the hub does not answer"
    if not reachable:  # to ask again would be to wait again
        return unknown
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except Exception as error:  # the hub's, httpx's, and those of being offline
        return f"{unknown} ({type(error).__name__})"
    sizes = {suffix: sum(file.size or 0 for file in files if file.rfilename.endswith(suffix)) for suffix in _WEIGHTS}
    return f"the weights of {name}: {_gigabytes(next((size for size in sizes.values() if size), 0))}"


def memory(settings: Settings, config: CorralConfig, model: PreTrainedModel) -> Iterator[str]:
    """Bytes of weights, gradients, optimizer and cache. Activations depend on kernels and checkpointing, and are not in it."""
    total = sum(p.numel() for p in model.parameters())
    trained = total
    adapter = lora_config(settings.lora)
    if adapter is not None:
        with torch.device("meta"):
            trained = sum(p.numel() for p in get_peft_model(model, adapter).parameters() if p.requires_grad)
        total += trained
    copies = (config.beta != 0 and adapter is None) + bool(settings.teacher)  # an adapter's reference is its base
    parts = {
        "weights": 4 * total,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference or teacher": 4 * total * copies,
        "the network before a step": 4 * trained * (config.deployed_bound is not None),
        "cache while sampling": _cache(config, model),
    }
    sizes = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items() if size)
    yield f"memory {_gigabytes(sum(parts.values()))} and activations: {sizes}"
    yield f"this machine has {_available()}"


def memory_by_name(settings: Settings) -> list[str]:
    """The same by the size in a model's name, such as 0.5B, where the model is not at hand."""
    found = _SIZE.search(settings.model)
    if settings.model in PACKAGED:
        total, said = PACKAGED[settings.model].parameters, ""
    elif found is not None:
        total = round(float(found[1]) * {"B": 1e9, "M": 1e6}[found[2].upper()])
        said = f", if {found[0]} is the number of parameters"
    else:
        return ["memory unknown: so is the model's size"]
    trained = f"gradients {_gigabytes(4 * total)}, AdamW {_gigabytes(8 * total)}"
    if settings.lora:
        trained = "and those of an adapter"
    whole = 4 * total if settings.lora else 16 * total
    return [
        f"memory about {_gigabytes(whole)}, activations and cache{said}: weights {_gigabytes(4 * total)}, {trained}",
        f"this machine has {_available()}",
    ]


_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)
"""The number of parameters in a model's name."""


def _cache(config: CorralConfig, model: PreTrainedModel) -> int:
    """Bytes of keys and values of one process's completions, sampled together by transformers."""
    if config.use_vllm:
        return 0
    about: dict[str, Any] = model.config.get_text_config().to_dict()
    heads = about.get("num_key_value_heads") or about.get("num_attention_heads") or 0
    width = about.get("head_dim") or about.get("hidden_size", 0) // max(about.get("num_attention_heads") or 1, 1)
    assert config.steps_per_generation is not None  # TRL has filled it in
    rows = config.per_device_train_batch_size * config.steps_per_generation
    size = 2 if config.bf16 else 4
    return 2 * size * rows * (config.max_completion_length or 0) * (about.get("num_hidden_layers") or 0) * heads * width


def _available() -> str:
    """Memory of the device that would train."""
    if torch.cuda.is_available():
        return f"{_gigabytes(torch.cuda.get_device_properties(0).total_memory)} on its GPU"
    return f"{_gigabytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory and no GPU"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
