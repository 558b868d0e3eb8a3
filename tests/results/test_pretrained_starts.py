"""Pretrained models on word problems: starts are folders that say what they can do, and runs of the plans train from them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from corral.lab.jobs.llm.settings import resolve
from corral.lab.models.load import load_model
from corral.lab.run.settings import read_recipe
from results import spec as runs_spec
from results.evidence import starts
from results.evidence.cells import at_best
from results.plans import BEST, MEASURED, PLANS, SEEDS, WORD_RATES, WORD_SEEDS
from results.study import run as run_spec


def test_a_start_is_a_folder_that_loads_and_says_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(starts.WARM_UPS, "gemma", replace(starts.WARM_UPS["gemma"], rate=1e-3, watched=4))
    start = starts.load("gemma", "cpu", "smoke")
    before = [weight.detach().clone() for weight in start.model.parameters()]
    card = starts.make(start, "gemma", 1, tmp_path / "1", rounds=2, problems=2)
    assert len(card["rounds"]) == 2
    assert card["rounds"][1]["loss"] < card["rounds"][0]["loss"], "it learned nothing"
    assert set(card["after"]) == set(card["before"]) == {"greedy", "1", "0.7", "0.4", "0.2"}
    model, tokenizer = load_model(str(tmp_path / "1"))
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert any((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    assert json.dumps(card)


def test_without_rounds_a_start_is_the_model_as_it_comes(tmp_path: Path) -> None:
    start = starts.load("smollm2", "cpu", "smoke")
    card = starts.make(start, "smollm2", 1, tmp_path / "1", rounds=0, problems=2)
    assert card["rounds"] == []
    pairs = zip(load_model("smoke")[0].parameters(), load_model(str(tmp_path / "1"))[0].parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_the_loss_is_that_of_the_answers_alone_and_padding_is_not_seen() -> None:
    start = starts.load("smollm2", "cpu", "smoke")
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
    names = ("b", "b-clip", "b-held", "b-gemma", "b-gemma-held", "b-books", "b-gsm8k")
    plans = {name: {spec.key: spec for spec in PLANS[name]()} for name in names}
    assert [len(plan) for plan in plans.values()] == [60, 15, 33, 60, 9, 27, 27]
    assert len({key for plan in plans.values() for key in plan}) == 75 + 33 + 60 + 9 + 27 + 27
    assert {spec.model for spec in plans["b-gemma"].values()} == {f"runs/pretrained/gemma-{place}" for place in (1, 2, 3)}
    asked = resolve([read_recipe("evidence-b"), next(iter(plans["b-gemma"].values())).layer()])
    assert asked.instruction == "{problem}\nAnswer:"
    automatic = [spec for spec in plans["b-held"].values() if spec.rate == "auto"]
    assert {(spec.passes, spec.arm, spec.schedule) for spec in automatic} == {
        (1, "on 0.03", "constant"),
        (4, "on 0.01", "constant"),
    }
    assert resolve([read_recipe("evidence-b"), automatic[0].layer()]).trainer["learning_rate"] == "auto"
    books, gsm8k = (
        [resolve([read_recipe("evidence-b"), spec.layer()]) for spec in plans[name].values()] for name in ("b-books", "b-gsm8k")
    )
    assert {(settings.task, settings.task_config["part"], settings.eval_size) for settings in books} == {("words", "rl", 1000)}
    assert {settings.model for settings in books} == {f"runs/pretrained/books-{place}" for place in (1, 2, 3)}
    assert {(settings.task, settings.model, settings.eval_size) for settings in gsm8k} == {
        ("gsm8k", "runs/pretrained/smollm2", 128)
    }
    assert {settings.trainer["max_completion_length"] for settings in gsm8k} == {96}


@pytest.mark.parametrize(("base", "seeds", "runs"), [("smollm2", 10, 50), ("gemma", 5, 25)])
def test_confirming_runs_have_fresh_seeds_the_rates_that_were_chosen_and_many_problems(
    base: str, seeds: int, runs: int
) -> None:
    plan = PLANS["b-confirm" if base == "smollm2" else "b-gemma-confirm"]()
    assert len(plan) == len({spec.key for spec in plan}) == runs
    assert len(WORD_SEEDS[base]) == seeds
    assert not set(WORD_SEEDS[base]) & set(SEEDS)
    for spec in plan:
        settings = resolve([read_recipe("evidence-b"), replace(spec, device="cuda").layer()])
        assert settings.eval_size == MEASURED
        assert settings.trainer["learning_rate"] == ("auto" if spec.rate == "auto" else BEST[base][spec.objective, spec.passes])
    assert {spec.seed for spec in plan if spec.passes == 4} == set(WORD_SEEDS[base][:5])
    assert [spec.arm for spec in plan if spec.rate == "auto"] == ["on 0.03"] * seeds


def test_books_are_shown_from_the_half_that_is_not_reinforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("asdiv", "mawps", "svamp"):
        rows = [{"question": f"{name} has {one} plums and {one} pears. How many?", "answer": str(2 * one)} for one in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(runs_spec.BASES["books"], "task_config", {"path": str(tmp_path), "part": "rl"})
    shown = starts.demonstrations("books", 500, seed=1)
    reinforced = set(starts.task_of("books").train_prompts(500, seed=1))
    assert len({prompt for prompt, _ in shown}) + len(reinforced) == 80
    assert not reinforced & {prompt for prompt, _ in shown}
    assert all(int(answer) == 2 * int(prompt.split()[2]) for prompt, answer in shown)
    monkeypatch.setitem(starts.WARM_UPS, "books", replace(starts.WARM_UPS["books"], watched=4))
    start = starts.load("books", "cpu", "smoke")
    card = starts.make(start, "books", 1, tmp_path / "1", rounds=1, problems=2)
    assert (card["model"], card["held_out"], len(card["rounds"])) == ("books", 2, 1)


def test_a_run_of_the_plan_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(PLANS["b"]()[0], model="smoke", steps=1, eval_size=2, eval_every=1)
    monkeypatch.setattr(runs_spec.Run, "layer", lambda self, own=runs_spec.Run.layer: own(self) | {"max_completion_length": 2})
    found = run_spec(spec, math.inf)
    assert (found["finished"], found["recipe"], len(found["lines"])) == (True, "evidence-b", 2)
    assert found["key"].startswith("smollm2-shipped-ppo_clip-off-1e-05")


def test_golden_each_seed_at_the_best_rate_of_the_others() -> None:
    # Seed 1: the others have 1 → (5 + 1)/2 = 3, 2 → (1 + 4)/2 = 2.5, so rate 1: 9. Seed 2: 1 → 5, 2 → 2.5: 5.
    # Seed 3: 1 → 7, 2 → 1: its 1, though its own best is 4. Seed 4 lacks a rate.
    values = {(1, 1.0): 9.0, (1, 2.0): 1.0, (2, 1.0): 5.0, (2, 2.0): 1.0, (3, 1.0): 1.0, (3, 2.0): 4.0, (4, 1.0): 7.0}
    assert at_best(values, (1.0, 2.0)) == {"1": 9.0, "2": 5.0, "3": 1.0}
    assert at_best({(1, 1.0): 9.0, (1, 2.0): 1.0}, (1.0, 2.0)) == {}
