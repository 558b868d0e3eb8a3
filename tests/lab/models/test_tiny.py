"""The embedded models: a standard architecture and tokenizer, the shipped folders, and the script that makes them."""

import importlib.util
import json
import os
import string
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from corral.lab.models import EMBEDDED
from corral.lab.models.load import load_model
from corral.lab.models.tiny import FILES, FOLDERS, build_tiny, load_tiny
from corral.lab.run.settings import read_recipe
from corral.lab.tasks import make_task
from corral.lab.tasks.procedural import Arithmetic, Countdown
from corral.validate import RunError

logging.disable_progress_bar()

MODEL, TOKENIZER = build_tiny(0)
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
PROMPTS = ["3 7 12>22:", "19 18 17>54:", "1 2 3>6:"]  # 10, 12 and 8 characters


@pytest.fixture(scope="module")
def warm_start() -> ModuleType:
    """scripts/warm_start.py as a module."""
    spec = importlib.util.spec_from_file_location("warm_start", Path(__file__).parents[3] / "scripts" / "warm_start.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["warm_start"] = script  # dataclasses look their own module up
    spec.loader.exec_module(script)
    return script


# ---------------------------------------------------------------- model


def test_golden_parameter_count() -> None:
    # Two embeddings 100·128, four layers of 4·128² + 3·128·416 + 2·128, one last norm of 128.
    assert 2 * 100 * 128 + 4 * (4 * 128**2 + 3 * 128 * 416 + 2 * 128) + 128 == 927_872
    assert sum(p.numel() for p in MODEL.parameters()) == 927_872
    assert {p.dtype for p in MODEL.parameters()} == {torch.float32}


def test_seeds_decide_the_weights_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    same, other = build_tiny(0)[0], build_tiny(1)[0]
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(same.lm_head.weight, MODEL.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, MODEL.lm_head.weight)


def test_what_is_saved_loads_like_any_other_model(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    assert (tmp_path / "model.safetensors").stat().st_size <= 4_000_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(model) is LlamaForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), MODEL.parameters(), strict=True))
    assert model.generation_config.to_dict() == MODEL.generation_config.to_dict()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == ("left", PAD, EOS)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer(PROMPTS)["input_ids"] == TOKENIZER(PROMPTS)["input_ids"]
    # The model is told the same special tokens as the tokenizer.
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == ids == (0, 1, 2)


def test_left_padding_does_not_change_the_logits() -> None:
    batch = TOKENIZER(PROMPTS, padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(1).tolist() == [11, 13, 9]
    with torch.no_grad():
        padded = MODEL(**batch).logits
        for row, prompt in enumerate(PROMPTS):
            alone = MODEL(**TOKENIZER(prompt, return_tensors="pt")).logits[0]
            torch.testing.assert_close(padded[row, -len(alone) :], alone, atol=2e-6, rtol=0)


def test_generation_stops_at_the_end_and_pads() -> None:
    model, _ = build_tiny(0)
    batch = TOKENIZER(PROMPTS, padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=15)
    assert out.shape == (3, 13 + 15)
    assert torch.equal(out[:, :13], batch["input_ids"])
    with torch.no_grad():
        model.lm_head.weight[2] = 1e3 * model.model(**batch).last_hidden_state[0, -1]  # the first row now ends at once
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert out[0, 13:].tolist() == [2] + [0] * (out.shape[1] - 14)


def test_plain_generation_samples_from_every_token() -> None:
    # Untrained, all 100 tokens are about equally likely; a top-k of 50, transformers' default, would leave half of them out.
    model, _ = build_tiny(0)
    model.generation_config.eos_token_id = None
    batch = TOKENIZER(PROMPTS[:1] * 100, padding=True, return_tensors="pt")
    drawn = model.generate(**batch, max_new_tokens=15)[:, 11:]
    assert len(drawn.unique()) == 100


# ---------------------------------------------------------------- tokenizer


def test_golden_tokens() -> None:
    assert len(TOKENIZER) == 100
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER("3 7>10:")["input_ids"]) == [BOS, "3", " ", "7", ">", "1", "0", ":"]
    assert TOKENIZER("3 7>10:", add_special_tokens=False)["input_ids"] == [7, 98, 11, 85, 5, 4, 81]
    assert TOKENIZER.convert_tokens_to_ids([PAD, BOS, EOS, UNKNOWN]) == [0, 1, 2, 3]
    assert TOKENIZER("\n\n\t", add_special_tokens=False)["input_ids"] == [99, 99, 3]  # `.` in a pattern would not part these


