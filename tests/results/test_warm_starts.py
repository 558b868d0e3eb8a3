"""Families of warm starts: of the embedded model's size and tokenizer, loadable by name, different by seed."""

import json
from pathlib import Path

import pytest
import torch
from start_that_learns import CANDIDATES, tasks_of
from warm_start import FAMILIES, build, main

from corral.lab.models.load import load_model
from corral.lab.tasks import verify_all
from results.plans import FAMILIES as PLANNED
from results.plans import PLANS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_about_as_large_as_the_embedded_model(family: str) -> None:
    model, tokenizer = build(family, 1)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 2.1e6
    again, other = build(family, 1)[0], build(family, 2)[0]
    ids = tokenizer(["3 7 12>22:"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = [one(ids).logits for one in (model, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    if family == "gemma":
        assert model.config.final_logit_softcapping == 30.0


@pytest.mark.filterwarnings("ignore")  # of two steps nothing is learned, and some of it is said
def test_a_start_is_a_folder_that_loads(tmp_path: Path) -> None:
    small = ["--steps", "2", "--batch", "64", "--demonstrations", "512", "--evaluate", "4"]
    main(["--family", "moe", "--seed", "1", "--out", str(tmp_path / "moe-1"), *small])
    model, tokenizer = load_model(str(tmp_path / "moe-1"))
    assert (type(model).__name__, len(tokenizer)) == ("Qwen3MoeForCausalLM", 100)
    card = json.loads((tmp_path / "moe-1" / "warm_start.json").read_text())
    assert (card["settings"]["family"], card["settings"]["seed"]) == ("moe", 1)
    assert set(card["held_out_success"]) == {"prompts", "temperature_1", "greedy"}


def test_the_plan_of_starts_uses_what_the_command_makes() -> None:
    assert set(PLANNED) | {"llama"} == set(FAMILIES)
    folders = {Path(spec.model) for spec in PLANS["a-starts"]()}
    assert {folder.name for folder in folders} == {"llama-1", "llama-2", "llama-3", *(f"{name}-1" for name in PLANNED)}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_start_that_learns_is_shown_right_answers(name: str, tmp_path: Path) -> None:
    task, shown = tasks_of(CANDIDATES[name], tmp_path, unsafe=True)
    prompts, answers = zip(*shown.demonstrations(20, 0)[:20], strict=True)
    if name == "functions":  # no demonstrated sentence is asked
        assert not set(prompts) & {*task.train_prompts(2000, 0), *task.held_out_prompts(1000, 0)}
    else:
        assert verify_all(task, prompts, answers) == [1.0] * 20
    asked = task.train_prompts(50, 0)
    assert all(len(prompt) < 64 and prompt.endswith("\n" if name == "functions" else ":") for prompt in asked)


def test_the_start_of_unseen_numbers_is_asked_for_numbers_that_it_never_saw() -> None:
    task, shown = tasks_of(CANDIDATES["unseen"], Path(), unsafe=False)
    largest = [max(max(one.parse_prompt(prompt)[0]) for prompt in one.train_prompts(200, 0)) for one in (shown, task)]
    assert largest == [12, 19]
