"""`--smoke`: any recipe in seconds, with a random model over bytes, two steps, and no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corral.lab.tasks import text_of

_PAD, _START, _END = _SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tool calls, as the models of the recipes have it."""

_DATA = Path(__file__).parents[1] / "recipes" / "llm" / "smoke"

TASK_CONFIG: dict[str, dict[str, Any]] = {
    "gsm8k": {"path": str(_DATA / "gsm8k")},
    "words": {"path": str(_DATA / "words")},
    "dapo_math": {"path": str(_DATA / "dapo_math.jsonl"), "held_out": 0.3},
}
"""A few problems of our own, in the shape of data sets that have to be fetched."""

_TRAINING: dict[str, Any] = {
    "model": "smoke",
    "device": "cpu",
    "steps": 2,
    "eval_every": 1,
    "eval_size": 2,
    "eval_batch_size": 2,
    "checkpoint_every": 1,
    "max_completion_length": 8,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,  # two updates per batch of rollouts, so that the trust region can act
    "bf16": False,
    "use_vllm": False,
    "gradient_checkpointing": False,
    # A random model is never right, and groups without differences give no gradient. Success is still the task's own verdict.
    "reward": "corral.lab.models.smoke:letters",
}
"""What --smoke changes in a recipe; objective, reduction, instruction and verifier stay."""

EVALUATION: dict[str, Any] = {
    "model": "smoke",
    "device": "cpu",
    "backend": "transformers",
    "problems": 2,
    "samples": 2,
    "batch_size": 2,
    "max_tokens": 8,
}
"""The same for `corral eval`."""


def smoke_layers(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What --smoke puts on top of a recipe and a file: small numbers, and packaged problems for the task that was asked for."""
    task = next((layer["task"] for layer in reversed(layers) if "task" in layer), "countdown")
    return [_TRAINING, {"task": task, "task_config": TASK_CONFIG.get(task, {})}]


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that a random model gets in part: the share of letters in a completion."""
    texts = [text_of(completion) for completion in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]


def build_smoke() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """A Llama over bytes with seven thousand random weights, the same ones every time."""
    tokenizer = build_byte_tokenizer()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.convert_tokens_to_ids(_START),
        "eos_token_id": tokenizer.eos_token_id,
    }
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
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    model.name_or_path = "smoke"  # what an adapter's checkpoint names as its base
    return model.eval(), tokenizer


def build_byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte of UTF-8, so that any text goes in and comes back, with a chat template."""
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
