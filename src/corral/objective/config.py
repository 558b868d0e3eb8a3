"""Settings and declared properties of every objective, and the registry of objectives. This module does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from corral.validate import Checked, limited, number_in, require

if TYPE_CHECKING:
    from corral.tensors import ObjectiveOutput, TokenBatch

Anchor = Literal["old", "rollout"]
Action = Literal["projected", "masked", "clipped"]
Support = Literal["none", "topk", "full"]
Measure = Literal["ratio", "binary_tv", "binary_kl", "support_tv", "support_kl", "chi_square"]
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

NEEDS_TOKENS = frozenset({"logp_new", "logp_old", "advantages", "mask"})
"""Names of the TokenBatch fields that every objective needs."""

NEEDS_SUPPORT = frozenset({"dist_new", "dist_old"})
"""Names of the TokenBatch fields that an objective needs in addition if it reads more than the sampled tokens."""

_SUM_FIRST: tuple[Reduction, ...] = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "token-mean", "seq-mean-token-mean")
"""Reductions for objectives whose paper sums the loss over a sequence. The first reduction is the default.
A fixed length has the same gradient, on the scale of a mean."""

_MEAN_FIRST: tuple[Reduction, ...] = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
"""Reductions for objectives whose paper averages over a sequence's tokens, then over sequences. The first is the default."""

FILL = 1e-12
"""Probability that the TROLL paper assigns to every token outside the support."""


@dataclass(frozen=True, kw_only=True)
class TokenRule:
    """Rule for one kernel that computes many objectives: a token's loss as a function of ratio, advantage and divergence."""

    rule: Literal["clip", "mask", "weight", "gate", "penalty", "flip"]
    low: float
    high: float
    cap: float | None = None
    """Largest importance weight of a token. For rule "clip", the constant c of the dual clip."""
    measure: Measure = "ratio"
    """Distance between new and old policy that a clip, a mask or a penalty compares with `low` and `high`."""
    symmetric: bool = False
    """True if the mask removes the gradient of every token outside the trust region, in whichever direction it moved."""
    decoupled: bool = False
    """True if the loss is weighted by π_old / π_rollout, the ratio of the old policy to the sampler's policy."""


@dataclass(frozen=True, kw_only=True)
class ProjectionRule:
    """Rule for the projection kernel: project onto the KL ball around the old policy, and regress onto the projected policy."""

    bound: float
    regression: float
    gradient: Literal["exact", "constant_dual", "unprojected"]
    ratio_cap: float | None
    outward: bool
    """True if tokens whose own gradient step lowers the KL to the centre are not projected."""


