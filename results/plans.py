"""The runs of each part of the studies on language models, the most telling first, one seed after another."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from results.spec import BASES, CODE, CODED, PRETRAINED, WORDS, Run
from results.table import every_arm

TUNING = (301, 302, 303)
"""Seeds that settings are chosen on; the third for what cannot be told from two."""
FRESH = tuple(range(401, 411))
"""Seeds on which nothing was tuned."""
SEEDS = FRESH[:5]
TUNED, HOT = 2e-4, 1e-3
"""The demo's own rate, and one at which regions have something to do."""
RATES = (3e-4, 1e-3, 1e-4, 3e-3, 1e-2, 3e-5, 3e-2)
"""Half decades around the demo's own rate, the most telling first."""
BOUNDS = (0.01, 0.1, 0.03, 0.003, 0.3)
"""Half decades of the mean KL, the most telling first."""
HELD: dict[str, Any] = {"rate": "auto", "bound": None}
"""`learning_rate="auto"` with the bound .02."""
AUTO_BOUNDS = (0.01, 0.02, 0.03)
"""Bounds between which "auto" was decided; with one pass it has the last."""
HELD_CONSTANT: dict[str, Any] = {"rate": "auto", "bound": 0.03, "schedule": "constant"}
_REUSED = ("troll", "ppo_clip", "dppo")
_REUSE: dict[str, Any] = {"steps": 10, "eval_size": 1024}
_CONFIRM: dict[str, Any] = {"eval_every": 2, "eval_size": 1024, "end_size": 4096}
CHOSEN: tuple[dict[str, Any], ...] = (
    {"objective": "troll", "passes": 4, "rate": "auto", "bound": 0.03},
    {"objective": "ppo_clip", "passes": 4, "rate": 2e-4},
    {"objective": "ppo_clip", "passes": 1, "rate": 4e-4, "steps": 20},
    {"objective": "dppo", "passes": 8, **HELD},
    {"objective": "ppo_clip", "passes": 8, "rate": "auto", "bound": 0.08},
    {"objective": "troll", "passes": 4, "rate": 2e-4},
)
"""By area over ten steps on the tuning seeds: the best of TROLL; of clipping unbounded (1e-4, 2e-4, 4e-4 × 2, 4, 8 passes); its
better rate in one pass, with twice the rollouts; the best of DPPO, and of clipping bounded; TROLL unbounded."""
_FOUR: dict[str, Any] = {"passes": 4, "schedule": "constant"}
MANY: tuple[dict[str, Any], ...] = (
    {"objective": "troll", "rate": "auto", "bound": 0.01, **_FOUR},
    {"objective": "ppo_clip", "rate": "auto", "bound": 0.02, **_FOUR},
    {"objective": "dppo", "rate": "auto", "bound": 0.02, **_FOUR},
    {"objective": "ppo_clip", "rate": 1e-4, **_FOUR},
    {"objective": "troll", "rate": 1e-4, **_FOUR},
)
"""Four passes with a constant schedule: the better bounds of two tuning seeds, DPPO's a guess; and the schedule alone, at the
mean rate of the linear ones that were chosen."""
AUTO_START = {("ppo_clip", 1): 4e-4, ("troll", 1): 4e-4, ("ppo_clip", 4): 2e-4, ("troll", 4): 2e-4}
"""The rate of the largest mean area by objective and passes, unbounded."""

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
REUSED = ARMS[:5]
"""Those with one and with 32 updates per batch."""
AGAIN: dict[str, Any] = {"passes": 4, "steps": 10, "eval_every": 2}
"""32 updates per batch: four passes over each, 10 batches."""
FAMILIES = ("qwen3", "gemma", "moe")
"""Of other starts than the embedded model's own, as scripts/warm_start.py makes them."""
ABLATIONS = (
    "constant dual", "unprojected", "no regression", "α=.1", "α=.3", "α=3", "α=10", "ε=.01", "ε=.2", "union", "fill", "K=4",
    "mass .9", "K=16", "K=4, mass .9",
)  # fmt: skip
PUBLISHED = (("troll", "published"), ("troll", "token mean"), ("ppo_clip", "token mean"), ("dppo", "token sum, no std"))
"""Objectives as their papers run them, where that differs from the common form: sums over a fixed length for all."""
WORD_RATES = (1e-5, 3e-5, 1e-4)
"""Of a pretrained model, half decades; on seed 301 the middle one was the best of 3e-6 to 1e-4 for every objective."""
GEMMA_RATES = (1e-6, 3e-6, *WORD_RATES)
"""Two lower for the larger model, whose best are there."""
QWEN_RATES = (3e-6, 1e-6, 1e-5, 3e-5)
"""Half decades for Qwen, the middle ones first."""
WORD_ARMS = (("ppo_clip", 1), ("troll", 1), ("dppo", 1), ("troll", 4))
"""Objective and passes over each batch."""
BOUNDED_ARMS = (("ppo_clip", 1), ("troll", 1), ("troll", 4))
"""Those of runs whose deployed network is bounded."""
WORD_SEEDS = {"smollm2": range(406, 416), "gemma": range(406, 411)}
"""Seeds of a pretrained model on which nothing was chosen."""
BEST: dict[str, dict[tuple[str, int], float]] = {
    "smollm2": {("ppo_clip", 1): 3e-5, ("troll", 1): 3e-5, ("dppo", 1): 3e-5, ("troll", 4): 1e-5, ("ppo_clip", 4): 3e-5},
    "gemma": {("ppo_clip", 1): 1e-6, ("troll", 1): 3e-6, ("dppo", 1): 1e-6, ("troll", 4): 1e-6},
}
"""The rate of the largest mean area on seeds 401 to 405; on Gemma 401 to 403, with four passes 401 alone."""
MEASURED = 1024
"""Held-out problems of a measurement where a few points decide. The area has four measurements, so that of one run has a
standard error of .008 at most, that of a single measurement on 4,096 problems."""


