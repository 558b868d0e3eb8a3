"""Settings of generation that leave the sampled policy the trained one, and the refusal of all others.

Ratios and gradients are of softmax(logits / temperature). Whatever else reshapes the probabilities that tokens are drawn with
makes the completions another policy's.
"""

from typing import Any

from transformers import GenerationConfig
from trl import GRPOConfig

TRUNCATIONS = ("top_p", "top_k", "min_p")
"""Cut unlikely tokens off and scale the others up: the ratio of two policies is then off by the mass that each kept."""

_HARMLESS = (
    "max_new_tokens", "max_tokens", "max_length", "max_time",
    "stop", "stop_strings", "stop_token_ids", "include_stop_str_in_output", "eos_token_id", "pad_token_id", "bos_token_id",
    "seed", "use_cache", "cache_implementation", "cache_config", "prefill_chunk_size",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
"""`generation_kwargs` of transformers and vLLM that change no token's probability."""

_NEUTRAL = {
    "do_sample": True, "num_beams": 1, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0,
    "typical_p": 1, "guidance_scale": 1,
}  # fmt: skip
"""Others that change none at one value."""

_ELSEWHERE = (*TRUNCATIONS, "logprobs")
"""Others yet, with a sentence of their own where they are wrong."""

_OF_MODELS = (
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "guidance_scale",
    "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "watermarking_config", "dola_layers", "penalty_alpha",
)  # fmt: skip
"""What changes probabilities from a model's own generation_config: of its settings, TRL overrides temperature, truncations and
repetition penalty, and transformers follows the others."""

_WHY = "completions must be drawn from the policy that is trained, or its ratios and gradient are of another one's tokens"

_Refusals = list[tuple[bool, str]]


def sampling_refusals(config: GRPOConfig, given: dict[str, Any]) -> _Refusals:
    """What is wrong with `repetition_penalty` and the `given` generation_kwargs, whoever samples."""
    temperature = config.temperature
    neutral = _NEUTRAL | {"temperature": temperature}
    changing = [key for key in given if key not in (*_HARMLESS, *_ELSEWHERE) and neutral.get(key) != given[key]]
    return [
        (
            config.repetition_penalty != 1,
            f"`repetition_penalty` is {config.repetition_penalty}: {_WHY}. Leave it at 1.",
        ),
        (
            "temperature" in changing,
            f"generation_kwargs has temperature {given.get('temperature')}, and the trained policy {temperature}: {_WHY}. Use "
            f"`temperature`, which sets both.",
        ),
        (
            bool(changing),
            f"generation_kwargs has `{'`, `'.join(changing)}`, not known to leave every token its probability: {_WHY}. "
            f"Leave that out. Allowed: {', '.join(_HARMLESS)}.",
        ),
    ]


def model_refusals(generation_config: GenerationConfig | None) -> _Refusals:
    """What is wrong with a model's own settings of generation, where transformers samples."""
    given = {} if generation_config is None else generation_config.to_diff_dict()
    return [
        (
            bool(given.get(key)) and given[key] != _NEUTRAL.get(key),
            f"the model's generation_config has {key}={given.get(key)!r}: {_WHY}. Set model.generation_config.{key} = None.",
        )
        for key in _OF_MODELS
    ]