@given(text=st.text(CHARACTERS, max_size=60))
def test_text_comes_back_as_it_was(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    if not any(special in text for special in (PAD, BOS, EOS, UNKNOWN)):
        assert len(ids) == 1 + len(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == BOS + text
    assert UNKNOWN in text or 3 not in ids


@given(text=st.text(max_size=20))
def test_any_text_has_tokens(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert all(0 <= index < 100 for index in ids)
    assert TOKENIZER.decode([*ids, 2, 0, 0], skip_special_tokens=True) == "".join(
        TOKENIZER.convert_ids_to_tokens([index for index in ids if index > 3])
    )


def test_every_countdown_character_is_known() -> None:
    for prompt, answer in Countdown().demonstrations(200, 0):
        ids = TOKENIZER(prompt + answer + EOS)["input_ids"]
        assert len(ids) == 1 + len(prompt) + len(answer) + 1
        assert 3 not in ids
        assert ids[-1] == 2


# ---------------------------------------------------------------- the shipped folder


@pytest.mark.parametrize("name", EMBEDDED)
def test_missing_weights_are_named_with_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setitem(FOLDERS, name, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"scripts/warm_start\.py has the command") as raised:
        load_tiny(name)
    wanted = "load_tiny: generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json should be in"
    assert str(raised.value).startswith(wanted)  # and config.json, which is there, is not named
    with pytest.raises(RunError, match="Reinstall corral"):  # the command line prints it as one sentence
        load_model(name)


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=EMBEDDED)
def test_a_shipped_folder_is_small_and_whole(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {*FILES, "warm_start.json"}
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_shipped_model_is_what_build_tiny_builds_but_trained(name: str) -> None:
    model, tokenizer = load_model(name)
    assert AutoTokenizer.from_pretrained(FOLDERS[name], local_files_only=True).get_vocab() == TOKENIZER.get_vocab()
    assert model.dtype == torch.float32
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    ours, theirs = MODEL.config.to_dict(), model.config.to_dict()
    given_by_the_library = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= given_by_the_library
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_model_of_the_demo_mostly_forgets_to_carry_sampled_or_not(warm_start: ModuleType) -> None:
    # 150 prompts: three standard deviations are at most .123.
    task = make_task("arithmetic", **read_recipe("sums")["task_config"])
    card = json.loads((FOLDERS["tiny-sums"] / "warm_start.json").read_text())
    assert task == warm_start.TASKS[card["settings"]["task"]]
    model, tokenizer = load_tiny("tiny-sums")
    prompts = task.held_out_prompts(150, seed=5)
    said = card["held_out_success"]
    assert abs(warm_start.success(model, tokenizer, task, prompts, seed=None) - said["greedy"]) < 0.123
    assert abs(warm_start.success(model, tokenizer, task, prompts, seed=0) - said["temperature_1"]) < 0.123
    assert 0.2 < said["greedy"] < said["temperature_1"] < 0.4


def test_the_shipped_model_solves_held_out_problems_greedily_and_seldom_when_sampled(warm_start: ModuleType) -> None:
    # 200 prompts: three standard deviations are at most .11.
    card = json.loads((FOLDERS["tiny"] / "warm_start.json").read_text())["held_out_success"]
    model, tokenizer = load_tiny()
    prompts = Countdown().held_out_prompts(200, seed=5)
    assert abs(warm_start.success(model, tokenizer, Countdown(), prompts, seed=None) - card["greedy"]) < 0.11
    assert abs(warm_start.success(model, tokenizer, Countdown(), prompts, seed=0) - card["temperature_1"]) < 0.11
    assert card["temperature_1"] < 0.25
    assert card["greedy"] > 0.5


# ---------------------------------------------------------------- the script


def test_mistakes_are_made_in_answers_only_and_as_often_as_asked(warm_start: ModuleType) -> None:
    task, noise = Countdown(), 0.3
    data = warm_start.demonstrate(task, TOKENIZER, 50, 0, torch.device("cpu"))
    rows = {tuple(row) for row in data.tokens.tolist()}
    clean = dict(zip([prompt for prompt, _ in task.demonstrations(50, 0)], data.tokens, strict=True))
    inputs, targets = data.batch(4_000, noise, torch.Generator().manual_seed(0))
    wrong, characters = 0, 0
    for tokens, wanted in zip(inputs, targets, strict=True):
        text = TOKENIZER.decode(tokens)
        prompt = text[len(BOS) : text.index(":") + 1]
        original, start = clean[prompt], 1 + len(prompt)
        end = original.tolist().index(2)
        counted = torch.arange(len(wanted)) + 1
        assert torch.equal(wanted != -100, (counted >= start) & (counted <= end))  # the answer and its end, nothing else
        assert wanted[end - 1] == 2  # the end is never a mistake
        assert torch.equal(tokens[start:end], wanted[start - 1 : end - 1])  # inputs contain the same mistakes
        assert torch.equal(tokens[:start], original[:start])
        changed = tokens[start:end] != original[start:end]
        assert set(TOKENIZER.decode(tokens[start:end][changed])) <= set(warm_start.MISTAKES)
        wrong, characters = wrong + int(changed.sum()), characters + end - start
    # One mistake in 14 puts the right character by accident. 48 thousand characters: three standard deviations are .006.
    assert abs(wrong / characters - noise * 13 / 14) < 0.007
    clean_inputs, clean_targets = data.batch(20, 0.0, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in clean_inputs.tolist()} <= {row[:-1] for row in rows}
    assert clean_targets.shape == clean_inputs.shape


@pytest.mark.parametrize(
    ("prompt", "carried", "answer"),
    [
        ("47+85:", 1.0, "47+80=127+5=132"),
        ("47+85:", 0.0, "47+80=27+5=22"),  # 4 + 8 and 7 + 5, each without its 1
        ("97+10:", 0.0, "97+10=7"),  # 07
        ("7+85:", 0.0, "7+80=87+5=82"),
        ("11+23:", 0.0, "11+20=31+3=34"),  # nothing to carry
    ],
)
def test_golden_carries(warm_start: ModuleType, prompt: str, carried: float, answer: str) -> None:
    assert warm_start.add_up(prompt, carried, lambda: 0.5) == answer


def test_carries_are_written_down_as_often_as_asked(warm_start: ModuleType) -> None:
    task = Arithmetic(operations="+")
    right = task.demonstrations(1000, 0)
    assert [warm_start.add_up(prompt, 1.0, lambda: 0.999) for prompt, _ in right] == [answer for _, answer in right]
    never = sum(warm_start.add_up(prompt, 0.0, lambda: 0.5) == answer for prompt, answer in right) / 1000
    data = warm_start.demonstrate(task, TOKENIZER, 1000, 0, torch.device("cpu"), carried=0.5)
    shown = [text.split(":") for text in TOKENIZER.batch_decode(data.tokens, skip_special_tokens=True)]
    share = sum(task.verify(f"{prompt}:", answer) for prompt, answer in shown) / 1000
    # About .28 have nothing to carry, .5 one digit, and the others two: .28 + .5/2 + .22/4 are right.
    assert 0.22 < never < 0.34
    assert 0.52 < share < 0.65


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_success_counts_right_answers_sampled_or_greedy_padded_or_not(warm_start: ModuleType, seed: int | None) -> None:
    """A model that has learnt one answer by heart is right on that problem and on no other."""
    model, _ = build_tiny(0)
    task, prompt, other, answer = Countdown(), "3 7 12>22:", "15 17 12>44:", "3+7=10+12=22"
    wanted = TOKENIZER(prompt + answer + EOS, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(wanted[:, :-1]).logits[0, 10:], wanted[0, 11:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert warm_start.success(model, TOKENIZER, task, [prompt] * 20, seed) >= 0.9
    assert 0.45 <= warm_start.success(model, TOKENIZER, task, [prompt, other] * 20, seed) <= 0.5
    with torch.no_grad():
        model.lm_head.weight[2] = -model.lm_head.weight[2]  # never ends: the right text alone is not enough
    assert warm_start.success(model, TOKENIZER, task, [prompt] * 20, seed) == 0.0


def test_the_script_writes_the_folder_whole_or_not_at_all(
    warm_start: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    command = ["--out", str(out), "--device", "cpu", "--steps", "2", "--batch", "4", "--demonstrations", "20"]
    command += ["--evaluate", "4", "--report-every", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            warm_start.main(command)
    assert list(tmp_path.iterdir()) == []
    warm_start.main(command)
    assert "held out, 4 prompts: T=1 0.000, greedy 0.000" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {*FILES, "warm_start.json"}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    assert json.loads((out / "tokenizer.json").read_text())["padding"] is None  # nothing left over from training
    monkeypatch.setitem(FOLDERS, "tiny", out)
    model, tokenizer = load_tiny()
    assert model.generate(**tokenizer(PROMPTS, padding=True, return_tensors="pt"), max_new_tokens=2).shape == (3, 15)
    with pytest.raises(SystemExit):
        warm_start.main(command)
    assert "is there already; remove it first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        warm_start.main(["--out", str(tmp_path / "other"), "--carried", "0.2"])
    assert "--carried is for --task sums; got --task countdown" in capsys.readouterr().err
