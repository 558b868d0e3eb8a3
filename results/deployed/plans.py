"""The runs of each part of the study, the most telling first."""

import itertools
import math
from collections.abc import Callable, Sequence
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


def arms(names: Sequence[str], schedule: str, seeds: Sequence[int], objective: str = "ppo_clip") -> list[Spec]:
    """Arms × their rates, seeds outermost; "tuned" is nothing at rates that suit it."""
    plan = []
    for seed, name in itertools.product(seeds, names):
        for rate in TUNED if name == "tuned" else SHARE:
            if name in DEAD_AT.get(rate, ()) and seed > 202:
                continue
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
    for seed in FRESH[:3]:
        for name in WORD_ARMS:
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


def shipped(seeds: Sequence[int], objectives: Sequence[str], grid: Sequence[dict[str, Any]], **same: Any) -> list[Shipped]:
    """Settings × objectives of the trainer as it ships, seeds outermost."""
    return [
        Shipped(objective=objective, seed=seed, **arm, **same)
        for seed, arm, objective in itertools.product(seeds, grid, objectives)
    ]


def reuse() -> list[Shipped]:
    """Passes × objectives, at the demo's rate and at "auto"; long runs first for each seed: a piece ends with short ones."""
    grid = [{"passes": passes, **arm} for passes in (8, 4, 2, 1) for arm in ({"rate": 2e-4}, HELD)]
    return shipped((301, 302), _REUSED, grid, **_REUSE)


def reuse_auto() -> list[Shipped]:
    """As many passes as a batch is good for, at the demo's rate and at "auto"."""
    grid = [{"passes": 8, "rate": rate, "bound": 0.02, "reuse": "auto"} for rate in (2e-4, "auto")]
    return shipped((301, 302), _REUSED, grid, **_REUSE)


def bound() -> list[Shipped]:
    """Bounds at "auto" over two decades with one pass, then with the passes that were chosen: how far off may one be?"""
    one = [{"passes": 1, "rate": "auto", "bound": bound} for bound in BOUNDS]
    many = [{"passes": passes, "rate": "auto", "bound": bound} for bound in (0.01, 0.03, 0.05) for passes in (4, 8)]
    runs = shipped(TUNING, _REUSED, one, end_size=4096, **_REUSE)
    return runs + shipped(TUNING[:2], ("troll", "ppo_clip"), many, end_size=4096, **_REUSE)


def bound_constant() -> list[Shipped]:
    """The same with one pass and a constant schedule, where the bound alone says how far a step goes."""
    grid = [{**HELD_CONSTANT, "bound": bound} for bound in BOUNDS]
    return shipped(TUNING, _REUSED, grid, end_size=4096, **_REUSE)


def tune() -> list[Shipped]:
    """Other rates × passes with nothing held: with `reuse`, the trials by which settings are chosen to be confirmed."""
    grid = [{"passes": passes, "rate": rate} for passes in (8, 4, 2) for rate in (1e-4, 4e-4)]
    return shipped((301, 302), _REUSED, grid, **_REUSE)


def confirm_reuse() -> list[Shipped]:
    """What was chosen, on fresh seeds: ten of the first three, which the main comparison needs, five of the others."""
    return _chosen(FRESH[:5], CHOSEN[:3]) + _chosen(FRESH[:5], CHOSEN[3:]) + _chosen(FRESH[5:], CHOSEN[:3])


def confirm_more() -> list[Shipped]:
    """The other five seeds of the others."""
    return _chosen(FRESH[5:], CHOSEN[3:])


def _chosen(seeds: Sequence[int], chosen: Sequence[dict[str, Any]]) -> list[Shipped]:
    """Settings as they were chosen, seeds outermost; ten steps unless they say otherwise."""
    return [Shipped(seed=seed, **{"steps": 10, **how}, **_CONFIRM) for seed in seeds for how in chosen]


def confirm_rates() -> list[Shipped]:
    """Clipping and TROLL with one pass on five fresh seeds: at a tuned rate, at "auto", and at rates far too large."""
    return _rates_on(FRESH[:5])


