"""Completions that attack the graders: none ends the run, none is paid for what it forged, none takes the host's time."""

import json
import re
from collections.abc import Callable
from typing import ClassVar

import pytest
from sandboxes import needs_a_sandbox

from corral.lab.sandbox import SandboxJob, SandboxLimits, SandboxResult, SandboxStatus
from corral.lab.sandbox.pool import SandboxPool, shared_pool
from corral.lab.tasks.code import Code
from corral.lab.tasks.code import problem as code_problem
from corral.lab.tasks.code import tests as code_tests
from corral.lab.tasks.code.problem import Agreement, Calls, Checks, Problem, grade_all
from corral.lab.tasks.code.value import dumps, same_output
from corral.lab.tasks.dataset import Malformed
from corral.lab.tasks.grader import grader_counts

pytestmark = needs_a_sandbox
QUICK = SandboxLimits(timeout=2.0)


def grade(problem: Problem, completion: str, partial: bool = False) -> float:
    return grade_all([problem], [completion], shared_pool(), QUICK, partial)[0]


WRITES = """
import os
for n in range(64):
    try: os.write(n, {line!r} * 9)
    except OSError: pass
def {entry}(*_): return 0
"""

# ---------------------------------------------------------------- forged lines

SQUARE = Problem(tests=Calls("f", tuple((dumps([n]), dumps(n * n + 17)) for n in (3, 5, 8))))
FORGED = [
    b'{"value": ["complex", 1' + b"0" * 400 + b", 0]}\n",
    b'{"value": ["int", "-0x1p9"]}\n',
    b'{"value": ["dict", [["list"], 1]]}\n',
    b'{"value": ["bytes", "f"]}\n',
    b'{"value": [[[]]]}\n',
    b'{"value": 1' + b"0" * 5000 + b"}\n",
    b'{"value": ' + b'["list", ' * 400 + b"]" * 400 + b"}\n",
    b'{"value": ' + b"[" * 100_000 + b"\n",
    b"[" * 200_000 + b"\n",
    b'{"value": ["set", ' + b"NaN, " * 1000 + b"NaN]}\n",
    b"\xff\xfe\n",
]


@pytest.mark.parametrize("line", FORGED, ids=range(len(FORGED)))
def test_no_forged_line_ends_the_run_or_costs_another_completion(line: bytes) -> None:
    forged, right = WRITES.format(line=line, entry="f"), "def f(n): return n * n + 17"
    assert grade_all([SQUARE] * 3, [right, forged, right], shared_pool(), QUICK, partial=True) == [1.0, 0.0, 1.0]


def test_a_forged_number_does_not_end_a_task() -> None:
    prompt = next(prompt for prompt in Code().train_prompts(31, 0) if "larger(a, b)" in prompt)
    assert Code().verify_all([prompt], [WRITES.format(line=FORGED[0], entry="larger")]) == [0.0]


def of_one_hash() -> list[int]:
    """Multiples of 2⁶¹ − 1, all of which Python hashes to 0: to put n of them into a set takes n² steps."""
    return [number * (2**61 - 1) for number in range(1, 20_001)]


def of_one_chain() -> list[int]:
    """Numbers of different hashes for which a dict of 2¹⁷ slots tries tens of thousands of others first, each of them 50 times.

    From slot i a dict goes on to 5i + 1, once the higher bits of a hash have been used up. The first numbers take the slots of
    that walk in turn; the others start it near its beginning.
    """
    size, chain, slot = 1 << 17, [], 0
    for _ in range(80_000):
        chain.append(slot)
        slot = (5 * slot + 1) % size
    place, late = {slot: number for number, slot in enumerate(chain)}, []
    for number in range(size, 64 * size, 7):
        slot, rest = number % size, number
        while slot in place and rest:
            rest >>= 5
            slot = (5 * slot + 1 + rest) % size
        if place.get(slot, size) < 8_000:
            late.append(number)
        if len(late) == 400:
            break
    return chain + late * 50


