"""Countdown: problems drawn by seed, a split that never leaks, and a verifier that pays for right answers only."""

import hashlib
import operator
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral.lab.tasks import make_task
from corral.lab.tasks import procedural as draws
from corral.lab.tasks.procedural import Countdown, in_held_out_share

TASK = Countdown()


STEPS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def solutions(prompt: str, value_max: int = 99) -> set[str]:
    """Oracle: every right answer, by going forward from each number through all that can follow, and keeping what ends well."""
    numbers, target = problem(prompt)
    paths = {(str(number), number, (*numbers[:i], *numbers[i + 1 :])) for i, number in enumerate(numbers)}
    for _ in numbers[1:]:
        paths = {
            (f"{text}{sign}{number}={step(value, number)}", step(value, number), (*left[:i], *left[i + 1 :]))
            for text, value, left in paths
            for i, number in enumerate(left)
            for sign, step in STEPS.items()
            if step(value, number) in range(value_max + 1)
        }
    return {text for text, value, _ in paths if value == target}


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    return in_held_out_share(f"{' '.join(map(str, sorted(numbers)))}>{target}")


def problem(prompt: str) -> tuple[tuple[int, ...], int]:
    numbers, _, target = prompt.removesuffix(":").partition(">")
    return tuple(sorted(int(number) for number in numbers.split())), int(target)


# ---------------------------------------------------------------- the verifier


@pytest.mark.parametrize("answer", ["3+7=10+12=22", "7+3=10+12=22", "12+7=19+3=22", "3+12=15+7=22"])
def test_golden_right_answers(answer: str) -> None:
    assert TASK.verify("3 7 12>22:", answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "nothing"),
        ("22", "a target and no steps"),
        ("3+7=10", "a number is left over, and 10 is not 22"),
        ("12+10=22", "10 is not among the numbers"),
        ("3+7=10+12=22+0=22", "0 is not among the numbers"),
        ("3+7=11+12=22", "3 + 7 is not 11, though the end is right"),
        ("3+7=10+12=23", "10 + 12 is not 23"),
        ("3+7=10-12=-2", "negative"),
        ("3-7=-4", "negative"),
        ("12+3=15-7=8", "right arithmetic, wrong target"),
        ("3+12=15+12=27", "12 twice, 7 never"),
        ("3+7=10+12", "the last result is missing"),
        ("3+7=10+12=", "the last result is missing"),
        ("+3+7=10+12=22", "a sign"),
        ("03+7=10+12=22", "a leading zero in front"),
        ("3+07=10+12=22", "a leading zero in an operand"),
        ("3+7=010+12=22", "a leading zero in a result"),
        (" 3+7=10+12=22", "a space in front"),
        ("3+7=10+12=22 ", "a space behind"),
        ("3+7=10 +12=22", "a space inside"),
        ("3+7=10+12=22\n", "a line end: `$` in a pattern would let it pass"),
        ("3+7=10 10+12=22", "a result written twice"),
        ("3+7=10+12=22<eos>", "the end of the sequence as text"),
        ("3+7=10+12=22+", "more to come"),
        ("3+7=10+12=22.0", "a decimal"),
        ("3+7=1_0+12=22", "int() would take the underscore"),
        ("٣+7=10+12=22", "an Arabic digit, which int() and \\d would take"),
        ("３+7=10+12=22", "a full-width digit"),
        ("3＋7=10+12=22", "a full-width plus"),
        ("3−7=10+12=22", "a minus sign that is not ASCII"),
        ("3×7=21+1=22", "a times sign that is not ASCII"),
        ("3/7=10+12=22", "no such operator"),
        ("3**7=10+12=22", "no such operator"),
        ("3+7==10+12=22", "two equals signs"),
        ("3+7=10+12=22\x00", "a null character"),
        ("(3+7)+12=22", "brackets"),
        ("3+7=10+12=22" * 100_000, "enormous"),
        ("9" * 1_000_000, "more digits than int() takes"),
        ("3+" + "9" * 5_000 + "=1", "more digits than int() takes, in an operand"),
        ("3*7=" + "9" * 5_000, "more digits than int() takes, in a result"),
    ],
)
def test_golden_wrong_answers(answer: str, why: str) -> None:
    assert TASK.verify("3 7 12>22:", answer) == 0.0, why


def test_golden_results_stay_within_the_range() -> None:
    # 19 · 6 = 114 lies outside 0..99, 114 − 19 = 95 inside again: wrong by default, right where results may reach 200.
    assert TASK.verify("19 6 19>95:", "19*6=114-19=95") == 0.0
    assert Countdown(value_max=200).verify("19 6 19>95:", "19*6=114-19=95") == 1.0
    assert TASK.verify("9 11 1>99:", "9*11=99*1=99") == 1.0  # the limits themselves belong to the range
    assert TASK.verify("5 5 7>0:", "5-5=0*7=0") == 1.0


