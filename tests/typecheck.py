"""The type checker that tests run under: beartype, with an int accepted where a float is asked for, as Python itself has it."""

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def light_jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What jaxtyping puts before every function, less the book-keeping of shapes where a signature has none.

    Names in quotes stay with jaxtyping, which lets pass what is imported for type checkers alone.
    """

    def decorate(function: Any) -> Any:
        types = function.__annotations__.values() if inspect.isfunction(function) else [""]
        if any(isinstance(kind, str) or "jaxtyping" in (text := repr(kind)) or "ForwardRef" in text for kind in types):
            return _jaxtyped(typechecker=typechecker)(function)
        strict = typechecker(function)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            return (function if jaxtyping.config.jaxtyping_disable else strict)(*args, **given)

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
