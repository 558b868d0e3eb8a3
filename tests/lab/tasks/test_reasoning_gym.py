"""reasoning-gym: any generator, its own scorer, no question on both sides, and no text that a scorer would execute."""

import copy
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

import corral.lab.tasks.reasoning_gym as module
from corral.lab.tasks import make_task, settings_of, verify_all
from corral.lab.tasks.grader import grader_counts
from corral.lab.tasks.reasoning_gym import FORMULAS, HALF, LITERALS, ReasoningGym, answer_of, is_harmless

TASK = ReasoningGym(generator="chain_sum")
(QUESTION,) = TASK.train_prompts(1, 0)


def gold(task: ReasoningGym, prompt: str) -> str:
    return str(task._drawn[prompt]["answer"])


def test_scores_are_the_generators_own() -> None:
    """Oracle: the library's scorer, called directly."""
    for name in ("chain_sum", "countdown", "spell_backward", "spiral_matrix", "polynomial_multiplication"):
        task = ReasoningGym(generator=name)
        prompts = task.train_prompts(2, 0)
        scorer = reasoning_gym.create_dataset(name, seed=0, size=1)
        for prompt in prompts:
            entry = task._drawn[prompt]
            answers = [gold(task, prompt), "7", "x", f"<answer>{gold(task, prompt)}</answer>"]
            expected = [scorer.score_answer(answer, entry) for answer in (answers[0], "7", "x", answers[0])]
            assert verify_all(task, [prompt] * 4, answers) == expected, name
        assert task.verify(prompts[0], gold(task, prompts[0])) == 1.0


@pytest.mark.parametrize("name", ["chain_sum", "coin_flip", "list_functions", "acre"])
def test_draws_repeat_extend_and_never_leak(name: str) -> None:
    task = ReasoningGym(generator=name)
    train, held_out = task.train_prompts(60, 1), task.held_out_prompts(30, 1)
    assert train[:20] == ReasoningGym(generator=name).train_prompts(20, 1)
    assert held_out[:10] == ReasoningGym(generator=name).held_out_prompts(10, 1)
    assert len(set(train)) == 60
    assert len(set(held_out)) == 30
    assert not set(train) & set(held_out)
    assert train != task.train_prompts(60, 2)


def test_seeds_of_the_splits_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[bool, set[int]] = {True: set(), False: set()}
    entries = ReasoningGym._entries

    def spy(self: ReasoningGym, seed: int) -> Any:
        seeds[seed >= HALF].add(seed)
        return entries(self, seed)

    task = ReasoningGym(generator="chain_sum")
    monkeypatch.setattr(ReasoningGym, "_entries", spy)
    task.train_prompts(40, 3)
    assert not seeds[True]
    seeds[False].clear()
    task.held_out_prompts(40, 3)
    assert not seeds[False]
    assert max(seeds[True]) < 2**32


