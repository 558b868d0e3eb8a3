"""Word problems with two numbers: what is drawn, and which answers count."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.tasks import make_task
from corral.lab.tasks.procedural import TwoNumbers

TASK = TwoNumbers()
WORDS = {
    "+": ("more are put", "together", "get on", "both cost"),
    "-": ("are sold", "away", "cut off", "older"),
    "*": ("in each", "seats each", "Each of", "rows of"),
}
SHELF = "A shelf holds {} books, and {} more are put on it. How many books does it hold now?"


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        (SHELF.format(48, 17), "65"),
        ("Of 81 apples in a crate, 27 are sold. How many apples are left?", "54"),
        ("There are 12 boxes with 9 pencils in each. How many pencils are there?", "108"),
    ],
)
def test_golden_answers(prompt: str, right: str) -> None:
    assert TASK.verify(prompt, right) == TASK.verify(prompt, f"There are {right} of them.") == 1.0
    assert TASK.verify(prompt, f"{int(right) + 1}") == TASK.verify(prompt, f"{right}, or 3?") == TASK.verify(prompt, "") == 0.0


def test_the_last_whole_number_counts() -> None:
    task, prompt = TwoNumbers(number_max=999), SHELF.format(900, 134)
    assert task.verify(prompt, "900+134=1,034") == 1.0
    assert task.verify(prompt, "1034 books, not 900") == task.verify(prompt, "01034") == task.verify(prompt, "١٠٣٤") == 0.0


@given(seed=st.integers(0, 10_000), text=st.text())
def test_an_oracle_agrees_on_any_text(seed: int, text: str) -> None:
    (prompt,) = TASK.train_prompts(1, seed)
    a, b = map(int, re.findall("[0-9]+", prompt))
    (operation,) = (operation for operation, words in WORDS.items() if any(word in prompt for word in words))
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    digits = "".join(c if c in "0123456789" else " " for c in text.replace(",", "")).split()
    assert TASK.verify(prompt, text) == float(digits[-1:] == [str(result)])
    assert TASK.verify(prompt, f"{text} {result}") == 1.0


def test_draws_repeat_extend_fit_and_never_leak() -> None:
    pairs, held_out = TASK.demonstrations(1_000, 1), TASK.held_out_prompts(300, 2)
    assert pairs[:50] == TASK.demonstrations(50, 1)
    assert all(TASK.verify(prompt, answer) == 1.0 for prompt, answer in pairs)
    assert not {prompt for prompt, _ in pairs} & set(held_out)
    assert min(int(answer) for _, answer in pairs) >= 0
    drawn = [operation for prompt in held_out for operation, words in WORDS.items() if any(word in prompt for word in words)]
    assert all(80 < drawn.count(operation) < 120 for operation in WORDS), "no operation is rare"


def test_golden_draws_are_pinned() -> None:
    assert TASK.demonstrations(2, seed=0) == [
        ("A rope is 94 metres long, and 57 metres are cut off. How many metres are left?", "37"),
        ("A garden has 9 rows of 3 trees. How many trees does it have?", "27"),
    ]


@pytest.mark.parametrize(
    "prompt", ["", "47+85:", SHELF.format(17, 48), SHELF.format(100, 2), SHELF.format("081", 27), SHELF.format(5, 1)]
)
def test_a_prompt_of_another_task_is_an_error_and_not_a_zero(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"two_numbers: .* is no prompt of this task. .* settings than TwoNumbers"):
        TASK.verify(prompt, "1")


@pytest.mark.parametrize("settings", [{"number_max": 1}, {"factor_max": 1000}, {"number_max": 0}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        make_task("two_numbers", **settings)
