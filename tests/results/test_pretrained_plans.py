"""Plans on pretrained models: runs resolve to what their names say, and train."""

import math
from dataclasses import replace

import pytest

from corral.lab.jobs.llm.settings import resolve
from corral.lab.run.settings import read_recipe
from results import spec as runs_spec
from results.evidence.cells import at_best
from results.plans import AUTO_BOUNDS, BEST, PLANS
from results.study import run as run_spec


def test_runs_at_auto_are_bounded_and_have_a_constant_schedule() -> None:
    plan = PLANS["b-auto-start"]()
    assert len(plan) == len({spec.key for spec in plan}) == 6 * (2 * 2 + 2 * 4)
    assert {spec.model for spec in plan} == {"runs/pretrained/smollm2"}
    automatic = {(spec.passes, spec.bound) for spec in plan if spec.rate == "auto"}
    assert automatic == {(1, AUTO_BOUNDS[-1]), *((4, bound) for bound in AUTO_BOUNDS)}
    assert {spec.schedule for spec in plan} == {"constant"}
    for spec in plan:
        settings = resolve([read_recipe(spec.recipe), replace(spec, device="cuda").layer()])
        assert (settings.model, settings.task, settings.device) == ("runs/pretrained/smollm2", "two_numbers", "cuda")
        assert (settings.trainer["bf16"], settings.trainer["save_only_model"]) == (True, True)
        rate = "auto" if spec.rate == "auto" else BEST["smollm2"][spec.objective, spec.passes]
        assert settings.trainer["learning_rate"] == rate


def test_qwen_is_asked_gsm8k() -> None:
    spec = PLANS["qwen-auto-start"]()[0]
    settings = resolve([read_recipe(spec.recipe), replace(spec, device="cuda").layer()])
    assert (settings.task, settings.model, settings.eval_size) == ("gsm8k", "runs/pretrained/qwen", 8)
    assert (spec.rate, spec.bound, spec.schedule) == ("auto", 0.03, "constant")


def test_a_run_of_the_plan_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(PLANS["b-tiny"]()[0], model="smoke", steps=1, eval_size=2, eval_every=1)
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
