"""Loading of language models: embedded in corral, SmolLM2 or Gemma from packages, from a folder, or from the hub."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from corral.lab.models import BUILT_IN, EMBEDDED
from corral.lab.models.packaged import PACKAGED, load_packaged
from corral.lab.models.smoke import build_smoke
from corral.lab.models.tiny import load_tiny
from corral.lab.run.files import read_json, require_regular
from corral.trl.processes import base_model
from corral.validate import RunError, run_errors

_Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(name: str, dtype: torch.dtype = torch.float32) -> _Loaded:
    """Load a causal language model and its tokenizer, given a name in `BUILT_IN`, a folder, or a name on the hub.

    Weights of a folder or the hub come in `dtype`, and those of a built-in model in float32. An adapter comes inside its
    base model.
    """
    model, tokenizer = load_trainable(name, dtype)
    return base_model(model), tokenizer


def load_trainable(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Load a language model for training. An adapter becomes a trainable PeftModel, which transformers alone would freeze."""
    if name == "smoke":
        return build_smoke()
    if name in EMBEDDED:
        with run_errors(FileNotFoundError):
            return load_tiny(name)
    if name in PACKAGED:
        return load_packaged(name)
    where = _where(name)
    try:
        for path in Path(name).iterdir() if Path(name).is_dir() else ():
            if not path.is_dir():
                require_regular(path)  # a library would be given a pipe to read, and wait for it
        # The tokenizer first: what is not in the cache is said without waiting.
        tokenizer = AutoTokenizer.from_pretrained(name, **where, **NO_CODE)
        if (base := _base_of_adapter(name, where)) is not None:
            on = load_model(base, dtype)[0]
            model: PreTrainedModel | PeftModel = PeftModel.from_pretrained(on, name, is_trainable=True, **where)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **where, **NO_CODE)
        for weight_name, weight in model.named_parameters():  # greedy completions of such a model look like any others
            if not weight.is_meta and not bool(weight.detach().float().sum().isfinite()) and not bool(weight.isfinite().all()):
                raise ValueError(f"its weight {weight_name} has values that are not finite.")
        return model, tokenizer
    except RunError as error:
        raise RunError(f"{name} is an adapter, and of its base {error}") from error
    except Exception as error:  # transformers, tokenizers, safetensors and the hub have one each
        raise _not_loaded(name, error) from error


def _not_loaded(name: str, error: Exception) -> RunError:
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        return RunError(f"there is no folder {name}. A model is a run, a folder from save_pretrained, or a name on the hub.")
    return RunError(
        f"the model {name!r} could not be loaded. It should be tiny, tiny-sums, smollm2, gemma, a run, a folder from "
        f"save_pretrained, or a name on the hub. transformers says: {(str(error).splitlines() or [type(error).__name__])[0]}"
    )


def load_skeleton(name: str) -> _Loaded:
    """Load a model's structure on torch's `meta` device, and its tokenizer, without downloading weights."""
    if name in PACKAGED:
        return load_packaged(name, weights=False)
    if name in BUILT_IN:
        return load_model(name)
    where = _where(name)
    try:
        base = _base_of_adapter(name, where) or name
        if base in BUILT_IN:
            return load_skeleton(base)[0], AutoTokenizer.from_pretrained(name, **where, **NO_CODE)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, **where, **NO_CODE), **NO_CODE)
        return model, AutoTokenizer.from_pretrained(name, **where, **NO_CODE)
    except Exception as error:  # transformers, tokenizers and the hub have one each
        raise _not_loaded(name, error) from error


def is_local(name: str) -> bool:
    """Return True if a model is part of corral or of an installed package, or lies in a folder."""
    return name in BUILT_IN or Path(name).exists()


NO_CODE = {"trust_remote_code": False}
"""Arguments that prevent transformers from running Python files beside a model's weights, or asking to run them."""


def _where(name: str) -> dict[str, Any]:
    """Return arguments that limit loading to the local cache if the hub cannot be reached.
    Otherwise libraries retry for a minute."""
    if is_local(name) or not name or name.startswith((".", "/", "~")):
        return {}
    try:
        HfApi().model_info(name, timeout=10)
    except (HfHubHTTPError, ValueError):  # it answers, or there is no such name
        return {}
    except Exception:  # offline, and each release of huggingface_hub raises another error then
        return {"local_files_only": True}
    return {}


def _base_of_adapter(name: str, where: dict[str, Any]) -> str | None:
    """Return the name of an adapter's base model. Returns None if `name` is a whole model.
    The adapter is in a folder or on the hub."""
    file = find_adapter_config_file(name, **where)
    base = None if file is None else adapter_base(Path(file).parent)  # transformers puts an adapter into a whole model too
    return None if Path(name, "config.json").is_file() else base


def adapter_base(folder: Path) -> str:
    """Return the base model's name from an adapter's config. Raises ValueError if the config has none, or names code."""
    content = read_json(folder / "adapter_config.json")
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise ValueError("its adapter_config.json names no base_model_name_or_path.")
    if content.get("megatron_config"):
        raise ValueError(f"its adapter_config.json names code, which peft would import: {content.get('megatron_core')!r}.")
    if content.get("adapters"):  # of X-LoRA: peft reads their files without asking here
        raise ValueError("its adapter_config.json names further adapters, and one adapter is loaded.")
    return base


def choose_device(requested: str) -> str:
    """Resolve a device name: "auto" is the GPU if this machine has one, else the CPU."""
    there = torch.cuda.is_available()
    if requested == "cuda" and not there:
        raise RunError("device='cuda', but torch finds no GPU. `corral doctor` says what it finds.")
    return "cuda" if there and requested != "cpu" else "cpu"