def test_golden_equal_numbers_count_as_often_as_they_occur() -> None:
    assert TASK.verify("4 4 5>13:", "4+4=8+5=13") == 1.0
    assert TASK.verify("4 5 5>13:", "4+4=8+5=13") == 0.0


WRONG_PROMPTS = [
    *[
        "",
        "3 7 12>22",
        "3 7 12>22:\n",
        " 3 7 12>22:",
        "3  7 12>22:",
        "3 7 12 > 22 :",
        "03 7 12>22:",
        "0 7 12>22:",
        "3 7 -1>22:",
    ],
    *["3 7 ١٢>22:", "3 7>10:", "3 7 12 1>22:", "3 7 20>22:", "3 7 12>100:", "3 7 12>-1:", "Natalia sold 48 clips."],
    "3 7 12>" + "9" * 5_000 + ":",
]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS)
def test_a_prompt_of_another_task_is_an_error_and_not_a_zero(prompt: str) -> None:
    with pytest.raises(ValueError, match="countdown: ") as raised:
        TASK.verify(prompt, "3+7=10+12=22")
    assert len(str(raised.value)) < 300


ANSWERLIKE = st.text("0123456789+-*= ", max_size=16)


@given(seed=st.integers(0, 10_000), answer=st.one_of(ANSWERLIKE, st.text()))
@example(seed=0, answer="\ud800")  # half a surrogate pair, as a broken decoder may produce it
def test_any_text_is_graded_and_only_solutions_are_paid(seed: int, answer: str) -> None:
    (prompt,) = TASK.train_prompts(1, seed)
    assert TASK.verify(prompt, answer) == float(answer in solutions(prompt))


@given(seed=st.integers(0, 10_000), n=st.integers(2, 4))
def test_every_edit_of_one_character_is_judged_as_the_oracle_does(seed: int, n: int) -> None:
    task = Countdown(n=n)
    ((prompt, answer),) = task.demonstrations(1, seed)
    right = solutions(prompt)
    assert answer in right
    edits = {
        answer[:i] + new + answer[i + cut :]
        for i in range(len(answer) + 1)
        for cut in (0, 1)
        for new in ("", *"0123456789+-*= \n٣")
    }
    judged = {edit for edit in edits if task.verify(prompt, edit) == 1.0}
    assert judged == edits & right
    assert all(task.verify(prompt, solution) == 1.0 for solution in right)


def test_demonstrations_include_every_solution() -> None:
    prompts_seen: dict[str, set[str]] = {}
    for prompt, answer in Countdown(n=2, n_max=5).demonstrations(5_000, seed=0):
        prompts_seen.setdefault(prompt, set()).add(answer)
    assert all(answers == solutions(prompt) for prompt, answers in prompts_seen.items())


# ---------------------------------------------------------------- the split


def every_problem() -> set[tuple[tuple[int, ...], int]]:
    """All of (sorted numbers, target) with the default settings."""
    found = set()
    for a, b, c in product(range(1, 20), repeat=3):
        for first in (a + b, a - b, a * b):
            if 0 <= first <= 99:
                found |= {(tuple(sorted((a, b, c))), last) for last in (first + c, first - c, first * c) if 0 <= last <= 99}
    return found


def test_golden_split_of_all_problems() -> None:
    # 12,041 problems; a tenth is 1,204 and one standard deviation 33.
    problems = every_problem()
    held_out = {one for one in problems if is_held_out(*one)}
    assert (len(problems), len(held_out)) == (12_041, 1_239)
    # The list itself is pinned, since a released evaluation must mean the same problems tomorrow.
    digest = hashlib.sha256(repr(sorted(held_out)).encode()).hexdigest()
    assert digest.startswith(PINNED_SPLIT)


PINNED_SPLIT = "6b5900a9bcb263f9"


def test_the_splits_are_disjoint_and_reach_everything() -> None:
    train = {problem(prompt) for prompt in TASK.train_prompts(30_000, seed=1)}
    held_out = {problem(prompt) for prompt in TASK.held_out_prompts(4_000, seed=2)}
    assert not train & held_out
    assert train | held_out <= every_problem()
    assert len(train) > 0.8 * (12_041 - 1_239)
    assert len(held_out) > 0.8 * 1_239


@given(numbers=st.lists(st.integers(1, 99), min_size=2, max_size=5), target=st.integers(0, 999), data=st.data())
def test_the_order_of_the_numbers_does_not_move_a_problem_across(numbers: list[int], target: int, data: st.DataObject) -> None:
    assert is_held_out(numbers, target) == is_held_out(data.draw(st.permutations(numbers)), target)


