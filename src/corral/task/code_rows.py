"""Rows of code data sets in their usual shapes → a prompt and a problem. Tests are read where they can be, not run."""

import ast
import builtins
import copy
import json
import math
import sys
from typing import Any

from corral.task.code_problem import Agreement, Calls, Checks, Problem, Runs, Tests
from corral.task.code_value import dumps
from corral.task.rows import Malformed, Row, text_column

CLOSE = 1e-6
"""EvalPlus compares floats within this."""


def own_row(row: Row) -> tuple[str, Problem]:
    """`prompt`, and `tests` that each have `stdin` and `stdout`, or `args` and `result` for the function `entry`."""
    problem = problem_from_tests({key: row[key] for key in ("tests", "entry", "tolerance") if key in row})
    reference = row.get("reference", "")
    if not isinstance(reference, str):
        raise Malformed(f"`reference` should be a program; got {reference!r:.60}")
    return text_column(row, "prompt"), Problem(tests=problem.tests, reference=reference)


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
    tolerance = answer.get("tolerance", 0.0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise Malformed(f"`tolerance` should be a number, 0 or above; got {tolerance!r:.60}")
    return Problem(tests=Calls(entry, tuple((dumps(test["args"]), dumps(test["result"])) for test in tests), float(tolerance)))


def human_eval_row(row: Row) -> tuple[str, Problem]:
    """HumanEval and HumanEval+: `prompt`, `entry_point`, and `test`, or `base_input` and `plus_input` for the reference."""
    prompt, entry = text_column(row, "prompt"), text_column(row, "entry_point")
    solution = row.get("canonical_solution") or ""
    if "base_input" in row and solution:
        inputs = [*_list(row, "base_input"), *_list(row, "plus_input" if "plus_input" in row else "base_input", [])]
        if not inputs or not all(isinstance(arguments, list) for arguments in inputs):
            raise Malformed("`base_input` and `plus_input` should be lists of lists of arguments")
        tolerance = max(float(row.get("atol") or 0.0), CLOSE)
        tests: Tests = Agreement(entry, tuple(map(dumps, inputs)), prompt + solution, entry, tolerance)
    else:
        tests = tests_from_code(text_column(row, "test"), entry)
    start = prompt.find(f"def {entry}")
    if start < 0:
        raise Malformed(f"`prompt` should have the head of {entry}, the `entry_point`")
    return prompt, Problem(tests=tests, stem=prompt, preamble=prompt[:start], reference=prompt + solution if solution else "")


def mbpp_row(row: Row, shown: int = 1) -> tuple[str, Problem]:
    """MBPP and MBPP+: `prompt` or `text`, `test_list`, and `test` (MBPP+), which then is what counts.

    The prompt ends with the first `shown` assertions, which name the function.
    """
    text, asserts = text_column(row, "prompt", "text"), _list(row, "test_list")
    if not asserts or not all(isinstance(test, str) for test in asserts):
        raise Malformed("`test_list` should be a list of assertions, not empty")
    entry = called_function(asserts[0])
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    tests = tests_from_code(row["test"], entry) if row.get("test") else tests_from_asserts(asserts, entry, setup)
    prompt = f"{text.strip()}\nYour code should pass tests like these:\n" + "\n".join(asserts[: max(1, shown)])
    return prompt, Problem(tests=tests, reference=row.get("code") or "")


def apps_row(row: Row) -> tuple[str, Problem]:
    """APPS and its like: `question`, and `input_output` with `inputs`, `outputs` and, for functions, `fn_name`."""
    question, starter = text_column(row, "question", "prompt"), row.get("starter_code") or ""
    cases = row.get("input_output")
    try:
        cases = json.loads(cases) if isinstance(cases, str) else cases
    except (ValueError, RecursionError) as error:
        raise Malformed(f"`input_output` is not JSON: {error}") from error
    if not isinstance(cases, dict):
        raise Malformed("`input_output` should be an object with `inputs` and `outputs`")
    inputs, outputs = _list(cases, "inputs"), _list(cases, "outputs")
    if not inputs or len(inputs) != len(outputs):
        raise Malformed(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if name := cases.get("fn_name"):
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise Malformed("`inputs` of a function should be lists of arguments")
        pairs = zip(map(dumps, inputs), map(dumps, outputs), strict=True)
        tests: Tests = Calls(name, tuple(pairs), CLOSE, loose=True)
    else:
        tests = Runs(tuple((_joined(given), _joined(wanted)) for given, wanted in zip(inputs, outputs, strict=True)))
    return question + (f"\n\n{starter}" if starter.strip() else ""), Problem(
        tests=tests, reference=_first(row.get("solutions"))
    )


def tests_from_code(source: str, entry: str) -> Tests:
    """Tests that are written as a program, `check(candidate)` or a script.

    Where the program is a list of inputs with results, or of assertions `f(…) == …` with plain values, these are taken and
    compared on this side. Inputs with a reference function become an Agreement. All else runs as it is, in its own sandbox.
    """
    tree = _parsed(source)
    values = {name: _literal(node.value) for node in ast.walk(tree) if (name := _target(node)) in ("inputs", "results")}
    inputs, results, compared = values.get("inputs"), values.get("results"), _compared(tree, entry)
    if compared and isinstance(inputs, list) and inputs and all(isinstance(one, list | tuple) for one in inputs):
        arguments = [dumps(list(one)) for one in inputs]
        if compared == "exp" and isinstance(results, list) and len(results) == len(inputs):
            return Calls(entry, tuple(zip(arguments, map(dumps, results), strict=True)), _tolerance(tree))
        if compared == "ref_func(*inp)":
            kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) or _standard_import(node)]
            return Agreement(entry, tuple(arguments), ast.unparse(ast.Module(kept, [])), "ref_func", _tolerance(tree))
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if checks and (cases := _plain_asserts(checks[0].body, {"candidate", entry})):
        return Calls(entry, cases)
    call = "\ncheck(candidate)" if checks and not _calls_check(tree) else ""
    return _checks(entry, "", (source + call,))