@dataclass(frozen=True)
class Paper:
    """Bibliographic entry of the paper that introduced an objective, for model cards."""

    name: str
    """Short name of the method that the paper introduced."""
    title: str
    """Title of the paper, with braces around words whose case BibTeX must not change."""
    authors: str
    """Authors of the paper, in the format of BibTeX."""
    arxiv: str
    """Number of the paper on arXiv, which begins with year and month."""

    @property
    def plain_title(self) -> str:
        """Title of the paper without BibTeX braces."""
        return self.title.replace("{", "").replace("}", "")

    @property
    def bibtex(self) -> str:
        """BibTeX entry of the paper."""
        year = f"20{self.arxiv[:2]}"
        first = self.authors.partition(",")[0].lower()
        lines = {"title        ": self.title, "author       ": self.authors, "year         ": year, "eprint       ": self.arxiv}
        entries = "".join(f"  {key} = {{{value}}},\n" for key, value in lines.items())
        return f"@misc{{{first}{year}{self.name.lower()},\n{entries}  archivePrefix = {{arXiv}}\n}}"


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked):
    """Base class of every objective's settings. Subclasses are frozen, keyword-only dataclasses with limits beside defaults.

    Besides its settings a class declares how its objective is used. Trainers, engines, kernels and reports read these
    declarations, and name no objective.
    """

    paper: ClassVar[Paper | None] = None
    """Paper that a model card cites for this objective. None if no paper is cited."""

    anchor: ClassVar[Anchor] = "old"
    """Policy whose log-probs are passed as `logp_old`: "old" is recomputed by the trainer, "rollout" is the sampler's."""

    action: ClassVar[Action] = "clipped"
    """Word for the effect on tokens outside the trust region: "clipped", "masked" or "projected"."""

    has_region: ClassVar[bool] = True
    """False if the objective has no trust region, so that nothing keeps the new policy near the old one."""

    corrects_sampler: ClassVar[bool] = False
    """True if the loss already corrects for the sampler's policy, so that a sampler correction would correct twice."""

    @property
    def tokenwise(self) -> bool:
        """True if a token's loss depends on no other token, so that gradients can be computed for a few tokens at a time."""
        return True

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Reductions (ways of averaging the loss) under which the objective keeps its own gradient. The first is the default.

        The losses of single tokens may be averaged in any way: the choice weighs lengths. A sequence's value that stands on
        each of its tokens is one sequence's share only where every sequence counts the same.
        """
        return get_args(Reduction) if self.tokenwise else ("seq-mean-token-mean",)

    bound_names: ClassVar[tuple[str, str] | None] = None
    """Names of two settings: the bound for negative and the bound for positive advantages. None without bounds."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds for negative and for positive advantages, in the unit of the objective's divergence. None without bounds."""
        return None if self.bound_names is None else (vars(self)[self.bound_names[0]], vars(self)[self.bound_names[1]])

    @property
    def kl_bound(self) -> float | None:
        """Bound on the KL of a token, in nats. None if the trust region is not a KL ball."""
        return None

    @property
    def support(self) -> Support:
        """Tokens of the old policy that the loss reads: sampled tokens only ("none"), top-k tokens ("topk") or all ("full")."""
        return "none"

    @property
    def filled_tail(self) -> float | None:
        """Probability assigned to each token outside the support. None if the tail keeps its exact mass."""
        return None

    @property
    def third_policy(self) -> Literal["teacher", "reference"] | None:
        """Role of the policy that is passed as `dist_teacher`: teacher or reference. None if the loss reads no third policy."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """Names of the TokenBatch fields that the objective requires. Trainers without these fields refuse to start."""
        needs = NEEDS_TOKENS if self.support == "none" else NEEDS_TOKENS | NEEDS_SUPPORT
        return needs | {"dist_teacher"} if self.third_policy else needs

    @property
    def plain_on_policy(self) -> bool:
        """True if the loss is the plain policy gradient at π = π_old, so that on-policy training needs no support."""
        return False

    @property
    def regresses(self) -> bool:
        """True if the loss has a regression term besides the policy gradient: `ObjectiveOutput.regression`."""
        return False

    @property
    def kernel(self) -> TokenRule | ProjectionRule | None:
        """Rule for the fused kernel that computes the objective with these settings. None if there is no such kernel."""
        return None


@dataclass(frozen=True, kw_only=True)
class JointConfig(ObjectiveConfig):
    """Base class of settings for losses in which a call's tokens depend on each other. By default any reduction is allowed."""

    reductions: ClassVar[tuple[Reduction, ...]] = get_args(Reduction)

    tokenwise: ClassVar[bool] = False


# ------------------------------------------------------------------------------------- no region, or weights alone


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(ObjectiveConfig):
    has_region: ClassVar[bool] = False

    ratio_cap: float | None = limited(None, at_least=0, what="a weight")
    """Largest importance weight of a token, a constant for autograd. None sets no limit."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="mask", low=inf, high=inf, cap=self.ratio_cap)


@dataclass(frozen=True, kw_only=True)
class CISPOConfig(ObjectiveConfig):
    cap_low: float = 0.0
    """Smallest importance weight of a token."""
    cap_high: float = 5.0
    """Largest importance weight of a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
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

    cap: float = limited(1.0, at_least=0, finite=True, what="a weight")
    """Largest importance weight of a sequence with a negative advantage."""


@dataclass(frozen=True, kw_only=True)
class VESPOConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"

    k_positive: float = limited(2.0, at_least=0, finite=True, what="an exponent")
    """Exponent k for Â ≥ 0. With a larger k, the weight of a sequence falls faster when its ratio falls below 1."""
    lambda_positive: float = limited(3.0, at_least=0, finite=True, what="an exponent")
    """Exponent λ for Â ≥ 0. With a larger λ, the weight of a sequence falls faster when its ratio grows above 1."""
    k_negative: float = limited(3.0, at_least=0, finite=True, what="an exponent")
    """Exponent k for Â < 0. With a larger k, the weight of a sequence falls faster when its ratio falls below 1."""
    lambda_negative: float = limited(2.0, at_least=0, finite=True, what="an exponent")
    """Exponent λ for Â < 0. With a larger λ, the weight of a sequence falls faster when its ratio grows above 1."""


