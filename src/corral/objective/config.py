"""Base of the objectives' settings: needs of a batch, anchor, reductions."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from corral.objective.reduction import Reduction

Anchor = Literal["old", "rollout"]
Action = Literal["projected", "masked", "clipped"]

NEEDS_TOKENS = frozenset({"logp_new", "logp_old", "advantages", "mask"})
"""What every objective needs of a batch."""

NEEDS_SUPPORT = frozenset({"dist_new", "dist_old"})
"""What objectives need besides, when they look at more than the sampled token."""

NO_LOWER_CLIP = "a ratio is never below 0, so 1 clips none from below"
"""Why a distance below ratio 1 ends at 1."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Base of every objective's settings. Subclasses are frozen, keyword-only, and validate in `__post_init__`."""

    anchor: ClassVar[Anchor] = "old"
    """Which policy a trainer should pass as `logp_old`: "old" is recomputed by the trainer, "rollout" is the sampler's."""

    action: ClassVar[Action] = "clipped"
    """What happens to a token that leaves the region, in a word."""

    @property
    def tokenwise(self) -> bool:
        """Whether a token's loss depends on no other token: then gradients may be computed a few tokens at a time."""
        return True

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Reductions that give the objective's own gradient; the first is the default.

        A token's own loss may be averaged in any way: that weighs lengths, and is a choice apart. A sequence's value that
        stands on each of its tokens is one sequence's share only where every sequence counts the same.
        """
        return get_args(Reduction) if self.tokenwise else ("seq-mean-token-mean",)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds where Â < 0 and where Â > 0, in the objective's own measure; None where there is none."""
        return None

    @property
    def plain_on_policy(self) -> bool:
        """Whether at π = π_old the loss is known to be the plain policy gradient, whatever the support: then none is needed."""
        return False

    @property
    def regresses(self) -> bool:
        """Whether the loss has a part beside the policy gradient, `ObjectiveOutput.regression`."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Fields of TokenBatch that must be there. A door that cannot supply one says so at start-up."""
        return NEEDS_TOKENS


@dataclass(frozen=True, kw_only=True)
class JointConfig(ObjectiveConfig):
    """Base of settings where a token's loss depends on other tokens of the call, and any reduction may average it."""

    @property
    def tokenwise(self) -> bool:
        return False

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return get_args(Reduction)
