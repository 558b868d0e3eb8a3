"""Arithmetic: every step of the scratchpad is checked, and only right ones are paid."""

import operator
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral.lab.models.tiny import tiny_tokenizer
from corral.lab.tasks import make_task
from corral.lab.tasks import procedural as draws
from corral.lab.tasks.procedural import Arithmetic, places

TASK = Arithmetic()
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def solutions(prompt: str) -> set[str]:
    """Oracle: every right answer, one for each order of the places of b."""
    sign = next(one for one in SIGNS if one in prompt)
    left, right = (int(number) for number in prompt[:-1].split(sign))
    parts = [int(digit + "0" * rest) for digit, rest in zip(str(right), range(len(str(right)) - 1, -1, -1), strict=True)]
    found = set()
    for order in permutations([part for part in parts if part]):
        if sign == "*":
            done = [left * part for part in order]
            lines = [f"{left}*{part}={left * part}" for part in order]
            lines += [f"{sum(done[:i])}+{done[i]}={sum(done[: i + 1])}" for i in range(1, len(done))]
            found.add(",".join(lines))
        else:
            step = SIGNS[sign]
            found.add(f"{left}" + "".join(f"{sign}{p}={step(left, sum(order[: i + 1]))}" for i, p in enumerate(order)))
    return found


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("47+85:", ["47+80=127+5=132", "47+5=52+80=132"]),
        ("85-47:", ["85-40=45-7=38", "85-7=78-40=38"]),
        ("23*47:", ["23*40=920,23*7=161,920+161=1081", "23*7=161,23*40=920,161+920=1081"]),
        ("23*7:", ["23*7=161"]),
        ("23*40:", ["23*40=920"]),
        ("7-7:", ["7-7=0"]),
    ],
)
def test_golden_right_answers(prompt: str, answers: list[str]) -> None:
    assert [TASK.verify(prompt, answer) for answer in answers] == [1.0] * len(answers)
    assert solutions(prompt) == set(answers)


@pytest.mark.parametrize(
    ("prompt", "answer", "why"),
    [
        ("47+85:", "132", "no steps"),
        ("47+85:", "47+85=132", "not by places"),
        ("47+85:", "47+80=127", "a place is missing"),
        ("47+85:", "47+80=127+5=132+0=132", "a place that is not there"),
        ("47+85:", "47+80=128+5=132", "the end is right and a step is not"),
        ("47+85:", "47+80=127-5=122", "another operation"),
        ("47+85:", "85+40=125+7=132", "the other way round"),
        ("47+85:", "47+80=127+5=132 ", "a space"),
        ("47+85:", "٤7+80=127+5=132", "a digit of another script"),
        ("47+85:", "", "nothing"),
        ("47+85:", "9" * 1_000_000, "enormous"),
        ("23*47:", "23*40=920,23*7=161", "the sum is missing"),
        ("23*47:", "23*40=920,920+161=1081", "a product is missing"),
        ("23*47:", "23*40=920,23*7=161,161+920=1081", "the sum in another order than the products"),
        ("23*47:", "23*40=920,920+161=1081,23*7=161", "summed before it was computed"),
        ("23*47:", "23*47=1081", "not by places"),
        ("23*47:", "23*40=920,23*7=162,920+162=1082", "a wrong product"),
        ("23*47:", "40*23=920,23*7=161,920+161=1081", "the other way round"),
        ("23*47:", "24*40=960,23*7=161,960+161=1121", "right arithmetic on another number"),
        ("23*47:", "23*40=920,23*7=161,920+161=1081,", "more to come"),
        ("23*47:", "23*40=920,23*7=161,900+181=1081", "the end is right and the sum is of other numbers"),
    ],
)
def test_golden_wrong_answers(prompt: str, answer: str, why: str) -> None:
    assert TASK.verify(prompt, answer) == 0.0, why


