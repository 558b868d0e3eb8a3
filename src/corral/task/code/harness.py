"""What runs inside the sandbox around a function under test, and, in another sandbox, around tests that are programs.

This file is run there after `value.py`, whose names it uses without importing them; it needs the standard library alone. The
function's side is in the hands of the function: all it can forge are its own results. The tests' side never shares a process
with it, so no result has a method of its own, and success cannot be claimed but by the tests.
"""

import builtins
import json
import os
import sys
import types
from typing import Any

from corral.task.code.value import decode, encode  # inside, both are there already, and this line is left out


def serve(program: str, entry: str, show_changes: bool = False) -> None:
    """Call `entry` of `program` with the arguments in each line of standard input; a result per line of standard output.

    The program's own input and output lead nowhere. A line holds a list of arguments, or a tuple of such a list and a dict of
    those with names; the answer holds the value, or the name of what was raised; with `show_changes`, the arguments after the
    call too.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
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
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


class _RemoteError(Exception):
    """An exception of the function whose class is no built-in."""


class NotPlainData(Exception):
    """A test calls the function with what cannot be serialized: an object of a class, a function, a generator."""


def _is_opaque(code: Any) -> bool:
    """Whether an encoded value holds such a thing, other than one that the function itself returned."""
    if not isinstance(code, list):
        return False
    kind, *items = code
    if kind == "other":
        return items != ["Opaque object"]
    return any(_is_opaque(part) for item in items for part in (item if kind == "dict" else [item]))


class _RemoteFunction:
    """The function in the other sandbox: a line out, a line in for every call.

    Lists, dicts and sets that a call changed change here too if it gave nothing back. If it gave something back they do with
    `show_changes` alone: a test that works out what it expects from its own arguments must not be handed them empty.
    """

    def __init__(self, show_changes: bool) -> None:
        self.show_changes = show_changes
        self.called = False
        """From then on, whatever goes wrong may be the function's doing."""
        self.changed_too = False
        """Whether a call has given something back and changed its arguments."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        request = encode((list(arguments), named) if named else list(arguments))
        if _is_opaque(request):
            raise NotPlainData("an argument of the function is no plain data")
        self.called = True
        calls, answers = sys.__stdout__, sys.__stdin__
        assert calls is not None  # None only where Python was started without streams
        assert answers is not None
        calls.write(json.dumps(request) + "\n")
        calls.flush()
        answer = json.loads(answers.readline() or '{"error": "EOFError", "text": "the program has ended"}')
        if "error" in answer:
            kind = vars(builtins).get(answer["error"], _RemoteError)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else _RemoteError)(answer["text"])
        value = decode(answer["value"])
        for mine, theirs in zip((*arguments, *named.values()), decode(answer["arguments"]), strict=True):
            if isinstance(mine, list | dict | set) and type(mine) is type(theirs) and mine != theirs:
                self.changed_too |= value is not None
                if value is None or self.show_changes:
                    mine.clear()
                    mine.extend(theirs) if isinstance(mine, list) else mine.update(theirs)
        return value


def check(setup: str, tests: list[str], entry: str) -> None:
    """Run tests that are programs, one after another; says how many of them pass in one line of JSON on standard error.

    A test passes if it does whether or not it sees what calls that gave something back did to their arguments. What is raised
    before the function has been called is the tests' fault, and said instead.
    """
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what a test prints is no call, and no verdict
    passed = [True] * (1 + len(tests))
    for show_changes in (True, False):
        function = _RemoteFunction(show_changes)
        namespace = {"__name__": "tests", entry: function, "candidate": function}
        for number, test in enumerate([setup, *tests]):
            try:
                exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
            except BaseException as error:
                if not function.called:
                    return _report(unable=f"{type(error).__name__}: {error}")
                passed[number] = False
        if not function.called:
            return _report(unable="they never call it, so every program would pass")
        if not function.changed_too:
            break
    return _report(passed=sum(passed[1:]) if passed[0] else 0)


def _report(**report: Any) -> None:
    """Write the verdict, one line of JSON, for the host."""
    verdicts = sys.__stderr__
    assert verdicts is not None
    verdicts.write(json.dumps(report) + "\n")
