"""Embedded character-level language models, small enough for a laptop CPU and shipped inside the package.

`tiny` answers countdown right if it may take the likeliest characters, and seldom if it samples: RL sharpens it. `tiny-sums`
adds two numbers of up to two digits and mostly forgets to carry, sampled or not: RL teaches it to carry.

Their 100 tokens are all of printable ASCII, though countdown needs 17 characters: other tasks can use the same models, and a
top-64 support has a tail, as it has in a real vocabulary. A text begins with <bos>, and batches are padded on the left.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from corral.lab.models import EMBEDDED

FOLDERS = {name: Path(__file__).parent / name for name in EMBEDDED}
"""Folders of the embedded models in the format of `save_pretrained`. scripts/warm_start.py creates the weights."""

TINY_FOLDER = FOLDERS["tiny"]
"""Folder of the model "tiny", the default of `load_tiny()`, with the tokenizer of both embedded models."""

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def load_tiny(name: str = "tiny") -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load an embedded, warm-started model in float32 and its tokenizer, without network or cache."""
    folder = FOLDERS[name]
    missing = [file for file in FILES if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"load_tiny: {', '.join(missing)} should be in {folder}, which ships with corral. Reinstall corral, or "
            f"make the weights anew: scripts/warm_start.py has the command."
        )
    return LlamaForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32), tiny_tokenizer()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Load the embedded models' tokenizer, which has one token per character."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)
    return tokenizer


def build_tiny(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Build an embedded model's architecture with 0.93 M random weights, and its tokenizer.
    The global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(AutoConfig.from_pretrained(TINY_FOLDER, local_files_only=True))
    model.generation_config = GenerationConfig.from_pretrained(TINY_FOLDER, local_files_only=True)
    return model.eval(), tiny_tokenizer()
