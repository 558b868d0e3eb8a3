"""TRL integration: `CorralTrainer` is GRPOTrainer with a trust region. The constants here do not import TRL."""

TRL_RANGE = ("1.7", "1.17")
"""First supported release of TRL, and first untested release. The constant is available without importing TRL."""

LAST_TESTED = "1.16"
"""Newest minor version of TRL that `make test-trl-versions` runs."""

TEACHER_PROMPT = "teacher_prompt"
"""Dataset column that the teacher of a distillation reads instead of `prompt`."""

MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that are taken from a model's own generation_config; its other fields are ignored."""


class IncompatibleTRL(ImportError):
    """Raised if the installed TRL is too old, or its overridden methods have changed."""


def is_untested(version: str) -> bool:
    """True if a release of TRL, or a pre-release of it, is newer than the tested releases."""
    from packaging.version import InvalidVersion, Version  # comes with transformers

    try:
        return Version(version).release[:2] >= Version(TRL_RANGE[1]).release
    except InvalidVersion:
        return True