def grid(axes: Mapping[str, Sequence[Any]], kind: Callable[..., Run] = Run, **same: Any) -> list[Run]:
    """A run for every combination of values, the last axis innermost; values of the axis `how` are several settings each."""
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [kind(**{**same, **row.pop("how", {}), **row}) for row in rows]


def reuse() -> list[Run]:
    """Passes × objectives, at the demo's rate and at "auto"; long runs first for each seed: a piece ends with short ones."""
    return grid({"seed": TUNING[:2], "passes": (8, 4, 2, 1), "how": ({"rate": 2e-4}, HELD), "objective": _REUSED}, **_REUSE)


def bound() -> list[Run]:
    """Bounds at "auto" over two decades with one pass, then with the passes that were chosen: how far off may one be?"""
    same = {"rate": "auto", "end_size": 4096, **_REUSE}
    one = grid({"seed": TUNING, "bound": BOUNDS, "objective": _REUSED}, passes=1, **same)
    many = {"seed": TUNING[:2], "bound": (0.01, 0.03, 0.05), "passes": (4, 8), "objective": ("troll", "ppo_clip")}
    return one + grid(many, **same)


def chosen(seeds: Sequence[int], settings: Sequence[dict[str, Any]], **same: Any) -> list[Run]:
    """Settings as they were chosen, seeds outermost; ten steps unless they say otherwise."""
    return grid({"seed": seeds, "how": settings}, **{"steps": 10, **_CONFIRM, **same})


def confirm_rates(seeds: Sequence[int]) -> list[Run]:
    """Clipping and TROLL with one pass: at tuned rates, at "auto", and at rates far too large, bounded and not."""
    settings: list[dict[str, Any]] = [{"rate": 2e-4}, {"rate": 4e-4}, {"rate": "auto", "bound": 0.03}]
    settings += [{"rate": rate, "bound": bound} for rate in (1e-3, 3e-3) for bound in (0.03, math.inf)]
    settings += [{"rate": 2e-4, "bound": 0.03}]
    return grid({"seed": seeds, "how": settings, "objective": ("ppo_clip", "troll")}, eval_size=1024, end_size=4096)


def confirm_constant() -> list[Run]:
    """A constant schedule at "auto", as the tuning seeds favour it, on fresh seeds; then with four passes on tuning seeds."""
    one = grid({"seed": FRESH, "objective": ("ppo_clip", "troll")}, **HELD_CONSTANT, eval_size=1024, end_size=4096)
    axes = {"seed": TUNING[:2], "bound": (0.03, 0.02, 0.01), "objective": ("troll", "ppo_clip")}
    return one + grid(axes, **HELD_CONSTANT, passes=4, end_size=4096, **_REUSE)


def bound_many() -> list[Run]:
    """Unbounded rates, then bounds, with four and eight passes and a constant schedule, on tuning seeds."""
    same: dict[str, Any] = {"end_size": 4096, "schedule": "constant", **_REUSE}
    unbounded = grid({"seed": TUNING[:2], "rate": (1e-4, 2e-4, 5e-5), "objective": _REUSED}, passes=4, **same)
    axes = {"seed": TUNING[:2], "passes": (4, 8), "bound": (0.01, 0.02, 0.005), "objective": _REUSED}
    return unbounded + grid(axes, rate="auto", **same)


