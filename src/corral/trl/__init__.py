"""TRL integration: `CorralTrainer`, a GRPOTrainer with a trust region. Importing these constants does not import TRL."""

TRL_RANGE = ("1.7", "1.17")
"""First supported release of TRL, and first untested release. Reading them does not import TRL."""

LAST_TESTED = "1.16"
"""Newest minor version of TRL that `make test-trl-versions` runs."""

TEACHER_PROMPT = "teacher_prompt"
"""Dataset column with the prompt that the teacher of a distillation reads instead of `prompt`."""

MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Token ids that TRL takes from a model's own generation_config. All other fields of that file are ignored."""


class IncompatibleTRL(ImportError):
    """Raised if the installed TRL is too old, or its overridden methods have changed."""


def is_untested(version: str) -> bool:
    """True if this release or pre-release of TRL is newer than all tested releases."""
    from packaging.version import InvalidVersion, Version  # comes with transformers

    try:
        return Version(version).release[:2] >= Version(TRL_RANGE[1]).release
    except InvalidVersion:
        return True
