"""Plug-in for verl, in the entry-point group `verl.plugins`. Importing it registers losses, engines and trainers.

verl swallows what goes wrong while it loads plug-ins. So nothing is raised here: each part is tried by itself, failures are
logged as errors and remembered, and whoever asks for a part that is missing is told why (`missing`, `corral doctor`).
"""

import importlib
import logging
import os
from importlib.metadata import PackageNotFoundError, version

import verl.workers.engine
from verl.trainer.ppo import core_algos

from corral.engines.checkup import release_in
from corral.engines.verl.policy_loss import make_policy_loss
from corral.engines.verl.settings import VERL_RANGE, loss_modes

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))  # as verl's own modules: the root logger is at WARNING

LOSSES = {mode: make_policy_loss(mode, core_algos.agg_loss) for mode in loss_modes()}
"""Policy loss registered with verl for each loss_mode."""

HAS_MEGATRON = verl.workers.engine.MegatronEngineWithLMHead is not None
"""True if verl could import Megatron, which few installations have."""
FAILED: dict[str, str] = {}
"""Reason why a part of corral was not registered with verl, for each such part."""


def missing(loss_mode: str) -> str | None:
    """Return the reason why a policy loss is not active in this process, or None if it is active."""
    if core_algos.POLICY_LOSS_REGISTRY.get(loss_mode) is LOSSES.get(loss_mode):
        return None
    why = FAILED.get("policy losses") or "another plug-in has taken its name"
    return f"corral for verl: {loss_mode} is not registered: {why}. Run `corral doctor --engine verl` on this node."


def _register_losses() -> None:
    """Register all policy losses with verl, or none if another plug-in has taken one of their names."""
    taken = LOSSES.keys() & core_algos.POLICY_LOSS_REGISTRY.keys()
    if taken:
        raise RuntimeError(f"another plug-in has registered {', '.join(sorted(taken))}")
    for mode, loss in LOSSES.items():
        core_algos.register_policy_loss(mode)(loss)


def _register() -> None:
    """Register every part of corral with verl independently, so that the failure of one part does not stop the others."""
    try:
        release = version("verl")
    except PackageNotFoundError:
        release = "a source tree without a release"
    if not release_in(release, VERL_RANGE):
        wanted = f"corral works with verl {VERL_RANGE}; found {release}"
        FAILED.update({"policy losses": wanted, "engine": wanted, "trainers": wanted})
    else:
        parts = {
            "policy losses": _register_losses,
            "engine": lambda: importlib.import_module("corral.engines.verl.engine"),
            "trainers": lambda: importlib.import_module("corral.engines.verl.trainer"),
        }
        if HAS_MEGATRON:
            parts["Megatron engine"] = lambda: importlib.import_module("corral.engines.verl.megatron")
        for part, register in parts.items():
            try:
                register()
            except Exception as error:  # whatever is wrong with one part, the others are registered
                FAILED[part] = f"{type(error).__name__}: {error}"
    for part, why in FAILED.items():
        logger.error("corral for verl: %s not registered: %s", part, why)
    if "policy losses" not in FAILED:
        logger.info("corral for verl is active: loss_mode=%s", ", ".join(LOSSES))


_register()