def test_a_tenth_of_any_large_set_is_held_out() -> None:
    # 10,000 draws of probability 1/10: four standard deviations are 120.
    share = sum(is_held_out((a, b), target) for a in range(100, 200) for b in range(a, 200) for target in (a + b, a * b))
    assert abs(share - 1_010) < 120


# ---------------------------------------------------------------- drawing


def test_golden_draws_are_pinned() -> None:
    assert TASK.demonstrations(2, seed=0) == [("19 10 5>45:", "19-10=9*5=45"), ("17 4 17>38:", "17+4=21+17=38")]
    assert TASK.held_out_prompts(3, seed=0) == ["16 2 7>21:", "10 13 12>35:", "2 2 16>34:"]


def test_draws_do_not_depend_on_the_process() -> None:
    script = "from corral.task import make_task; print(make_task('countdown').train_prompts(20, 3))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{TASK.train_prompts(20, 3)}\n"


@given(
    seed=st.integers(-(2**70), 2**70),
    settings=st.sampled_from([{}, {"n": 2, "n_max": 5}, {"n": 4, "n_max": 13, "value_max": 50}]),
)
def test_prompts_repeat_extend_and_fit(seed: int, settings: dict[str, int]) -> None:
    task = Countdown(**settings)
    for draw in (task.train_prompts, task.held_out_prompts):
        prompts = draw(6, seed)
        assert prompts == draw(6, seed)
        assert prompts[:4] == draw(4, seed)
        assert prompts != draw(6, seed + 1)
        for prompt in prompts:
            right = solutions(prompt, task.value_max)
            assert right
            assert max(map(len, right)) <= task.max_completion_length
            assert is_held_out(*problem(prompt)) == (draw == task.held_out_prompts)
            assert all(task.verify(prompt, answer) == 1.0 for answer in right)


def test_opposite_seeds_differ() -> None:
    # random.Random(seed) takes the absolute value of a whole number.
    assert TASK.train_prompts(5, 1) != TASK.train_prompts(5, -1)


def test_golden_longest_lengths() -> None:
    # "19 19 19>99:" and "19+19=38+19=57"
    assert TASK.max_completion_length == 14
    prompts = TASK.train_prompts(5_000, 0)
    assert max(map(len, prompts)) == 12
    assert max(len(answer) for _, answer in TASK.demonstrations(5_000, 0)) == 14


def test_the_order_of_the_numbers_tells_nothing() -> None:
    # The first number of the prompt opens a third of the answers (a little more where numbers are equal).
    pairs = Countdown(n_max=99).demonstrations(3_000, 0)
    same = sum(prompt.split()[0] == answer.split("+")[0].split("-")[0].split("*")[0] for prompt, answer in pairs)
    assert abs(same / 3_000 - 1 / 3) < 0.05


def test_no_prompts_is_an_empty_list() -> None:
    assert TASK.train_prompts(0, 0) == TASK.held_out_prompts(0, 0) == []


def test_the_smallest_settings_have_both_splits() -> None:
    task = Countdown(n=2, n_max=5, value_max=5)
    assert {problem(prompt) for prompt in task.held_out_prompts(200, 0)} == {((1, 1), 2), ((3, 4), 1)}
    assert len({problem(prompt) for prompt in task.train_prompts(500, 0)}) > 15


# ---------------------------------------------------------------- settings and registry


def test_the_registry_makes_it() -> None:
    assert make_task("countdown") == TASK
    assert make_task("countdown", n=4, n_max=13) == Countdown(n=4, n_max=13)


def test_unknown_names_and_settings_get_a_near_match() -> None:
    with pytest.raises(ValueError, match=r"no task 'countdwn'. Did you mean 'countdown'\?"):
        make_task("countdwn")
    with pytest.raises(ValueError, match=r"countdown: there is no setting `nmax`. Did you mean 'n_max'\?"):
        make_task("countdown", nmax=9)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"n": 1}, "n"),
        ({"n": 10}, "n"),
        ({"n": 3.0}, "n"),
        ({"n": True}, "n"),
        ({"n_max": 4}, "n_max"),
        ({"n_max": "9"}, "n_max"),
        ({"value_max": 18}, "value_max"),
        ({"value_max": 100_000}, "value_max"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_settings_are_refused(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=rf"countdown: `{key}` is a whole number in"):
        make_task("countdown", **settings)


def test_a_negative_count_is_refused() -> None:
    for draw in (TASK.train_prompts, TASK.held_out_prompts, TASK.demonstrations):
        with pytest.raises(ValueError, match="cannot be negative; got -1"):
            draw(-1, 0)


def test_drawing_gives_up_where_there_is_nothing_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_MISSES", 20)
    with pytest.raises(ValueError, match=r"no held-out problem in 20 draws\. Try a smaller `n`"):
        Countdown(n=9, n_max=99).held_out_prompts(1, 0)
