"""Settings of every objective, what each declares about itself, and the one registry. Nothing here imports torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from corral.validate import number_in, require, require_words

if TYPE_CHECKING:
    from corral.tensors import ObjectiveOutput, TokenBatch

Anchor = Literal["old", "rollout"]
Action = Literal["projected", "masked", "clipped"]
Support = Literal["none", "topk", "full"]
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

NEEDS_TOKENS = frozenset({"logp_new", "logp_old", "advantages", "mask"})
"""Fields of a batch that every objective needs."""

NEEDS_SUPPORT = frozenset({"dist_new", "dist_old"})
"""Fields of a batch that an objective needs besides if it reads more than the sampled token."""

_SUM_FIRST: tuple[Reduction, ...] = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "token-mean", "seq-mean-token-mean")
"""For papers that sum over a sequence: over a fixed length the gradient is the same, at the size of a mean's."""

_MEAN_FIRST: tuple[Reduction, ...] = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""For papers that take the mean over a sequence, then over sequences."""

FILL = 1e-12
"""Probability of every token outside the support in the published form of TROLL."""


@dataclass(frozen=True, kw_only=True)
class TokenRule:
    """A loss that follows from a token's ratio, advantage and divergence: the objectives that one kernel computes."""

    rule: Literal["clip", "mask", "weight", "gate", "penalty", "flip"]
    low: float
    high: float
    cap: float | None = None
    """Largest weight, or the dual clip's constant."""
    measure: Literal["ratio", "binary_tv", "binary_kl", "support_tv", "support_kl", "chi_square"] = "ratio"
    """Distance that a clip, a mask or a penalty compares with `low` and `high`."""
    symmetric: bool = False
    """True for a mask that ignores the direction of the move."""
    decoupled: bool = False
    """True if the loss is weighed by old policy over sampler."""


@dataclass(frozen=True, kw_only=True)
class ProjectionRule:
    """A projection onto the KL ball around the old policy with a regression onto it: what the second kernel computes."""

    bound: float
    regression: float
    gradient: Literal["exact", "constant_dual", "unprojected"]
    ratio_cap: float | None
    outward: bool
    """True if tokens stay as they are whose own gradient step lowers the KL."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Base of every objective's settings. Subclasses are frozen, keyword-only, and validate in `__post_init__`.

    Besides its settings a class declares how its objective is used. Trainers, engines, kernels and reports read these
    declarations, and name no objective.
    """

    anchor: ClassVar[Anchor] = "old"
    """Policy that a trainer should pass as `logp_old`: "old" is recomputed by the trainer, "rollout" is the sampler's."""

    action: ClassVar[Action] = "clipped"
    """Word for what happens to a token that leaves the region."""

    has_region: ClassVar[bool] = True
    """False if nothing keeps the new policy near the old one."""

    corrects_sampler: ClassVar[bool] = False
    """True if the loss weighs the old policy against the sampler itself: a correction would do it twice."""

    @property
    def tokenwise(self) -> bool:
        """True if a token's loss depends on no other token: then gradients may be computed a few tokens at a time."""
        return True

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Reductions that give the objective's own gradient; the first is the default.

        The losses of single tokens may be averaged in any way: the choice weighs lengths. A sequence's value that stands on
        each of its tokens is one sequence's share only where every sequence counts the same.
        """
        return get_args(Reduction) if self.tokenwise else ("seq-mean-token-mean",)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds where Â < 0 and where Â > 0, in the objective's own measure; None if there are none."""
        return None

    @property
    def kl_bound(self) -> float | None:
        """Bound on the KL of a token, in nats; None if the region is no KL ball."""
        return None

    @property
    def support(self) -> Support:
        """Part of the old policy that the loss reads: the sampled token alone, a top-K support, or every token."""
        return "none"

    @property
    def filled_tail(self) -> float | None:
        """Probability that each token outside the support is given; None if its tail's exact mass is kept."""
        return None

    @property
    def third_policy(self) -> Literal["teacher", "reference"] | None:
        """Role of the policy that the loss reads as `dist_teacher`; None if it reads no third policy."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """Fields of TokenBatch that must be there. A door that cannot supply one says so at start-up."""
        needs = NEEDS_TOKENS if self.support == "none" else NEEDS_TOKENS | NEEDS_SUPPORT
        return needs | {"dist_teacher"} if self.third_policy else needs

    @property
    def plain_on_policy(self) -> bool:
        """True if at π = π_old the loss is the plain policy gradient whatever the support: then none is needed."""
        return False

    @property
    def regresses(self) -> bool:
        """True if the loss has a part beside the policy gradient, `ObjectiveOutput.regression`."""
        return False

    @property
    def kernel(self) -> TokenRule | ProjectionRule | None:
        """Rule for the fused kernel; None if no kernel computes this objective with these settings."""
        return None


@dataclass(frozen=True, kw_only=True)
class JointConfig(ObjectiveConfig):
    """Base of settings where a token's loss depends on other tokens of the call, and any reduction may average it."""

    reductions: ClassVar[tuple[Reduction, ...]] = get_args(Reduction)

    tokenwise: ClassVar[bool] = False