def tests_from_asserts(asserts: list[str], entry: str, setup: str) -> Tests:
    """A list of assertions."""
    body = [node for test in asserts for node in _parsed(test).body]
    if not setup.strip() and (cases := _plain_asserts(body, {entry})) and len(cases) == len(asserts):
        return Calls(entry, cases)
    return _checks(entry, setup, tuple(asserts))


def called_function(test: str) -> str:
    """The function that an assertion is about: the innermost call by name that is no built-in's."""
    for node in ast.walk(_parsed(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in dir(builtins):
            return node.func.id
    raise Malformed(f"no function is called in {test[:60]!r}")


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(f"the test is not Python: {error}") from error


def _plain_asserts(body: list[ast.stmt], names: set[str]) -> tuple[tuple[str, str], ...] | None:
    """(arguments, result) of every assertion, if all of them say name(plain values) == plain value; else None."""
    cases = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not isinstance(node, ast.Assert) or not isinstance(test := node.test, ast.Compare) or len(test.ops) != 1:
            return None
        made = test.left
        if not isinstance(test.ops[0], ast.Eq) or not isinstance(made, ast.Call) or made.keywords:
            return None
        if not isinstance(made.func, ast.Name) or made.func.id not in names:
            return None
        try:
            arguments = [ast.literal_eval(argument) for argument in made.args]
            cases.append((dumps(arguments), dumps(ast.literal_eval(test.comparators[0]))))
        except (ValueError, TypeError):
            return None
    return tuple(cases)


def _checks(entry: str, setup: str, tests: tuple[str, ...]) -> Checks:
    """Tests to run, if they can: of modules and names they may use the standard library's and their own."""
    tree = _parsed("\n".join((setup, *tests)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if foreign := [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]:
                raise Malformed(f"the test imports {foreign[0]}, and the sandbox has the standard library alone")
    if unknown := sorted(_names(tree, ast.Load) - _defined(tree) - set(dir(builtins)) - {entry, "candidate", "__name__"}):
        raise Malformed(f"the test uses {unknown[0]}, which neither it nor Python defines")
    return Checks(entry, setup, tests)


def _names(tree: ast.Module, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _defined(tree: ast.Module) -> set[str]:
    """Every name that is given a meaning anywhere."""
    found = _names(tree, ast.Store)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def _compared(tree: ast.Module, entry: str) -> str:
    """What EvalPlus' assertion(f(*inp), …, tolerance) compares the function's bare result with; "" for any other form."""
    found = {
        ast.unparse(node.args[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assertion" and len(node.args) == 3
        if ast.unparse(node.args[0]) in ("candidate(*inp)", f"{entry}(*inp)")
    }
    calls = sum(isinstance(node, ast.Call) and ast.unparse(node.func) in ("candidate", entry) for node in ast.walk(tree))
    return found.pop() if len(found) == calls == 1 else ""


def _target(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _literal(node: ast.expr) -> Any:
    """The value of an expression that is written out; None where it has to be run."""
    try:
        return ast.literal_eval(_Spelled().visit(copy.deepcopy(node)))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Spelled(ast.NodeTransformer):
    """Values that repr writes as names or calls: inf, nan, float("inf"), set()."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        if text in ("float('inf')", "float('-inf')", "float('nan')"):
            return ast.Constant(float(text[7:-2]))
        return node  # set() is a literal already


def _tolerance(tree: ast.Module) -> float:
    """The third argument of EvalPlus' assertion(…), and at least what it allows by itself."""
    given = [
        _literal(node.args[2])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "assertion"
        and len(node.args) == 3
    ]
    return max([CLOSE, *(float(value) for value in given if isinstance(value, int | float))])


def _standard_import(node: ast.stmt) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return bool(names) and not any(name.partition(".")[0] == "numpy" for name in names)


def _calls_check(tree: ast.Module) -> bool:
    calls = [node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "check" for call in calls)


def _list(row: Row, name: str, default: list[Any] | None = None) -> list[Any]:
    value = row.get(name, default)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"`{name}` is not JSON: {error}") from error
    if not isinstance(value, list | tuple):
        raise Malformed(f"`{name}` should be a list; got {value!r:.60}")
    return list(value)


def _text(test: Row, name: str) -> str:
    if not isinstance(value := test.get(name), str):
        raise Malformed(f"`{name}` of a test should be a text; got {value!r:.60}")
    return value


def _joined(value: Any) -> str:
    """APPS gives texts, and sometimes their lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise Malformed(f"inputs and outputs of programs should be texts; got {value!r:.60}")
    return value


def _first(solutions: Any) -> str:
    try:
        found = json.loads(solutions) if isinstance(solutions, str) and solutions.strip() else solutions
    except (ValueError, RecursionError):
        return ""  # a reference is welcome and not needed
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""
