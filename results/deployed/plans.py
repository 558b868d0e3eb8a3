"""The runs of each part of the study, the most telling first."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from results.deployed.spec import Arm, Shipped, Spec, WordSpec

TUNED = (2e-4, 4e-4)
"""Rates at which nothing needs to be held: the best, and the largest that is not far behind."""
DEAD_AT = {1e-2: ("none", "calm", "stop", "rate_k3", "rate_mean", "rate_update")}
"""Arms that end at 0 at a rate: two seeds show that."""
SHARE = {1e-3: 0.25, 1e-2: 0.03}
"""Lookahead's share of a step: about what retraction keeps at that rate."""

ARMS = {
    "auto": Arm(control="mean", retract="p999", slack=2.0),
    "auto_mean": Arm(control="mean", retract="mean", slack=2.0),
    "auto_redo": Arm(control="mean", retract="mean", slack=2.0, redo=True),
    "rate_first": Arm(control="k3", first=True),
    "mean": Arm(retract="mean"),
    "redo": Arm(retract="mean", redo=True),
    "rate_k3": Arm(control="k3"),
    "rate_update": Arm(within=True),
    "lookahead": Arm(),
    "p999": Arm(retract="p999"),
    "rate_mean": Arm(control="mean"),
    "none": Arm(),
    "accept": Arm(retract="mean", accept=True),
    "stop": Arm(stop=True),
    "ema": Arm(ema=0.8),
    "calm": Arm(calm=True),
    "cvar": Arm(retract="cvar"),
    "k3": Arm(retract="k3"),
}
"""What is compared, the most telling first. Prodigy and schedule-free AdamW are packages that the study does without."""

WORD_ARMS = (
    "auto_mean", "rate_first", "mean", "none", "redo", "rate_k3", "rate_update", "p999", "lookahead", "stop", "k3", "cvar",
    "accept", "ema", "calm",
)  # fmt: skip
"""Those on a pretrained model, the most telling first."""
TOLD_APART = ("auto_mean", "rate_first", "mean", "none")
"""Those that run with both schedules, and at a rate ten times larger."""
WORDS_TUNED = (1e-5, 3e-5)
"""Rates at which nothing needs to be held there, by the map of docs/results/llm.md."""
RATES = (3e-4, 1e-3, 1e-4, 3e-3, 1e-2, 3e-5, 3e-2)
"""Half decades around the demo's own 2e-4, the most telling first."""
BOUNDS = (0.01, 0.1, 0.03, 0.003, 0.3)
"""Half decades of the mean KL, the most telling first."""
HELD: dict[str, Any] = {"rate": "auto", "bound": None}
"""`learning_rate="auto"` with the bound .02."""
HELD_CONSTANT: dict[str, Any] = {"rate": "auto", "bound": 0.03, "schedule": "constant"}
_REUSED = ("troll", "ppo_clip", "dppo")
_REUSE: dict[str, Any] = {"steps": 10, "eval_size": 1024}
_CONFIRM: dict[str, Any] = {"eval_every": 2, "eval_size": 1024, "end_size": 4096}
TUNING = (301, 302, 303)
"""Seeds that settings are chosen on; the third for what cannot be told from two."""
FRESH = tuple(range(401, 411))
"""Seeds on which nothing was tuned."""
CHOSEN: tuple[dict[str, Any], ...] = (
    {"objective": "troll", "passes": 4, "rate": "auto", "bound": 0.03},
    {"objective": "ppo_clip", "passes": 4, "rate": 2e-4},
    {"objective": "ppo_clip", "passes": 1, "rate": 4e-4, "steps": 20},
    {"objective": "dppo", "passes": 8, **HELD},
    {"objective": "ppo_clip", "passes": 8, "rate": "auto", "bound": 0.08},
    {"objective": "troll", "passes": 4, "rate": 2e-4},
)
"""By area over ten steps on the tuning seeds: the best of TROLL; of clipping with nothing held (1e-4, 2e-4, 4e-4 × 2, 4, 8
passes); its better rate in one pass, with twice the rollouts (gate 0); the best of DPPO, and of clipping held; TROLL unheld."""


def grid(axes: Mapping[str, Sequence[Any]], kind: Callable[..., Any] = Shipped, **same: Any) -> list[Any]:
    """A run for every combination of values, the last axis innermost; values of the axis `how` are several settings each."""
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [kind(**{**same, **row.pop("how", {}), **row}) for row in rows]


def arms(names: Sequence[str], schedule: str, seeds: Sequence[int], objective: str = "ppo_clip") -> list[Spec]:
    """Arms × their rates, seeds outermost; "tuned" is nothing at rates that suit it."""
    plan = []
    for seed, name in itertools.product(seeds, names):
        for rate in TUNED if name == "tuned" else SHARE:
            if not (name in DEAD_AT.get(rate, ()) and seed > 202):
                held = Arm(share=SHARE[rate]) if name == "lookahead" else ARMS.get(name, Arm())
                plan.append(Spec(arm=name, held=held, rate=rate, schedule=schedule, seed=seed, objective=objective))
    return plan


