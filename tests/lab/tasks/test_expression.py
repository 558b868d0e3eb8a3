"""One-expression completion: graded as Python would compute it, and never run."""

import ast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral.lab.models.tiny import tiny_tokenizer
from corral.lab.tasks import make_task
from corral.lab.tasks import procedural as draws
from corral.lab.tasks.procedural import BOUND, Expression, format_prompt

TASK = Expression()
DOUBLE = "1>3 2>5 3>7 4>9:"


@pytest.mark.parametrize("answer", ["2*x+1", "x*2+1", "x+x+1", "1+2*x", "(x+x)+1", "3+(x-1)*2", "-(-2*x)+1", "4*x//2+1"])
def test_golden_right_answers(answer: str) -> None:
    assert TASK.verify(DOUBLE, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "nothing"),
        ("2*x", "not that"),
        ("2*x+1 ", "a space"),
        ("2*x+1\n", "a line end"),
        ("2*x+1#", "a comment"),
        ("2*y+1", "no such name"),
        ("2*xx", "no such name"),
        ("2x+1", "not Python"),
        ("x2", "no such name"),
        ("0x2*x+1", "a hexadecimal number"),
        ("2**x", "a power"),
        ("9**9**9**9", "a tower"),
        ("2*x/1+1", "true division"),
        ("2*x+1.0", "a float"),
        ("2*x+1e0", "a float"),
        ("2*x+True", "a bool"),
        ("(2*x+1,)", "a tuple"),
        ("[3,5,7,9][x-1]", "a table"),
        ("x if x else 1", "a condition"),
        ("(lambda:x)()", "a function"),
        ("x(1)", "a call"),
        ("1(1)", "a call, of which Python warns"),
        ("1+2*x if 1else x", "a literal of which Python warns"),
        ("x:=1", "a statement"),
        ("x//(x-x)", "a division by zero"),
        ("x%0", "a division by zero"),
        ("~x", "another operator"),
        ("+x", "another operator"),
        ("2*x+1\x00", "a null character"),
        ("２*x+1", "a full-width digit"),
        ("2*х+1", "a Cyrillic letter"),
        ("__import__('os')", "an import"),
        ("x+99999-99998+x", "beyond the bound on the way"),
        ("9999*9999*0+2*x+1", "beyond the bound on the way, and too long"),
        ("(" * 1_000_000, "enormous"),
        ("-" * 100_000 + "x", "enormous"),
        ("9" * 1_000_000, "enormous"),
    ],
)
def test_golden_wrong_answers(answer: str, why: str) -> None:
    assert TASK.verify(DOUBLE, answer) == 0.0, why
    assert Expression(max_length=64).verify(DOUBLE, answer) == 0.0, why


def test_deep_nesting_is_read_as_far_as_it_goes() -> None:
    task = Expression(max_length=64)
    assert task.verify(DOUBLE, "(" * 29 + "2*x+1" + ")" * 29) == 1.0
    assert task.verify(DOUBLE, "-" * 58 + "x*2+1") == 1.0


EXPRESSION = st.recursive(
    st.one_of(st.just("x"), st.integers(0, 99).map(str)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        inner.map(lambda text: f"(-{text})"),
    ),
    max_leaves=6,
)


@given(text=EXPRESSION.filter(lambda text: len(text) <= 64), pairs=st.integers(2, 9))
def test_values_are_pythons(text: str, pairs: int) -> None:
    """Oracle: Python itself, on expressions that this test wrote."""
    tree = ast.parse(text, mode="eval").body
    steps = [compile(ast.Expression(node), "", "eval") for node in ast.walk(tree) if isinstance(node, ast.expr)]
    try:
        values = [[eval(step, {"__builtins__": {}}, {"x": x}) for step in steps] for x in range(1, pairs + 1)]
        within = all(abs(value) <= BOUND for row in values for value in row)  # nothing on the way is beyond the bound
        expected = [row[0] for row in values] if within else None
    except ZeroDivisionError:
        expected = None
    assert Expression(max_length=64, pairs=pairs).outputs(text) == expected


@given(answer=st.one_of(st.text("0123456789x+-*/%() ", max_size=16), st.text(), EXPRESSION))
@example(answer="\ud800")
def test_any_text_is_graded(answer: str) -> None:
    assert TASK.verify(DOUBLE, answer) in (0.0, 1.0)


@pytest.mark.parametrize("settings", [{}, {"pairs": 2}, {"pairs": 6, "constant_max": 20, "value_max": 999}])
def test_draws_repeat_extend_fit_and_never_leak(settings: dict[str, int]) -> None:
    task = make_task("expression", **settings)
    pairs, held_out = task.demonstrations(500, 1), task.held_out_prompts(60, 2)
    assert pairs[:50] == task.demonstrations(50, 1)
    assert pairs[:20] != task.demonstrations(20, -1)
    assert all(task.verify(prompt, answer) == 1.0 for prompt, answer in pairs)
    assert max(len(answer) for _, answer in pairs) <= task.max_completion_length
    known = set(tiny_tokenizer().get_vocab())
    assert all(set(prompt + answer) <= known for prompt, answer in pairs)
    assert not {prompt for prompt, _ in pairs} & set(held_out)


def test_there_are_many_problems() -> None:
    prompts = TASK.train_prompts(2_000, 0)
    assert len(set(prompts)) > 600
    assert prompts[:2] == ["1>6 2>12 3>18 4>24:", "1>-11 2>-10 3>-9 4>-8:"]
    assert format_prompt([6, 12, 18, 24]) == prompts[0]


@pytest.mark.parametrize(
    "prompt", ["", "1>3 2>5 3>7:", "1>3 2>5 3>7 5>9:", "1>3 2>5 3>7 4>9", "1>03 2>5 3>7 4>9:", "1>3 2>5 3>7 4>100:", "47+85:"]
)
def test_a_prompt_of_another_task_is_an_error_and_not_a_zero(prompt: str) -> None:
    with pytest.raises(ValueError, match="expression: "):
        TASK.verify(prompt, "x")


@pytest.mark.parametrize("settings", [{"pairs": 1}, {"constant_max": 0}, {"value_max": 8}, {"max_length": 8}, {"pairs": True}])
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"expression: `{next(iter(settings))}` is a whole number in"):
        make_task("expression", **settings)


def test_drawing_gives_up_where_there_is_nothing_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "in_held_out_share", lambda text: True)
    monkeypatch.setattr(draws, "MAX_MISSES", 20)
    with pytest.raises(ValueError, match="no training problem in 20 draws"):
        TASK.train_prompts(1, 0)
