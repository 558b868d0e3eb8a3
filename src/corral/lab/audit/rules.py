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
    """Rules that an audit compares: a clipping objective, DPPO with a bound on TV, and TROLL with a bound on KL."""

    clip: Objective = field(default_factory=lambda: make_objective("ppo_clip"))
    """Clipping objective that the run trains with, or ppo_clip if the run does not clip."""
    own: bool = False
    """True if the run itself trains with `clip`. If False, the audit only computes what clipping would have done."""
    kl_bound: float = 0.05
    """Radius ε of the KL ball, KL(new‖old) ≤ ε in nats. TROLL projects tokens into the ball."""
    tv_bound: float = 0.2
    """Radius δ of the ball of total variation. DPPO masks only tokens outside the ball."""
    top_k: int = 20
    """Number k of most likely tokens on which DPPO's top-k estimator compares the policies."""
    support_size: int = 64
    """Largest number of most likely tokens (the support) whose probabilities TROLL projects one by one."""
    support_mass: float = 1 - 1e-5
    """Total probability at which TROLL's support is complete, even with fewer than `support_size` tokens."""

    def __post_init__(self) -> None:
        if self.clip.name not in CLIPPING:
            raise ValueError(f"audit: `clip` is one of {', '.join(CLIPPING)}; got {self.clip.name!r}.")
        require(self, "kl_bound", "tv_bound", above=0, what="the radius of a ball", name="audit")
        require(self, "top_k", "support_size", integer=True, at_least=1, what="a number of tokens", name="audit")
        require(self, "support_mass", above=0, at_most=1, what="a probability", name="audit")

    @property
    def whole_sequences(self) -> bool:
        """True if clipping acts on whole completions, so that no token of a completion may be left out."""
        return self.clip.name == "gspo"

    def dppo(self, estimator: str) -> Objective:
        """Make DPPO's objective with a bound on TV. `estimator` is "binary" (sampled token) or "topk" (top-k tokens)."""
        return make_objective("dppo", divergence="tv", estimator=estimator, bound=self.tv_bound)

    def as_dict(self) -> dict[str, Any]:
        """Return the rules as a mapping for audit.json."""
        return {**vars(self), "clip": {"name": self.clip.name, **dataclasses.asdict(self.clip.config)}}


def read_rules(content: Any) -> Rules:
    """Read an audit's rules from the mapping in audit.json. Raises ValueError or TypeError for invalid content."""
    given = {key: guess(value) for key, value in dict(content).items()}
    return Rules(clip=read_objective(given.pop("clip")), **given)


def read_objective(content: Any) -> Objective:
    """Make an objective from its name and settings in JSON, where infinities are texts."""
    given = {key: guess(value) for key, value in dict(content).items()}
    if not isinstance(name := given.pop("name"), str):
        raise TypeError(f"the name of an objective is a text; got {name!r}")
    return make_objective(name, **given)
