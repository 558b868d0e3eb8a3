"""A fuzzer of grading: hostile results through every decoder and comparer on the host. None may raise, hang or pass."""

import io
import json
import random

from corral.lab.tasks.code import harness as code_harness
from corral.lab.tasks.code.problem import defines, extract_program
from corral.lab.tasks.code.value import COMPARISONS, dumps, same_output
from corral.lab.tasks.grader import grader_pool
from corral.lab.tasks.math import extract, one_number, same_number
from corral.lab.tasks.procedural import Arithmetic, Countdown, Expression

RESULTS = 5_000
"""Hostile results per run; the seed of each is its number, so that one that gets through can be looked at alone."""
SECONDS = 0.5
"""Processor time for one of them: few need a millisecond, and those that would need hours are ended."""
SECRET = "no forger knows this text"
EXPECTED = [
    SECRET,
    [SECRET],
    (1, SECRET),
    {SECRET},
    {1: SECRET},
    {SECRET: 1.5},
    0.123456789,
    10**30 + 7,
    [[], {}, SECRET],
    b"\0\1\2",
]
KINDS = ["int", "list", "tuple", "set", "frozenset", "dict", "complex", "bytes", "other", "", "Int", "object"]
SCALARS = [
    "null", "true", "false", "0", "-0", "1", "-1", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "-Infinity", "0.1",
    "1" + "0" * 400, "9" * 4300, "9" * 5000, '""', '"x"', '"\\ud800"', '"\\u0000"', '"-"', '"0x"', '"ff"', '"-ff"', '"_"',
    '"' + "f" * 5000 + '"', "{}", "[]",
]  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> str:
    """JSON that may be an encoded value, or nearly one."""
    what = draw.random()
    if depth > 5 or what < 0.3:
        return draw.choice(SCALARS)
    if what < 0.35:
        return json.dumps(draw.randbytes(draw.randrange(20)).decode("latin-1"))
    if what < 0.38:  # as deep as can just be read, or deeper
        count = draw.choice([50, 300, 330, 400, 900, 3000])
        return '["list", ' * count + value(draw, 9) + "]" * count
    if what < 0.385:  # keys of one hash
        keys = [f'["int", "{number * (2**61 - 1):x}"]' for number in range(1, draw.choice([3, 60, 600, 2000]))]
        return (
            '["set", ' + ", ".join(keys) + "]"
            if draw.random() < 0.5
            else '["dict", ' + ", ".join(f"[{k}, 0]" for k in keys) + "]"
        )
    items = [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if what < 0.45:
        return "{" + ", ".join(f'"{draw.choice(KINDS)}": {item}' for item in items) + "}"
    if what < 0.5:
        return "[" + ", ".join(items) + "]"
    kind = draw.choice(KINDS)
    if kind == "dict" and draw.random() < 0.8:
        items = [f"[{item}, {value(draw, depth + 1)}]" for item in items]
    return f'["{kind}"' + "".join(f", {item}" for item in items) + "]"


def line(draw: random.Random) -> str:
    """What a program might write where the harness writes a result."""
    text = value(draw)
    form = draw.random()
    if form < 0.7:
        text = f'{{"value": {text}}}'
    elif form < 0.8:
        text = f'{{"value": {text}, "arguments": {value(draw)}, "error": {value(draw)}}}'
    elif form < 0.9:
        text = f'{{"error": {text}, "text": {value(draw)}}}'
    for _ in range(draw.choice([0, 0, 0, 1, 3])):  # and then something is missing, doubled or new
        at, length = draw.randrange(len(text) + 1), draw.randrange(9)
        text = (
            text[:at]
            + draw.choice(["", text[at : at + length] * 2, chr(draw.randrange(0x3000)), "\0", "1"])
            + text[at + length :]
        )
    return text


def test_no_forged_result_raises_hangs_or_passes() -> None:
    questions = []
    for number in range(RESULTS):
        draw = random.Random(number)
        expected = [dumps(draw.choice(EXPECTED)) for _ in range(3)]
        output = "\n".join(line(draw) for _ in range(3))
        questions.append((draw.choice(list(COMPARISONS)), draw.choice([0.0, 1e-6]), output, expected))
    verdicts = grader_pool("code").grade(questions, SECONDS)
    assert [number for number, verdict in enumerate(verdicts) if verdict.score > 0] == []
    assert [number for number, verdict in enumerate(verdicts) if verdict.status in ("died", "error")] == []
    ended = sum(verdict.status == "timeout" for verdict in verdicts)
    assert ended < RESULTS / 100  # nearly all are read and compared


def test_the_right_results_pass_the_same_way() -> None:
    lines = [json.dumps({"value": json.loads(dumps(expected))}) for expected in EXPECTED]
    questions = [("same", 0.0, "\n".join(lines), [dumps(expected) for expected in EXPECTED])]
    assert grader_pool("code").grade(questions, SECONDS)[0].score == len(EXPECTED)


def test_no_forged_answer_passes_a_test_or_keeps_it_from_its_verdict() -> None:
    """The tests' own process reads answers too; it is ended when its time is up, so sets of one hash are left out here."""
    tests = [f"assert f([1], {{2: 3}}) == {SECRET!r}", "xs = [1]\nassert sorted(f(xs, {})) == xs != [1]"]
    for number in range(RESULTS // 5):
        draw = random.Random(number)
        answers = "".join(line(draw).replace("\n", " ") + "\n" for _ in range(4))
        if len(answers) > 50_000:
            continue
        verdict = code_harness.run_tests("", tests, "f", io.StringIO(), io.StringIO(answers))
        assert verdict == "passed 0", number


def output(draw: random.Random) -> str:
    """Standard output, with numbers that are none."""
    words = [
        "inf",
        "-inf",
        "nan",
        "1e999",
        "0x1",
        "1_0",
        "١",
        "½",
        "1.",
        ".",
        "+",
        "--1",
        "1e",
        "9" * 5000,
        "0" * 5000 + "1",
        "\0",
        "\ud800",
    ]
    return "".join(
        draw.choice(words) + draw.choice([" ", "\n", "\r", "\t", "\x0b", "\u2028", ""]) for _ in range(draw.randrange(12))
    )


def test_no_forged_output_raises_or_passes() -> None:
    expected = ["3.14159 26\n", "9" * 4999 + "8", "0.5\n0.25", "yes 1e300"]
    for number in range(RESULTS):
        draw = random.Random(number)
        assert not same_output(output(draw), draw.choice(expected), draw.choice([0.0, 1e-6])), number


def completion(draw: random.Random) -> str:
    """Text that is nearly an answer of some task."""
    parts = [
        "\\boxed{", "}", "{", "####", "1e999999999", "1e-999999999", "1/0", "7/3", "−", "½", "٣", "9" * 5000, "**", "(",
        ")", "x", "+", "-", "*", "/", "=", ",", "<think>", "</think>", "```python\n", "```\n", "\n", " ", "\0",
        "\ud800", "\\frac{1}{0}", "f(", "lambda", "(" * 300,
    ]  # fmt: skip
    return "".join(draw.choice(parts) for _ in range(draw.randrange(25)))


def test_no_completion_raises_in_what_reads_it_on_the_host() -> None:
    tasks = [Arithmetic(), Countdown(), Expression()]
    prompts = [task.train_prompts(5, 0) for task in tasks]
    for number in range(RESULTS // 5):
        draw = random.Random(number)
        text = completion(draw)
        for task, some in zip(tasks, prompts, strict=True):
            assert 0.0 <= task.verify(draw.choice(some), text) < 1.0, number
        answer = extract(text)
        assert answer is None or (one_number(answer.text), same_number("123456789", answer.text))[1] is False, number
        defines(extract_program(text), "f")