# ------------------------------------------------------------------------------------------- a clip of the ratio


@dataclass(frozen=True, kw_only=True)
class ClipRangeConfig(ObjectiveConfig):
    """Base class of settings with PPO's clip range around the probability ratio 1."""

    bound_names: ClassVar[tuple[str, str] | None] = ("clip_low", "clip_high")

    clip_low: float = limited(
        0.2, at_least=0, at_most=1, what="a distance from ratio 1", note="a ratio is never below 0, so 1 clips none from below"
    )
    """Lower clip distance ε_low. With a negative advantage, a ratio below 1 − ε_low has no gradient."""
    clip_high: float = limited(0.2, at_least=0, what="a distance from ratio 1")
    """Upper clip distance ε_high. With a positive advantage, a ratio above 1 + ε_high has no gradient."""


@dataclass(frozen=True, kw_only=True)
class PPOClipConfig(ClipRangeConfig):
    """PPO's clip: ratios outside 1 ± 0.2 bring no further gain. With a negative advantage, large ratios are not limited."""

    dual_clip: float | None = limited(None, above=1, what="a ratio")
    """Constant c > 1 of the dual clip. With a negative advantage, the loss is at most c|Â|; a ratio above c has no gradient."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="clip", low=1 - self.clip_low, high=1 + self.clip_high, cap=self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class ClipHigherConfig(PPOClipConfig):
    """PPO's clip with a larger upper clip distance (0.28 instead of 0.2), so that unlikely tokens can become likelier."""

    clip_high: float = 0.28
    """Upper clip distance ε_high, larger than ε_low so that unlikely tokens can become likelier."""


@dataclass(frozen=True, kw_only=True)
class DualClipConfig(PPOClipConfig):
    """PPO's clip with a second limit: with a negative advantage, a ratio above 3 has no gradient, so no token dominates."""

    dual_clip: float | None = 3.0
    """Constant c > 1 of the dual clip. With a negative advantage, the loss is at most c|Â|; a ratio above c has no gradient."""


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
    """Lower clip distance ε_low. With a negative advantage, a ratio below 1 − ε_low has no gradient."""
    clip_high: float = 0.2
    """Upper clip distance ε_high. With a positive advantage, a ratio above 1 + ε_high has no gradient."""
    cap: float = limited(3.0, above=1, what="a weight")
    """Largest importance weight c > 1 of a token, a constant for autograd. A capped token keeps its gradient."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="flip", low=1 - self.clip_low, high=1 + self.clip_high, cap=self.cap)


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(ClipRangeConfig):
    tokenwise: ClassVar[bool] = False

    clip_low: float = 3e-4
    """Lower clip distance ε_low. With a negative advantage, a sequence whose ratio is below 1 − ε_low has no gradient.
    A sequence's ratio is a mean over tokens, and so far closer to 1 than a token's ratio."""
    clip_high: float = 4e-4
    """Upper clip distance ε_high. With a positive advantage, a sequence whose ratio is above 1 + ε_high has no gradient."""


@dataclass(frozen=True, kw_only=True)
class GMPOConfig(ObjectiveConfig):
    tokenwise: ClassVar[bool] = False
    bound_names: ClassVar[tuple[str, str] | None] = ("clip", "clip")

    clip: float = limited(0.4, at_least=0, what="a distance in log-ratio")
    """Clip distance ε of log-ratios. A token's log-ratio is clipped at ε for a positive, and at −ε for a negative advantage."""


