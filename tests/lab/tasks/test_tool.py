"""Tools that answer within a completion."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.tasks import make_task
from corral.lab.tasks.imports import Calculator, make_tool


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("3+7=", "10"),
        ("3+7=10-12=", "-2"),  # 10 − 12
        ("3*12=", "36"),
        ("=", "?"),
        ("3+=", "?"),
        ("1+2+3=", "5"),  # the last two numbers
        ("9" * 400 + "+1=", "?"),  # nobody multiplies enormous numbers
        ("٣+٣=", "?"),
    ],
)
def test_the_calculator_knows_the_last_two_numbers(text: str, reply: str) -> None:
    assert Calculator().reply("any", text) == reply


@given(st.text(max_size=40))
def test_the_calculator_answers_any_text(text: str) -> None:
    assert Calculator().reply("", text + "=")


def test_a_right_answer_of_countdown_is_what_the_calculator_leaves_of_it() -> None:
    text = ""
    for turn in ("3+7=", "+12="):
        text += turn
        text += Calculator().reply("3 7 12>22:", text)
    assert text == "3+7=10+12=22"
    assert make_task("countdown").verify("3 7 12>22:", text) == 1.0


def test_tools_by_name_and_by_path(tmp_path: Path) -> None:
    assert isinstance(make_tool("calculator"), Calculator)
    (tmp_path / "mine.py").write_text(
        "class Echo:\n    stops = ('.',)\n    def reply(self, problem, text):\n        return None\n"
        "class Mute:\n    stops = ()\n    def reply(self, problem, text):\n        return None\n"
        "class Other:\n    pass\nnumber = 1\n"
    )
    assert make_tool(f"{tmp_path}/mine.py:Echo").stops == (".",)
    for name, why in (("Mute", "at least one"), ("Other", "is no tool"), ("number", "cannot be called")):
        with pytest.raises(ValueError, match=why):
            make_tool(f"{tmp_path}/mine.py:{name}")
    with pytest.raises(ValueError, match=r"no tool 'calculatr'\. Did you mean 'calculator'"):
        make_tool("calculatr")