# ------------------------------------------------------------------------------------- no region, or weights alone


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(ObjectiveConfig):
    has_region: ClassVar[bool] = False

    ratio_cap: float | None = None
    """Largest weight of a token, as a constant for autograd; None leaves the ratio alone."""

    def __post_init__(self) -> None:
        require(self, "ratio_cap", at_least=0, optional=True, what="a weight")

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="mask", low=inf, high=inf, cap=self.ratio_cap)


@dataclass(frozen=True, kw_only=True)
class CISPOConfig(ObjectiveConfig):
    cap_low: float = 0.0
    """Smallest weight of a token."""
    cap_high: float = 5.0
    """Largest weight of a token."""

    def __post_init__(self) -> None:
        if not (number_in(self.cap_low, 0) and self.cap_low < inf and number_in(self.cap_high, self.cap_low)):
            raise ValueError(
                f"cispo: weights lie in [`cap_low`, `cap_high`] with 0 ≤ cap_low ≤ cap_high, cap_low < inf; got "
                f"[{self.cap_low!r}, {self.cap_high!r}]."
            )

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="weight", low=self.cap_low, high=self.cap_high)


@dataclass(frozen=True, kw_only=True)
class TOPRConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"
    reductions: ClassVar[tuple[Reduction, ...]] = _SUM_FIRST

    cap: float = 1.0
    """Largest weight of a sequence with a negative advantage."""

    def __post_init__(self) -> None:
        require(self, "cap", at_least=0, finite=True, what="a weight")


@dataclass(frozen=True, kw_only=True)
class VESPOConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"

    k_positive: float = 2.0
    """k where Â ≥ 0: how fast the weight falls as the sequence grows unlikely."""
    lambda_positive: float = 3.0
    """λ where Â ≥ 0: how fast the weight falls as the sequence grows likely."""
    k_negative: float = 3.0
    """k where Â < 0."""
    lambda_negative: float = 2.0
    """λ where Â < 0."""

    def __post_init__(self) -> None:
        fields = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
        require(self, *fields, at_least=0, finite=True, what="an exponent")


# ------------------------------------------------------------------------------------------- a clip of the ratio


@dataclass(frozen=True, kw_only=True)
class ClipRangeConfig(ObjectiveConfig):
    """Base of settings with PPO's clip range around ratio 1."""

    clip_low: float = 0.2
    """ε_low: ratios below 1 − ε_low earn nothing more for a negative advantage."""
    clip_high: float = 0.2
    """ε_high: ratios above 1 + ε_high earn nothing more for a positive advantage."""

    def __post_init__(self) -> None:
        note = "a ratio is never below 0, so 1 clips none from below"
        require(self, "clip_low", at_least=0, at_most=1, what="a distance from ratio 1", note=note)
        require(self, "clip_high", at_least=0, what="a distance from ratio 1")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


