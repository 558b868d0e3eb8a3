"""The claims of docs/results/llm.md: who against whom, in which cell, by one primary endpoint, and what may be said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from corral.lab.report.statistics import Difference, holm, is_significant
from results.evidence.cells import Cell, compare, word_cell
from results.evidence.tables import OFTEN
from results.packed import Row
from results.pages import interval_text, p_text
from results.plans import BEST, WORD_SEEDS

TUNED_UP_TO = 400
"""Settings were chosen on seeds up to here, so they are no evidence."""
TROLL, CLIP, DPPO, NONE = ("troll", ""), ("ppo_clip", ""), ("dppo", ""), ("reinforce", "")
_HOT = Cell(arm=TROLL, rate=1e-3)
_REUSED = Cell(arm=TROLL, rate=2e-4, **OFTEN)
_FP8 = Cell(arm=TROLL, others={"sampler": "fp8", "anchor": "rollout"})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`ours` has more mean held-out success over the run than `theirs`: what a paper claims, or what we expected."""

    name: str
    says: str
    """The difference, in words."""
    ours: Cell
    theirs: Cell


def _claim(name: str, says: str, cell: Cell, ours: tuple[str, str], theirs: tuple[str, str]) -> Claim:
    return Claim(name=name, says=says, ours=replace(cell, arm=ours), theirs=replace(cell, arm=theirs))


def _chosen(base: str, objective: str, passes: int) -> Cell:
    """A pretrained model at the rate that was the best for this objective on other seeds."""
    return word_cell(base, objective, passes, BEST[base][objective, passes], seeds=WORD_SEEDS[base])


def _on(model: str, name: str, base: str) -> tuple[Claim, ...]:
    """Claims on a pretrained model."""
    best, clip = f"on {model}, each at its best rate", _chosen(base, "ppo_clip", 1)
    reused = f"TROLL with four passes − clipping with one {best}, at equal rollouts"
    return (
        Claim(name=f"{name}-troll", says=f"TROLL − clipping {best}", ours=_chosen(base, "troll", 1), theirs=clip),
        Claim(name=f"{name}-dppo", says=f"DPPO − clipping {best}", ours=_chosen(base, "dppo", 1), theirs=clip),
        Claim(name=f"{name}-reuse", says=reused, ours=_chosen(base, "troll", 4), theirs=clip),
    )


CLAIMS = (
    _claim("troll-tuned", "TROLL − clipping at a rate that suits both", Cell(arm=TROLL), TROLL, CLIP),
    _claim("troll-hot", "TROLL − clipping at five times that rate", _HOT, TROLL, CLIP),
    _claim("troll-reuse", "TROLL − clipping with four passes over a batch", _REUSED, TROLL, CLIP),
    *_on("SmolLM2", "words", "smollm2"),
    Claim(
        name="words-passes",
        says="TROLL − clipping on SmolLM2 with four passes over a batch, each at its best rate",
        ours=_chosen("smollm2", "troll", 4),
        theirs=_chosen("smollm2", "ppo_clip", 4),
    ),
    *_on("Gemma", "gemma", "gemma"),
    _claim("dppo-tuned", "DPPO − clipping at a rate that suits both", Cell(arm=TROLL), DPPO, CLIP),
    _claim("dppo-hot", "DPPO − clipping at five times that rate", _HOT, DPPO, CLIP),
    _claim("dppo-reuse", "DPPO − clipping with four passes over a batch", _REUSED, DPPO, CLIP),
    _claim("troll-dppo", "TROLL − DPPO with four passes over a batch", _REUSED, TROLL, DPPO),
    _claim(
        "rare-reuse",
        "Clipping of tokens above .1 alone − clipping with four passes over a batch",
        _REUSED,
        ("rare_clip", "below .1"),
        CLIP,
    ),
    _claim("region", "Clipping − no region at all at five times that rate", _HOT, CLIP, NONE),
    _claim("topk", "DPPO with a top-K divergence − DPPO with the sampled token's", _HOT, ("dppo", "top-K"), DPPO),
    _claim("projection", "TROLL − TROLL without its projection", _HOT, TROLL, ("troll", "unprojected")),
    _claim("exact", "TROLL − TROLL with a constant dual", _HOT, TROLL, ("troll", "constant dual")),
    _claim("regression", "TROLL − TROLL without its regression", _HOT, TROLL, ("troll", "no regression")),
    Claim(
        name="anchor-dppo",
        says="DPPO anchored at an fp8 sampler − anchored at the trainer's log-probs",
        ours=replace(_FP8, arm=DPPO),
        theirs=replace(_FP8, arm=DPPO, others={"sampler": "fp8", "anchor": "old"}),
    ),
    Claim(
        name="anchor-troll",
        says="TROLL anchored at the trainer's log-probs − anchored at an fp8 sampler",
        ours=replace(_FP8, others={"sampler": "fp8", "anchor": "old"}),
        theirs=_FP8,
    ),
)
"""In the order of the page; those that have been looked at are corrected together."""


class Verdict(NamedTuple):
    """What fresh seeds have of a claim."""

    claim: Claim
    found: Difference | None
    p: float
    """Adjusted for all claims that have runs."""

    @property
    def is_significant(self) -> bool:
        """True if it remains so after Holm's correction."""
        return is_significant(self.p)

    @property
    def row(self) -> list[str]:
        """A row below COMPARED."""
        return [self.claim.says, interval_text(self.found), str(self.found.seeds) if self.found else "0", p_text(self.p)]


COMPARED = ("difference", "points (95 %)", "seeds", "p (Holm)")


def judge(runs: Sequence[Row]) -> list[Verdict]:
    """Every claim, under Holm over those that could be looked at."""
    fresh = [run for run in runs if run["seed"] > TUNED_UP_TO]
    found = [compare(claim.ours, claim.theirs, fresh) for claim in CLAIMS]
    adjusted = iter(holm([one.p for one in found if one is not None]))
    return [Verdict(claim, one, 1.0 if one is None else next(adjusted)) for claim, one in zip(CLAIMS, found, strict=True)]