@dataclass(frozen=True, kw_only=True)
class RIPOConfig(ObjectiveConfig):
    bound_names: ClassVar[tuple[str, str] | None] = ("bound_low", "bound_high")

    bound_low: float = limited(0.05, at_least=0, what="a squared distance", note="inf switches it off")
    """Bound δ on a token's chi-square term π_old (ρ − 1)², for negative advantages. A token beyond δ has no gradient."""
    bound_high: float = limited(0.05, at_least=0, what="a squared distance", note="inf switches it off")
    """Bound δ on a token's chi-square term π_old (ρ − 1)², for positive advantages. A token beyond δ has no gradient."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="clip", low=self.bound_low**0.5, high=self.bound_high**0.5, measure="chi_square")


@dataclass(frozen=True, kw_only=True)
class BAPOConfig(JointConfig):
    share: float = limited(0.5, at_least=0, below=1, what="a share")
    """Share ρ₀ of the surrogate loss that positive advantages must contribute in a balanced batch."""
    low: float = limited(0.6, at_least=0, at_most=1, what="a ratio")
    """Lower clip bound l of the ratio in a batch whose positive and negative advantages are balanced.
    With a negative advantage, a ratio below l has no gradient."""
    low_end: float = limited(0.9, at_least=0, at_most=1, what="a ratio")
    """Lower clip bound l of the ratio in a batch whose positive and negative advantages are not balanced."""
    high: float = limited(1.2, at_least=1, finite=True, what="a ratio")
    """Upper clip bound h of the ratio in a batch whose positive and negative advantages are balanced.
    With a positive advantage, a ratio above h has no gradient."""
    high_end: float = limited(3.0, at_least=1, finite=True, what="a ratio")
    """Largest upper clip bound h of the ratio. In an unbalanced batch, h rises from `high` in steps of 0.05.
    It stops where positive and negative advantages are balanced."""
    dual_clip: float | None = limited(3.0, above=1, what="a ratio")
    """Constant c > 1 of the dual clip. With a negative advantage, the loss is at most c|Â|; a ratio above c has no gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "low_end", at_least=self.low, what="where `low` may rise to")
        require(self, "high_end", at_least=self.high, what="where `high` may rise to")


# ------------------------------------------------------------------------------- penalties and gates on the ratio


@dataclass(frozen=True, kw_only=True)
class SPOConfig(ObjectiveConfig):
    bound_names: ClassVar[tuple[str, str] | None] = ("epsilon", "epsilon")

    epsilon: float = limited(0.2, above=0, what="a distance from ratio 1")
    """Ratio distance ε. At the ratio 1 ± ε the penalty balances the advantage, and beyond 1 ± ε the gradient pulls back."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="penalty", low=self.epsilon, high=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class DRPOConfig(ObjectiveConfig):
    anchor: ClassVar[Anchor] = "rollout"
    bound_names: ClassVar[tuple[str, str] | None] = ("bound", "bound")

    bound: float = limited(0.2, above=0, what="a divergence", note="inf switches it off")
    """Bound δ on |π − π_old| of the sampled token. At δ the penalty balances the advantage; beyond δ the penalty prevails."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="penalty", low=self.bound, high=self.bound, measure="binary_tv")


@dataclass(frozen=True, kw_only=True)
class SAPOConfig(ObjectiveConfig):
    reductions: ClassVar[tuple[Reduction, ...]] = _MEAN_FIRST

    tau_positive: float = limited(1.0, above=0, finite=True, what="a temperature")
    """Temperature τ of the gate for Â > 0. With a higher τ, the gate closes faster as the ratio moves away from 1."""
    tau_negative: float = limited(1.05, above=0, finite=True, what="a temperature")
    """Temperature τ of the gate for Â < 0. The default is above `tau_positive`, because tokens with Â < 0 are less stable."""

    @property
    def kernel(self) -> TokenRule:
        return TokenRule(rule="gate", low=self.tau_negative, high=self.tau_positive)


# -------------------------------------------------------------------------------- masks on a divergence or a rank


