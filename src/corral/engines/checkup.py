"""What `corral doctor --engine NAME` reports: is corral active in that engine, does it compute what it should, which lines."""

import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any

from corral.validate import nearest

ENGINES = {
    "verl": "corral.engines.verl.checkup",
    "nemo_rl": "corral.engines.nemo_rl",
    "prime_rl": "corral.engines.prime_rl",
    "rllm": "corral.engines.rllm",
    "skyrl": "corral.engines.skyrl",
    "slime": "corral.engines.slime",
    "tinker": "corral.engines.tinker",
}
"""Engines and the modules of their adapters: with `checkup()`, or with `PACKAGE`, `LOOKED_UP` and a docstring that says how."""


@dataclass
class Checkup:
    """Rows to show, what is wrong, and the configuration that turns corral on."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """By what they turn on."""
    verdict: str = "corral is active."
    """Where nothing is wrong."""

    def check_release(self, package: str, low: str, high: str) -> bool:
        """A row on a package's release; trouble if it is not there or out of range."""
        try:
            found = version(package)
        except PackageNotFoundError:
            self.rows.append((package, "–"))
            self.trouble.append(f"{package} >={low},<{high} is not installed")
            return False
        self.rows.append((package, found))
        if not _numbers(low) <= _numbers(found) < _numbers(high):
            self.trouble.append(f"{package} >={low},<{high} is needed; found {found}")
            return False
        return True


def run_checkup(engine: str) -> Checkup:
    """Check one engine; a ValueError if there is none of that name."""
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}.{nearest(engine, ENGINES)}")
    module: Any = importlib.import_module(ENGINES[engine])
    found: Checkup = module.checkup() if "checkup" in vars(module) else _look_up(module)
    return found


def _look_up(module: Any) -> Checkup:
    """Of a thin adapter: is its engine there, with the names that the adapter uses?"""
    found = Checkup(lines={"how": str(module.__doc__).strip()}, verdict="The engine has what the adapter uses.")
    try:
        found.rows.append((module.PACKAGE, version(module.PACKAGE)))
    except PackageNotFoundError:
        found.rows.append((module.PACKAGE, "–"))
        found.trouble.append(f"{module.PACKAGE} is not installed")
        return found
    for name in module.LOOKED_UP:
        try:
            resolve_name(name)
            found.rows.append(("found", name))
        except Exception as error:  # engines import much, and what is missing there ends in errors of many kinds
            how = "is not there" if isinstance(error, AttributeError) else "cannot be imported"
            found.trouble.append(f"{name} {how}, and the adapter needs it: {type(error).__name__}: {error}")
    return found


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split(".")[:2] if part.isdigit())
