"""Pretrained models on word problems: starts are folders that say what they can do, and runs of the plans train from them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import evidence_spec
import pretrained_starts
import pytest
import torch
from evidence_plans import PLANS, SEEDS, WORD_RATES
from evidence_rows import at_best
from evidence_spec import Pretrained
from evidence_study import run as run_spec

from corral.llm.models import load_model
from corral.llm.settings import read_recipe, resolve


def test_a_start_is_a_folder_that_loads_and_says_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained_starts, "RATE", 1e-3)
    monkeypatch.setattr(pretrained_starts, "WATCHED", 4)
    start = pretrained_starts.load("gemma", "cpu", "smoke")
    before = [weight.detach().clone() for weight in start.model.parameters()]
    card = pretrained_starts.make(start, "gemma", 1, tmp_path / "1", rounds=2, problems=2)
    assert len(card["rounds"]) == 2
    assert card["rounds"][1]["loss"] < card["rounds"][0]["loss"], "it learned nothing"
    assert set(card["after"]) == set(card["before"]) == {"greedy", "1", "0.7", "0.4", "0.2"}
    model, tokenizer = load_model(str(tmp_path / "1"))
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert any((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    assert json.dumps(card)


def test_without_rounds_a_start_is_the_model_as_it_comes(tmp_path: Path) -> None:
    start = pretrained_starts.load("smollm2", "cpu", "smoke")
    card = pretrained_starts.make(start, "smollm2", 1, tmp_path / "1", rounds=0, problems=2)
    assert card["rounds"] == []
    pairs = zip(load_model("smoke")[0].parameters(), load_model(str(tmp_path / "1"))[0].parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_the_loss_is_that_of_the_answers_alone_and_padding_is_not_seen() -> None:
    start = pretrained_starts.load("smollm2", "cpu", "smoke")
    rows = [([5, 6, 7, 8, 9], [10, 11]), ([12, 13], [14, 15, 16, 17])]
    start.model.eval()
    one_by_one = []
    for prompt, answer in rows:
        logits = start.model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        one_by_one += [-logits[len(prompt) + place - 1, token] for place, token in enumerate(answer)]
    torch.testing.assert_close(start.answer_loss(rows), torch.stack(one_by_one).mean(), rtol=1e-4, atol=1e-5)


def test_every_seed_has_every_rate() -> None:
    plan = [*PLANS["b"](), *PLANS["b-clip"]()]
    assert {spec.model for spec in plan} == {"runs/pretrained/smollm2"}
    arms = {(spec.objective, spec.passes) for spec in plan}
    assert len(plan) == len(arms) * len(SEEDS) * len(WORD_RATES) == 75
    settings = resolve([read_recipe("evidence-b"), replace(plan[0], device="cuda").layer()])
    assert (settings.model, settings.task, settings.device) == ("runs/pretrained/smollm2", "two_numbers", "cuda")
    assert (settings.trainer["bf16"], settings.trainer["save_only_model"]) == (True, True)


def test_held_runs_those_of_gemma_and_those_on_other_problems_are_told_apart() -> None:
    names = ("b", "b-clip", "b-held", "b-gemma", "b-gemma-held", "b-elsewhere")
    plans = {name: {spec.key: spec for spec in PLANS[name]()} for name in names}
    assert [len(plan) for plan in plans.values()] == [60, 15, 33, 60, 9, 18]
    assert len({key for plan in plans.values() for key in plan}) == 75 + 33 + 60 + 9 + 18
    assert {spec.model for spec in plans["b-gemma"].values()} == {f"runs/pretrained/gemma-{place}" for place in (1, 2, 3)}
    asked = resolve([read_recipe("evidence-b"), next(iter(plans["b-gemma"].values())).layer()])
    assert asked.instruction == "{problem}\nAnswer:"
    automatic = [spec for spec in plans["b-held"].values() if spec.rate == "auto"]
    assert {(spec.passes, spec.arm, spec.schedule) for spec in automatic} == {
        (1, "on 0.03", "constant"),
        (4, "on 0.01", "constant"),
    }
    assert resolve([read_recipe("evidence-b"), automatic[0].layer()]).trainer["learning_rate"] == "auto"
    elsewhere = [resolve([read_recipe("evidence-b"), spec.layer()]) for spec in plans["b-elsewhere"].values()]
    assert [settings.task for settings in elsewhere] == ["words"] * 9 + ["gsm8k"] * 9
    assert {settings.trainer["max_completion_length"] for settings in elsewhere[9:]} == {96}


def test_a_run_of_the_plan_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(PLANS["b"]()[0], model="smoke", steps=1, eval_size=2, eval_every=1)
    assert isinstance(spec, Pretrained)
    monkeypatch.setattr(
        evidence_spec.Run, "layer", lambda self, own=evidence_spec.Run.layer: own(self) | {"max_completion_length": 2}
    )
    found = run_spec(spec, math.inf)
    assert (found["finished"], found["recipe"], len(found["lines"])) == (True, "evidence-b", 2)
    assert found["key"].startswith("smollm2-shipped-ppo_clip-off-1e-05")


def test_golden_each_seed_at_the_best_rate_of_the_others() -> None:
    # Seed 1: the others have 1 → (5 + 1)/2 = 3, 2 → (1 + 4)/2 = 2.5, so rate 1: 9. Seed 2: 1 → 5, 2 → 2.5: 5.
    # Seed 3: 1 → 7, 2 → 1: its 1, though its own best is 4. Seed 4 lacks a rate.
    values = {(1, 1.0): 9.0, (1, 2.0): 1.0, (2, 1.0): 5.0, (2, 2.0): 1.0, (3, 1.0): 1.0, (3, 2.0): 4.0, (4, 1.0): 7.0}
    assert at_best(values, (1.0, 2.0)) == {"1": 9.0, "2": 5.0, "3": 1.0}
    assert at_best({(1, 1.0): 9.0, (1, 2.0): 1.0}, (1.0, 2.0)) == {}