@dataclass(frozen=True, kw_only=True)
class PPOClipConfig(ClipRangeConfig):
    dual_clip: float | None = None
    """c > 1: with a negative advantage the loss is cut off at c|Â|, so that a ratio above c has no gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "dual_clip", above=1, optional=True, what="a ratio")

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="clip", low=1 - self.clip_low, high=1 + self.clip_high, cap=self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class ClipHigherConfig(PPOClipConfig):
    clip_high: float = 0.28
    """ε_high, wider than ε_low so that unlikely tokens can rise."""


@dataclass(frozen=True, kw_only=True)
class DualClipConfig(PPOClipConfig):
    dual_clip: float | None = 3.0
    """c > 1: with a negative advantage the loss is cut off at c|Â|, so that a ratio above c has no gradient."""


@dataclass(frozen=True, kw_only=True)
class DecoupledPPOConfig(ClipRangeConfig):
    corrects_sampler: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS_TOKENS | {"logp_rollout"}

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="clip", low=1 - self.clip_low, high=1 + self.clip_high, decoupled=True)


@dataclass(frozen=True, kw_only=True)
class ASPOConfig(ClipRangeConfig):
    clip_low: float = 0.2
    """ε_low: where Â < 0, a ratio below 1 − ε_low has no gradient."""
    clip_high: float = 0.2
    """ε_high: where Â > 0, a ratio above 1 + ε_high has no gradient."""
    cap: float = 3.0
    """c > 1: largest weight of a token, as a constant for autograd: its gradient stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "cap", above=1, what="a weight")

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="flip", low=1 - self.clip_low, high=1 + self.clip_high, cap=self.cap)


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(ClipRangeConfig):
    tokenwise: ClassVar[bool] = False

    clip_low: float = 3e-4
    """ε_low on the sequence ratio, which averages over tokens and so stays far closer to 1 than a token's."""
    clip_high: float = 4e-4
    """ε_high on the sequence ratio."""


@dataclass(frozen=True, kw_only=True)
class GMPOConfig(ObjectiveConfig):
    tokenwise: ClassVar[bool] = False

    clip: float = 0.4
    """ε: a token's log-ratio counts only within ±ε, on the side its advantage pushes to."""

    def __post_init__(self) -> None:
        require(self, "clip", at_least=0, what="a distance in log-ratio")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip, self.clip


@dataclass(frozen=True, kw_only=True)
class RIPOConfig(ObjectiveConfig):
    bound_low: float = 0.05
    """δ where Â < 0: largest π_old (ρ − 1)² on the way down."""
    bound_high: float = 0.05
    """δ where Â > 0: largest π_old (ρ − 1)² on the way up."""

    def __post_init__(self) -> None:
        require(self, "bound_low", "bound_high", at_least=0, what="a squared distance", note="inf switches it off")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.bound_low, self.bound_high

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="clip", low=self.bound_low**0.5, high=self.bound_high**0.5, measure="chi_square")


@dataclass(frozen=True, kw_only=True)
class BAPOConfig(JointConfig):
    share: float = 0.5
    """ρ₀: share of the surrogate that tokens with a positive advantage should have."""
    low: float = 0.6
    """Smallest ratio with a gradient where Â < 0, in a balanced batch."""
    low_end: float = 0.9
    """Smallest ratio with a gradient where Â < 0, in an unbalanced batch."""
    high: float = 1.2
    """Largest ratio with a gradient where Â > 0, in a balanced batch."""
    high_end: float = 3.0
    """Largest value that `high` is raised to in an unbalanced batch."""
    dual_clip: float | None = 3.0
    """c > 1: with a negative advantage the loss is cut off at c|Â|, so that a ratio above c has no gradient."""

    def __post_init__(self) -> None:
        require(self, "share", at_least=0, below=1, what="a share")
        require(self, "low", "low_end", at_least=0, at_most=1, what="a ratio")
        require(self, "high", "high_end", at_least=1, finite=True, what="a ratio")
        require(self, "low_end", at_least=self.low, what="where `low` may rise to")
        require(self, "high_end", at_least=self.high, what="where `high` may rise to")
        require(self, "dual_clip", above=1, optional=True, what="a ratio")


# ------------------------------------------------------------------------------- penalties and gates on the ratio