@dataclass(frozen=True, kw_only=True)
class DPPOConfig(ObjectiveConfig):
    paper: ClassVar[Paper] = Paper(
        "DPPO",
        "Rethinking the Trust Region in {LLM} Reinforcement Learning",
        "Qi, Penghui and Zhou, Xiangxin and Liu, Zichen and Pang, Tianyu and Du, Chao and Lin, Min and Lee, Wee Sun",
        "2602.04879",
    )
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"
    reductions: ClassVar[tuple[Reduction, ...]] = _SUM_FIRST

    divergence: Literal["tv", "kl", "ratio"] = "tv"
    """Divergence that the trust region bounds: total variation, KL(old‖new), or PPO's ratio distance |ρ − 1|."""
    estimator: Literal["binary", "topk", "full"] = "binary"
    """Tokens on which the divergence is measured: "binary" is the sampled token against all others.
    "topk" is a top-K support with its tail, and "full" is every token."""
    bound: float | None = limited(None, at_least=0, what="a divergence", note="inf switches it off")
    """Bound δ on the divergence. A token beyond δ may not move further away from the old policy.
    None stands for 0.05 with divergence="kl" and for 0.2 otherwise. inf switches it off."""
    bound_low: float | None = limited(None, at_least=0, what="a divergence", note="inf switches it off")
    """Bound δ on the divergence of tokens with a negative advantage. None takes `bound`."""
    bound_high: float | None = limited(None, at_least=0, what="a divergence", note="inf switches it off")
    """Bound δ on the divergence of tokens with a positive advantage. None takes `bound`."""
    mask: Literal["outward", "symmetric", "predictive"] = "outward"
    """Tokens outside the trust region that lose their gradient. "outward" means tokens that moved along their advantage.
    "symmetric" means all tokens, and "predictive" means tokens whose own gradient step raises the divergence on the support."""
    ratio_cap: float | None = limited(None, at_least=0, what="a weight")
    """Largest importance weight of a token, a constant for autograd. None sets no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        over = "support" if self.estimator == "topk" else "binary"
        measure = cast(Measure, self.divergence if self.divergence == "ratio" else f"{over}_{self.divergence}")
        low, high = self.bounds
        symmetric = self.mask == "symmetric"
        return TokenRule(rule="mask", low=low, high=high, cap=self.ratio_cap, measure=measure, symmetric=symmetric)


@dataclass(frozen=True, kw_only=True)
class CPPOConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"

    estimator: Literal["binary", "topk"] = "binary"
    """Tokens on which the total variation is measured: "binary" is the sampled token against all others.
    "topk" is a top-K support with its tail."""
    bound: float = limited(0.2, at_least=0, what="a divergence", note="inf switches it off")
    """Bound δ on the total variation at the first token of a sequence. A token beyond δ may not move further out."""
    weight_last: float = limited(0.8, above=0, at_most=1, what="a weight")
    """Weight of the last token of a sequence. The first token has weight 1, and weights fall linearly in between."""
    budget: float = limited(0.02, at_least=0, what="a divergence", note="inf switches it off")
    """Mean divergence δ_b of the previous tokens above which the bound on a token becomes tighter.
    It is up to twice as large in sequences with large divergences."""

    @property
    def support(self) -> Support:
        return "none" if self.estimator == "binary" else "topk"


@dataclass(frozen=True, kw_only=True)
class M2POConfig(JointConfig):
    anchor: ClassVar[Anchor] = "rollout"
    action: ClassVar[Action] = "masked"

    bound: float = limited(0.04, at_least=0, what="a mean of squared log-ratios", note="inf switches it off")
    """Bound τ on the mean (log ρ)² of tokens that moved along their advantage. The farthest tokens are masked to reach τ."""


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig(ClipRangeConfig, JointConfig):
    share: float = limited(2e-4, above=0, at_most=1, what="a share of the tokens")
    """Share of the tokens in a call of the loss that lose their gradient, rounded down to at least one token.
    They are drawn among tokens whose covariance lies between `cov_low` and `cov_high`."""
    cov_low: float = 1.0
    """Smallest covariance of advantage and log-probability at which a token may lose its gradient."""
    cov_high: float = 5.0
    """Largest covariance of advantage and log-probability at which a token may lose its gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (number_in(self.cov_low, 0) and number_in(self.cov_high, self.cov_low)):
            raise ValueError(
                f"clip_cov: covariances lie in (`cov_low`, `cov_high`) with 0 ≤ cov_low ≤ cov_high; got ({self.cov_low!r}, "
                f"{self.cov_high!r})."
            )


@dataclass(frozen=True, kw_only=True)
class KLCovConfig(JointConfig):
    share: float = limited(2e-4, above=0, at_most=1, what="a share of the tokens")
    """Share of the tokens in a call of the loss that are penalised. At least one token is penalised."""
    penalty: float = limited(1.0, at_least=0, finite=True, what="a weight")
    """Weight β of the penalty |log ρ| on tokens with a large covariance of advantage and log-probability."""


# --------------------------------------------------------------------------------------- projections onto a KL ball


