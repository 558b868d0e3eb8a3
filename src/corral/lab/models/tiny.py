"""The embedded model: a character-level causal LM, small enough for a laptop CPU and shipped inside the package."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

TINY_FOLDER = Path(__file__).parent / "tiny"
"""Folder of the shipped model in the format of `save_pretrained`, made by scripts/warm_start.py."""

PAD, BOS, EOS, UNKNOWN = _SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

# All of printable ASCII, though countdown needs 17 characters: other tasks can use the same model, and with 100 tokens a top-64
# support has a rest, as it has in a real vocabulary. The 79 unused characters cost 20 thousand parameters.
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def load_tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load the warm-started model in float32 and its tokenizer from the package itself, without network or cache."""
    missing = [name for name in FILES if not (TINY_FOLDER / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"load_tiny: {', '.join(missing)} should be in {TINY_FOLDER}, which ships with corral. Reinstall corral, or "
            f"make the model anew: python scripts/warm_start.py --out {TINY_FOLDER}"
        )
    model = LlamaForCausalLM.from_pretrained(TINY_FOLDER, local_files_only=True, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)


def build_tiny(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Build a model with 0.93 M random weights and its tokenizer. The global random state is unchanged."""
    tokenizer = build_tokenizer()
    return build_llama(
        tokenizer,
        tokenizer.bos_token_id,
        seed,
        hidden_size=128,
        intermediate_size=416,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,  # rotary: costs nothing, and leaves room for longer tasks than countdown
        tie_word_embeddings=False,  # a head of its own is 13 thousand parameters
    ), tokenizer


def build_llama(tokenizer: PreTrainedTokenizerBase, start: int, seed: int, **shape: Any) -> LlamaForCausalLM:
    """Build a Llama with random weights for a tokenizer whose texts begin with the token `start`.

    Plain `generate` samples the policy itself; transformers' own default would cut it to the 50 likeliest tokens.
    """
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": start, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ids))
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model.eval()


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per character. Text starts with <bos>, and batches are left-padded for generation."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # the default joins with spaces
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # "1 + 2 ." must come back as it was
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )
