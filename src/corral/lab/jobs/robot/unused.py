"""Settings that a run would never read: refused before it begins, since nothing in its results would tell."""

from dataclasses import fields

from corral.lab.baselines.config import BaselineConfig
from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.settings import ALGORITHMS, Settings
from corral.robot.bbrl import BBRLConfig
from corral.robot.tce import TCEConfig
from corral.validate import RunError

_TRPL = ("sb3-trpl",)
_SAC = tuple(name for name in ALGORITHMS if name.startswith("sb3-sac"))
_PPO = tuple(name for name in ALGORITHMS if name.startswith("sb3-ppo")) + _TRPL
_COLOURED = tuple(name for name in ALGORITHMS if name.endswith("-pink"))

_SOME_BASELINES = {
    "epochs": _PPO,
    "minibatches": _PPO,
    "train_freq": _SAC,
    "gradient_steps": _SAC,
    "device": _SAC,
    "noise_colour": _COLOURED,
    **dict.fromkeys(("projection", "mean_bound", "cov_bound", "regression", "deployed_bound"), _TRPL),
}
"""Baselines that read a setting, where not all of them do."""


def used_by(algorithm: str) -> set[str]:
    """Names of the settings under `learner` that an algorithm reads."""
    if algorithm in ("tce", "bbrl"):
        return {item.name for item in fields(TCEConfig if algorithm == "tce" else BBRLConfig)}
    names = {item.name for item in fields(BaselineConfig)}
    return {name for name in names if algorithm in _SOME_BASELINES.get(name, (algorithm,))}


def check_used(settings: Settings) -> None:
    """Refuse a new run with a setting of another algorithm, or of an event that the environment does not tell of.

    Only new ones: a folder from before this was refused can still be resumed and evaluated. A name that no algorithm has is
    left to `prepare`, which knows the nearest.
    """
    for key in settings.learner:
        owners = [name for name in ALGORITHMS if key in used_by(name)]
        if owners and settings.algorithm not in owners:
            raise RunError(
                f"{settings.algorithm}: there is no setting `{key}`: it belongs to {', '.join(owners)}. Leave it out, choose "
                f"another algorithm, or in a file put it into the table of its own, [{owners[0]}]."
            )
    known = ENVIRONMENTS.get(settings.environment)
    if known is not None and not known.tells_event and settings.learner.get("move_to_event"):
        there = ", ".join(name for name, other in ENVIRONMENTS.items() if other.tells_event)
        raise RunError(
            f"{settings.algorithm}: `learner.move_to_event` moves rewards to an event, and {settings.environment} tells of "
            f"none; {there} does. Leave it out."
        )