@pytest.mark.parametrize("numbers", [of_one_hash, of_one_chain])
def test_a_forged_dict_takes_its_own_time_alone(numbers: Callable[[], list[int]]) -> None:
    """It is made in a process that is ended when its time is up; here, it would keep the trainer waiting."""
    line = json.dumps({"value": ["dict", *([["int", f"{number:x}"], 0] for number in numbers())]})
    wide = Problem(tests=Calls("f", ((dumps([1]), dumps("x" * len(line))),)))  # as much as is expected may be written
    before = grader_counts().get("code", {}).get("timeout", 0)
    forged, limits = WRITES.format(line=line.encode() + b"\n", entry="f").replace(" * 9", ""), SandboxLimits(timeout=0.4)
    assert grade_all([wide], [forged], shared_pool(), limits) == [0.0]
    assert grader_counts()["code"]["timeout"] == before + 1
    assert grade(SQUARE, "def f(n): return n * n + 17") == 1.0


# ---------------------------------------------------------------- arguments that a test looks at again

ROOT = """
import math

def _poly(xs: list, x: float):
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])

def check(candidate):
    inputs, results = [[[-6, 5, -1]], [[1, 2]]], [2.0, -0.5]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assert _poly(*candidate(*inp), inp) <= 0.0001
"""
LOOKS_AGAIN = {
    "a polynomial": (ROOT, "xs.clear(); return 0.0", "return 2.0 if len(xs) == 3 else -.5"),
    "in one line": ("xs = [3, 1, 2]\nassert f(xs) == sorted(xs)", "xs.clear(); return []", "return sorted(xs)"),
    "in the next": ("xs = [3, 1]\nout = f(xs)\nassert out == sorted(xs)", "xs.clear(); return xs", "xs.sort(); return xs"),
    "a dict": ("d = {1: 2}\nassert f(d) == sum(d.values())", "xs.clear(); return 0", "return sum(xs.values())"),
    "a set": ("s = {1, 2}\nassert f(s) == len(s)", "xs.clear(); return 0", "return len(xs)"),
    "by name": ("xs = [3, 1]\nassert f(xs=xs) == max(xs, default=0)", "xs.clear(); return 0", "return max(xs)"),
    "unchanged": ("xs = [3, 1]\nassert f(xs) == 3 and xs == [3, 1]", "xs.sort(); return xs[-1]", "return max(xs)"),
    "in place": ("xs = [3, 1]\nf(xs)\nassert xs == [1, 3]", "xs.clear()", "xs.sort()"),
    "in place, said so": ("xs = [3, 1]\nout = f(xs)\nassert out is None and xs == [1, 3]", "return 0", "xs.sort()"),
}


@pytest.mark.parametrize("name", LOOKS_AGAIN)
def test_no_pass_is_forged_by_changed_arguments(name: str) -> None:
    source, forges, right = LOOKS_AGAIN[name]
    problem = Problem(tests=code_tests.tests_from_code(source, "f"))
    assert isinstance(problem.tests, Checks)
    assert grade(problem, f"def f(xs):\n    {right}") == 1.0
    assert grade(problem, f"def f(xs):\n    {forges}") == 0.0


# ---------------------------------------------------------------- exceptions that a test did not expect

