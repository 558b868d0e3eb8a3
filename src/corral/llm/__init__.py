"""Language models: the embedded one, and the door to TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.llm.audit_callback import audit
    from corral.llm.config import CorralConfig
    from corral.llm.trainer import CorralTrainer

__all__ = ["TRL_RANGE", "CorralConfig", "CorralTrainer", "audit"]

TRL_RANGE = ("1.7", "1.17")
"""First release of TRL that works, and the first that is unknown. Reading it imports nothing."""

TEACHER_PROMPT = "teacher_prompt"
"""A dataset's column that the teacher of a distillation reads in the place of `prompt`."""

_MODULES = {"CorralConfig": "config", "CorralTrainer": "trainer", "audit": "audit_callback"}


def __getattr__(name: str) -> Any:
    """Import TRL when one of these names is first used: `corral.llm.tiny` needs transformers alone."""
    if name in _MODULES:
        return vars(import_module(f"{__name__}.{_MODULES[name]}"))[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
