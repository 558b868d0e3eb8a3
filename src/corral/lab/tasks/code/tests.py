"""Parser of tests that are Python programs. It extracts calls with expected results, or keeps the tests as programs."""

import ast
import builtins
import copy
import symtable
import sys
from typing import Any, Literal

from corral.lab.tasks.code.problem import Agreement, Calls, Checks, Tests
from corral.lab.tasks.code.value import dumps
from corral.lab.tasks.dataset import Malformed

FLOAT_TOLERANCE = 1e-6
"""Default tolerance for floats, as in EvalPlus."""

_BROKEN_CHECK, _FIXED_CHECK = "_poly(*candidate(*inp), inp)", "min(abs(_poly(*inp, out := candidate(*inp))), abs(out - exp))"
"""Wrong expression in an assertion of problem HumanEval+/32 on the Hugging Face Hub, and the correct expression.

The wrong one treats a root as a polynomial, so every program fails. The correct one accepts a root, as EvalPlus does, or the
reference's root, which misses the tolerance if a polynomial is steep.
"""


_LOADERS = {"pickle", "marshal", "shelve", "runpy", "code", "codeop", "ctypes"}
"""Modules that can run code in the calling process, as `eval` and `exec` do."""


def tests_from_code(source: str, entry: str) -> Tests:
    """Parse tests that are a Python program: a function `check(candidate)`, or a script.

    Where the program is a list of inputs with results, or of assertions `f(…) == …` with plain values, these are taken and
    compared on this side. Inputs with a reference function become an Agreement. All else runs as it is, in its own sandbox.
    """
    source = source.replace(_BROKEN_CHECK, _FIXED_CHECK)
    tree = _parse(source)
    values = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="inputs" | "results" as name)], value=value):
                values[name] = _literal(value)
    inputs, results, compared = values.get("inputs"), values.get("results"), _expected_expression(tree, entry)
    if compared and isinstance(inputs, list) and inputs and all(isinstance(one, list | tuple) for one in inputs):
        arguments = [dumps(list(one)) for one in inputs]
        if compared == "exp" and isinstance(results, list) and len(results) == len(inputs):
            text = "".join(map(ast.unparse, _functions(tree, "assertion")))  # EvalPlus' own, where a test defines one
            how: Literal["same", "sets", "presence"]
            how = "sets" if "set(out)" in text else "presence" if "out is not None" in text else "same"
            return Calls(entry, tuple(zip(arguments, map(dumps, results), strict=True)), _tolerance(tree), how)
        if compared == "ref_func(*inp)":
            imports = [node for node in tree.body if (names := _modules(node)) and "numpy" not in names]
            kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) or node in imports]
            return Agreement(entry, tuple(arguments), ast.unparse(ast.Module(kept, [])), "ref_func", _tolerance(tree))
    checks = _functions(tree, "check")
    if checks and (cases := _plain_asserts(checks[0].body, {"candidate", entry})):
        return Calls(entry, cases)
    call = "\ncheck(candidate)" if checks and not any(_called(node) == "check" for node in tree.body) else ""
    return _checks(entry, "", (_without_unused_imports(source) + call,))


def tests_from_asserts(asserts: list[str], entry: str, setup: str) -> Tests:
    """Parse tests that are a list of assertions in Python."""
    body = [node for test in asserts for node in _parse(test).body]
    if not setup.strip() and (cases := _plain_asserts(body, {entry})) and len(cases) == len(asserts):
        return Calls(entry, cases)
    return _checks(entry, setup, tuple(asserts))


def called_function(test: str) -> str:
    """Name of the function that an assertion tests: the outermost function called by name, except built-in functions."""
    for node in ast.walk(_parse(test)):
        if isinstance(node, ast.Call) and (name := _called(node)) and name not in dir(builtins):
            return name
    raise Malformed(f"no function is called in {test[:60]!r}")


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(f"the test is not Python: {error}") from error


def _plain_asserts(body: list[ast.stmt], names: set[str]) -> tuple[tuple[str, str], ...] | None:
    """Read arguments and result from every assertion `name(values) == value`. Returns None if a statement has another form."""
    cases = []
    for node in body:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue  # a docstring
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=given, keywords=[]), ops=[ast.Eq()], comparators=[expected]
                )
            ) if name in names:
                try:
                    cases.append((dumps([ast.literal_eval(one) for one in given]), dumps(ast.literal_eval(expected))))
                except (ValueError, TypeError):
                    return None
            case _:
                return None
    return tuple(cases)


