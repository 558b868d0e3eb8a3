"""Pretrained models on word problems: warm starts learn equations of their half, and runs of the plan train from them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import evidence_spec
import pytest
import torch
import word_starts
from evidence_plans import PLANS, SEEDS, WORD_RATES
from evidence_rows import at_best
from evidence_spec import WORDS, Pretrained
from evidence_study import run as run_spec

from corral.llm.models import load_model
from corral.llm.settings import read_recipe, resolve
from corral.llm.smoke import TASK_CONFIG
from corral.task.words import WordProblems

DATA = TASK_CONFIG["words"]["path"]


def test_demonstrations_are_right_equations_of_the_half_for_warm_ups() -> None:
    learn, reinforce = (WordProblems(path=DATA, part=part) for part in ("sft", "rl"))
    found = word_starts.demonstrations(learn)
    assert found
    assert {"=" in text and learn.verify(prompt, text) for prompt, text in found} == {1.0}
    others = set(reinforce.train_prompts(reinforce.sizes[0], 0)) | set(learn.held_out_prompts(99, 0))
    assert not others & {prompt for prompt, _ in found}


def test_a_start_is_a_folder_that_loads_and_says_what_it_can_do(tmp_path: Path) -> None:
    card = word_starts.make("smoke", DATA, 1, tmp_path / "1", problems=2, epochs=2, device="cpu")
    assert len(card["epochs"]) == 2
    assert card["epochs"][1]["loss"] < card["epochs"][0]["loss"], "it learned nothing"
    assert set(card["after"]) == set(card["before"]) == {"greedy", "1", "0.7", "0.4", "0.2"}
    model, tokenizer = load_model(str(tmp_path / "1"))
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert json.dumps(card)


def test_the_loss_is_that_of_the_answers_alone_and_padding_is_not_seen() -> None:
    start = word_starts.Start("smoke", DATA, "cpu")
    rows = [([5, 6, 7, 8, 9], [10, 11]), ([12, 13], [14, 15, 16, 17])]
    start.model.eval()
    one_by_one = []
    for prompt, answer in rows:
        logits = start.model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        one_by_one += [-logits[len(prompt) + place - 1, token] for place, token in enumerate(answer)]
    torch.testing.assert_close(start._loss(rows), torch.stack(one_by_one).mean(), rtol=1e-4, atol=1e-5)


def test_every_seed_has_a_start_and_every_rate() -> None:
    plan = PLANS["b"]()
    assert {spec.model for spec in plan} == {f"runs/word-starts/{place}" for place in (1, 2, 3, 4, 5)}
    arms = {(spec.objective, spec.passes) for spec in plan}
    assert len(plan) == len(arms) * len(SEEDS) * len(WORD_RATES) == 75
    settings = resolve([read_recipe("evidence-b"), replace(plan[0], device="cuda").layer()])
    assert (settings.task_config["part"], settings.device, settings.eval_size) == ("rl", "cuda", 1000)
    assert (settings.trainer["bf16"], settings.trainer["save_only_model"]) == (True, True)


def test_held_runs_and_those_of_gemma_are_told_apart() -> None:
    held, gemma, plain = ({spec.key: spec for spec in PLANS[name]()} for name in ("b-held", "b-gemma", "b"))
    assert (len(held), len(gemma)) == (28, 36)
    assert not held.keys() & plain.keys()
    assert not gemma.keys() & plain.keys()
    assert {spec.model for spec in gemma.values()} == {f"runs/word-starts-gemma/{place}" for place in (1, 2, 3)}
    automatic = [spec for spec in held.values() if spec.rate == "auto"]
    assert {(spec.arm, spec.schedule) for spec in automatic} == {("on 0.03", "constant")}
    assert resolve([read_recipe("evidence-b"), automatic[0].layer()]).trainer["learning_rate"] == "auto"


def test_a_run_of_the_plan_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORDS, "task_config", {"path": DATA, "part": "all"})
    spec = replace(PLANS["b"]()[0], model="smoke", steps=1, eval_size=2, eval_every=1)
    assert isinstance(spec, Pretrained)
    monkeypatch.setattr(
        evidence_spec.Run, "layer", lambda self, own=evidence_spec.Run.layer: own(self) | {"max_completion_length": 2}
    )
    found = run_spec(spec, math.inf)
    assert (found["finished"], found["recipe"], len(found["lines"])) == (True, "evidence-b", 2)
    assert found["key"].startswith("words-shipped-ppo_clip-off-1e-05")


def test_golden_each_seed_at_the_best_rate_of_the_others() -> None:
    # Seed 1: the others have 1 → (5 + 1)/2 = 3, 2 → (1 + 4)/2 = 2.5, so rate 1: 9. Seed 2: 1 → 5, 2 → 2.5: 5.
    # Seed 3: 1 → 7, 2 → 1: its 1, though its own best is 4. Seed 4 lacks a rate.
    values = {(1, 1.0): 9.0, (1, 2.0): 1.0, (2, 1.0): 5.0, (2, 2.0): 1.0, (3, 1.0): 1.0, (3, 2.0): 4.0, (4, 1.0): 7.0}
    assert at_best(values, (1.0, 2.0)) == {"1": 9.0, "2": 5.0, "3": 1.0}
    assert at_best({(1, 1.0): 9.0, (1, 2.0): 1.0}, (1.0, 2.0)) == {}
