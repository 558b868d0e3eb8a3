"""The runs of each part of the study, the most telling first."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from spec import Arm, Shipped, Spec

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
FIRST = 7
"""The arms, from the first, that are seen with every seed before the others are."""

RATES = (3e-4, 1e-3, 1e-4, 3e-3, 1e-2)
"""Half decades around the demo's own 2e-4 and upwards, the most telling first."""
WIDE = 0.08
"""Four times the bound of `learning_rate="auto"`: where a batch is used several times, a step may go further."""
_REUSE: dict[str, Any] = {"steps": 10, "eval_size": 1024}
_REUSED = ("troll", "ppo_clip", "dppo")


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


def gate0(objective: str = "ppo_clip") -> list[Spec]:
    """Every arm × two rates far too large × two schedules × five seeds, and nothing at rates that suit it."""
    some, others = ("tuned", *tuple(ARMS)[:FIRST]), tuple(ARMS)[FIRST:-2]
    early, late = range(201, 204), range(204, 206)
    blocks = [
        ("linear", some, early), ("linear", others, early), ("constant", some, early), ("linear", some, late),
        ("constant", others, early), ("constant", some, late), ("linear", others, late), ("constant", others, late),
        ("linear", tuple(ARMS)[-2:], (*early, *late)),
    ]  # fmt: skip
    return [spec for schedule, names, seeds in blocks for spec in arms(names, schedule, seeds, objective)]


def gate0_rest() -> list[Spec]:
    """What a first reading of gate 0 lacks: the rivals that were never run, and five seeds of what ships and of its rivals."""
    rivals = arms(("accept", "stop", "ema", "calm", "none"), "linear", range(201, 204))
    return rivals + arms(("auto_mean", "tuned"), "linear", range(204, 206)) + arms(("auto_mean",), "constant", range(201, 204))


def reuse() -> list[Shipped]:
    """Passes × objectives, at the demo's rate and at "auto"; then passes by the bound.

    Long runs first for each seed, so that a piece ends with short ones.
    """
    arms: list[dict[str, Any]] = [{"rate": 2e-4}, {"rate": "auto", "bound": None}]
    plan = [
        Shipped(objective=objective, seed=seed, passes=passes, **arm, **_REUSE)
        for seed, passes, arm, objective in itertools.product((301, 302), (8, 4, 2, 1), arms, _REUSED)
    ]
    return plan + [
        Shipped(objective=objective, seed=seed, passes=8, rate=2e-4, bound=0.02, reuse="auto", **_REUSE)
        for seed, objective in itertools.product((301, 302), _REUSED)
    ]


def reuse_more() -> list[Shipped]:
    """A wider bound, then a third seed, then other rates, as tuning would try them."""
    wide: list[dict[str, Any]] = [{"rate": "auto", "bound": WIDE}]
    other: list[dict[str, Any]] = [{"rate": 1e-4}, {"rate": 4e-4}]
    arms: list[dict[str, Any]] = [{"rate": 2e-4}, {"rate": "auto", "bound": None}]
    grids = [
        itertools.product(wide, (301, 302), (8, 4, 1), _REUSED[:2]),
        itertools.product(arms, (303,), (8, 4, 1), _REUSED),
        itertools.product(other, (301, 302), (8, 4, 1), _REUSED[:2]),
    ]
    return [
        Shipped(objective=objective, seed=seed, passes=passes, **arm, **_REUSE)
        for arm, seed, passes, objective in itertools.chain(*grids)
    ]


def rates() -> list[Shipped]:
    """Half decades × objectives × off and on × two seeds; on is the bound of `learning_rate="auto"`."""
    grid = itertools.product(
        (301, 302), (3e-4, 1e-3, 1e-4, 3e-3, 1e-2), ("ppo_clip", "troll", "dppo", "reinforce"), (math.inf, 0.02)
    )
    return [
        Shipped(objective=objective, rate=rate, seed=seed, bound=bound, eval_every=3) for seed, rate, objective, bound in grid
    ]


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
    "reuse-more": reuse_more,
    "rates": rates,
    "gate0-rest": gate0_rest,
    "gate0": gate0,
    "gate0-troll": lambda: gate0("troll"),
    "tiny": tiny,
}
