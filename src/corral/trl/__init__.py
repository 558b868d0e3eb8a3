"""The TRL integration: `CorralTrainer` is GRPOTrainer with a trust region. Facts here are read without importing TRL."""

TRL_RANGE = ("1.7", "1.17")
"""First release of TRL that works, and the first that was never tested. Reading it imports nothing."""

LAST_TESTED = "1.16"
"""Releases of TRL up to this minor version are run by `make test-trl-versions`."""

TEACHER_PROMPT = "teacher_prompt"
"""A dataset's column that the teacher of a distillation reads in the place of `prompt`."""

MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What a model's own generation_config decides: nothing else of it is followed."""


class IncompatibleTRL(ImportError):
    """This TRL is too old, or changed what corral builds on."""


def is_untested(version: str) -> bool:
    """Whether a release of TRL, or what leads up to it, is newer than those that were tested."""
    from packaging.version import InvalidVersion, Version  # comes with transformers

    try:
        return Version(version).release[:2] >= Version(TRL_RANGE[1]).release
    except InvalidVersion:
        return True
