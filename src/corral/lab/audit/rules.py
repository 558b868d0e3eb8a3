"""The rules of an audit: the run's clipping, a KL ball and a TV ball, DPPO and TROLL."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from corral.lab.run.settings import guess
from corral.objective import Objective, make_objective
from corral.validate import require

CLIPPING = ("ppo_clip", "clip_higher", "dual_clip", "gspo", "gmpo")
"""Objectives that leave a token without a gradient once its ratio, or its sequence's, is out of range."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The run's own clipping, and the DPPO and TROLL that it is compared with."""

    clip: Objective = field(default_factory=lambda: make_objective("ppo_clip"))
    """The clipping objective: the run's own, or ppo_clip for runs that do not clip."""
    own: bool = False
    """Whether `clip` is what the run trains with; else it is what clipping would have done."""
    kl_bound: float = 0.05
    """ε of the KL ball, KL(new‖old) ≤ ε in nats, that TROLL projects into."""
    tv_bound: float = 0.2
    """δ of the ball of total variation that DPPO masks outside of."""
    top_k: int = 20
    """Tokens of DPPO's support."""
    support_size: int = 64
    """Tokens of TROLL's support at most…"""
    support_mass: float = 1 - 1e-5
    """…until they hold this probability."""

    def __post_init__(self) -> None:
        if self.clip.name not in CLIPPING:
            raise ValueError(f"audit: `clip` is one of {', '.join(CLIPPING)}; got {self.clip.name!r}.")
        require(self, "kl_bound", "tv_bound", above=0, what="the radius of a ball", name="audit")
        require(self, "top_k", "support_size", integer=True, at_least=1, what="a number of tokens", name="audit")
        require(self, "support_mass", above=0, at_most=1, what="a probability", name="audit")

    @property
    def whole_sequences(self) -> bool:
        """True if clipping looks at a whole completion, so that no token of one may be left out."""
        return self.clip.name == "gspo"

    def dppo(self, estimator: str) -> Objective:
        """DPPO on the sampled token ("binary") or on its support ("topk")."""
        return make_objective("dppo", divergence="tv", estimator=estimator, bound=self.tv_bound)

    def as_dict(self) -> dict[str, Any]:
        """A mapping for audit.json."""
        return {**vars(self), "clip": {"name": self.clip.name, **dataclasses.asdict(self.clip.config)}}


def read_rules(content: Any) -> Rules:
    """Rules as `as_dict` wrote them, from JSON; ValueError or TypeError for anything else."""
    given = {key: guess(value) for key, value in dict(content).items()}
    return Rules(clip=read_objective(given.pop("clip")), **given)


def read_objective(content: Any) -> Objective:
    """An objective from its name and settings, as JSON holds them: infinities are text there."""
    given = {key: guess(value) for key, value in dict(content).items()}
    if not isinstance(name := given.pop("name"), str):
        raise TypeError(f"the name of an objective is a text; got {name!r}")
    return make_objective(name, **given)