def elsewhere() -> list[Run]:
    """The two of the main comparison on other tasks, from other warm starts and in another family; seeds outermost."""
    places = ("n_max29", "arithmetic", "start1", "start2", "start3", "gemma")
    same = {"steps": 10, **_CONFIRM, "eval_every": 5}  # the curve is not compared
    return grid({"seed": FRESH[:3], "how": CHOSEN[:2], "start": places}, **same) + chosen(
        FRESH[:3], CHOSEN[:2], start="n_max9", eval_every=5
    )


def auto_start(tuned: Mapping[tuple[str, int], float]) -> list[Run]:
    """Five batches each at "auto", with its bound from 1e-3 without a search, and at a tuned rate."""
    how = []
    for (objective, passes), rate in tuned.items():
        about, bound = {"objective": objective, "passes": passes}, 0.03 if passes == 1 else 0.01
        how += [{**about, "rate": "auto", "bound": bound}, {**about, "rate": 1e-3, "bound": bound}, {**about, "rate": rate}]
    return grid({"seed": range(501, 509), "how": how}, steps=5, eval_every=5, eval_size=8, schedule="constant")


def auto_start_four() -> list[Run]:
    """Bounds at "auto" with four passes, beside tuned rates: ten batches, of which the first five show what the start costs."""
    bounds: list[dict[str, Any]] = [{"rate": "auto", "bound": bound} for bound in AUTO_BOUNDS]
    axes = {"seed": range(501, 509), "how": [*bounds, {"rate": 2e-4}], "objective": ("ppo_clip", "troll")}
    return grid(axes, passes=4, steps=10, eval_every=5, eval_size=1024, schedule="constant")


def smollm2_start() -> list[Run]:
    """Five batches of SmolLM2 at "auto" and at the rate that a grid chose; with four passes at three bounds."""
    how: list[dict[str, Any]] = []
    for arm in (("ppo_clip", 1), ("troll", 1), ("ppo_clip", 4), ("troll", 4)):
        how += [{"arm": arm, "rate": "auto", "bound": bound} for bound in (AUTO_BOUNDS if arm[1] > 1 else AUTO_BOUNDS[-1:])]
        how += [{"arm": arm, "rate": BEST["smollm2"][arm]}]
    return words({"seed": range(501, 507), "how": how}, steps=5, eval_every=5, eval_size=8, schedule="constant")


def qwen(objectives: Sequence[str], rates: Sequence[float | str], seeds: Sequence[int], steps: int) -> list[Run]:
    """A few batches of Qwen, used once; "auto" is bounded."""
    axes = {"seed": seeds, "rate": rates, "objective": objectives}
    return words(axes, base="qwen", passes=1, steps=steps, eval_every=steps, eval_size=8, schedule="constant")


def auto_again() -> list[Run]:
    """Published runs of the embedded model at "auto", now with the search on the first batch; those of the headline first."""
    names = ("confirm-reuse", "confirm-many", "confirm-constant", "confirm-rates", "confirm-rates-more", "confirm-more")
    names += ("elsewhere", "bound-constant", "bound-many", "bound", "reuse", "reuse-auto")
    return [spec for name in names for spec in PLANS[name]() if spec.rate == "auto"]


def rates(seeds: Sequence[int]) -> list[Run]:
    """Half decades × objectives × off and on, the edges of what is usable first; linear schedules, then constant."""
    objectives = ("ppo_clip", "troll", "dppo", "reinforce")
    axes = {"schedule": ("linear", "constant"), "seed": seeds, "rate": RATES, "bound": (0.03, math.inf)}
    return grid({**axes, "objective": objectives}, end_size=4096, **_REUSE)


def run(arm: tuple[str, str] = ("troll", ""), **others: Any) -> Run:
    """One run of an arm, measured on as many problems as pages compare."""
    return Run(objective=arm[0], variant=arm[1], **{"eval_size": 1024, **others})


def plan(axes: Mapping[str, Sequence[Any]], **same: Any) -> list[Run]:
    """A run of the embedded model for every combination of values, the last axis innermost."""
    return grid(axes, run, **same)


def starts() -> list[Run]:
    """The map's two main contestants and DPPO from other warm starts and families: runs/starts must exist."""
    folders = [f"runs/starts/{name}" for name in ("llama-1", "llama-2", "llama-3", *(f"{name}-1" for name in FAMILIES))]
    return plan({"seed": SEEDS[:3], "model": folders, "rate": (HOT, TUNED), "arm": ARMS[:3]})


