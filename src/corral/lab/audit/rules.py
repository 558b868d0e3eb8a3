"""The rules of an audit: the run's clipping, a KL ball and a TV ball, DPPO and TROLL."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from corral.lab.run.settings import guess
from corral.objective import Objective, make_objective
from corral.validate import require

CLIPPING = ("ppo_clip", "clip_higher", "dual_clip", "gspo", "gmpo")
"""Objectives that set a token's gradient to zero once its ratio, or its sequence's ratio, is out of range."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The run's own clipping, and the DPPO and TROLL that are compared with it."""

    clip: Objective = field(default_factory=lambda: make_objective("ppo_clip"))
    """The clipping objective: the run's own, or ppo_clip for runs that do not clip."""
    own: bool = False
    """True if the run trains with `clip`; otherwise clipping is counterfactual."""
    kl_bound: float = 0.05
    """ε of the KL ball, KL(new‖old) ≤ ε in nats, that TROLL projects into."""
    tv_bound: float = 0.2
    """δ of the ball of total variation outside which DPPO masks tokens."""
    top_k: int = 20
    """Number of tokens in DPPO's support."""
    support_size: int = 64
    """Largest number of tokens in TROLL's support."""
    support_mass: float = 1 - 1e-5
    """Probability mass at which TROLL's support is complete."""

    def __post_init__(self) -> None:
        if self.clip.name not in CLIPPING:
            raise ValueError(f"audit: `clip` is one of {', '.join(CLIPPING)}; got {self.clip.name!r}.")
        require(self, "kl_bound", "tv_bound", above=0, what="the radius of a ball", name="audit")
        require(self, "top_k", "support_size", integer=True, at_least=1, what="a number of tokens", name="audit")
        require(self, "support_mass", above=0, at_most=1, what="a probability", name="audit")

    @property
    def whole_sequences(self) -> bool:
        """True if whole completions are clipped, so that no token of a completion may be left out."""
        return self.clip.name == "gspo"

    def dppo(self, estimator: str) -> Objective:
        """DPPO on the sampled token ("binary") or on its support ("topk")."""
        return make_objective("dppo", divergence="tv", estimator=estimator, bound=self.tv_bound)

    def as_dict(self) -> dict[str, Any]:
        """A mapping for audit.json."""
        return {**vars(self), "clip": {"name": self.clip.name, **dataclasses.asdict(self.clip.config)}}


def read_rules(content: Any) -> Rules:
    """Read rules in the JSON form of `as_dict`; ValueError or TypeError for invalid content."""
    given = {key: guess(value) for key, value in dict(content).items()}
    return Rules(clip=read_objective(given.pop("clip")), **given)


def read_objective(content: Any) -> Objective:
    """Read an objective from its name and settings in JSON form, where infinities are text."""
    given = {key: guess(value) for key, value in dict(content).items()}
    if not isinstance(name := given.pop("name"), str):
        raise TypeError(f"the name of an objective is a text; got {name!r}")
    return make_objective(name, **given)