@pytest.mark.parametrize("prompt", ["", "47+85", "047+85:", "47/85:", "47+850:", "7-8:", "3 7 12>22:", "0+1:"])
def test_a_prompt_of_another_task_is_an_error_and_not_a_zero(prompt: str) -> None:
    with pytest.raises(ValueError, match="arithmetic: "):
        TASK.verify(prompt, "1")


@given(seed=st.integers(0, 10_000), digits=st.integers(1, 3))
def test_every_edit_of_one_character_is_judged_as_the_oracle_does(seed: int, digits: int) -> None:
    task = Arithmetic(digits=digits)
    ((prompt, answer),) = task.demonstrations(1, seed)
    right = solutions(prompt)
    assert answer in right
    edits = {
        answer[:i] + new + answer[i + cut :] for i in range(len(answer) + 1) for cut in (0, 1) for new in ("", *"0159+-*=,")
    }
    assert {edit for edit in edits | right if task.verify(prompt, edit) == 1.0} == (edits & right) | right


@given(seed=st.integers(0, 10_000), answer=st.one_of(st.text("0123456789+-*=,", max_size=20), st.text()))
@example(seed=0, answer="\ud800")
def test_any_text_is_graded(seed: int, answer: str) -> None:
    (prompt,) = TASK.train_prompts(1, seed)
    assert TASK.verify(prompt, answer) == float(answer in solutions(prompt))


@pytest.mark.parametrize("settings", [{}, {"operations": "-"}, {"operations": "*", "digits": 3}, {"digits": 1}])
def test_draws_repeat_extend_fit_and_never_leak(settings: dict[str, object]) -> None:
    task = make_task("arithmetic", **settings)
    pairs, held_out = task.demonstrations(1_000, 1), task.held_out_prompts(300, 2)
    assert pairs[:50] == task.demonstrations(50, 1)
    assert pairs[:20] != task.demonstrations(20, -1)
    assert max(len(answer) for _, answer in pairs) <= task.max_completion_length
    known = set(tiny_tokenizer().get_vocab())
    assert all(set(prompt + answer) <= known for prompt, answer in pairs)

    def key(prompt: str) -> tuple[str, frozenset[int]]:
        sign = next(one for one in SIGNS if one in prompt)
        return sign, frozenset(int(number) for number in prompt[:-1].split(sign))

    assert not {key(prompt) for prompt, _ in pairs} & {key(prompt) for prompt in held_out}


def test_the_longest_answer_is_as_long_as_said() -> None:
    for operation in "+-*":
        for digits in (1, 2):
            task = Arithmetic(operations=operation, digits=digits)
            assert max(len(answer) for _, answer in task.demonstrations(2_000, 0)) == task.max_completion_length


def test_golden_draws_are_pinned() -> None:
    assert TASK.demonstrations(2, seed=0) == [("16-12:", "16-10=6-2=4"), ("96+44:", "96+40=136+4=140")]
    assert TASK.held_out_prompts(3, seed=0) == ["26+3:", "45+21:", "14*3:"]


def test_places() -> None:
    assert [places(number) for number in (473, 400, 7, 1001)] == [[400, 70, 3], [400], [7], [1000, 1]]


@pytest.mark.parametrize(
    "settings", [{"digits": 0}, {"digits": 7}, {"digits": "2"}, {"operations": ""}, {"operations": "++"}, {"operations": "/"}]
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"arithmetic: `{next(iter(settings))}` is"):
        make_task("arithmetic", **settings)


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TASK.train_prompts(0, 0) == []
    with pytest.raises(ValueError, match=r"arithmetic: `count` .* cannot be negative; got -1"):
        TASK.train_prompts(-1, 0)
    monkeypatch.setattr(draws, "in_held_out_share", lambda text: False)
    monkeypatch.setattr(draws, "MAX_MISSES", 20)
    with pytest.raises(ValueError, match="no held-out problem in 20 draws"):
        TASK.held_out_prompts(1, 0)