def gate0(schedule: str = "linear", objective: str = "ppo_clip") -> list[Spec]:
    """Every arm × two rates far too large × five seeds, and nothing at rates that suit it; seeds outermost."""
    plan = arms(("tuned", *ARMS), schedule, range(201, 206), objective)
    return [replace(spec, steps=10, eval_every=2, eval_size=1024) for spec in plan]


def gate0_words() -> list[WordSpec]:
    """The same on SmolLM2 at rates 30 and 300 times too large, and nothing at rates that suit it; seeds outermost."""
    same: dict[str, Any] = {"steps": 10, "eval_every": 2, "eval_size": 256}
    plan = []
    for seed, name in itertools.product(FRESH[:3], WORD_ARMS):
        held = Arm(share=0.03) if name == "lookahead" else ARMS[name]
        linear = WordSpec(arm=name, held=held, rate=1e-3, schedule="linear", seed=seed, **same)
        plan += [linear]
        if name == "auto_mean":  # what it is compared with is wanted next
            tuned = [replace(linear, arm="tuned", held=Arm(), rate=rate) for rate in WORDS_TUNED]
            plan += [*tuned, *(replace(run, schedule="constant") for run in tuned)]
        if name in TOLD_APART:
            plan += [replace(linear, schedule="constant"), replace(linear, rate=1e-2)]
    return plan


def both_schedules(plan: Callable[..., Sequence[Spec | Shipped]], seeds: Sequence[int]) -> list[Spec | Shipped]:
    """Runs of a plan with some seeds: linear ones first, then constant."""
    return [run for schedule in ("linear", "constant") for run in plan(schedule) if run.seed in seeds]


def reuse() -> list[Shipped]:
    """Passes × objectives, at the demo's rate and at "auto"; long runs first for each seed: a piece ends with short ones."""
    return grid({"seed": TUNING[:2], "passes": (8, 4, 2, 1), "how": ({"rate": 2e-4}, HELD), "objective": _REUSED}, **_REUSE)


def bound() -> list[Shipped]:
    """Bounds at "auto" over two decades with one pass, then with the passes that were chosen: how far off may one be?"""
    same = {"rate": "auto", "end_size": 4096, **_REUSE}
    one = grid({"seed": TUNING, "bound": BOUNDS, "objective": _REUSED}, passes=1, **same)
    many = {"seed": TUNING[:2], "bound": (0.01, 0.03, 0.05), "passes": (4, 8), "objective": ("troll", "ppo_clip")}
    return one + grid(many, **same)


def chosen(seeds: Sequence[int], settings: Sequence[dict[str, Any]], **same: Any) -> list[Shipped]:
    """Settings as they were chosen, seeds outermost; ten steps unless they say otherwise."""
    return grid({"seed": seeds, "how": settings}, **{"steps": 10, **_CONFIRM, **same})


def confirm_reuse() -> list[Shipped]:
    """What was chosen, on fresh seeds: ten of the first three, which the main comparison needs, five of the others."""
    return chosen(FRESH[:5], CHOSEN[:3]) + chosen(FRESH[:5], CHOSEN[3:]) + chosen(FRESH[5:], CHOSEN[:3])


def confirm_rates(seeds: Sequence[int]) -> list[Shipped]:
    """Clipping and TROLL with one pass: at tuned rates, at "auto", at rates far too large, and the best of gate 0 held."""
    settings: list[dict[str, Any]] = [{"rate": 2e-4}, {"rate": 4e-4}, {"rate": "auto", "bound": 0.03}]
    settings += [{"rate": rate, "bound": bound} for rate in (1e-3, 3e-3) for bound in (0.03, math.inf)]
    settings += [{"rate": 2e-4, "bound": 0.03}]
    return grid({"seed": seeds, "how": settings, "objective": ("ppo_clip", "troll")}, eval_size=1024, end_size=4096)


def confirm_constant() -> list[Shipped]:
    """A constant schedule at "auto", as the tuning seeds favour it, on fresh seeds; then with four passes on tuning seeds."""
    one = grid({"seed": FRESH, "objective": ("ppo_clip", "troll")}, **HELD_CONSTANT, eval_size=1024, end_size=4096)
    axes = {"seed": TUNING[:2], "bound": (0.03, 0.02, 0.01), "objective": ("troll", "ppo_clip")}
    return one + grid(axes, **HELD_CONSTANT, passes=4, end_size=4096, **_REUSE)


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


