"""Supported engines, and the installation check `corral doctor --engine NAME`."""

import importlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any

from corral.validate import nearest

_NEMO = "nemo_rl.algorithms.loss.interfaces"
_PRIME = "prime_rl.trainer.rl.loss"
_SLIME = "slime.backends.megatron_utils.loss"
ENGINES: dict[str, tuple[str, ...]] = {
    "verl": (),  # its adapter has a checkup of its own
    "nemo_rl": (f"{_NEMO}:LossType", f"{_NEMO}:LossInputType", f"{_NEMO}:LossFunction"),
    "prime_rl": (f"{_PRIME}:LossInputs", f"{_PRIME}:LossOutputs"),
    "rllm": ("rllm:register_loss", "rllm:LossContext"),
    "skyrl": ("skyrl.backends.skyrl_train.utils.ppo_utils:PolicyLossRegistry",),
    "slime": (f"{_SLIME}:get_log_probs_and_entropy", f"{_SLIME}:get_rollout_top_p_logprob_kwargs"),
    "tinker": ("tinker:Datum", "tinker:TrainingClient.forward_backward_custom"),
}
"""For each engine, the names in the engine's package that corral's adapter uses.
The adapter is `corral.engines.NAME`; its docstring explains the set-up."""


@dataclass
class Checkup:
    """Report on an engine's installation: table rows, problems, and the configuration that turns corral on."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """Configuration lines that turn corral on in the engine, keyed by what each line is for."""
    verdict: str = "corral is active."
    """Final sentence of the installation report if it has no problems."""

    def check_release(self, package: str, wanted: str = "") -> bool:
        """Add a package's release to the table, and a problem if it is missing or outside a range such as ">=0.9,<0.10".

        Returns True if there is no problem.
        """
        name = f"{package} {wanted}".rstrip()
        try:
            found = version(package)
        except PackageNotFoundError:
            self.rows.append((package, "–"))
            self.trouble.append(f"{name} is not installed")
            return False
        self.rows.append((package, found))
        fits = not wanted or release_in(found, wanted)
        if not fits:
            self.trouble.append(f"{name} is needed; found {found}")
        return fits


def run_checkup(engine: str) -> Checkup:
    """Check the installation of an engine by name. Raises ValueError for an unknown engine."""
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}.{nearest(engine, ENGINES)}")
    if engine == "verl":
        verl: Any = importlib.import_module("corral.engines.verl.checkup")
        own: Checkup = verl.checkup()
        return own
    how = str(importlib.import_module(f"corral.engines.{engine}").__doc__)
    found = Checkup(lines={"how": how.strip()}, verdict="The engine has what the adapter uses.")
    if not found.check_release(engine.replace("_", "-")):
        return found
    for name in ENGINES[engine]:
        try:
            resolve_name(name)
            found.rows.append(("found", name))
        except Exception as error:  # engines import much, and what is missing there ends in errors of many kinds
            how = "is not there" if isinstance(error, AttributeError) else "cannot be imported"
            found.trouble.append(f"{name} {how}, and the adapter needs it: {type(error).__name__}: {error}")
    return found


def release_in(release: str, wanted: str) -> bool:
    """True if a package release is in a range such as ">=0.9,<0.10"; False if the release is not a valid version.

    Pre-releases count as their release.
    """
    from packaging.specifiers import SpecifierSet  # packaging comes with every engine, and not with torch
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(wanted).contains(Version(release).base_version)
    except InvalidVersion:
        return False
