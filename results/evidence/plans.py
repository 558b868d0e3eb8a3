"""The runs of each part of the evidence, the most telling first, one seed after another."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from results.deployed.plans import auto_start, grid
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
"""Of other starts than the embedded model's own, as scripts/warm_start.py makes them."""
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


def run(arm: tuple[str, str] = ("troll", ""), **others: Any) -> Run:
    """One run of an arm."""
    return Run(objective=arm[0], variant=arm[1], **others)


def plan(axes: Mapping[str, Sequence[Any]], **same: Any) -> list[Run]:
    """A run of the embedded model for every combination of values, the last axis innermost."""
    return grid(axes, run, **same)


def starts() -> list[Run]:
    """The map's two main contestants and what holds them apart, from other warm starts and families: runs/starts must exist."""
    folders = [f"runs/starts/{name}" for name in ("llama-1", "llama-2", "llama-3", *(f"{name}-1" for name in FAMILIES))]
    arms = (("ppo_clip", ""), ("troll", ""), ("dppo", ""))
    return plan({"seed": SEEDS[:3], "model": folders, "rate": (HOT, TUNED), "arm": arms})


def mismatch() -> list[Run]:
    """Samplers in fp8 and bf16, anchored at what they report and at what the trainer recomputes; then the same precision."""
    arms = (("dppo", ""), ("troll", ""), ("ppo_clip", ""), ("troll", "unprojected"))
    return plan({"seed": SEEDS, "sampler": ("fp8", "bf16"), "anchor": ("rollout", "old"), "arm": arms}, rate=TUNED)


def bounds() -> list[Run]:
    """DPPO with smaller bounds, beside .2 and clipping's ε of the map."""
    return plan({"seed": SEEDS[:3], "rate": (HOT, TUNED), "arm": [("dppo", variant) for variant in ("", "δ=.1", "δ=.15")]})


def rare() -> list[Run]:
    """Clipping lifted for rare tokens, where it is tuned, at a large rate, and with four passes over a batch."""
    return plan({"seed": SEEDS, "how": ({"rate": TUNED, **AGAIN}, {"rate": HOT}, {"rate": TUNED}), "arm": RARE})


def estimators() -> list[Run]:
    """TROLL and clipping under other advantages than the group's standardised ones."""
    arms = [(objective, variant) for variant in ("rloo", "no std", "reinforce++") for objective in ("troll", "ppo_clip")]
    return plan({"seed": SEEDS[:3], "rate": (HOT, TUNED), "arm": arms})


def stability() -> list[Run]:
    """DPPO's stability protocol in small: 2,048 updates at a small constant rate, an fp8 sampler, both anchors.

    The protocol asks for problems that can all be solved: the embedded model solves its training problems greedily, so rewards
    should reach 1. The paper has 4 updates per batch, this plan 32 in four passes, so that a run takes minutes of a GPU.
    """
    return plan({"seed": SEEDS, "how": [{"arm": (name, ""), "anchor": at} for name, at in ANCHORED]}, rate=1e-4, **LONG)


def experts() -> list[Run]:
    """A mixture of experts with a sampler in fp8, which routes some tokens otherwise, by anchor: runs/starts must exist."""
    arms = (("dppo", ""), ("troll", ""), ("ppo_clip", ""))
    return plan({"seed": SEEDS[:3], "anchor": ("rollout", "old"), "arm": arms}, rate=TUNED, model=MOE, sampler="fp8")


def pretrained(arm: tuple[str, int], rate: float | str, seed: int, base: str = "smollm2", **others: Any) -> Pretrained:
    """One run of a pretrained model; "auto" is held, at the bound that is its default for as many passes."""
    model = str(BASES[base]["model"]).format(start=seed - SEEDS[0] + 1)
    held = {"schedule": "constant", "bound": 0.03 if arm[1] == 1 else 0.01} if rate == "auto" else {}
    others = {"eval_size": problems_of(base), **held, **others}
    return Pretrained(objective=arm[0], passes=arm[1], rate=rate, seed=seed, base=base, model=model, **others)


def first_batches(objective: str, passes: int, base: str = "smollm2", **others: Any) -> Pretrained:
    """A run of a pretrained model for the start of "auto"."""
    recipe = {"recipe": "gsm8k"} if base == "qwen" else {}
    return pretrained((objective, passes), base=base, **recipe, **others)


def words(axes: Mapping[str, Sequence[Any]], **same: Any) -> list[Pretrained]:
    """A run of a pretrained model for every combination of values, the last axis innermost."""
    return grid(axes, pretrained, **same)


def smollm2() -> list[Pretrained]:
    """SmolLM2: three seeds of four arms × three rates, then two more."""
    axes: dict[str, Any] = {"rate": WORD_RATES, "arm": WORD_ARMS}
    return words({"seed": SEEDS[:3], **axes}) + words({"seed": SEEDS[3:], **axes})


def held_smollm2() -> list[Pretrained]:
    """SmolLM2 with the deployed network held: a rate that nobody tunes, then one that is good and one that is not."""
    how = ({"rate": 1e-4, "bound": 0.03}, {"rate": 1e-3, "bound": 0.03}, {"rate": 1e-3})
    plan = words({"seed": SEEDS, "arm": HELD_ARMS}, rate="auto")
    return plan + words({"seed": SEEDS[:3], "arm": WORD_ARMS[:2], "how": how})


