"""GSM8K on an excerpt of it (MIT licence, see gsm8k/README.md): every gold answer is right, and every perturbed one wrong."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from math_verify import parse, verify

from corral.lab.tasks import make_task, verify_all
from corral.lab.tasks.math import one_number
from corral.lab.tasks.math_problems import GSM8K

EXCERPT = Path(__file__).with_name("gsm8k")
TASK = GSM8K(path=str(EXCERPT))
ROWS = [json.loads(line) for name in ("train", "test") for line in (EXCERPT / f"{name}.jsonl").read_text().splitlines()]
PROMPTS = [row["question"] for row in ROWS]
GOLD = [row["answer"].rpartition("#### ")[2] for row in ROWS]


def test_the_excerpt() -> None:
    assert TASK.sizes == (240, 60)
    assert set(TASK.train_prompts(240, 3)) | set(TASK.held_out_prompts(60, 3)) == set(PROMPTS)
    assert any("," in gold for gold in GOLD)
    assert any(gold.startswith("-") for gold in GOLD)


@pytest.mark.parametrize(
    "wording",
    [
        "#### {}",
        r"So the answer is \boxed{{{}}}.",
        r"$\boxed{{\${}}}$",
        r"\boxed{{{} \text{{ apples}}}}",
        r"\boxed{{{}.00}}",
        "The answer is {}.",
        "It costs ${} in total.",
        "First 17, then 3.5.\n#### {}\n",
        "**{}**",
        "```\n{}\n```",
    ],
)
def test_every_gold_answer_is_right_in_any_wording(wording: str) -> None:
    assert verify_all(TASK, PROMPTS, [wording.format(gold) for gold in GOLD]) == [1.0] * len(ROWS)


def test_every_worked_solution_is_right() -> None:
    assert verify_all(TASK, PROMPTS, [row["answer"] for row in ROWS]) == [1.0] * len(ROWS)


def perturbed(gold: str) -> list[str]:
    value = int(gold.replace(",", ""))
    wrong = [str(value + 1), str(value - 1), str(-value) if value else "1", f"{value}0", f"{value}.5", f"1{abs(value)}"]
    wrong += [f"{value / 7:.3f}", f"{value} and {value + 1}", f"{value}, {value}", "", "x", f"{value}/2" if value else "1"]
    return wrong


def test_every_perturbed_answer_is_wrong() -> None:
    cases = [(prompt, wrong) for prompt, gold in zip(PROMPTS, GOLD, strict=True) for wrong in perturbed(gold)]
    for wording in (r"\boxed{{{}}}", "#### {}"):
        found = verify_all(TASK, [prompt for prompt, _ in cases], [wording.format(wrong) for _, wrong in cases])
        assert [case for case, reward in zip(cases, found, strict=True) if reward] == []


def test_verdicts_on_numbers_are_math_verifys() -> None:
    """Oracle: math-verify, on plain numbers as a model would write them."""
    for prompt, gold in zip(PROMPTS[::6], GOLD[::6], strict=True):
        value = int(gold.replace(",", ""))
        for text in (f"{value:,}", f"{value}", f"{value}.0", f"{value + 1}", f"{value}.5", f"{2 * value}/2"):
            oracle = verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{text}}}"))
            assert TASK.verify(prompt, rf"\boxed{{{text}}}") == float(oracle), text


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" ".join(str(number) for number in range(1, 200)), 0.0),  # answer dumping: the last counts
        (r"\boxed{" + " ".join(str(number) for number in range(1, 100)) + "}", 0.0),
        ("#### " + ", ".join(str(number) for number in range(1, 100)), 0.0),
        (r"\boxed{72} or \boxed{73}", 0.0),
        (r"#### 73" + "\n" + r"\boxed{72}", 1.0),
        (PROMPTS[0], 0.0),  # the prompt again; its last number is 48
        (PROMPTS[0] + " #### 72", 1.0),
        ("The answer is correct.", 0.0),
        ("#### seventy-two", 0.0),
        ("#### ٧٢", 1.0),
        ("#### 72%", 1.0),
        ("{" * 1_000_000, 0.0),
        ("7" * 1_000_000, 0.0),
        ("", 0.0),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_golden_rewards(completion: str, reward: float) -> None:
    assert GOLD[0] == "72"
    assert TASK.verify(PROMPTS[0], completion) == reward


@given(completion=st.one_of(st.text(), st.text("0123456789,.#$\\boxed{}/- \n", max_size=40)))
@example(completion="\ud800")
def test_any_text_is_graded(completion: str) -> None:
    assert TASK.verify(PROMPTS[0], completion) in (0.0, 1.0)


@given(value=st.integers(-(10**9), 10**9))
def test_numbers_are_compared_exactly(value: int) -> None:
    assert one_number(f"{value:,}") == one_number(f"{value}") == Fraction(value)


def test_the_format_reward() -> None:
    task = make_task("gsm8k", path=str(EXCERPT), format_weight=0.1, form="####")
    found = task.verify_all([PROMPTS[0]] * 4, ["#### 72", "#### 71", r"\boxed{72}", "71"])
    assert found == [1.0, 0.1, 0.9, 0.0]


def test_malformed_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "1"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "c", "answer": "#### one"}\n{"prompt": "d"}\n')
    with pytest.raises(ValueError, match=r"gsm8k: 2 rows are malformed:") as raised:
        make_task("gsm8k", path=str(tmp_path))
    wrong = re.findall(r"test.jsonl, line \d: [^\n]+", str(raised.value))
    assert wrong == [
        "test.jsonl, line 1: `answer` should end in #### and a number; got '#### one'",
        "test.jsonl, line 2: there is no `question`; the row has prompt",
    ]