def _checks(entry: str, setup: str, tests: tuple[str, ...]) -> Checks:
    """Make tests that run as a program. Raises Malformed if the tests are unsafe, cannot run or never call the function."""
    source = "\n".join((setup, *tests))
    tree = _parse(source)
    modules = [module for node in ast.walk(tree) for module in _modules(node)]
    if foreign := [module for module in modules if module not in sys.stdlib_module_names]:
        raise Malformed(f"the test imports {foreign[0]}, and the sandbox has the standard library alone")
    if loaders := [module for module in modules if module in _LOADERS]:
        raise Malformed(f"the test imports {loaders[0]}, which would run a completion's text among the tests")
    if runners := _names(tree) & {"eval", "exec"}:
        raise Malformed(f"the test uses {min(runners)}, which would run a completion's text among the tests")
    # The function has to be used anywhere but as the argument of check(…).
    known = {entry, "candidate", *(argument.arg for node in _functions(tree, "check") for argument in node.args.args)}
    if not known & _names(ast.Module([node for node in tree.body if _called(node) != "check"], [])):
        raise Malformed(f"the test never calls {entry}, so every program would pass it")
    try:
        tables = [symtable.symtable(source, "<test>", "exec")]
    except (SyntaxError, RecursionError) as error:  # which the compiler alone finds: `return` outside of a function
        raise Malformed(f"the test is not Python: {error}") from error
    for table in tables:
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    bound = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported() or one.is_parameter()}
    if unknown := sorted(_names(tree) - bound - {*dir(builtins), entry, "candidate", "__name__"}):
        raise Malformed(f"the test uses {unknown[0]}, which neither it nor Python defines")
    return Checks(entry, setup, tests)


def _called(node: ast.AST) -> str:
    """Name of the function that a syntax node calls; "" if the node is not a call of a function by name."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""


def _functions(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    """Return the top-level definitions of the function `name` in a syntax tree."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]


def _modules(node: ast.AST) -> list[str]:
    """Names of the top-level packages that a statement imports."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return [name.partition(".")[0] for name in names]


def _names(tree: ast.Module) -> set[str]:
    """All variable names that a syntax tree reads."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _assertions(tree: ast.Module) -> list[list[ast.expr]]:
    """Arguments of every call `assertion(result, expected, tolerance)` in a test. EvalPlus writes its tests in this form."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 3]
    return [call.args for call in calls if _called(call) == "assertion"]


def _expected_expression(tree: ast.Module, entry: str) -> str:
    """Source text of the value that EvalPlus' assertion(…) expects; "" if the test compares anything but the plain result."""
    bare = ("candidate(*inp)", f"{entry}(*inp)")
    found = {ast.unparse(expected) for got, expected, _ in _assertions(tree) if ast.unparse(got) in bare}
    calls = sum(isinstance(node, ast.Call) and ast.unparse(node.func) in ("candidate", entry) for node in ast.walk(tree))
    return found.pop() if len(found) == calls == 1 else ""


def _without_unused_imports(source: str) -> str:
    """Remove unused imports from a test, because EvalPlus imports numpy into every test."""
    tree = _parse(source)
    used = _names(tree)
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    names = [{(alias.asname or alias.name).partition(".")[0] for alias in node.names} for node in imports]
    unused = [node for node, own in zip(imports, names, strict=True) if not used & own]
    return ast.unparse(ast.Module([node for node in tree.body if node not in unused], [])) if unused else source


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal expression, or None for an expression that must be run."""
    try:
        return ast.literal_eval(_NamedConstants().visit(copy.deepcopy(node)))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


class _NamedConstants(ast.NodeTransformer):
    """Replace inf, nan and calls such as float("inf") in a syntax tree by constants, so that they count as literals."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        if text in ("float('inf')", "float('-inf')", "float('nan')"):
            return ast.Constant(float(text[7:-2]))
        return node  # set() is a literal already


def _tolerance(tree: ast.Module) -> float:
    """Largest tolerance (third argument) in a test's EvalPlus assertions; EvalPlus' default if that is larger."""
    given = [_literal(tolerance) for _, _, tolerance in _assertions(tree)]
    return max([FLOAT_TOLERANCE, *(float(value) for value in given if isinstance(value, int | float))])