def estimators() -> list[Run]:
    """TROLL and clipping under other advantages than the group's standardised ones."""
    arms = [(objective, variant) for variant in ("rloo", "no std", "reinforce++") for objective in ("troll", "ppo_clip")]
    return plan({"seed": SEEDS[:3], "rate": (HOT, TUNED), "arm": arms})


def pretrained(
    arm: tuple[str, int] = ("", 0), *, rate: float | str, seed: int, objective: str = "", passes: int = 0,
    base: str = "smollm2", **others: Any,
) -> Run:  # fmt: skip
    """One run of a pretrained model; "auto" is bounded, at the default for as many passes."""
    objective, passes = (objective, passes) if objective else arm
    bounded = {"schedule": "constant", "bound": 0.03 if passes == 1 else 0.01} if rate == "auto" else {}
    same = {"recipe": "gsm8k" if base == "qwen" else PRETRAINED, "steps": int(WORDS["steps"])}
    same |= {"eval_every": int(WORDS["eval_every"]), "eval_size": int(BASES[base].get("eval_size", WORDS["eval_size"]))}
    model = str(BASES[base]["model"]).format(start=seed - SEEDS[0] + 1)
    about = {"objective": objective, "passes": passes, "rate": rate, "seed": seed, "base": base, "model": model}
    return Run(**{**same, **bounded, **about, **others})


def words(axes: Mapping[str, Sequence[Any]], **same: Any) -> list[Run]:
    """A run of a pretrained model for every combination of values, the last axis innermost."""
    return grid(axes, pretrained, **same)


def smollm2() -> list[Run]:
    """SmolLM2: three seeds of four arms × three rates, then two more."""
    axes: dict[str, Any] = {"rate": WORD_RATES, "arm": WORD_ARMS}
    return words({"seed": SEEDS[:3], **axes}) + words({"seed": SEEDS[3:], **axes})


def bounded_smollm2() -> list[Run]:
    """SmolLM2 with the deployed network bounded: a rate that nobody tunes, then one that is good and one that is not."""
    how = ({"rate": 1e-4, "bound": 0.03}, {"rate": 1e-3, "bound": 0.03}, {"rate": 1e-3})
    automatic = words({"seed": SEEDS, "arm": BOUNDED_ARMS}, rate="auto")
    return automatic + words({"seed": SEEDS[:3], "arm": WORD_ARMS[:2], "how": how})


def confirmed(base: str) -> list[Run]:
    """Each arm at its best rate, and clipping at a rate that nobody tunes, measured on more held-out problems.

    On seeds that had no part in choosing those rates; four passes on the first five of them, after all else.
    """
    how = [{"arm": arm, "rate": rate} for arm, rate in BEST[base].items()]
    once, again = ([one for one in how if (one["arm"][1] == 1) == wanted] for wanted in (True, False))
    same: dict[str, Any] = {"base": base, "eval_size": MEASURED}
    first = words({"seed": WORD_SEEDS[base], "how": [*once, {"arm": once[0]["arm"], "rate": "auto"}]}, **same)
    return first + words({"seed": WORD_SEEDS[base][:5], "how": again}, **same)


def other_problems(base: str) -> list[Run]:
    """SmolLM2 on word problems from books, or on GSM8K: three seeds of three arms × three rates, the middle one first."""
    return words({"rate": (3e-5, 1e-5, 1e-4), "seed": SEEDS[:3], "arm": WORD_ARMS[:3]}, base=base)


def code() -> list[Run]:
    """Programs: clipping and TROLL, three starts, at three rates."""
    folder = str(CODE["task_config"]["path"]).rpartition("/")[0]
    how = [{"seed": seed, "model": f"{folder}/{place}"} for place, seed in enumerate(SEEDS[:3], 1)]
    same = {name: int(CODE[name]) for name in ("steps", "eval_every", "eval_size")}
    return grid({"rate": (TUNED, 1e-4, HOT), "how": how, "objective": ("ppo_clip", "troll")}, recipe=CODED, **same)


def claims() -> list[Run]:
    """What the claims on the embedded model compare, and nothing else: 14 runs of one core for each seed."""
    hot = [*ARMS[:6], ("troll", "constant dual"), ("troll", "no regression")]
    found = []
    for seed in SEEDS:
        found += plan({"arm": hot}, rate=HOT, seed=seed)
        found += plan({"how": (AGAIN, {}), "arm": ARMS[:3]}, rate=TUNED, seed=seed)
    return found