def confirmed(base: str) -> list[Pretrained]:
    """Each arm at its best rate, and clipping at a rate that nobody tunes, measured on more held-out problems.

    On seeds that had no part in choosing those rates; four passes on the first five of them, after all else.
    """
    how = [{"arm": arm, "rate": rate} for arm, rate in BEST[base].items()]
    once, again = ([one for one in how if (one["arm"][1] == 1) == wanted] for wanted in (True, False))
    same: dict[str, Any] = {"base": base, "eval_size": MANY}
    plan = words({"seed": FRESH[base], "how": [*once, {"arm": once[0]["arm"], "rate": "auto"}]}, **same)
    return plan + words({"seed": FRESH[base][:5], "how": again}, **same)


def elsewhere(base: str) -> list[Pretrained]:
    """SmolLM2 on word problems from books, or on GSM8K: three seeds of three arms × three rates, the middle one first."""
    return words({"rate": (3e-5, 1e-5, 1e-4), "seed": SEEDS[:3], "arm": WORD_ARMS[:3]}, base=base)


def code() -> list[Coded]:
    """Programs: clipping and TROLL, three starts, at three rates."""
    folder = str(CODE["task_config"]["path"]).rpartition("/")[0]
    starts = [{"seed": seed, "model": f"{folder}/{place}"} for place, seed in enumerate(SEEDS[:3], 1)]
    return grid({"rate": (TUNED, 1e-4, HOT), "how": starts, "objective": ("ppo_clip", "troll")}, Coded)


def claims() -> list[Run]:
    """What the claims on the embedded model compare, and nothing else: 18 runs and 1,100 seconds of one core for each seed."""
    hot = [*ARMS[:6], ("troll", "constant dual"), ("troll", "no regression")]
    found = []
    for seed in SEEDS:
        found += plan({"arm": hot}, rate=HOT, seed=seed)
        found += plan({"how": (AGAIN, {}), "arm": ARMS[:3]}, rate=TUNED, seed=seed)
        arms = (("troll", ""), ("dppo", ""))
        found += plan({"arm": arms, "anchor": ("rollout", "old")}, rate=TUNED, seed=seed, sampler="fp8")
    return found


def first() -> list[Run]:
    """Three seeds of the map, then of the ablations where TROLL acts: two hours of one core, eight minutes of sixteen."""
    ablated = [spec for spec in PLANS["g"]() if spec.rate == HOT]
    return [spec for spec in [*PLANS["a"](), *ablated] if spec.seed in SEEDS[:3]]


def tiny() -> list[Run]:
    """Two steps of every variant, and of one update per batch: does it run at all?"""
    small: dict[str, Any] = {"rate": 1e-3, "seed": 1, "steps": 2, "eval_size": 16, "eval_every": 2}
    arms = list(dict.fromkeys([*ARMS, *RARE, *PUBLISHED, *(("troll", variant) for variant in ABLATIONS)]))
    coarse = {"arm": (("dppo", ""), ("troll", "")), "anchor": ("rollout", "old")}
    return [*plan({"arm": arms}, **small), run(updates=1, **small), *plan(coarse, sampler="fp8", **small)]


PLANS: dict[str, Callable[[], Sequence[Run]]] = {
    "claims": claims,
    "first": first,
    # Seven contestants × four rates at 8 updates per batch, 15 batches.
    "a": lambda: plan({"seed": SEEDS, "rate": RATES, "arm": ARMS}),
    # One update per batch: objectives differ by rounding alone, so this is what chance does.
    "a-floor": lambda: plan({"seed": SEEDS, "rate": (HOT, 3e-3, TUNED), "arm": REUSED}, updates=1),
    # Four passes over each batch at three rates.
    "a-reuse": lambda: plan({"seed": SEEDS, "rate": (TUNED, 4e-4, 1e-4), "arm": REUSED}, **AGAIN),
    # The papers' own reductions and advantages, at the best rate and above it.
    "a-published": lambda: plan({"seed": SEEDS, "rate": (TUNED, HOT), "arm": PUBLISHED}),
    "a-starts": starts,
    # TROLL, one thing changed at a time, where it acts and where it is tuned.
    "g": lambda: plan({"seed": SEEDS, "rate": (HOT, TUNED), "arm": [("troll", variant) for variant in ("", *ABLATIONS)]}),
    "b": smollm2,
    "b-held": held_smollm2,
    "b-clip": lambda: words({"seed": SEEDS, "rate": WORD_RATES}, arm=("ppo_clip", 4)),
    "b-gemma": lambda: words({"seed": SEEDS[:3], "rate": GEMMA_RATES, "arm": WORD_ARMS}, base="gemma"),
    "b-gemma-held": lambda: words({"seed": SEEDS[:3], "arm": HELD_ARMS}, rate="auto", base="gemma"),
    "b-confirm": lambda: confirmed("smollm2"),
    "b-gemma-confirm": lambda: confirmed("gemma"),
    "b-books": lambda: elsewhere("books"),
    "b-gsm8k": lambda: elsewhere("gsm8k"),
    "b-auto-start": lambda: grid(
        **auto_start({arm: rate for arm, rate in BEST["smollm2"].items() if arm[0] != "dppo"}, kind=first_batches)
    ),
    "qwen-auto-start": lambda: grid(**auto_start({("troll", 1): 3e-6, ("ppo_clip", 1): 3e-6}, kind=first_batches, base="qwen")),
    "f": mismatch,
    "f-bounds": bounds,
    "f-rare": rare,
    "f-stability": stability,
    "f-moe": experts,
    "c": estimators,
    "e": code,
    "evidence-tiny": tiny,
    "b-tiny": lambda: words({"arm": WORD_ARMS}, rate=1e-5, seed=401, steps=2, eval_size=16, eval_every=2),
}
