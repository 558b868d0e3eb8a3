"""The runs of each part of the evidence, the most telling first, one seed after another."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from results.evidence.spec import BASES, CODE, Coded, Pretrained, Run, problems_of

SEEDS = (401, 402, 403, 404, 405)
"""Those on which the study of deployed networks confirms what it found."""
TUNED, HOT = 2e-4, 1e-3
"""The demo's own rate, and one at which regions have something to do."""
RATES = (HOT, TUNED, 1e-4, 3e-3)
"""The best of every objective is inside."""
ARMS = (
    ("ppo_clip", ""),
    ("troll", ""),
    ("dppo", ""),
    ("troll", "unprojected"),
    ("reinforce", ""),
    ("dppo", "top-K"),
    ("drpo", ""),
)
"""Objective and variant of the contestants."""
REUSED = (("ppo_clip", ""), ("troll", ""), ("dppo", ""), ("troll", "unprojected"), ("reinforce", ""))
"""Those with one and with 32 updates per batch."""
FAMILIES = ("qwen3", "gemma", "moe")
"""Of other starts than the embedded model's own, as results/evidence/warm_starts.py makes them."""
ABLATIONS = (
    "constant dual", "unprojected", "no regression", "α=.1", "α=.3", "α=3", "α=10", "ε=.01", "ε=.2", "union", "fill", "K=4",
    "mass .9", "K=16", "K=4, mass .9",
)  # fmt: skip
WORD_RATES = (1e-5, 3e-5, 1e-4)
"""Of a pretrained model, half decades; on seed 301 the middle one was the best of 3e-6 to 1e-4 for every objective."""
GEMMA_RATES = (1e-6, 3e-6, *WORD_RATES)
"""Two lower for the larger model, whose best are there."""
WORD_ARMS = (("ppo_clip", 1), ("troll", 1), ("dppo", 1), ("troll", 4))
"""Objective and passes over each batch: the last is what needs the fewest rollouts in the study of deployed networks."""
HELD_ARMS = (("ppo_clip", 1), ("troll", 1), ("troll", 4))
"""Those of runs whose deployed network is held."""
FRESH = {"smollm2": range(406, 416), "gemma": range(406, 411)}
"""Seeds of a pretrained model on which nothing was chosen."""
BEST: dict[str, dict[tuple[str, int], float]] = {
    "smollm2": {("ppo_clip", 1): 3e-5, ("troll", 1): 3e-5, ("dppo", 1): 3e-5, ("troll", 4): 1e-5, ("ppo_clip", 4): 3e-5},
    "gemma": {("ppo_clip", 1): 1e-6, ("troll", 1): 3e-6, ("dppo", 1): 1e-6, ("troll", 4): 1e-6},
}
"""The rate of the largest mean area on seeds 401 to 405; on Gemma 401 to 403, with four passes 401 alone."""
MANY = 1024
"""Held-out problems of a measurement where a few points decide. The area has four measurements, so that of one run has a
standard error of .008 at most, that of a single measurement on 4,096 problems."""
ANCHORED = (("dppo", "rollout"), ("dppo", "old"), ("ppo_clip", "rollout"), ("reinforce", "rollout"), ("troll", "old"))
"""Objective and anchor of long runs."""
LONG: dict[str, Any] = {"passes": 4, "steps": 64, "eval_every": 16, "schedule": "constant", "sampler": "fp8"}
"""2,048 updates: 32 of each of 64 batches."""
MOE = "runs/starts/moe-1"
"""A mixture of experts, whose routing a sampler in fp8 changes."""
RARE = (("ppo_clip", ""), ("rare_clip", "below .1"), ("rare_clip", "below .01"), ("dppo", ""))
"""Clipping, the same lifted for tokens whose old probability is below a threshold, and DPPO."""
AGAIN: dict[str, Any] = {"passes": 4, "steps": 10, "eval_every": 2}
"""32 updates per batch: four passes over each, 10 batches."""
PUBLISHED = (("troll", "published"), ("troll", "token mean"), ("ppo_clip", "token mean"), ("dppo", "token sum, no std"))
"""Objectives as their papers run them, where that differs from the common form: sums over a fixed length for all."""


