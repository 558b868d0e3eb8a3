"""Provenance of a run: package versions, the commit of corral's checkout, and values in JSON form."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import corral

_PACKAGES = (
    *("torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "pyarrow"),
    *("gymnasium", "mujoco", "stable-baselines3"),
)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the given packages. The version of a package that is not installed is None."""
    found: dict[str, str | None] = {"python": platform.python_version(), "corral": corral.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Return the commit of corral's own checkout, followed by + if files have changed. Returns None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(corral.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a virtual environment inside somebody else's checkout is not ours
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """Convert a value to a type that JSON supports, for records of a run."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
