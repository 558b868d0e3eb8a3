"""The type checker that tests run under: beartype, with an int accepted where a float is asked for, as Python itself has it."""

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping._storage import pop_shape_memo, push_shape_memo

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped
_seen: set[CodeType] = set()
"""Of functions inside functions, which are made anew at every call: those that were made before."""


def light_jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What jaxtyping puts before every function, but arguments are bound by Python alone and checked once, not twice.

    Classes stay with jaxtyping, and so do names in quotes: it lets pass what is imported for type checkers alone. A function
    inside another is checked when it is first made: writing its checks takes longer than most of them run.
    """

    def decorate(function: Any) -> Any:
        if inspect.isfunction(function) and "return" not in function.__annotations__:
            return function  # a Triton kernel: everything else has a return type
        if inspect.isfunction(function) and "<locals>" in function.__qualname__:
            if function.__code__ in _seen:
                return function
            _seen.add(function.__code__)
        types = function.__annotations__.values() if inspect.isfunction(function) else [""]
        if any(isinstance(kind, str) or "ForwardRef" in repr(kind) for kind in types):
            return _jaxtyped(typechecker=typechecker)(function)
        strict, shaped = typechecker(function), any("jaxtyping" in repr(kind) for kind in types)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if jaxtyping.config.jaxtyping_disable:
                return function(*args, **given)
            if not shaped:
                return strict(*args, **given)
            push_shape_memo({})  # what B, T and V are in this call
            try:
                return strict(*args, **given)
            finally:
                pop_shape_memo()

        return call

    return decorate


jaxtyping.jaxtyped = light_jaxtyped


def passed_unchecked(traced: Callable[..., object]) -> bool:
    """Whether the test that asks, and traces a function, has passed in a process without checks, which cannot be traced.

    False where nothing is checked here either, and the test itself goes on.
    """
    if not hasattr(traced, "__wrapped__"):
        return False
    here, root = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)"), Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", here]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    return True