@dataclass(frozen=True, kw_only=True)
class SPOConfig(ObjectiveConfig):
    epsilon: float = 0.2
    """ε: the ratio 1 ± ε at which the penalty balances the advantage; further out the gradient pulls back."""

    def __post_init__(self) -> None:
        require(self, "epsilon", above=0, what="a distance from ratio 1")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.epsilon, self.epsilon

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="penalty", low=self.epsilon, high=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class DRPOConfig(ObjectiveConfig):
    anchor: ClassVar[Anchor] = "rollout"

    bound: float = 0.2
    """δ: the change |π − π_old| at which the penalty balances the advantage; further out the gradient pulls back."""

    def __post_init__(self) -> None:
        require(self, "bound", above=0, what="a divergence", note="inf switches it off")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.bound, self.bound

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="penalty", low=self.bound, high=self.bound, measure="binary_tv")


@dataclass(frozen=True, kw_only=True)
class SAPOConfig(ObjectiveConfig):
    reductions: ClassVar[tuple[Reduction, ...]] = _MEAN_FIRST

    tau_positive: float = 1.0
    """τ where Â > 0: how fast the gate closes as the ratio leaves 1."""
    tau_negative: float = 1.05
    """τ where Â < 0; larger, for these tokens are the unstable ones."""

    def __post_init__(self) -> None:
        require(self, "tau_positive", "tau_negative", above=0, finite=True, what="a temperature")

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="gate", low=self.tau_negative, high=self.tau_positive)


# -------------------------------------------------------------------------------- masks on a divergence or a rank


@dataclass(frozen=True, kw_only=True)
class DPPOConfig(ObjectiveConfig):
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"
    reductions: ClassVar[tuple[Reduction, ...]] = _SUM_FIRST

    divergence: Literal["tv", "kl", "ratio"] = "tv"
    """Divergence that is bounded: total variation, KL(old‖new), or |ρ − 1|, which is PPO's own rule."""
    estimator: Literal["binary", "topk", "full"] = "binary"
    """Tokens it is measured on: the sampled one against all others, a top-K support with its tail, or every token."""
    bound: float | None = None
    """δ: beyond it a token may not move further out. None: 0.2 for tv, 0.05 for kl, 0.2 for ratio; inf switches it off."""
    bound_low: float | None = None
    """δ where Â < 0; None takes `bound`."""
    bound_high: float | None = None
    """δ where Â > 0; None takes `bound`."""
    mask: Literal["outward", "symmetric", "predictive"] = "outward"
    """Tokens outside the region that lose their gradient: those moved along their advantage, all, or those whose own step
    raises D on the support."""
    ratio_cap: float | None = None
    """Largest weight of a token, as a constant for autograd; None leaves the ratio alone."""

    def __post_init__(self) -> None:
        require_words(self, "divergence", "estimator", "mask")
        if self.divergence == "ratio" and self.estimator != "binary":
            raise ValueError(
                f"dppo: the ratio is the sampled token's alone, so divergence='ratio' goes with estimator='binary'; got "
                f"{self.estimator!r}."
            )
        if self.mask == "predictive" and self.estimator == "binary":
            raise ValueError(
                "dppo: mask='predictive' looks at what a step does to the support, so it goes with estimator='topk' or 'full'; "
                "got 'binary', where it would be mask='outward'."
            )
        bounds = ("bound", "bound_low", "bound_high")
        require(self, *bounds, at_least=0, optional=True, what="a divergence", note="inf switches it off")
        require(self, "ratio_cap", at_least=0, optional=True, what="a weight")

    @property
    def plain_on_policy(self) -> bool:
        return self.ratio_cap is None

    @property
    def support(self) -> Support:
        return "none" if self.estimator == "binary" else self.estimator

    @property
    def bounds(self) -> tuple[float, float]:
        bound = (0.05 if self.divergence == "kl" else 0.2) if self.bound is None else self.bound
        low = bound if self.bound_low is None else self.bound_low
        high = bound if self.bound_high is None else self.bound_high
        return low, high

    @property
    def kl_bound(self) -> float | None:
        return self.bound if self.divergence == "kl" else None

    @property
    def kernel(self) -> TokenRule | None:
        if self.estimator == "full" or self.mask == "predictive":  # both have more to check
            return None
        low, high = self.bounds
        rule = TokenRule(rule="mask", low=low, high=high, cap=self.ratio_cap, symmetric=self.mask == "symmetric")
        if self.divergence == "ratio":
            return rule
        if self.estimator == "binary":
            return replace(rule, measure="binary_tv" if self.divergence == "tv" else "binary_kl")
        return replace(rule, measure="support_tv" if self.divergence == "tv" else "support_kl")