def confirm_rates_more() -> list[Shipped]:
    """The same on the other five."""
    return _rates_on(FRESH[5:])


def _rates_on(seeds: Sequence[int]) -> list[Shipped]:
    """Three rates off and on, "auto", and the rate that was best in gate 0; seeds outermost."""
    grid: list[dict[str, Any]] = [{"rate": 2e-4}, {"rate": 4e-4}, {"rate": "auto", "bound": 0.03}]
    grid += [{"rate": rate, "bound": bound} for rate in (1e-3, 3e-3) for bound in (0.03, math.inf)]
    grid += [{"rate": 2e-4, "bound": 0.03}]
    return shipped(seeds, ("ppo_clip", "troll"), grid, eval_size=1024, end_size=4096)


def confirm_constant() -> list[Shipped]:
    """A constant schedule at "auto", as the tuning seeds favour it, on fresh seeds; then with four passes on tuning seeds."""
    one = shipped(FRESH, ("ppo_clip", "troll"), [HELD_CONSTANT], eval_size=1024, end_size=4096)
    many = [{**HELD_CONSTANT, "passes": 4, "bound": bound} for bound in (0.03, 0.02, 0.01)]
    return one + shipped(TUNING[:2], ("troll", "ppo_clip"), many, end_size=4096, **_REUSE)


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


def confirm_many() -> list[Shipped]:
    """Several passes with a constant schedule on fresh seeds."""
    return _chosen(FRESH, MANY)


def bound_many() -> list[Shipped]:
    """Unheld rates, then bounds, with four and eight passes and a constant schedule, on tuning seeds."""
    same: dict[str, Any] = {"end_size": 4096, "schedule": "constant", **_REUSE}
    unheld = [{"passes": 4, "rate": rate} for rate in (1e-4, 2e-4, 5e-5)]
    grid = [{"rate": "auto", "passes": passes, "bound": bound} for passes in (4, 8) for bound in (0.01, 0.02, 0.005)]
    return shipped(TUNING[:2], _REUSED, unheld, **same) + shipped(TUNING[:2], _REUSED, grid, **same)


def elsewhere() -> list[Shipped]:
    """The two of the main comparison on other tasks, from other warm starts and in another family; seeds outermost."""
    places = ("n_max29", "arithmetic", "start1", "start2", "start3", "gemma")
    few: dict[str, Any] = {"eval_every": 5}  # the curve is not compared
    runs = [replace(run, start=start, **few) for run in _chosen(FRESH[:3], CHOSEN[:2]) for start in places]
    return runs + [replace(run, start="n_max9", **few) for run in _chosen(FRESH[:3], CHOSEN[:2])]


def rates(schedule: str = "linear") -> list[Shipped]:
    """Half decades × objectives × off and on × three seeds, the edges of what is usable first."""
    grid = [{"rate": rate, "bound": bound} for rate in RATES for bound in (0.03, math.inf)]
    objectives = ("ppo_clip", "troll", "dppo", "reinforce")
    return shipped(TUNING, objectives, grid, schedule=schedule, end_size=4096, **_REUSE)


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
    "bound-constant": bound_constant,
    "tune": tune,
    "reuse-auto": reuse_auto,
    "confirm-reuse": confirm_reuse,
    "confirm-rates": confirm_rates,
    "confirm-rates-more": confirm_rates_more,
    "confirm-constant": confirm_constant,
    "confirm-more": confirm_more,
    "confirm-many": confirm_many,
    "bound-many": bound_many,
    "rates": lambda: both_schedules(rates, TUNING[:2]),
    "rates-more": lambda: both_schedules(rates, TUNING[2:]),
    "elsewhere": elsewhere,
    "gate0": lambda: both_schedules(gate0, range(201, 204)),
    "gate0-more": lambda: both_schedules(gate0, range(204, 206)),
    "gate0-words": gate0_words,
    "gate0-troll": lambda: gate0(objective="troll"),
    "tiny": tiny,
}
