"""What runs inside the sandbox around a function under test, and, in another sandbox, around tests that are programs.

This file is run there after `code_value`, whose names it uses without importing them; it needs the standard library alone. The
function's side is in the hands of the function: all it can forge are its own results. The tests' side never shares a process
with it, so no result has a method of its own, and success cannot be claimed but by the tests.
"""

import builtins
import json
import os
import sys
import types
from typing import Any

from corral.task.code_value import decode, encode  # inside, both are there already, and this line is left out

REPORT = "corral: passed "
UNABLE = "corral: this test cannot run: "


def serve(program: str, entry: str) -> None:
    """Call `entry` of `program` with the arguments in each line of standard input; a result per line of standard output.

    The program's own input and output lead nowhere. A line holds a list of arguments, or a tuple of such a list and a dict of
    those with names; the answer holds the value and the arguments as they are after the call, or the name of what was raised.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, entry, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), entry)
    for line in requests:
        given = decode(json.loads(line))
        arguments, named = given if isinstance(given, tuple) else (given, {})
        try:
            answer = {"value": encode(function(*arguments, **named)), "arguments": encode([*arguments, *named.values()])}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error)[:1000]}
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


class Raised(Exception):
    """Something was raised beyond the wall that has no name here."""


class Stranger(Exception):
    """A test calls the function with a thing that cannot cross: an object of a class, a function, a generator."""


def is_strange(code: Any) -> bool:
    """Whether there is such a thing in what `encode` made. What the function itself gave back as one is its own affair."""
    if not isinstance(code, list):
        return False
    kind, *items = code
    if kind == "other":
        return items != ["Opaque object"]
    return any(is_strange(part) for item in items for part in (item if kind == "dict" else [item]))


def remote(*arguments: Any, **named: Any) -> Any:
    """Call the function in the other sandbox: a line out, a line in. Lists, dicts and sets that it changed change here too."""
    request = encode((list(arguments), named) if named else list(arguments))
    if is_strange(request):
        raise Stranger("an argument of the function is no plain data")
    sys.__stdout__.write(json.dumps(request) + "\n")
    sys.__stdout__.flush()
    answer = json.loads(sys.__stdin__.readline() or '{"error": "EOFError", "text": "the program has ended"}')
    if "error" in answer:
        kind = getattr(builtins, answer["error"], Raised)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        error = (kind if known else Raised)(answer["text"])
        error.from_beyond = True
        raise error
    for mine, theirs in zip((*arguments, *named.values()), decode(answer["arguments"]), strict=True):
        if type(mine) is type(theirs) and isinstance(mine, list):
            mine[:] = theirs
        elif type(mine) is type(theirs) and isinstance(mine, dict | set) and mine != theirs:
            mine.clear()
            mine.update(theirs)
    return decode(answer["value"])


def check(setup: str, tests: list[str], entry: str) -> None:
    """Run tests that are programs, one after another; how many of them pass is said on standard error."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what a test prints is no call
    namespace = {"__name__": "tests", entry: remote, "candidate": remote}
    passed = 0
    for number, test in enumerate([setup, *tests]):
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), namespace)
        except BaseException as error:
            ours = isinstance(error, ImportError | SyntaxError | NameError | Stranger) and not hasattr(error, "from_beyond")
            if ours or number == 0:
                sys.__stderr__.write(f"{UNABLE}{type(error).__name__}: {error}\n")
                return
            continue
        passed += number > 0
    sys.__stderr__.write(f"{REPORT}{passed}\n")
