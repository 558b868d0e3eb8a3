"""Code that runs inside the sandboxes and calls the function under test, or runs tests that are programs.

This file is run there after `value.py`, whose names it uses without importing them; it needs the standard library alone. The
function's side is in the hands of the function: all it can forge are its own results. The tests' side never shares a process
with it. So no result has a method of its own, and success cannot be claimed but by the tests.
"""

import builtins
import contextlib
import json
import os
import sys
import types
from io import TextIOBase
from typing import Any

from corral.lab.tasks.code.value import decode, encode  # inside, both are there already, and this line is left out


def serve(program: str, entry: str, show_changes: bool = False) -> None:
    """Read arguments line by line, call the function `entry` of `program` with them, and write one result per line.

    The program's own input and output lead nowhere. A line holds a list of arguments, or a tuple of such a list and a dict of
    those with names; the answer holds the value, or the name of what was raised; with `show_changes`, the arguments after the
    call too.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    _lead_nowhere(0, 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
    function: Any = getattr(module, entry, None)  # by name: the problem says which
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), entry)
    for line in requests:
        given = decode(json.loads(line))
        arguments, named = given if isinstance(given, tuple) else (given, {})
        try:
            answer = {"value": encode(function(*arguments, **named))}
            if show_changes:
                answer["arguments"] = encode([*arguments, *named.values()])
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error)[:200]}
        _write(answers, json.dumps(answer))


def _lead_nowhere(*files: int) -> None:
    """Redirect open file descriptors to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(nowhere, file)
    os.close(nowhere)


def _write(file: int, line: str) -> None:
    """Write a whole line to a file descriptor."""
    data = line.encode(errors="replace") + b"\n"
    while data:
        data = data[os.write(file, data) :]


class RemoteError(Exception):
    """Raised in a test when the function under test has raised an exception in its own sandbox.

    Python itself never catches this class. So an exception whose class ends a loop (StopIteration, IndexError) or stands for a
    missing attribute or key passes no test that does not expect it.
    """


class NotPlainData(Exception):
    """Raised when a test calls the function under test with a value that cannot be serialized.

    Such values are objects of a class, functions and generators.
    """


def _is_opaque(code: Any) -> bool:
    """Return True if an encoded value has a part that could not be serialized.

    Results of the function under test, which a test may pass on, do not count.
    """
    if not isinstance(code, list):
        return False
    kind, *items = code
    if kind == "other":
        return items != ["Opaque object"]
    return any(_is_opaque(part) for item in items for part in (item if kind == "dict" else [item]))


def _names(code: types.CodeType) -> set[str]:
    """Return all names and text constants in a compiled test, including the functions and classes inside the test."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
        elif isinstance(constant, str):  # type(error).__name__ == "ValueError"
            found.add(constant)
    return found


def _rebuild(name: str, text: str, expected: set[str]) -> Exception:
    """Rebuild an exception that the function under test raised in the other sandbox.

    Its class is kept if the tests' text names the class or a base below Exception; StopIteration, StopAsyncIteration and
    classes outside Exception become RemoteError.
    """
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration):
        bases = kind.__mro__[: kind.__mro__.index(Exception)]
        if expected.intersection(base.__name__ for base in bases):
            for base in bases:
                with contextlib.suppress(TypeError):  # UnicodeDecodeError takes more than a text, its base does not
                    return base(text)
    return RemoteError(text)


def _read_answer(line: str, expected: set[str]) -> tuple[Any, Any]:
    """Read a function's result and changed arguments from a line, or raise the exception that the line describes.

    The process under test may have forged the line. Whatever reading it provokes is a RemoteError.
    """
    try:
        answer = json.loads(line)
        if "error" not in answer:
            return decode(answer["value"]), decode(answer.get("arguments"))
        error = _rebuild(answer["error"], answer["text"], expected)
    except Exception:  # of any class: the line is in the hands of the function
        error = RemoteError("the answer cannot be read, or the process has ended")
    raise error


class _RemoteFunction:
    """Stand-in for the function under test, which runs in another sandbox. Each call writes one line and reads one line.

    Lists, dicts and sets that a call changed change here too if it gave nothing back. If it gave something back they do with
    `show_changes` alone: a test that works out what it expects from its own arguments must not be handed them empty.
    """

    def __init__(self, calls: TextIOBase, answers: TextIOBase, expected: set[str], show_changes: bool) -> None:
        self.calls, self.answers, self.expected = calls, answers, expected
        self.show_changes = show_changes
        self.called = False
        """True once a test has called the function under test. Later errors may be the function's fault."""
        self.changed_too = False
        """True if any call of the function under test has both returned a value and changed its arguments."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        request = encode((list(arguments), named) if named else list(arguments))
        if _is_opaque(request):
            raise NotPlainData("an argument of the function is no plain data")
        self.called = True
        try:
            self.calls.write(json.dumps(request) + "\n")
            self.calls.flush()
            line = self.answers.readline()
        except (OSError, ValueError):  # it has ended, or writes what is no text
            line = ""
        value, changed = _read_answer(line, self.expected)
        mine = [*arguments, *named.values()]
        if not isinstance(changed, list) or len(changed) != len(mine):
            raise RemoteError("the answer does not say what became of the arguments")
        for before, after in zip(mine, changed, strict=True):
            if isinstance(before, list | dict | set) and type(before) is type(after) and before != after:
                self.changed_too |= value is not None
                if value is None or self.show_changes:
                    before.clear()
                    before.extend(after) if isinstance(before, list) else before.update(after)
        return value


_BUILTINS = {name: value for name, value in vars(builtins).items() if name not in ("eval", "exec")}
"""Built-in names that tests may use. Excluded are eval and exec, which could run the tested function's text as a test."""


def check(setup: str, tests: list[str], entry: str, nonce: str) -> None:
    """Run tests that are programs, and write one line with a secret (the nonce) and the verdict to standard error.

    Standard input and output, on which the function is called, and standard error are moved to files of their own, which no
    process that a test starts inherits. What a test prints is no call, and no verdict.
    """
    answers, calls, verdicts = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), os.dup(2)
    _lead_nowhere(0, 1, 2)
    _write(verdicts, f"{nonce} {run_tests(setup, tests, entry, calls, answers)}")


def run_tests(setup: str, tests: list[str], entry: str, calls: TextIOBase, answers: TextIOBase) -> str:
    """Run all tests. Return "passed" with the number of passed tests, or "unable" with the reason why the tests cannot run.

    A test passes if it does whether or not it sees what calls that gave something back did to their arguments. What is raised
    before the function has been called is the tests' fault.
    """
    try:
        codes = [compile(test, "<test>", "exec", dont_inherit=True) for test in (setup, *tests)]
    except Exception as error:  # of any class: compile() raises several
        return f"unable {type(error).__name__}: {error}"
    expected = set().union(*map(_names, codes))
    passed = [True] * len(codes)
    for show_changes in (True, False):
        function = _RemoteFunction(calls, answers, expected, show_changes)
        namespace = {"__name__": "tests", "__builtins__": _BUILTINS, entry: function, "candidate": function}
        for number, code in enumerate(codes):
            try:
                exec(code, namespace)
            except BaseException as error:
                if not function.called:
                    return f"unable {type(error).__name__}: {error}"
                passed[number] = False
        if not function.called:
            return "unable they never call it, so every program would pass"
        if not function.changed_too:
            break
    return f"passed {sum(passed[1:]) if passed[0] else 0}"
