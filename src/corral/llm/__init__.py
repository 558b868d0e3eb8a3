"""Language models: the embedded one, and the door to TRL."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.llm.audit_callback import audit
    from corral.llm.config import CorralConfig
    from corral.llm.trainer import CorralTrainer

__all__ = ["TRL_RANGE", "CorralConfig", "CorralTrainer", "audit"]

TRL_RANGE = ("1.7", "1.17")
"""First release of TRL that works, and the first that is unknown. Reading it imports nothing."""


def __getattr__(name: str) -> Any:
    """TRL is imported when the door is opened: `corral.llm.tiny` needs transformers alone."""
    if name == "CorralConfig":
        from corral.llm.config import CorralConfig

        return CorralConfig
    if name == "CorralTrainer":
        from corral.llm.trainer import CorralTrainer

        return CorralTrainer
    if name == "audit":
        from corral.llm.audit_callback import audit

        return audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
