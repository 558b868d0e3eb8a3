"""Every recipe, two steps of it through the command line, without a network; and the random model that they run on."""

import json
import re
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.cli import main
from corral.lab.jobs.llm.settings import resolve
from corral.lab.jobs.llm.smoke import TASK_CONFIG, letters
from corral.lab.models.smoke import build_byte_tokenizer, build_smoke
from corral.lab.run.settings import RECIPES, read_recipe
from corral.lab.tasks import make_task
from corral.objective import make_objective
from corral.trl.api import REDUCTIONS

NAMES = sorted(path.stem for path in (RECIPES / "llm").glob("*.toml"))


def test_the_recipes_that_there_are() -> None:
    evidence = [f"evidence-{part}" for part in "abefgh"]
    others = ["code", "countdown", "dapo-like", "demo", "dppo_published", "gsm8k", "leaderboard", "sums", "tool_use"]
    assert sorted([*others, *evidence]) == NAMES


# Those of the evidence differ in whom they compare, and one of them shows that they train. `sums` is `demo` with more passes.
SLOW = {"demo", "leaderboard", *(f"evidence-{part}" for part in "aefgh")}
SMOKE = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]


@pytest.mark.parametrize("name", SMOKE)
def test_a_recipe_runs_in_smoke_form(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["train", "--recipe", name, "--smoke", "--quiet", "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"], summary["skipped"]) == ("finished", 2, 0)
    assert summary["success_final"] is not None
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    given_ = resolve([read_recipe(name)])
    assert config["model"]["name"] == "smoke"
    assert (config["settings"]["task"], config["settings"]["objective"]) == (given_.task, given_.objective)
    own = {"code": "dr_grpo", "countdown": "dapo", "dapo-like": "dapo", "demo": "dr_grpo", "gsm8k": "dapo"}
    own |= {"dppo_published": "luspo", "leaderboard": "dr_grpo", "sums": "dr_grpo", "tool_use": "dapo"}
    own |= {name: "dr_grpo" for name in NAMES if name.startswith("evidence")}
    assert config["trainer"]["loss_type"] == own[name], "what is not about size stays"
    assert config["reduction"] == {"name": REDUCTIONS[own[name]], "own": True}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    if not given_.trainer.get("mask_truncated_completions"):
        assert any(line.get("grad_norm", 0) > 0 for line in lines), "there is a gradient"
    instruction = given_.instruction.replace("{problem}", "").strip()
    prompts = pq.read_table(tmp_path / "run" / "completions.parquet")["prompt"].to_pylist()
    assert all(instruction in prompt for prompt in prompts), "asked as the recipe says, in a chat"
    if name != "tool_use":  # which `corral eval` does not play
        assert main(["eval", str(tmp_path / "run"), "--problems", "2", "--samples", "2", "--quiet"]) == 0
        assert f"problems of {given_.task}" in capsys.readouterr().out
    assert time.monotonic() - started < 60  # two or three seconds, on a machine that has nothing else to do


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_why(name: str) -> None:
    text = (RECIPES / "llm" / f"{name}.toml").read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 128 for line in text.splitlines())
    settings = resolve([read_recipe(name)])
    make_objective(settings.objective, **settings.objective_config)
    per_update = settings.trainer.get("gradient_accumulation_steps", 1)
    assert settings.trainer["steps_per_generation"] / per_update >= 4, "several updates per batch, or no region could act"
    assert settings.trainer["per_device_train_batch_size"] * per_update % settings.trainer["num_generations"] == 0


def test_what_recipes_say_about_sizes_is_so() -> None:
    """The comments are counted after: 128 completions per update, 128 prompts per step, 8 updates."""
    settings = resolve([read_recipe("gsm8k")]).trainer
    rollouts = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
    assert rollouts // settings["num_generations"] == 128
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 128
    assert settings["steps_per_generation"] // settings["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize("name", sorted(TASK_CONFIG))
def test_packaged_problems_are_in_the_data_set_s_own_shape(name: str) -> None:
    task = make_task(name, **TASK_CONFIG[name])
    train, held_out = task.train_prompts(4, 0), task.held_out_prompts(2, 0)
    assert len(train) == 4
    assert len(held_out) == 2
    assert task.verify(held_out[0], "I do not know.") == 0.0
    assert task.verify(held_out[0], f"So it is \\boxed{{{task.answer(held_out[0])}}}.") == 1.0


def test_the_packaged_solutions_of_gsm8k_add_up() -> None:
    """As in the data set, every step stands between << and >> with its result."""
    rows = [
        json.loads(line) for path in (RECIPES / "llm" / "smoke" / "gsm8k").iterdir() for line in path.read_text().splitlines()
    ]
    assert len(rows) == 9
    for row in rows:
        steps = re.findall(r"<<([\d*/+-]+)=(\d+)>>", row["answer"])
        assert steps
        assert all(eval(sum_) == float(result) for sum_, result in steps)
        assert row["answer"].endswith(f"#### {steps[-1][1]}")


def test_smoke_lies_between_recipe_and_flags(tmp_path: Path) -> None:
    argv = ["train", "--recipe", "countdown", "--smoke", "--steps", "1", "--set", "task_config.n=2", "--quiet"]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["steps"], settings["model"], settings["task_config"]) == (1, "smoke", {"n": 2})
    assert settings["objective_config"] == {"bound": 0.05}


def test_programs_run_outside_the_sandbox_only_if_the_user_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--smoke", "--steps", "1", "--quiet", "--unsafe-code-execution"]
    assert main([*argv, "--task", "code", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"]["unsafe_code_execution"] is True
    assert main([*argv, "--task", "countdown", "--out", str(tmp_path / "other")]) == 1
    assert "unsafe_code_execution" in capsys.readouterr().err
    flags = ["--quiet", "--unsafe-code-execution", "--out", str(tmp_path / "e")]
    assert main(["eval", "--smoke", "--task", "code", *flags]) == 0
    assert json.loads((tmp_path / "e" / "eval.json").read_text())["settings"]["task"]["unsafe_code_execution"] is True


def test_a_run_cannot_be_resumed_in_smoke_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "runs/any", "--smoke"]) == 1
    assert "so smoke cannot be given with it" in capsys.readouterr().err


@given(st.text())
def test_any_text_goes_through_the_byte_tokenizer(text: str) -> None:
    tokenizer = TOKENIZER
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert len(ids) == len(text.encode())


TOKENIZER = build_byte_tokenizer()


def test_the_random_model_is_always_the_same_and_draws_no_number_of_others() -> None:
    before = torch.random.get_rng_state()
    (one, tokenizer), (two, _) = build_smoke(), build_smoke()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert sum(p.numel() for p in one.parameters()) < 10_000
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_letters_are_shares() -> None:
    chat = [{"role": "assistant", "content": "12"}]
    assert letters(["ab1 ", "", chat, "é"]) == [0.5, 0.0, 0.0, 1.0]