def bound_many() -> list[Shipped]:
    """Unheld rates, then bounds, with four and eight passes and a constant schedule, on tuning seeds."""
    same: dict[str, Any] = {"end_size": 4096, "schedule": "constant", **_REUSE}
    unheld = grid({"seed": TUNING[:2], "rate": (1e-4, 2e-4, 5e-5), "objective": _REUSED}, passes=4, **same)
    axes = {"seed": TUNING[:2], "passes": (4, 8), "bound": (0.01, 0.02, 0.005), "objective": _REUSED}
    return unheld + grid(axes, rate="auto", **same)


def elsewhere() -> list[Shipped]:
    """The two of the main comparison on other tasks, from other warm starts and in another family; seeds outermost."""
    places = ("n_max29", "arithmetic", "start1", "start2", "start3", "gemma")
    same = {"steps": 10, **_CONFIRM, "eval_every": 5}  # the curve is not compared
    return grid({"seed": FRESH[:3], "how": CHOSEN[:2], "start": places}, **same) + chosen(
        FRESH[:3], CHOSEN[:2], start="n_max9", eval_every=5
    )


AUTO_START = {("ppo_clip", 1): 4e-4, ("troll", 1): 4e-4, ("ppo_clip", 4): 2e-4, ("troll", 4): 2e-4}
"""The rate of the largest mean area by objective and passes, unheld."""


def auto_start(tuned: Mapping[tuple[str, int], float], **same: Any) -> dict[str, Any]:
    """What the first five batches pay for a rate that is found: "auto", its bound from 1e-3 without a search, a tuned rate."""
    how = []
    for (objective, passes), rate in tuned.items():
        about, bound = {"objective": objective, "passes": passes}, 0.03 if passes == 1 else 0.01
        how += [{**about, "rate": "auto", "bound": bound}, {**about, "rate": 1e-3, "bound": bound}, {**about, "rate": rate}]
    return {"axes": {"seed": range(501, 509), "how": how}, "steps": 5, "eval_every": 5, "schedule": "constant", **same}


def rates(schedule: str = "linear") -> list[Shipped]:
    """Half decades × objectives × off and on × three seeds, the edges of what is usable first."""
    objectives = ("ppo_clip", "troll", "dppo", "reinforce")
    axes = {"seed": TUNING, "rate": RATES, "bound": (0.03, math.inf), "objective": objectives}
    return grid(axes, schedule=schedule, end_size=4096, **_REUSE)


def tiny() -> list[Spec | Shipped]:
    """Two steps of every arm, and of the trainer as it ships: does it run at all?"""
    held = {name: Arm(share=0.3) if name == "lookahead" else arm for name, arm in ARMS.items()}
    small: dict[str, Any] = {"steps": 2, "eval_size": 64, "seed": 1}
    plan: list[Spec | Shipped] = [
        Shipped(objective="troll", rate="auto", bound=None, passes=2, **small),
        Shipped(objective="ppo_clip", rate=1e-2, **small),
    ]
    return plan + [Spec(arm=name, held=arm, rate=1e-3, schedule="constant", **small) for name, arm in held.items()]


PLANS: dict[str, Callable[[], Sequence[Spec | Shipped]]] = {
    "reuse": reuse,
    "bound": bound,
    # With one pass and a constant schedule, where the bound alone says how far a step goes.
    "bound-constant": lambda: grid(
        {"seed": TUNING, "bound": BOUNDS, "objective": _REUSED}, **{**HELD_CONSTANT, "end_size": 4096, **_REUSE}
    ),
    # Other rates × passes with nothing held: with `reuse`, the trials by which settings are chosen to be confirmed.
    "tune": lambda: grid({"seed": TUNING[:2], "passes": (8, 4, 2), "rate": (1e-4, 4e-4), "objective": _REUSED}, **_REUSE),
    # As many passes as a batch is good for, at the demo's rate and at "auto".
    "reuse-auto": lambda: grid(
        {"seed": TUNING[:2], "rate": (2e-4, "auto"), "objective": _REUSED}, passes=8, bound=0.02, reuse="auto", **_REUSE
    ),
    "confirm-reuse": confirm_reuse,
    "confirm-rates": lambda: confirm_rates(FRESH[:5]),
    "confirm-rates-more": lambda: confirm_rates(FRESH[5:]),
    "confirm-constant": confirm_constant,
    "confirm-more": lambda: chosen(FRESH[5:], CHOSEN[3:]),
    "confirm-many": lambda: chosen(FRESH, MANY),
    "bound-many": bound_many,
    "rates": lambda: both_schedules(rates, TUNING[:2]),
    "rates-more": lambda: both_schedules(rates, TUNING[2:]),
    "elsewhere": elsewhere,
    "gate0": lambda: both_schedules(gate0, range(201, 204)),
    "gate0-more": lambda: both_schedules(gate0, range(204, 206)),
    "gate0-words": gate0_words,
    "gate0-troll": lambda: gate0(objective="troll"),
    # On seeds on which nothing was chosen.
    "auto-start": lambda: grid(**auto_start(AUTO_START, eval_size=8)),
    "tiny": tiny,
}