def run(arm: tuple[str, str], rate: float, seed: int, **others: Any) -> Run:
    """One run of an arm."""
    return Run(objective=arm[0], variant=arm[1], rate=rate, seed=seed, **others)


def the_map() -> list[Run]:
    """Seven contestants × four rates at 8 updates per batch, 15 batches."""
    return [run(arm, rate, seed) for seed, rate, arm in itertools.product(SEEDS, RATES, ARMS)]


def floor() -> list[Run]:
    """One update per batch: objectives differ by rounding alone, so this is what chance does."""
    grid = itertools.product(SEEDS, (HOT, 3e-3, TUNED), REUSED)
    return [run(arm, rate, seed, updates=1) for seed, rate, arm in grid]


def reused() -> list[Run]:
    """Four passes over each batch at three rates."""
    grid = itertools.product(SEEDS, (TUNED, 4e-4, 1e-4), REUSED)
    return [run(arm, rate, seed, **AGAIN) for seed, rate, arm in grid]


def ablations() -> list[Run]:
    """TROLL, one thing changed at a time, where it acts and where it is tuned."""
    grid = itertools.product(SEEDS, (HOT, TUNED), ("", *ABLATIONS))
    return [run(("troll", variant), rate, seed) for seed, rate, variant in grid]


def published() -> list[Run]:
    """The papers' own reductions and advantages, at the best rate and above it."""
    return [run(arm, rate, seed) for seed, rate, arm in itertools.product(SEEDS, (TUNED, HOT), PUBLISHED)]


def starts() -> list[Run]:
    """The map's two main contestants and what holds them apart, from other warm starts and families: runs/starts must exist."""
    folders = [*(f"runs/starts/llama-{seed}" for seed in (1, 2, 3)), *(f"runs/starts/{name}-1" for name in FAMILIES)]
    arms = (("ppo_clip", ""), ("troll", ""), ("dppo", ""))
    grid = itertools.product(SEEDS[:3], folders, (HOT, TUNED), arms)
    return [run(arm, rate, seed, model=folder) for seed, folder, rate, arm in grid]


def mismatch() -> list[Run]:
    """Samplers in fp8 and bf16, anchored at what they report and at what the trainer recomputes; then the same precision."""
    arms = (("dppo", ""), ("troll", ""), ("ppo_clip", ""), ("troll", "unprojected"))
    grid = itertools.product(SEEDS, ("fp8", "bf16"), ("rollout", "old"), (TUNED,), arms)
    return [run(arm, rate, seed, sampler=sampler, anchor=anchor) for seed, sampler, anchor, rate, arm in grid]


def bounds() -> list[Run]:
    """DPPO with smaller bounds, beside .2 and clipping's ε of the map."""
    grid = itertools.product(SEEDS[:3], (HOT, TUNED), ("", "δ=.1", "δ=.15"))
    return [run(("dppo", variant), rate, seed) for seed, rate, variant in grid]


def rare() -> list[Run]:
    """Clipping lifted for rare tokens, where it is tuned, at a large rate, and with four passes over a batch."""
    settings: tuple[tuple[float, dict[str, Any]], ...] = ((TUNED, AGAIN), (HOT, {}), (TUNED, {}))
    grid = itertools.product(SEEDS, settings, RARE)
    return [run(arm, rate, seed, **others) for seed, (rate, others), arm in grid]


def estimators() -> list[Run]:
    """TROLL and clipping under other advantages than the group's standardised ones."""
    grid = itertools.product(SEEDS[:3], (HOT, TUNED), ("rloo", "no std", "reinforce++"), ("troll", "ppo_clip"))
    return [run((objective, variant), rate, seed) for seed, rate, variant, objective in grid]