def first() -> list[Run]:
    """Three seeds of the map, then of the ablations where TROLL acts: two hours of one core, eight minutes of sixteen."""
    ablated = [spec for spec in PLANS["g"]() if spec.rate == HOT]
    return [spec for spec in [*PLANS["a"](), *ablated] if spec.seed in SEEDS[:3]]


def tiny() -> list[Run]:
    """Two steps of every variant, of one update per batch, and bounded: does it run at all?"""
    small: dict[str, Any] = {"rate": 1e-3, "seed": 1, "steps": 2, "eval_size": 16, "eval_every": 2}
    arms = list(dict.fromkeys([*ARMS, *PUBLISHED, *(("troll", variant) for variant in ABLATIONS)]))
    return [*plan({"arm": arms}, **small), run(updates=1, **small), run(passes=2, **{**small, **HELD})]


PLANS: dict[str, Callable[[], Sequence[Run]]] = {
    "reuse": reuse,
    "bound": bound,
    # With one pass and a constant schedule, where the bound alone says how far a step goes.
    "bound-constant": lambda: grid(
        {"seed": TUNING, "bound": BOUNDS, "objective": _REUSED}, **{**HELD_CONSTANT, "end_size": 4096, **_REUSE}
    ),
    # Other rates × passes, unbounded: with `reuse`, the trials by which settings are chosen to be confirmed.
    "tune": lambda: grid({"seed": TUNING[:2], "passes": (8, 4, 2), "rate": (1e-4, 4e-4), "objective": _REUSED}, **_REUSE),
    # As many passes as a batch is good for, at the demo's rate and at "auto".
    "reuse-auto": lambda: grid(
        {"seed": TUNING[:2], "rate": (2e-4, "auto"), "objective": _REUSED}, passes=8, bound=0.02, reuse="auto", **_REUSE
    ),
    # Ten fresh seeds of the first three of CHOSEN, which the main comparison needs, five of the others.
    "confirm-reuse": lambda: chosen(SEEDS, CHOSEN) + chosen(FRESH[5:], CHOSEN[:3]),
    "confirm-rates": lambda: confirm_rates(SEEDS),
    "confirm-rates-more": lambda: confirm_rates(FRESH[5:]),
    "confirm-constant": confirm_constant,
    "confirm-more": lambda: chosen(FRESH[5:], CHOSEN[3:]),
    "confirm-many": lambda: chosen(FRESH, MANY),
    "bound-many": bound_many,
    "rates": lambda: rates(TUNING[:2]),
    "rates-more": lambda: rates(TUNING[2:]),
    "elsewhere": elsewhere,
    "auto-start": lambda: auto_start(AUTO_START),
    "claims": claims,
    "first": first,
    # Seven contestants × four rates at 8 updates per batch, 15 batches; the best of every objective is inside.
    "a": lambda: plan({"seed": SEEDS, "rate": (HOT, TUNED, 1e-4, 3e-3), "arm": ARMS}),
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
    "b-held": bounded_smollm2,
    "b-clip": lambda: words({"seed": SEEDS, "rate": WORD_RATES}, arm=("ppo_clip", 4)),
    "b-gemma": lambda: words({"seed": SEEDS[:3], "rate": GEMMA_RATES, "arm": WORD_ARMS}, base="gemma"),
    "b-gemma-held": lambda: words({"seed": SEEDS[:3], "arm": BOUNDED_ARMS}, rate="auto", base="gemma"),
    "b-confirm": lambda: confirmed("smollm2"),
    "b-gemma-confirm": lambda: confirmed("gemma"),
    "b-books": lambda: other_problems("books"),
    "b-gsm8k": lambda: other_problems("gsm8k"),
    "b-auto-start": smollm2_start,
    "auto-start-four": auto_start_four,
    "auto-again": auto_again,
    "qwen-tune": lambda: qwen(("ppo_clip",), QWEN_RATES, (401,), 8) + qwen(("troll",), QWEN_RATES[:3], (401,), 8),
    "qwen-auto-start": lambda: qwen(("troll", "ppo_clip"), ("auto", *QWEN_RATES), range(501, 506), 5),
    # DPPO with smaller bounds, beside .2 and clipping's ε of the map.
    "f-bounds": lambda: plan({"seed": SEEDS[:3], "rate": (HOT, TUNED), "arm": [("dppo", x) for x in ("", "δ=.1", "δ=.15")]}),
    "c": estimators,
    "e": code,
    "tiny": tiny,
    "table-tiny": every_arm,
    "b-tiny": lambda: words({"arm": WORD_ARMS}, rate=1e-5, seed=401, steps=2, eval_size=16, eval_every=2),
}
