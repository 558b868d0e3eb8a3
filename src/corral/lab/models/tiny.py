"""The embedded model: a character-level causal LM, small enough for a laptop CPU and shipped inside the package.

Its 100 tokens are all of printable ASCII, though countdown needs 17 characters: other tasks can use the same model, and a
top-64 support has a tail, as it has in a real vocabulary. A text begins with <bos>, and batches are padded on the left.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

TINY_FOLDER = Path(__file__).parent / "tiny"
"""Folder of the shipped model in the format of `save_pretrained`; scripts/warm_start.py makes its weights."""

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def load_tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load the warm-started model in float32 and its tokenizer from the package itself, without network or cache."""
    missing = [name for name in FILES if not (TINY_FOLDER / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"load_tiny: {', '.join(missing)} should be in {TINY_FOLDER}, which ships with corral. Reinstall corral, or "
            f"make the weights anew: python scripts/warm_start.py --out {TINY_FOLDER}"
        )
    return LlamaForCausalLM.from_pretrained(TINY_FOLDER, local_files_only=True, dtype=torch.float32), tiny_tokenizer()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Load the embedded model's tokenizer, which has one token per character."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)
    return tokenizer


def build_tiny(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Build the same model with 0.93 M random weights, and its tokenizer. The global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(AutoConfig.from_pretrained(TINY_FOLDER, local_files_only=True))
    model.generation_config = GenerationConfig.from_pretrained(TINY_FOLDER, local_files_only=True)
    return model.eval(), tiny_tokenizer()