def stability() -> list[Run]:
    """DPPO's stability protocol in small: 2,048 updates at a small constant rate, an fp8 sampler, both anchors.

    The protocol asks for problems that can all be solved: the embedded model solves its training problems greedily, so rewards
    should reach 1. The paper has 4 updates per batch, this plan 32 in four passes, so that a run takes minutes of a GPU.
    """
    return [run((name, ""), 1e-4, seed, anchor=anchor, **LONG) for seed, (name, anchor) in itertools.product(SEEDS, ANCHORED)]


def experts() -> list[Run]:
    """A mixture of experts with a sampler in fp8, which routes some tokens otherwise, by anchor: runs/starts must exist."""
    grid = itertools.product(SEEDS[:3], ("rollout", "old"), ("dppo", "troll", "ppo_clip"))
    return [run((name, ""), TUNED, seed, model=MOE, sampler="fp8", anchor=anchor) for seed, anchor, name in grid]


def pretrained() -> list[Pretrained]:
    """SmolLM2: three seeds of four arms × three rates, then two more."""
    grid = itertools.chain(*(itertools.product(seeds, WORD_RATES, WORD_ARMS) for seeds in (SEEDS[:3], SEEDS[3:])))
    return [_pretrained(arm, rate, seed) for seed, rate, arm in grid]


def held_pretrained() -> list[Pretrained]:
    """SmolLM2 with the deployed network held: a rate that nobody tunes, then one that is good and one that is not."""
    plan = [_automatic(arm, seed) for seed, arm in itertools.product(SEEDS, HELD_ARMS)]
    for seed, arm in itertools.product(SEEDS[:3], WORD_ARMS[:2]):
        plan += [_pretrained(arm, rate, seed, bound=0.03) for rate in (1e-4, 1e-3)] + [_pretrained(arm, 1e-3, seed)]
    return plan


def gemma() -> list[Pretrained]:
    """Gemma: three seeds of four arms × five rates."""
    grid = itertools.product(SEEDS[:3], GEMMA_RATES, WORD_ARMS)
    return [_pretrained(arm, rate, seed, base="gemma") for seed, rate, arm in grid]


def held_gemma() -> list[Pretrained]:
    """Gemma with a rate that nobody tunes: three seeds."""
    return [_automatic(arm, seed, base="gemma") for seed, arm in itertools.product(SEEDS[:3], HELD_ARMS)]


def confirmed(base: str) -> list[Pretrained]:
    """Each arm at its best rate, and clipping at a rate that nobody tunes, measured on more held-out problems.

    On seeds that had no part in choosing those rates; four passes on the first five of them, after all else.
    """
    size = {"base": base, "eval_size": MANY}
    once, again = ([arm for arm in BEST[base] if (arm[1] == 1) == wanted] for wanted in (True, False))
    plan = []
    for seed in FRESH[base]:
        plan += [_pretrained(arm, BEST[base][arm], seed, **size) for arm in once] + [_automatic(once[0], seed, **size)]
    return plan + [_pretrained(arm, BEST[base][arm], seed, **size) for seed in FRESH[base][:5] for arm in again]


def elsewhere(base: str) -> list[Pretrained]:
    """SmolLM2 on word problems from books, or on GSM8K: three seeds of three arms × three rates, the middle one first."""
    grid = itertools.product((3e-5, 1e-5, 1e-4), SEEDS[:3], WORD_ARMS[:3])
    return [_pretrained(arm, rate, seed, base=base) for rate, seed, arm in grid]


def _automatic(arm: tuple[str, int], seed: int, **others: Any) -> Pretrained:
    """At `learning_rate="auto"`, with the bound that is its default for as many passes."""
    return _pretrained(arm, "auto", seed, schedule="constant", bound=0.03 if arm[1] == 1 else 0.01, **others)