@dataclass(frozen=True, kw_only=True)
class TROLLConfig(ObjectiveConfig):
    paper: ClassVar[Paper] = Paper(
        "TROLL",
        "{TROLL}: Trust Regions improve Reinforcement Learning for Large Language Models",
        "Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and Neumann, Gerhard",
        "2510.03817",
    )
    action: ClassVar[Action] = "projected"
    support: ClassVar[Support] = "topk"
    bound_names: ClassVar[tuple[str, str] | None] = ("bound", "bound")

    bound: float = limited(0.05, at_least=0, what="a KL in nats", note="inf switches it off")
    """Bound ε on KL(projected‖centre) of every token, in nats. inf switches the projection off."""
    regression: float = limited(1.0, at_least=0, finite=True, what="a weight")
    """Weight α of the regression of the network onto the projected policy. Without it (0), the network may drift."""
    tail: Literal["bucket", "fill"] = "bucket"
    """Treatment of tokens outside the support. "bucket" keeps their exact mass as one more category.
    "fill" gives each of them a fixed tiny probability, as in the TROLL paper."""
    vocab_size: int | None = limited(None, at_least=1, what="a number of tokens")
    """Vocabulary size V, in tokens. The setting `tail="fill"` needs it to count the tokens outside the support."""
    level: Literal["token", "sequence"] = "token"
    """Ratio in the policy gradient: of each token ("token"), or of a whole sequence, normalised by length ("sequence")."""
    gradient: Literal["exact", "constant_dual", "unprojected"] = "exact"
    """Gradient through the projection: "exact", with a constant dual variable ("constant_dual"), or none ("unprojected").
    With "unprojected", the regression alone keeps the network in the trust region."""
    project: Literal["all", "outward"] = "all"
    """Tokens that are projected: "all" outside the KL ball, or "outward" without tokens whose own step lowers the KL."""
    centre: Literal["old", "reference"] = "old"
    """Policy at the centre of the KL ball. "old" moves with training; "reference" is frozen, which bounds all drift.
    The reference is passed as `dist_teacher`."""
    ratio_cap: float | None = limited(None, at_least=0, what="a weight")
    """Largest importance weight of a token, a constant for autograd. A KL bound does not limit the ratio of a rare token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail == "fill" and self.vocab_size is None:
            raise ValueError("troll: tail='fill' gives every dropped token 1e-12 and has to know how many: set `vocab_size`.")

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
    bound_names: ClassVar[tuple[str, str] | None] = ("bound", "bound")

    bound: float = limited(0.05, at_least=0, what="a KL in nats", note="inf switches it off")
    """Bound ε on every token's KL(regression target‖old policy), in nats. With inf, the target is the teacher."""
    direction: Literal["reverse", "forward"] = "reverse"
    """Direction of the regression: "reverse" is KL(new‖target), which drops modes. "forward" is KL(target‖new).
    "forward" covers all modes of the target."""


# ------------------------------------------------------------------------------------------------------ registry

ObjectiveFunction = Callable[["TokenBatch", Any], "ObjectiveOutput"]

OBJECTIVES: dict[str, tuple[str | ObjectiveFunction, type[ObjectiveConfig]]] = {
    "troll": ("projections.troll", TROLLConfig),
    "dppo": ("masks.dppo", DPPOConfig),
    "ppo_clip": ("clips.ppo_clip", PPOClipConfig),
    "clip_higher": ("clips.ppo_clip", ClipHigherConfig),
    "reinforce": ("weights.reinforce", ReinforceConfig),
    "gspo": ("clips.gspo", GSPOConfig),
    "cispo": ("weights.cispo", CISPOConfig),
    "dual_clip": ("clips.ppo_clip", DualClipConfig),
    "sapo": ("penalties.sapo", SAPOConfig),
    "gmpo": ("clips.gmpo", GMPOConfig),
    "spo": ("penalties.spo", SPOConfig),
    "m2po": ("masks.m2po", M2POConfig),
    "drpo": ("penalties.drpo", DRPOConfig),
    "aspo": ("clips.aspo", ASPOConfig),
    "bapo": ("clips.bapo", BAPOConfig),
    "clip_cov": ("masks.clip_cov", ClipCovConfig),
    "cppo": ("masks.cppo", CPPOConfig),
    "decoupled_ppo": ("clips.decoupled_ppo", DecoupledPPOConfig),
    "distill": ("projections.distill", DistillConfig),
    "kl_cov": ("masks.kl_cov", KLCovConfig),
    "ripo": ("clips.ripo", RIPOConfig),
    "topr": ("weights.topr", TOPRConfig),
    "vespo": ("weights.vespo", VESPOConfig),
}
"""Registry of objectives: each name is mapped to the objective's function and settings class.
A string is a function's path in this package.

Reports give colours in this order, so a new objective comes last.
"""
