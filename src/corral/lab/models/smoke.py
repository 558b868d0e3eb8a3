"""Byte-level language model with seven thousand random weights and a chat template, for `--smoke`."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_PAD, _START, _END = _SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML chat template with tool calls, like the templates of the models in the recipes."""


def build_smoke() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Build a byte-level Llama with seven thousand random weights, which are equal at every call."""
    tokenizer = build_byte_tokenizer()
    start = tokenizer.get_vocab()[_START]
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": start, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16_384,  # rotary: costs nothing, and a token is a byte
        tie_word_embeddings=True,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    # Plain `generate` samples the policy itself; transformers' own default would cut it to the 50 likeliest tokens.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    model.name_or_path = "smoke"  # what an adapter's checkpoint names as its base
    return model, tokenizer


def build_byte_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per UTF-8 byte and a chat template. It encodes any text without loss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_PAD,
        eos_token=_END,
        additional_special_tokens=[_START],
        chat_template=TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
