"""TRL integration: `CorralTrainer`, a GRPOTrainer with a trust region. Importing this package alone does not import TRL."""

TRL_RANGE = ("1.7", "1.17")
"""First supported release of TRL, and the first untested release after it. Reading this constant does not import TRL."""

LAST_TESTED = "1.16"
"""Newest minor version of TRL that `make test-trl-versions` runs."""

TEACHER_PROMPT = "teacher_prompt"
"""Dataset column with the teacher's own prompt for distillation. The student reads the column `prompt`."""

MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Token ids that TRL takes from a model's own generation_config. All other fields of generation_config are ignored."""


class IncompatibleTRL(ImportError):
    """Raised if the installed TRL is too old, or if TRL methods that corral overrides have changed."""


def is_untested(version: str) -> bool:
    """True if this release or pre-release of TRL is newer than all tested releases."""
    from packaging.version import InvalidVersion, Version  # comes with transformers

    try:
        return Version(version).release[:2] >= Version(TRL_RANGE[1]).release
    except InvalidVersion:
        return True