@dataclass(frozen=True, kw_only=True)
class CPPOConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"

    estimator: Literal["binary", "topk"] = "binary"
    """Tokens the total variation is measured on: the sampled one against all others, or a top-K support with its tail."""
    bound: float = 0.2
    """δ: total variation beyond which the first token of a sequence may not move further out."""
    weight_last: float = 0.8
    """Weight of a sequence's last token; the first one's is 1, and between them it falls linearly."""
    budget: float = 0.02
    """δ_b: mean divergence of a prefix from which on the bound tightens; up to twice that where divergences are large."""

    def __post_init__(self) -> None:
        require_words(self, "estimator")
        require(self, "bound", "budget", at_least=0, what="a divergence", note="inf switches it off")
        require(self, "weight_last", above=0, at_most=1, what="a weight")

    @property
    def support(self) -> Support:
        return "none" if self.estimator == "binary" else "topk"


@dataclass(frozen=True, kw_only=True)
class M2POConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"

    bound: float = 0.04
    """τ: largest mean of (log ρ)² over the tokens of a call that have moved along their advantage and are not masked."""

    def __post_init__(self) -> None:
        require(self, "bound", at_least=0, what="a mean of squared log-ratios", note="inf switches it off")


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig(ClipRangeConfig, JointConfig):
    share: float = 2e-4
    """Share of the call's tokens that lose their gradient, at least one, if there are as many to choose from."""
    cov_low: float = 1.0
    """Covariance above which a token may be chosen."""
    cov_high: float = 5.0
    """Covariance below which a token may be chosen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "share", above=0, at_most=1, what="a share of the tokens")
        if not (number_in(self.cov_low, 0) and number_in(self.cov_high, self.cov_low)):
            raise ValueError(
                f"clip_cov: covariances lie in (`cov_low`, `cov_high`) with 0 ≤ cov_low ≤ cov_high; got ({self.cov_low!r}, "
                f"{self.cov_high!r})."
            )


@dataclass(frozen=True, kw_only=True)
class KLCovConfig(JointConfig):
    share: float = 2e-4
    """Share of the call's tokens that are penalised, at least one."""
    penalty: float = 1.0
    """β: weight of the penalty."""

    def __post_init__(self) -> None:
        require(self, "share", above=0, at_most=1, what="a share of the tokens")
        require(self, "penalty", at_least=0, finite=True, what="a weight")


# --------------------------------------------------------------------------------------- projections onto a KL ball