def test_a_small_generator_comes_round_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One term of one digit: ten questions, asked under many seeds."""
    monkeypatch.setattr(module, "MAX_MISSES", 200)
    task = ReasoningGym(generator="chain_sum", settings={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    held_out, train = task.held_out_prompts(50, 0), task.train_prompts(50, 0)
    there = set(train)
    assert len(there) + len(held_out) == 10
    assert not there & set(held_out)
    size = len(there)
    assert set(train[:size]) == set(train[size : 2 * size]) == there
    assert train[:size] != train[size : 2 * size]
    assert train[:25] == task.train_prompts(25, 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_copy_knows_what_was_drawn(copied: Callable[[ReasoningGym], ReasoningGym]) -> None:
    task = ReasoningGym(generator="chain_sum", settings={"min_terms": 2})
    (prompt,) = task.train_prompts(1, 0)
    other = copied(task)
    assert other == task
    assert other.verify(prompt, gold(task, prompt)) == 1.0


def test_settings_reach_the_generator() -> None:
    task = make_task("reasoning_gym", generator="chain_sum", settings={"min_terms": 2, "max_terms": 2})
    prompts = task.train_prompts(10, 0)
    assert all(len(re.findall("[+-]", prompt)) == 1 for prompt in prompts)
    assert settings_of(task).keys() == {"generator", "settings", "max_completion_length", "time_limit"}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"generator": "chain_sums"}, r"there is no generator 'chain_sums'. Did you mean 'chain_sum'\?"),
        ({"generator": "chain_sum", "settings": {"terms": 2}}, r"chain_sum refuses \{'terms': 2\}: TypeError: .*'terms'"),
        ({"generator": "chain_sum", "settings": {"min_terms": -1}}, r"chain_sum refuses \{'min_terms': -1\}: AssertionError"),
        ({"generator": "chain_sum", "settings": {"seed": 1}}, "`seed` is decided by the task"),
        ({"generator": "composite"}, "composite refuses {}: AssertionError"),
        ({"time_limit": 0.0}, "`time_limit` is a number of seconds"),
        ({"max_completion_length": 0}, "`max_completion_length` is a whole number"),
    ],
)
def test_what_cannot_be(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("reasoning_gym", **given_)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"needs reasoning_gym.factory. Install it: pip install 'corral\[task\]'"):
        make_task("reasoning_gym")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 42\n", "42"),
        ("<answer>41</answer> <answer> 42 </answer>", "42"),
        ("<think>…</think><answer>42</answer> Done.", "42"),
        ("<answer>42", "<answer>42"),
        ("42</answer>", "42</answer>"),
        ("</answer><answer>42", "</answer><answer>42"),
        ("<answer><answer>42</answer></answer>", "42</answer>"),
        ("", ""),
    ],
)
def test_golden_answers(completion: str, answer: str) -> None:
    assert answer_of(completion) == answer


def test_every_scorer_that_evaluates_answers_is_known() -> None:
    """A new release of the library that evaluates more must not pass unnoticed."""
    evaluates = re.compile(
        r"parse_expr\(answer|parse_expr\(user|(?<![_.a-z])eval\(answer|(?<![_.a-z])exec\(answer|sympify\(answer"
    )
    found = {name for name, (cls, _) in DATASETS.items() if evaluates.search(inspect.getsource(cls))}
    assert found == LITERALS | FORMULAS
    suspects = re.compile(r"(?<![_.a-z])(?:eval|exec|sympify)\(|sp(?:ympy)?\.parse_expr\(")
    others = {name for name, (cls, _) in DATASETS.items() if suspects.search(inspect.getsource(cls))} - found
    assert others == {"codeio", "number_sorting"}  # these evaluate text of their own


ATTACKS = [
    "__import__('os').system('touch {0}')",
    "open('{0}', 'w')",
    "[open('{0}', 'w')]",
    "exec(chr(111)+chr(112))",
    "eval(x)",
    "(lambda: open('{0}', 'w'))()",
    "[[c for c in ().__class__.__base__.__subclasses__()], open('{0}', 'w')]",
    'S(\'open("{0}", "w")\')',
    "print(1)",
    "S('1')",
    "exit()",
    # Without a bracket: the comprehension makes exec what an index calls, and \\x28 is "(" to it alone.
    """[quit["open\\x28'{0}', 'w'\\x29"] for quit.__class__.__getitem__ in [exec]]""",
    # Variables of scorers and what they hold.
    "oracle_answer",
    "entry['answer']",
    "[*oracle_answer]",
    "valid_solutions[0]",
]


@pytest.mark.parametrize("name", sorted(LITERALS | FORMULAS))
def test_no_answer_is_executed(name: str, tmp_path: Path) -> None:
    task = ReasoningGym(generator=name)
    (prompt,) = task.train_prompts(1, 0)
    target = tmp_path / "touched"
    attacks = [attack.format(target) for attack in ATTACKS]
    assert not any(is_harmless(attack, task._drawn[prompt], name) for attack in attacks)
    assert verify_all(task, [prompt] * len(attacks), attacks) == [0.0] * len(attacks)
    assert not target.exists()


def test_literals_and_right_answers_reach_their_scorers() -> None:
    queens = ReasoningGym(generator="n_queens", settings={"n": 4, "min_remove": 4, "max_remove": 4})
    (prompt,) = queens.train_prompts(1, 0)
    boards = queens._drawn[prompt]["metadata"]["valid_answers"]
    assert len(boards) == 2  # with four queens taken off, both boards of 4 × 4 are left
    lists = [str([row.split() for row in board.splitlines()]) for board in boards]
    assert queens.verify_all([prompt] * 4, [*boards, *lists]) == [1.0, 1.0, 0.5, 0.5]


def test_not_a_number_is_near_no_number() -> None:
    task = ReasoningGym(generator="complex_arithmetic")
    (prompt,) = task.train_prompts(1, 0)
    assert task.verify_all([prompt] * 5, ["nan", "NaN", "nan+nani", "-nanj", gold(task, prompt)]) == [0.0] * 4 + [1.0]
    assert is_harmless("banana and nanny", {"answer": "nan"}, "spell_backward")
    assert is_harmless("nan", {"answer": "nan"}, "spell_backward")


@pytest.mark.parametrize("answer", ["9**9**9**9**9", "((((9!)!)!)!)", "9^9^9^9^9^9"])
def test_no_answer_hangs_a_scorer(answer: str) -> None:
    task = ReasoningGym(generator="countdown", time_limit=0.5)
    (prompt,) = task.train_prompts(1, 0)
    assert task.verify(prompt, answer) <= 0.05
    assert task.verify(prompt, gold(task, prompt)) == 1.0


def test_a_scorer_that_raises_counts_as_wrong_and_is_counted() -> None:
    task = ReasoningGym(generator="prime_factorization")  # its scorer takes whatever is there for numbers
    (prompt,) = task.train_prompts(1, 0)
    before = grader_counts().get("reasoning_gym", {}).get("error", 0)
    assert task.verify(prompt, "zebra") == 0.0
    assert grader_counts()["reasoning_gym"]["error"] == before + 1


@settings(max_examples=40)
@given(completion=st.one_of(st.text(), st.text("0123456789+-*/() \n<answer>")))
@example(completion="\ud800")
@example(completion="1" * 1_000_000)
def test_any_text_is_graded(completion: str) -> None:
    assert 0.0 <= TASK.verify(QUESTION, completion) <= 1.0


def test_a_prompt_of_another_task_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="reasoning_gym: '3 7 12>22:' is no prompt of this task"):
        TASK.verify("3 7 12>22:", "1")
