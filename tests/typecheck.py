"""The type checker that tests run under: beartype, with an int accepted where a float is asked for, as Python itself has it."""

import subprocess
import sys
from collections.abc import Callable

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def passed_unchecked(test: Callable[[], None], traced: Callable[..., object]) -> bool:
    """Whether a test that traces a function has passed in a process without checks: what they wrap cannot be traced.

    False where nothing is checked here either, and the test itself goes on.
    """
    if not hasattr(traced, "__wrapped__"):
        return False
    here = f"{test.__code__.co_filename}::{test.__name__}"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", here], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    return True
