"""What `corral doctor --engine NAME` reports: is corral active in that engine, does it compute what it should, which lines."""

import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from corral.naming import nearest

ENGINES = {"verl": "corral.engine.verl.checkup"}
"""Engines with an adapter, and where each is checked; a module with `checkup()`."""


@dataclass
class Checkup:
    """Rows to show, what is wrong, and the configuration that turns corral on."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """By what they turn on."""

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
    module = importlib.import_module(ENGINES[engine])
    found: Checkup = module.checkup()
    return found


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("+")[0].split(".")[:2] if part.isdigit())
