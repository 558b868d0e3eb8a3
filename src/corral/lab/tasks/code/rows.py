"""Readers of code data sets: a row in one of the usual formats becomes a prompt and a problem."""

import json
import math
import re
from contextlib import suppress
from typing import Any

from corral.lab.tasks.code.problem import Agreement, Calls, Problem, Runs, Tests
from corral.lab.tasks.code.tests import FLOAT_TOLERANCE, called_function, tests_from_asserts, tests_from_code
from corral.lab.tasks.code.value import dumps
from corral.lab.tasks.dataset import Malformed, Row, text_column


def own_row(row: Row) -> tuple[str, Problem]:
    """Read corral's own format: `prompt`, and `tests` with `stdin` and `stdout`, or `args` and `result` for `entry`."""
    problem = problem_from_tests({key: row[key] for key in ("tests", "entry", "tolerance") if key in row})
    return text_column(row, "prompt"), Problem(tests=problem.tests, reference=_optional(row, "reference"))


def problem_from_tests(answer: Any) -> Problem:
    """A problem from its tests alone: {"tests": […], "entry": …}, or the list of tests."""
    answer = answer if isinstance(answer, dict) else {"tests": answer}
    tests, entry = answer.get("tests"), answer.get("entry")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
        raise Malformed("`tests` should be a list, not empty, of {stdin, stdout} or of {args, result}")
    if entry is None:
        return Problem(tests=Runs(tuple((_text(test, "stdin"), _text(test, "stdout")) for test in tests)))
    if not isinstance(entry, str) or not entry.isidentifier():
        raise Malformed(f"`entry` should be the name of a function; got {entry!r:.60}")
    if not all(isinstance(test.get("args"), list) and "result" in test for test in tests):
        raise Malformed("every test of a function should have `args`, a list, and `result`")
    cases = tuple((dumps(test["args"]), dumps(test["result"])) for test in tests)
    return Problem(tests=Calls(entry, cases, _tolerance(answer, "tolerance")))


def human_eval_row(row: Row) -> tuple[str, Problem]:
    """Read HumanEval and HumanEval+: `prompt`, `entry_point`, and `test`, or `base_input` and `plus_input`."""
    prompt, entry = text_column(row, "prompt"), text_column(row, "entry_point")
    solution = _optional(row, "canonical_solution")
    if "base_input" in row and solution:
        inputs = [*_list(row, "base_input"), *_list(row, "plus_input", [])]
        if not inputs or not all(isinstance(arguments, list) for arguments in inputs):
            raise Malformed("`base_input` and `plus_input` should be lists of lists of arguments")
        tolerance = max(_tolerance(row, "atol"), FLOAT_TOLERANCE)
        tests: Tests = Agreement(entry, tuple(map(dumps, inputs)), prompt + solution, entry, tolerance)
    else:
        tests = tests_from_code(text_column(row, "test"), entry)
    head = re.search(rf"^(?:async )?def {re.escape(entry)}\b", prompt, re.M)
    if head is None:
        raise Malformed(f"`prompt` should have the head of {entry}, the `entry_point`")
    reference = prompt + solution if solution else ""
    return prompt, Problem(tests=tests, stem=prompt, preamble=prompt[: head.start()], reference=reference)


def mbpp_row(row: Row, shown: int = 1) -> tuple[str, Problem]:
    """Read MBPP and MBPP+: `prompt` or `text`, `test_list`, and for MBPP+ `test`, which then decides.

    The prompt ends with the first `shown` assertions, which name the function.
    """
    text, asserts = text_column(row, "prompt", "text"), _list(row, "test_list")
    if not asserts or not all(isinstance(test, str) for test in asserts):
        raise Malformed("`test_list` should be a list of assertions, not empty")
    entry = called_function(asserts[0])
    setup = _optional(row, "test_setup_code") or "\n".join(map(str, _list(row, "test_imports", [])))
    test = _optional(row, "test")
    tests = tests_from_code(test, entry) if test else tests_from_asserts(asserts, entry, setup)
    prompt = f"{text.strip()}\nYour code should pass tests like these:\n" + "\n".join(asserts[: max(1, shown)])
    return prompt, Problem(tests=tests, reference=_optional(row, "code"))


def apps_row(row: Row) -> tuple[str, Problem]:
    """Read APPS: `question`, and `input_output` with `inputs`, `outputs` and, for functions, `fn_name`."""
    question, starter = text_column(row, "question", "prompt"), _optional(row, "starter_code")
    if row.get("input_output") == "":
        raise Malformed("`input_output` is empty: there are no tests")
    cases = _from_json(row, "input_output")
    if not isinstance(cases, dict):
        raise Malformed("`input_output` should be an object with `inputs` and `outputs`")
    inputs, outputs = _list(cases, "inputs"), _list(cases, "outputs")
    if not inputs or len(inputs) != len(outputs):
        raise Malformed(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if name := _optional(cases, "fn_name"):
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise Malformed("`inputs` of a function should be lists of arguments")
        arguments, results = ([dumps(_with_int_keys(one)) for one in values] for values in (inputs, outputs))
        tests: Tests = Calls(name, tuple(zip(arguments, results, strict=True)), FLOAT_TOLERANCE, "apps")
    else:
        given, expected = (map(_join_lines, values) for values in (inputs, outputs))
        tests = Runs(tuple(zip(given, expected, strict=True)), FLOAT_TOLERANCE)
    prompt = question + (f"\n\n{starter}" if starter.strip() else "")
    try:
        solutions = _from_json(row, "solutions")
    except Malformed:
        solutions = None  # a reference is welcome and not needed
    known = isinstance(solutions, list) and solutions and isinstance(solutions[0], str)
    return prompt, Problem(tests=tests, reference=solutions[0] if known else "")


def _from_json(row: Row, name: str) -> Any:
    """A column's value; one that is a text is read as JSON."""
    try:
        return json.loads(row[name]) if isinstance(row.get(name), str) else row.get(name)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"`{name}` is not JSON: {error}") from error


def _list(row: Row, name: str, default: list[Any] | None = None) -> list[Any]:
    """A column's list, or its text read as JSON; the default for None."""
    value = default if row.get(name) is None else _from_json(row, name)
    if not isinstance(value, list | tuple):
        raise Malformed(f"`{name}` should be a list; got {value!r:.60}")
    return list(value)


def _optional(row: Row, name: str) -> str:
    """A text, or "" where there is none."""
    return "" if row.get(name) is None else _text(row, name)


def _tolerance(row: Row, name: str) -> float:
    value = row.get(name)
    value = 0.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise Malformed(f"`{name}` should be a number, 0 or above; got {value!r:.60}")
    return float(value)


def _text(row: Row, name: str) -> str:
    if not isinstance(value := row.get(name), str):
        raise Malformed(f"`{name}` should be a text; got {value!r:.60}")
    return value


def _join_lines(value: Any) -> str:
    """A program's input or output as one text; APPS sometimes gives a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise Malformed(f"inputs and outputs of programs should be texts; got {value!r:.60}")
    return value


def _with_int_keys(value: Any) -> Any:
    """A value whose dicts get integer keys where all keys are integers: JSON has texts for APPS' integers."""
    if isinstance(value, list):
        return [_with_int_keys(item) if isinstance(item, dict) else item for item in value]
    with suppress(ValueError):
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    return value