def _pretrained(arm: tuple[str, int], rate: float | str, seed: int, base: str = "smollm2", **others: Any) -> Pretrained:
    model = str(BASES[base]["model"]).format(start=seed - SEEDS[0] + 1)
    others = {"eval_size": problems_of(base), **others}
    return Pretrained(objective=arm[0], passes=arm[1], rate=rate, seed=seed, base=base, model=model, **others)


def code() -> list[Coded]:
    """Programs: clipping and TROLL, three starts, at three rates."""
    folder = str(CODE["task_config"]["path"]).rpartition("/")[0]
    grid = itertools.product((TUNED, 1e-4, HOT), SEEDS[:3], ("ppo_clip", "troll"))
    return [Coded(objective=arm, rate=rate, seed=seed, model=f"{folder}/{seed - SEEDS[0] + 1}") for rate, seed, arm in grid]


def claims() -> list[Run]:
    """What the claims on the embedded model compare, and nothing else: 18 runs and 1,100 seconds of one core for each seed."""
    hot = [*ARMS[:6], ("troll", "constant dual"), ("troll", "no regression")]
    plan = []
    for seed in SEEDS:
        plan += [run(arm, HOT, seed) for arm in hot]
        plan += [run(arm, TUNED, seed, **AGAIN) for arm in ARMS[:3]] + [run(arm, TUNED, seed) for arm in ARMS[:3]]
        anchored = itertools.product((("troll", ""), ("dppo", "")), ("rollout", "old"))
        plan += [run(arm, TUNED, seed, sampler="fp8", anchor=anchor) for arm, anchor in anchored]
    return plan


def first() -> list[Run]:
    """Three seeds of the map, then of the ablations where TROLL acts: two hours of one core, eight minutes of sixteen."""
    ablated = [spec for spec in ablations() if spec.rate == HOT]
    return [spec for spec in [*the_map(), *ablated] if spec.seed in SEEDS[:3]]


def tiny() -> list[Run]:
    """Two steps of every variant, and of one update per batch: does it run at all?"""
    small: dict[str, Any] = {"steps": 2, "eval_size": 16, "eval_every": 2}
    arms = dict.fromkeys([*ARMS, *RARE, *PUBLISHED, *(("troll", variant) for variant in ABLATIONS)])
    plan = [run(arm, 1e-3, 1, **small) for arm in arms] + [run(("troll", ""), 1e-3, 1, updates=1, **small)]
    coarse = itertools.product((("dppo", ""), ("troll", "")), ("rollout", "old"))
    return plan + [run(arm, 1e-3, 1, sampler="fp8", anchor=anchor, **small) for arm, anchor in coarse]


PLANS: dict[str, Callable[[], Sequence[Run]]] = {
    "claims": claims,
    "first": first,
    "a": the_map,
    "a-floor": floor,
    "a-reuse": reused,
    "a-published": published,
    "a-starts": starts,
    "g": ablations,
    "b": pretrained,
    "b-held": held_pretrained,
    "b-clip": lambda: [_pretrained(("ppo_clip", 4), rate, seed) for seed, rate in itertools.product(SEEDS, WORD_RATES)],
    "b-gemma": gemma,
    "b-gemma-held": held_gemma,
    "b-confirm": lambda: confirmed("smollm2"),
    "b-gemma-confirm": lambda: confirmed("gemma"),
    "b-books": lambda: elsewhere("books"),
    "b-gsm8k": lambda: elsewhere("gsm8k"),
    "f": mismatch,
    "f-bounds": bounds,
    "f-rare": rare,
    "f-stability": stability,
    "f-moe": experts,
    "c": estimators,
    "e": code,
    "evidence-tiny": tiny,
    "b-tiny": lambda: [_pretrained(arm, 1e-5, 401, steps=2, eval_size=16, eval_every=2) for arm in WORD_ARMS],
}
