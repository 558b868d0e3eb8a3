"""The claims of docs/results/llm.md: who against whom, in which cell, by one primary endpoint, and what may be said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from corral.lab.report.statistics import ENOUGH, Difference, holm, plain, signed
from results.evidence.cells import Cell, arm_name, compare, word_cell
from results.evidence.tables import OFTEN
from results.packed import Row
from results.plans import BEST, WORD_SEEDS

MARGIN = 2.0
"""Points of success below which "no worse" is said."""
TUNED_UP_TO = 400
"""Settings were chosen on seeds up to here, so they are no evidence."""
TROLL, CLIP, DPPO, NONE = ("troll", ""), ("ppo_clip", ""), ("dppo", ""), ("reinforce", "")
_HOT = Cell(arm=TROLL, rate=1e-3)
_REUSED = Cell(arm=TROLL, rate=2e-4, **OFTEN)
_FP8 = Cell(arm=TROLL, others={"sampler": "fp8", "anchor": "rollout"})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`ours` is above `theirs` in the area under the held-out curve: what a paper says, or what we thought before."""

    name: str
    says: str
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
    reused = f"TROLL with four passes beats clipping with one {best}, at equal rollouts"
    return (
        Claim(name=f"{name}-troll", says=f"TROLL beats clipping {best}", ours=_chosen(base, "troll", 1), theirs=clip),
        Claim(name=f"{name}-dppo", says=f"DPPO beats clipping {best}", ours=_chosen(base, "dppo", 1), theirs=clip),
        Claim(name=f"{name}-reuse", says=reused, ours=_chosen(base, "troll", 4), theirs=clip),
    )


CLAIMS = (
    _claim("troll-tuned", "TROLL beats clipping at a rate that suits both", Cell(arm=TROLL), TROLL, CLIP),
    _claim("troll-hot", "TROLL beats clipping at five times that rate", _HOT, TROLL, CLIP),
    _claim("troll-reuse", "TROLL beats clipping with four passes over a batch", _REUSED, TROLL, CLIP),
    *_on("SmolLM2", "words", "smollm2"),
    Claim(
        name="words-passes",
        says="TROLL beats clipping on SmolLM2 with four passes over a batch, each at its best rate",
        ours=_chosen("smollm2", "troll", 4),
        theirs=_chosen("smollm2", "ppo_clip", 4),
    ),
    *_on("Gemma", "gemma", "gemma"),
    _claim("dppo-tuned", "DPPO beats clipping at a rate that suits both", Cell(arm=TROLL), DPPO, CLIP),
    _claim("dppo-hot", "DPPO beats clipping at five times that rate", _HOT, DPPO, CLIP),
    _claim("dppo-reuse", "DPPO beats clipping with four passes over a batch", _REUSED, DPPO, CLIP),
    _claim("troll-dppo", "TROLL beats DPPO with four passes over a batch", _REUSED, TROLL, DPPO),
    _claim(
        "rare-reuse",
        "Clipping lifted for tokens below .1 beats clipping with four passes over a batch",
        _REUSED,
        ("rare_clip", "below .1"),
        CLIP,
    ),
    _claim("region", "Clipping beats no region at all at five times that rate", _HOT, CLIP, NONE),
    _claim("topk", "A top-K divergence beats the sampled token's in DPPO", _HOT, ("dppo", "top-K"), DPPO),
    _claim("projection", "The projected gradient beats the regression alone", _HOT, TROLL, ("troll", "unprojected")),
    _claim("exact", "The exact gradient beats a dual held constant", _HOT, TROLL, ("troll", "constant dual")),
    _claim("regression", "The regression is needed", _HOT, TROLL, ("troll", "no regression")),
    Claim(
        name="anchor-dppo",
        says="Anchoring DPPO at an fp8 sampler beats anchoring it at what the trainer recomputes",
        ours=replace(_FP8, arm=DPPO),
        theirs=replace(_FP8, arm=DPPO, others={"sampler": "fp8", "anchor": "old"}),
    ),
    Claim(
        name="anchor-troll",
        says="Anchoring TROLL at what the trainer recomputes beats anchoring it at an fp8 sampler",
        ours=replace(_FP8, others={"sampler": "fp8", "anchor": "old"}),
        theirs=_FP8,
    ),
)
"""In the order of the page; those that have been looked at are corrected together."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on a claim."""

    claim: Claim
    found: Difference | None
    holds: bool
    among: int

    @property
    def can_tell(self) -> bool:
        """True if there are enough seeds for a verdict."""
        return self.found is not None and self.found.seeds >= ENOUGH

    @property
    def word(self) -> str:
        """`holds here`, `opposite here`, `does not show here`, or that there are too few runs."""
        if self.found is None or not self.can_tell:
            return "too few runs"
        if not self.holds:
            return "does not show here"
        return "holds here" if self.found.mean.value > 0 else "opposite here"

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        return f"**{self.word[0].upper()}{self.word[1:]}.** {self._numbers()}"

    def _numbers(self) -> str:
        found, cells = self.found, (self.claim.ours, self.claim.theirs)
        names = [arm_name(cell.arm) for cell in cells]
        if cells[0].passes != cells[1].passes:
            names = [f"{name} × {cell.passes}" for name, cell in zip(names, cells, strict=True)]
        elif names[0] == names[1]:
            names = [f"{name} at `{cell.others['anchor']}`" for name, cell in zip(names, cells, strict=True)]
        if found is None:
            return f"No run of {names[0]} and {names[1]} shares a seed yet."
        mean, seeds = found.mean, "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
        text = f"{names[0]} − {names[1]}: {signed(mean.value)} points"
        if mean.low is None or mean.high is None:
            return f"{text}, {seeds}: no interval."
        text += f", 95 % interval {plain(mean.low)} … {plain(mean.high)}, {seeds}"
        if found.p is not None and found.p <= 0.05 and not self.holds:
            text += f"; among {self.among} comparisons one may stray as far"
        elif not self.holds:
            fine = [name for name, bound in zip(names, (-mean.low, mean.high), strict=True) if bound < MARGIN]
            who = "neither is" if len(fine) == 2 else f"{fine[0]} is not" if fine else ""
            text += f"; {who} worse by {MARGIN:g} points or more" if who else ""
        return text + "."


def judge(runs: Sequence[Row]) -> list[Verdict]:
    """Every claim, under Holm over those that could be looked at."""
    fresh = [run for run in runs if run["seed"] > TUNED_UP_TO]
    found = [compare(claim.ours, claim.theirs, fresh) for claim in CLAIMS]
    looked = [one.p for one in found if one is not None]
    holds = iter(holm(looked))
    return [
        Verdict(claim=claim, found=one, holds=one is not None and next(holds), among=len(looked))
        for claim, one in zip(CLAIMS, found, strict=True)
    ]