@dataclass(frozen=True, kw_only=True)
class TROLLConfig(ObjectiveConfig):
    action: ClassVar[Action] = "projected"
    support: ClassVar[Support] = "topk"

    bound: float = 0.05
    """ε: KL(projected‖centre) of every token, in nats; inf switches the projection off."""
    regression: float = 1.0
    """α: how strongly the network is pulled to its own projection; 0 lets it drift."""
    tail: Literal["bucket", "fill"] = "bucket"
    """Tokens outside the support: their exact mass as one more category, or a fixed tiny probability each, as published."""
    vocab_size: int | None = None
    """V; `tail="fill"` needs it to count the tokens outside the support."""
    level: Literal["token", "sequence"] = "token"
    """Ratio in the policy gradient: each token's own, or the length-normalised one of its sequence, as in GSPO."""
    gradient: Literal["exact", "constant_dual", "unprojected"] = "exact"
    """Gradient through the projection: exact, with the dual held constant, or none (the regression alone holds the region)."""
    project: Literal["all", "outward"] = "all"
    """Tokens that are projected: all outside the ball, or not those whose own gradient step lowers the KL."""
    centre: Literal["old", "reference"] = "old"
    """Centre of the ball: the old policy, which moves with training, or a frozen one (`dist_teacher`), to bound all drift."""
    ratio_cap: float | None = None
    """Largest weight of a token, as a constant for autograd. A KL bound does not bound the ratio of a rare token."""

    def __post_init__(self) -> None:
        require(self, "bound", at_least=0, what="a KL in nats", note="inf switches it off")
        require(self, "regression", at_least=0, finite=True, what="a weight")
        require_words(self, "tail", "level", "gradient", "project", "centre")
        require(self, "vocab_size", at_least=1, integer=True, optional=True, what="a number of tokens")
        if self.tail == "fill" and self.vocab_size is None:
            raise ValueError("troll: tail='fill' gives every dropped token 1e-12 and has to know how many: set `vocab_size`.")
        require(self, "ratio_cap", at_least=0, optional=True, what="a weight")

    @property
    def tokenwise(self) -> bool:
        return self.level == "token"

    @property
    def plain_on_policy(self) -> bool:
        return self.ratio_cap is None and self.tail == "bucket" and self.centre == "old"

    @property
    def regresses(self) -> bool:
        return self.regression > 0

    @property
    def bounds(self) -> tuple[float, float]:
        return self.bound, self.bound

    @property
    def kl_bound(self) -> float:
        return self.bound

    @property
    def filled_tail(self) -> float | None:
        return FILL if self.tail == "fill" else None

    @property
    def third_policy(self) -> Literal["reference"] | None:
        return "reference" if self.centre == "reference" else None

    @property
    def kernel(self) -> ProjectionRule | None:
        if self.tail != "bucket" or self.level != "token" or self.centre != "old":
            return None
        return ProjectionRule(
            bound=self.bound, regression=self.regression, gradient=self.gradient, ratio_cap=self.ratio_cap,
            outward=self.project == "outward",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DistillConfig(ObjectiveConfig):
    action: ClassVar[Action] = "projected"
    support: ClassVar[Support] = "topk"
    regresses: ClassVar[bool] = True
    third_policy: ClassVar[Literal["teacher"]] = "teacher"

    bound: float = 0.05
    """ε: KL(target‖old) of every token, in nats; inf makes the teacher itself the target."""
    direction: Literal["reverse", "forward"] = "reverse"
    """Direction of the regression: KL(new‖target), which gives up modes, or KL(target‖new), which covers them."""

    def __post_init__(self) -> None:
        require(self, "bound", at_least=0, what="a KL in nats", note="inf switches it off")
        require_words(self, "direction")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.bound, self.bound


# ------------------------------------------------------------------------------------------------------ registry

ObjectiveFunction = Callable[["TokenBatch", Any], "ObjectiveOutput"]

OBJECTIVES: dict[str, tuple[str | ObjectiveFunction, type[ObjectiveConfig]]] = {
    "troll": ("troll", TROLLConfig),
    "dppo": ("dppo", DPPOConfig),
    "ppo_clip": ("ppo_clip", PPOClipConfig),
    "clip_higher": ("ppo_clip", ClipHigherConfig),
    "reinforce": ("reinforce", ReinforceConfig),
    "gspo": ("gspo", GSPOConfig),
    "cispo": ("cispo", CISPOConfig),
    "dual_clip": ("ppo_clip", DualClipConfig),
    "sapo": ("sapo", SAPOConfig),
    "gmpo": ("gmpo", GMPOConfig),
    "spo": ("spo", SPOConfig),
    "m2po": ("m2po", M2POConfig),
    "drpo": ("drpo", DRPOConfig),
    "aspo": ("aspo", ASPOConfig),
    "bapo": ("bapo", BAPOConfig),
    "clip_cov": ("clip_cov", ClipCovConfig),
    "cppo": ("cppo", CPPOConfig),
    "decoupled_ppo": ("decoupled_ppo", DecoupledPPOConfig),
    "distill": ("distill", DistillConfig),
    "kl_cov": ("kl_cov", KLCovConfig),
    "ripo": ("ripo", RIPOConfig),
    "topr": ("topr", TOPRConfig),
    "vespo": ("vespo", VESPOConfig),
}
"""Function and settings of every objective. A name stands for the function of that name in the module of that name.

Reports give colours in this order, so a new objective comes last.
"""
