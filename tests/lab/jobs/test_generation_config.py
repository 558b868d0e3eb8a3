"""A model's own generation_config steers neither evaluation nor training: every field set to something odd, one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.jobs.llm.turns import converse
from corral.lab.models.smoke import build_smoke
from corral.lab.tasks.imports import Calculator
from corral.trl.config import model_refusals

ODD: dict[str, Any] = {
    "max_length": 3, "max_new_tokens": 1, "min_length": 40, "min_new_tokens": 40, "early_stopping": True, "max_time": 0.0,
    "stop_strings": ["a", "1", "="], "do_sample": False, "num_beams": 3, "use_mtp": True, "use_cache": False,
    "cache_implementation": "static", "cache_config": {"max_cache_len": 4}, "max_cache_len": 4, "temperature": 3.0,
    "top_k": 1, "top_p": 0.01, "min_p": 0.9, "top_h": 0.1, "typical_p": 0.1, "epsilon_cutoff": 0.3, "eta_cutoff": 0.3,
    "repetition_penalty": 9.0, "encoder_repetition_penalty": 9.0, "length_penalty": 9.0, "no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(5, 60)], "renormalize_logits": True, "forced_bos_token_id": 7,
    "forced_eos_token_id": 7, "remove_invalid_values": True, "exponential_decay_length_penalty": (1, 9.0),
    "suppress_tokens": list(range(5, 60)), "begin_suppress_tokens": list(range(5, 60)), "sequence_bias": [[[7], 50.0]],
    "token_healing": True, "guidance_scale": 9.0, "watermarking_config": {"bias": 50.0, "greenlist_ratio": 0.1},
    "num_return_sequences": 2, "output_attentions": True, "output_hidden_states": True, "output_scores": True,
    "output_logits": True, "return_dict_in_generate": True, "encoder_no_repeat_ngram_size": 1, "decoder_start_token_id": 7,
    "is_assistant": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1,
    "assistant_early_exit": 1, "assistant_lookbehind": 1, "target_lookbehind": 1, "assistant_ensemble_weight": 0.5,
    "speculation_type": "odd", "compile_config": {"mode": "default"}, "disable_compile": True,
    "continuous_batching_config": None, "low_memory": True, "penalty_alpha": 0.6, "dola_layers": "low",
    "diversity_penalty": 9.0, "num_beam_groups": 3, "constraints": [1], "force_words_ids": [[7]], "prefill_chunk_size": 1,
    "bos_token_id": 7, "pad_token_id": 7, "_from_model_config": True, "transformers_version": "4.0",
    "somebodys_own": "odd", "custom_generate": "nobody/nowhere", "trust_remote_code": True,
}  # fmt: skip
"""Every field of this transformers', and three that are none of its own."""

ENDS = "eos_token_id"
"""The one field that a model decides: what ends a completion."""


@pytest.fixture(scope="module")
def smoke() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_smoke()


@pytest.fixture
def model(smoke: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Iterator[PreTrainedModel]:
    found = smoke[0]
    before = found.generation_config
    found.generation_config = GenerationConfig(eos_token_id=before.eos_token_id, pad_token_id=before.pad_token_id)
    yield found
    found.generation_config = before


def make_odd(model: PreTrainedModel, name: str) -> None:
    """Set one field, past every check of its value."""
    vars(model.generation_config)[name] = ODD[name]


def test_every_field_is_here() -> None:
    assert vars(GenerationConfig()).keys() <= {*ODD, ENDS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
class TestEveryField:
    @pytest.mark.parametrize("greedy", [True, False])
    def test_evaluations_draw_the_same_tokens(self, name: str, greedy: bool, smoke: Any, model: PreTrainedModel) -> None:
        tokenizer = smoke[1]
        ids = tokenizer(["1+1=", "23", "9-4"])["input_ids"]

        def draw() -> list[list[int]]:
            torch.manual_seed(0)
            return generate(model, tokenizer, ids, Sampling(max_tokens=12, greedy=greedy))

        plain = draw()
        make_odd(model, name)
        own = model.generation_config
        assert draw() == plain
        assert model.generation_config is own, "a model keeps its settings"

    def test_turns_are_the_same(self, name: str, smoke: Any, model: PreTrainedModel) -> None:
        tokenizer = smoke[1]
        asked = ["1+1=", "23"]
        ids = tokenizer(asked)["input_ids"]

        def play() -> list[tuple[list[int], list[float]]]:
            torch.manual_seed(0)
            found = converse(model, tokenizer, asked, ids, Calculator(), Sampling(max_tokens=12))
            return [(one.tokens, one.logps) for one in found]

        plain = play()
        make_odd(model, name)
        assert play() == plain

    def test_training_draws_the_same_tokens_or_refuses(self, name: str, smoke: Any, model: PreTrainedModel) -> None:
        """TRL passes its own settings to `generate`, and transformers takes the model's wherever those are None."""
        tokenizer = smoke[1]
        batch = tokenizer(["1+1=", "23", "9-4"], padding=True, padding_side="left", return_tensors="pt")
        of_trl = {
            "max_new_tokens": 12, "do_sample": True, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": model.generation_config.eos_token_id,
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
            "cache_implementation": None, "disable_compile": True,
        }  # fmt: skip

        def draw() -> Any:
            torch.manual_seed(0)
            return model.generate(**batch, generation_config=GenerationConfig(**of_trl)).tolist()

        plain = draw()
        make_odd(model, name)
        refusals = list(model_refusals(model.generation_config, {}))
        assert all(f"generation_config has {name}=" in why for why in refusals)
        if not refusals:
            assert draw() == plain


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_beams": 1, "typical_p": 1.0, "num_return_sequences": 1, "suppress_tokens": [], "guidance_scale": 1.0},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "repetition_penalty": 1.1, "max_length": 4096},
        {"return_dict_in_generate": False, "no_repeat_ngram_size": 0, "epsilon_cutoff": 0.0, "min_p": 0.0, "min_length": 0},
        {"chat_format": "chatml", "max_window_size": 6144},
    ],
    ids=str,
)
def test_what_published_models_say_is_no_reason_to_refuse(harmless: dict[str, Any]) -> None:
    assert not list(model_refusals(GenerationConfig(**harmless), {}))


def test_the_user_s_own_settings_come_first() -> None:
    assert not list(model_refusals(GenerationConfig(min_p=0.5), {"min_p": 0.0}))
    assert list(model_refusals(GenerationConfig(min_p=0.5), {"min_p": None}))


def test_a_training_run_with_such_a_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from corral.lab.jobs.llm.train import train
    from corral.validate import RunError
    from small_runs import save_model, small

    folder = Path(save_model(tmp_path / "model"))
    GenerationConfig(**(GenerationConfig.from_pretrained(folder).to_dict() | {"max_time": 0.5})).save_pretrained(folder)
    with pytest.raises(RunError, match=r"generation_config has max_time=0\.5.*generation_config\.json"):
        train(small(str(folder)), out=tmp_path / "run", quiet=True)
