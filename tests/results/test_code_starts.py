"""One-line functions: problems that say what to write, right answers that pass, and runs that resolve."""

from pathlib import Path

from corral.lab.jobs.llm.settings import resolve
from corral.lab.run.settings import read_recipe
from corral.lab.tasks.code import Code
from results.evidence import code_problems
from results.plans import PLANS
from results.spec import CODE


def test_golden_sentences_and_their_functions() -> None:
    pairs = dict(code_problems.functions())
    assert pairs["f(a,b): a plus 3, all times b"] == "def f(a,b):return (a+3)*b"
    assert pairs["f(a,b): the larger of a and b, minus 2"] == "def f(a,b):return max(a,b)-2"
    assert max(map(len, pairs.values())) < CODE["max_completion_length"]  # and the end


def test_examples_and_problems_of_reinforcement_and_measurement_are_disjoint(tmp_path: Path) -> None:
    shown = {prompt for prompt, _ in code_problems.write_problems(tmp_path)}
    task = Code(path=str(tmp_path))
    train, test = (set(draw(5000, 0)) for draw in (task.train_prompts, task.held_out_prompts))
    assert (len(shown), len(train), len(test)) == tuple(code_problems.SIZES.values())
    assert not shown & train
    assert not shown & test
    assert not train & test


def test_a_right_function_passes_in_the_sandbox_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    code_problems.write_problems(tmp_path)
    task = Code(path=str(tmp_path), workers=1)
    prompt = task.train_prompts(1, 0)[0]
    right = dict(code_problems.functions())[prompt]
    assert task.verify_all([prompt] * 3, [right, "def f(a,b):return 77777", "("]) == [1.0, 0.0, 0.0]


def test_each_seed_has_a_start_of_its_own_and_every_rate() -> None:
    plan = PLANS["e"]()
    assert len(plan) == 3 * 3 * 2
    assert {(spec.seed, spec.model) for spec in plan} == {(400 + n, f"runs/code-starts/{n}") for n in (1, 2, 3)}
    settings = resolve([read_recipe("evidence-e"), plan[0].layer()])
    assert (settings.task, settings.task_config["path"], settings.trainer["deployed_bound"]) == (
        "code",
        "runs/code-starts/problems",
        float("inf"),
    )
