"""Language models on TRL: a drop-in for GRPOTrainer, and an audit of the GRPOTrainer that you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from corral.trl import TRL_RANGE

if TYPE_CHECKING:
    from corral.lab.audit.callback import audit
    from corral.trl.config import CorralConfig
    from corral.trl.trainer import CorralTrainer

__all__ = ["TRL_RANGE", "CorralConfig", "CorralTrainer", "audit"]

_MODULES = {"CorralConfig": "trl.config", "CorralTrainer": "trl.trainer", "audit": "lab.audit.callback"}


def __getattr__(name: str) -> Any:
    """Import TRL only when a name of this module that needs it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"corral.{_MODULES[name]}"))[name]
