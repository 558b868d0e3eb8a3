"""What every objective's settings share: what the objective needs of a batch, and which policy anchors it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

Anchor = Literal["old", "rollout"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Base of every objective's settings. Subclasses are frozen, keyword-only, and validate in `__post_init__`."""

    anchor: ClassVar[Anchor] = "old"
    """Which policy a trainer should pass as `logp_old`: "old" is recomputed by the trainer, "rollout" is the sampler's."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of TokenBatch that must be there. A door that cannot supply one says so at start-up."""
        return frozenset({"logp_new", "logp_old", "advantages", "mask"})


NEEDS_SUPPORT = frozenset({"dist_new", "dist_old"})
"""What objectives need besides, when they look at more than the sampled token."""