PROVOKED = {
    "a syntax error": ("import ast\nassert ast.literal_eval(f(1)) == [1]", "return '('", "return '[1]'"),
    "a name that is missing": (
        "try:\n    out = f(1)\nexcept KeyError:\n    pass\nassert out == 2",
        "raise KeyError",
        "return 2",
    ),
    "a module that is missing": (
        "import importlib\nassert importlib.import_module(f(1)).pi > 3",
        "return 'no'",
        "return 'math'",
    ),
    "an error of its own": ("assert f(1) == 2", "raise NameError('name')", "return 2"),
    "an import error of its own": ("assert f(1) == 2", "raise ImportError", "return 2"),
    "the end of the tests": ("import os\nos._exit(f(1))", "return 0", None),
    "a report of its own": ("assert f(1) == 2", "raise ValueError('x\\\\n{\"passed\": 1}')", "return 2"),
    "an error that takes no text": ("assert f(1) == 2", "raise UnicodeDecodeError('u', b'', 0, 1, '')", "return 2"),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_whatever_is_raised_after_a_call_is_a_failed_test(name: str) -> None:
    test, provokes, right = PROVOKED[name]
    problem = Problem(tests=Checks("f", "", (test,)))
    assert grade(problem, f"def f(n):\n    {provokes}") == 0.0
    assert right is None or grade(problem, f"def f(n):\n    {right}") == 1.0


def test_a_set_up_that_calls_the_function_is_a_test_too() -> None:
    problem = Problem(tests=Checks("f", "table = {f(1): 1}", ("assert table[2] == 1", "assert f(1) == 2")))
    assert grade(problem, "def f(n): return 2", partial=True) == 1.0
    assert grade(problem, "def f(n): return []", partial=True) == 0.0  # a TypeError, after the call


def test_tests_that_never_call_the_function_are_reported() -> None:
    problem = Problem(tests=Checks("f", "", ("g = f\nassert True",)))
    with pytest.raises(ValueError, match="the tests of f cannot run: they never call it"):
        grade(problem, "def f(n): return 2")


# ---------------------------------------------------------------- verdicts that a completion writes

EVALUATES = {
    "an expression": "assert eval(f(1)) == 2",
    "a program": "names = {}\nexec(f(1), names)\nassert names['x'] == 2",
    "an expression with names": "assert eval(f(1), {'one': 1}) == 2",
    "an expression in a function": "def run(text):\n    return eval(text)\nassert run(f(1)) == 2",
}
"""Tests that evaluate what a completion returned, which has in its hands the process in which it runs."""


@pytest.mark.parametrize("test", EVALUATES)
def test_a_test_that_evaluates_text_is_refused_and_evaluates_none(test: str) -> None:
    """A row is malformed; and were such a test there, it would have neither `eval` nor `exec`."""
    with pytest.raises(Malformed, match=r"uses (eval|exec), which would run a completion's text among the tests"):
        code_tests.tests_from_asserts([EVALUATES[test]], "f", "")
    problem = Problem(tests=Checks("f", "", (EVALUATES[test],)))
    right = {"a program": "x = 1 + 1", "an expression with names": "one + one"}.get(test, "1 + 1")
    for text in (right, "exit(0)", "__import__('os')._exit(0)"):
        if test == "an expression in a function":  # it has called f by then
            assert grade(problem, f"def f(n): return {text!r}") == 0.0, text
            continue
        with pytest.raises(ValueError, match=r"the tests of f cannot run: NameError: name '(eval|exec)' is not defined"):
            grade(problem, f"def f(n): return {text!r}")


class Verdicts(SandboxPool):
    """A pool whose tests write a given verdict."""

    nonces: ClassVar[list[str]] = []

    def __init__(self, written: str, status: SandboxStatus = "ok") -> None:
        super().__init__(1)
        self.written, self.status = written, status

    def run_connected(self, first: SandboxJob, second: SandboxJob) -> tuple[SandboxResult, SandboxResult]:
        nonce = re.search(r"check\(.*'([0-9a-f]{32})'\)", second.code)
        assert nonce is not None
        assert nonce[1] not in first.code
        self.nonces.append(nonce[1])
        result = SandboxResult(self.status, "", self.written.replace("NONCE", nonce[1]), 0.0)
        return SandboxResult("ok", "", "", 0.0), result


FORGED_VERDICTS = [
    "", "junk", "[]", "1", '{"passed": 1}\n', '{"unable": "x"}\n', "passed 1\n", "unable x\n", "NONCE", "NONCE \n",
    "NONCE passed", "NONCE passed 1", "NONCE passed 3\n", "NONCE passed -1\n", "NONCE passed 1.0\n", "NONCE passed 01\n",
    "NONCE passed \u0661\n", "NONCE passed 1\nx\n", "x NONCE passed 1\n", "NONCE won 1\n", "NONCE passed 1 \n", "\ufffd\0",
    "[" * 100_000, "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("written", FORGED_VERDICTS, ids=range(len(FORGED_VERDICTS)))
def test_a_verdict_that_is_none_fails_and_is_counted(written: str) -> None:
    problem, limits = Checks("f", "", ("assert f(1)", "assert f(2)")), SandboxLimits()
    before = grader_counts().get("code", {}).get("error", 0)
    assert problem.pass_rate("", Verdicts(written), limits, True) == 0.0
    assert grader_counts()["code"]["error"] == before + 1


def test_a_verdict_counts_if_the_tests_ended_well() -> None:
    problem, limits = Checks("f", "", ("assert f(1)", "assert f(2)")), SandboxLimits()
    for status, share in {"ok": 0.5, "error": 0.0, "timeout": 0.0, "memory": 0.0, "output": 0.0}.items():
        assert problem.pass_rate("", Verdicts("NONCE passed 1\n", status), limits, True) == share
    assert len(set(Verdicts.nonces)) == len(Verdicts.nonces) >= 5
    with pytest.raises(ValueError, match=r"the tests of f cannot run: NameError: np\. Only the standard library"):
        problem.pass_rate("", Verdicts("NONCE unable NameError: np\n"), limits, True)
    writes = Problem(tests=Checks("f", "", ("import os, sys\nsys.stderr.write('x')\nos.write(2, b'x')\nassert f(1) == 2",)))
    assert grade(writes, "def f(n): return 2") == 1.0  # what tests write is no verdict
    ends = Problem(tests=Checks("f", "", ("import atexit, os\natexit.register(os._exit, 3)\nassert f(1) == 2",)))
    assert grade(ends, "def f(n): return 2") == 0.0


# ---------------------------------------------------------------- exceptions that steer Python itself

STEERED = {
    "all": "assert all(map(f, [1, 2]))",
    "any": "assert not any(map(f, [1, 2]))",
    "zip": "for got, want in zip(map(f, [1, 2]), [3, 4]):\n    assert got == want",
    "next": "assert next(map(f, [1, 2]), 3) == 3",
    "a list": "assert [*map(f, [1, 2])] == []",
    "a sequence": "class S:\n    def __getitem__(self, n): return f(n)\nassert list(S()) == []",
    "in": "class S:\n    def __getitem__(self, n): return f(n)\nassert 7 not in S()",
    "hasattr": "class S:\n    @property\n    def x(self): return f(1)\nassert not hasattr(S(), 'x')",
    "getattr": "class S:\n    @property\n    def x(self): return f(1)\nassert getattr(S(), 'x', 3) == 3",
    "a mapping": "import collections.abc\nclass M(collections.abc.Mapping):\n    __iter__ = __len__ = None\n"
    "    def __getitem__(self, key): return f(key)\nassert M().get(1, 3) == 3 and 1 not in M()",
    "a generator": "def g():\n    yield\n    yield f(1)\nassert list(g()) == [None]",
    "an attribute": "class S:\n    def __getattr__(self, name): return f(name)\nassert getattr(S(), 'x', 3) == 3",
}
STEERING = [
    "StopIteration",
    "IndexError",
    "KeyError",
    "AttributeError",
    "StopAsyncIteration",
    "GeneratorExit",
    "AssertionError",
]
STEERING += ["SystemExit(0)", "KeyboardInterrupt", "LookupError", "TypeError", "NotImplementedError", "MemoryError", "EOFError"]


@pytest.mark.parametrize("test", STEERED)
def test_no_exception_of_a_function_steers_the_tests(test: str) -> None:
    problem = Problem(tests=Checks("f", "", (STEERED[test],)))
    completions = [f"def f(x): raise {error}" for error in STEERING]
    forged = WRITES.format(line=b'{"value": ["int"]}\n', entry="f")  # reading it is an IndexError
    assert grade_all([problem] * (1 + len(STEERING)), [forged, *completions], shared_pool(), QUICK) == [0.0] * (
        1 + len(STEERING)
    )


ELSE = "\nelse: assert False"
EXPECTED = {
    "a clause": (f"try: f(1)\nexcept ValueError: pass{ELSE}", "ValueError", "TypeError"),
    "a clause for a base": (f"try: f(1)\nexcept LookupError: pass{ELSE}", "KeyError(1)", "ValueError"),
    "several": (f"try: f(1)\nexcept (IndexError, KeyError): pass{ELSE}", "IndexError", "ValueError"),
    "any": (f"try: f(1)\nexcept Exception: pass{ELSE}", "SystemExit", None),
    "in a function": (
        "def raises(kind):\n    try: f(1)\n    except kind: return True\nassert raises(IndexError)",
        "IndexError",
        "KeyError",
    ),
    "assertRaises": ("import unittest\nunittest.TestCase().assertRaises(IndexError, f, 1)", "IndexError", "ValueError"),
    "by name": (
        f"try: f(1)\nexcept Exception as error: assert type(error).__name__ == 'KeyError'{ELSE}",
        "KeyError",
        "ValueError",
    ),
    "more than a text": (f"try: f(1)\nexcept ValueError: pass{ELSE}", "UnicodeDecodeError('u', b'', 0, 1, '')", None),
    "the text": (f"try: f(1)\nexcept Exception as error: assert 'why' in str(error){ELSE}", "OSError('why')", "OSError"),
    "the text of an exit": (
        f"try: f(1)\nexcept Exception as error: assert 'why' in str(error){ELSE}",
        "SystemExit('why')",
        None,
    ),
    "an exit": ("try: f(1)\nexcept (KeyboardInterrupt, SystemExit): assert False\nexcept Exception: pass", "SystemExit", None),
    "an end": (f"try: [*map(f, [1])]\nexcept StopIteration: assert False\nexcept Exception: pass{ELSE}", "StopIteration", None),
}


@pytest.mark.parametrize("test", EXPECTED)
def test_an_exception_that_the_tests_name_keeps_its_class(test: str) -> None:
    source, right, wrong = EXPECTED[test]
    problem = Problem(tests=Checks("f", "", (source,)))
    assert grade(problem, f"def f(x): raise {right}") == 1.0
    assert wrong is None or grade(problem, f"def f(x): raise {wrong}") == 0.0


# ---------------------------------------------------------------- references

SLOW = "import time\ndef ref_func(x):\n    time.sleep(.3)\n    return x + 1"
CROWD = "import os\nfor _ in range(56):\n    if os.fork() == 0:\n        while True: pass\nwhile True: pass\ndef f(x): pass"


def test_references_are_run_before_any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a program with 56 processes, a reference that has run out of time would end the run."""
    ran: list[str] = []

    class Watched(SandboxPool):
        def run_one(self, job: SandboxJob) -> SandboxResult:
            ran.append("reference" if "ref_func" in job.code else "program")
            return super().run_one(job)

    tests = [Agreement("f", (dumps([n]),), SLOW, "ref_func") for n in range(20, 23)]
    with Watched(2) as watched:
        rewards = grade_all(
            [Problem(tests=one) for one in (*tests, tests[0])],
            [CROWD, *["def f(x): return x + 1"] * 3],
            watched,
            SandboxLimits(timeout=1.0),
        )
    assert rewards == [0.0, 1.0, 1.0, 1.0]
    assert ran == ["reference"] * 3 + ["program"] * 4


def test_a_reference_has_more_time_than_programs() -> None:
    tests = Agreement("f", (dumps([30]),), SLOW, "ref_func")
    assert grade_all([Problem(tests=tests)], ["def f(x): return x + 1"], shared_pool(), SandboxLimits(timeout=0.2)) == [1.0]
    assert code_problem._references[tests] == (dumps(31),)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("got", "expected"),
    [("inf", "9" * 5000), ("9" * 4999 + "8", "9" * 5000), ("inf", "1e999"), ("nan", "nan "), ("-inf", "-1e999"), ("1e0", "1")],
)
def test_numbers_too_large_to_measure_are_compared_as_texts(got: str, expected: str) -> None:
    assert not same_output(got, expected, 1e-6) or got.strip() == expected.strip()
