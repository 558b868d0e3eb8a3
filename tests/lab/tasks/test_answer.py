r"""Which answer counts: one, by a documented order, from any text whatever, in linear time."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral.lab.tasks.math import LONGEST, Answer, ascii_digits, extract, last_box, match_braces, one_number


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        (r"So \boxed{42}.", "42", "boxed"),
        (r"\boxed{1} and then \boxed{2}", "2", "boxed"),
        (r"\boxed{42} #### 7, or 8", "42", "boxed"),  # a box comes first, wherever it stands
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}", "boxed"),  # \{ is no brace
        (r"\boxed{\{1}", r"\{1", "boxed"),
        (r"\boxed {42}", "42", "boxed"),
        ("\\boxed{\n 42 \n}", "42", "boxed"),
        (r"\boxed{\boxed{42}}", "42", "boxed"),
        (r"\boxed{\boxed{\boxed{42}}}", "42", "boxed"),
        (r"\boxed{x=\boxed{3}+1}", r"x=\boxed{3}+1", "boxed"),
        (r"\boxed{\boxed{1},\boxed{2}}", r"\boxed{1},\boxed{2}", "boxed"),
        (r"\boxed{1} \boxed{2", "1", "boxed"),  # what is never closed is no box
        (r"\boxed{1 \boxed{2}", "2", "boxed"),
        (r"\boxed{42}}}}", "42", "boxed"),
        (r"}}}\boxed{42}", "42", "boxed"),
        (r"\boxed{}", "", "boxed"),  # an empty box is an empty answer…
        (r"The answer is 42. \boxed{ }", "", "boxed"),  # …whatever stands elsewhere
        ("```python\nprint('\\boxed{41}')\n```\n% \\boxed{42}", "42", "boxed"),  # text is text
        (r"\\boxed{42}", "42", "number"),  # a line break, and then a word
        ("#### 42", "42", "####"),
        ("####42", "42", "####"),
        ("#### 41\n#### 42\nHow odd.", "42", "####"),
        ("#### \n42", "", "####"),
        ("##### 42", "42", "####"),
        ("1 2 3 4 5 42", "42", "number"),
        ("It is 42.", "42", "number"),
        ("It is 1,234.50 dollars.", "1,234.50", "number"),
        ("It is -3", "-3", "number"),
        ("It is (-3)", "-3", "number"),
        ("10-3", "3", "number"),  # a difference, not a sign
        ("It is \u22123", "-3", "number"),
        ("It is \u0664\u0662.", "42", "number"),
        ("Three quarters: 3/4.", "3/4", "number"),
        ("Version 1.2.3", None, None),
        ("It is 1e5.", "1e5", "number"),
        (r"\boxed{42", "42", "number"),
        ("x2 = y", None, None),
        ("no number at all", None, None),
        ("", None, None),
        ("\x00\ud800", None, None),
    ],
)
def test_golden_order_of_the_forms(text: str, answer: str | None, form: str | None) -> None:
    assert extract(text) == (None if answer is None else Answer(answer, form))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", Fraction(42)),
        ("42.0", Fraction(42)),
        ("  42 apples", Fraction(42)),
        ("$42", Fraction(42)),
        (r"\$42.50", Fraction("42.5")),
        ("1,234", Fraction(1234)),
        ("1{,}234", Fraction(1234)),
        (r"1\,234", Fraction(1234)),
        (r"1\!,\!234", Fraction(1234)),
        ("109,200,000", Fraction(109_200_000)),
        ("50%", Fraction(50)),
        (r"50\%", Fraction(50)),
        ("x = 42", Fraction(42)),
        (r"42\text{ cm}", Fraction(42)),
        ("42 cm^2", Fraction(42)),
        (r"42\text{ m}^{2}", Fraction(42)),
        ("42 m²", Fraction(42)),
        (r"90^\circ", Fraction(90)),
        ("-3", Fraction(-3)),
        ("−3", Fraction(-3)),
        ("- 3", Fraction(3)),  # a dash before a number, as in a list
        ("+3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"-\frac{-1}{2}", Fraction(1, 2)),
        ("٤٢", Fraction(42)),
        ("４２", Fraction(42)),
        ("x_1 = 42", Fraction(42)),
        ("1/0", None),
        ("42 or 43", None),
        ("1 2 3 42", None),
        ("6*7", None),
        ("40+2", None),
        ("10^2", None),
        ("3 1/2", None),
        ("1,23", None),  # no thousands, so two numbers
        ("1 234", None),
        ("1.2.3", None),
        ("forty-two", None),
        ("", None),
        ("9" * 61, None),
        ("9" * 1_000_000, None),
        ("4²", None),  # nothing is computed…
        ("10³", None),
        ("5 m³", Fraction(5)),  # …but a unit is no number
        (r"\sqrt{16}", None),
        ("√16", None),
        (r"\pm 4", None),
        ("±4", None),
        (r"\log 4", None),
        (r"4\text{ logs}", Fraction(4)),
        ("1e5", Fraction(100_000)),  # as Python prints floats
        ("-1.5e-3", Fraction(-3, 2000)),
        ("1e100", None),
        ("0x10", None),
        ("5x10", None),
        ("1_000", None),
        ("3x4=12", None),
        ("12 or 4²", None),
        ("12, version 1.2.3", None),
        ("2x", Fraction(2)),
        ("42cm2", Fraction(42)),
    ],
)
def test_golden_numbers(text: str, number: Fraction | None) -> None:
    assert one_number(text) == number


@given(number=st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=1), cents=st.integers(0, 99))
def test_numbers_are_read_as_python_writes_them(number: Fraction, cents: int) -> None:
    value = abs(int(number)) + Fraction(cents, 100)
    assert one_number(f"{int(value):,}.{cents:02}") == value
    assert one_number(f"-{float(value):.2f}") == -Fraction(f"{float(value):.2f}")
    assert one_number(f"{int(number)}/7") == Fraction(int(number), 7)


CONTENT = st.recursive(
    st.text("ab1 ,^\\", max_size=4).filter(lambda text: not text.endswith("\\")),
    lambda inner: st.one_of(inner.map(lambda text: f"{{{text}}}"), st.lists(inner, max_size=3).map("".join)),
    max_leaves=8,
)


@given(before=st.text("ab1{ #"), content=CONTENT, after=st.text("ab1} #\n"))
def test_the_last_box_is_found_between_anything(before: str, content: str, after: str) -> None:
    assert last_box(rf"{before}\boxed{{{content}}}{after}") == content.strip()


@given(text=st.one_of(st.text(), st.text("\\boxed{}#123.,/- \n")))
@example(text="\\boxed{" * 300 + "}" * 299)
def test_any_text_has_one_answer_or_none(text: str) -> None:
    answer = extract(text)
    if answer is not None:
        assert answer.form in ("boxed", "####", "number")
        assert answer.text in ascii_digits(text)
        assert answer.form != "boxed" or match_braces(answer.text)[1]
        one_number(answer.text)


@pytest.mark.parametrize(
    "text",
    [
        *("{" * 1_000_000, "}" * 1_000_000, "{}" * 500_000, r"\boxed{" * 140_000, r"\boxed{" * 140_000 + "}" * 140_000),
        *(r"\boxed{1}" * 110_000, "\\" * 1_000_000, "#" * 1_000_000, "####" * 250_000, "1" * 1_000_000, "1," * 500_000),
        *("1,111" * 200_000, "1/" * 500_000, "-" * 1_000_000, "1." * 500_000, "٤" * 1_000_000, r"\boxed " * 140_000),
        "\\boxed" + " " * 1_000_000,
        "\\frac" * 200_000,
        "1 " + " " * 1_000_000 + "/",
    ],
    ids=lambda text: f"{text[:8]!r}…",
)
def test_a_megabyte_takes_no_time(text: str) -> None:
    started = time.process_time()
    answer = extract(text)
    one_number(text)
    if answer is not None and len(answer.text) <= LONGEST:
        one_number(answer.text)
    assert time.process_time() - started < 5  # about 0.3 s; anything quadratic takes minutes


def test_braces() -> None:
    assert match_braces(r"\frac{1}{2}")[1]
    assert match_braces(r"\left\{1\right\}")[1]
    assert not match_braces(r"1} \boxed{2")[1]
    assert not match_braces("{")[1]
    assert not match_braces("}")[1]
    assert not match_braces(r"\boxed{1")[1]
