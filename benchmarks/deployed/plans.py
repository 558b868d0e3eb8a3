"""The runs of each part of the study, the most telling first."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
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

RATES = (3e-4, 1e-3, 1e-4, 3e-3, 1e-2, 3e-5, 3e-2)
"""Half decades around the demo's own 2e-4, the most telling first."""
HELD: dict[str, Any] = {"rate": "auto", "bound": None}
"""`learning_rate="auto"` with the bound .02."""
_REUSED = ("troll", "ppo_clip", "dppo")
_REUSE: dict[str, Any] = {"steps": 10, "eval_size": 1024}
_CONFIRM: dict[str, Any] = {"eval_every": 2, "eval_size": 1024, "end_size": 4096}
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
    """As many passes as a batch is good for, at the demo's rate."""
    return shipped((301, 302), _REUSED, [{"passes": 8, "rate": 2e-4, "bound": 0.02, "reuse": "auto"}], **_REUSE)


def bound() -> list[Shipped]:
    """Wider bounds at "auto", where one pass needs no holding and where more do: which costs nothing?"""
    grid = [{"passes": passes, "rate": "auto", "bound": bound} for bound in (0.03, 0.05, 0.08) for passes in (8, 4, 1)]
    return shipped((301, 302), _REUSED, grid, **_REUSE)


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
    """Clipping and TROLL with one pass on fresh seeds: at a tuned rate and at "auto", then at rates far too large."""
    blocks: list[list[dict[str, Any]]] = [
        [{"rate": 2e-4}, {"rate": "auto", "bound": 0.03}],
        [{"rate": 1e-3, "bound": 0.03}, {"rate": 3e-3, "bound": 0.03}],
        [{"rate": 1e-3}, {"rate": 3e-3}, {"rate": 2e-4, "bound": 0.03}],
    ]
    halves = itertools.product((FRESH[:5], FRESH[5:]), blocks)
    return [run for seeds, grid in halves for run in shipped(seeds, ("ppo_clip", "troll"), grid, eval_size=1024, end_size=4096)]


def tasks() -> list[Shipped]:
    """Numbers that the start has never seen (greedy success .31), and few of them: the first three that were chosen."""
    return [replace(run, start=start) for start in ("n_max29", "n_max9") for run in _chosen(FRESH[:3], CHOSEN[:3])]


def starts() -> list[Shipped]:
    """Three other warm starts of the embedded model."""
    return [replace(run, start=f"start{start}") for start in (1, 2, 3) for run in _chosen(FRESH[:3], CHOSEN[:3])]


def smollm2() -> list[Shipped]:
    """A pretrained model of 135 M parameters: at a rate that suits it and at ten times that, unheld and held, and at "auto"."""
    grid = [{"passes": passes, **arm} for arm in ({"rate": 1e-5}, {"rate": "auto", "bound": 0.03}) for passes in (1, 4)]
    grid += [{"rate": 1e-4}, {"rate": 1e-4, "bound": 0.03}]
    return shipped(FRESH[:5], ("troll", "ppo_clip", "dppo"), grid, start="smollm2", steps=10, eval_every=2, eval_size=1024)


def rates() -> list[Shipped]:
    """Half decades × objectives × off and on × two seeds, the edges of what is usable first; then the ends of three decades."""
    plan = []
    for objectives, tried in itertools.product((("ppo_clip", "troll"), ("dppo", "reinforce")), (RATES[:5], RATES[5:])):
        grid = [{"rate": rate, "bound": bound} for rate in tried for bound in (math.inf, 0.02)]
        plan += shipped((301, 302), objectives, grid, eval_every=3)
    return plan


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
    "tune": tune,
    "reuse-auto": reuse_auto,
    "confirm-reuse": confirm_reuse,
    "confirm-rates": confirm_rates,
    "confirm-more": confirm_more,
    "rates": rates,
    "tasks": tasks,
    "starts": starts,
    "smollm2": smollm2,
    "gate0-rest": gate0_rest,
    "gate0": gate0,
    "gate0-troll": lambda: gate0("troll"),
    "tiny": tiny,
}
