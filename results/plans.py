"""Plans of the studies on language models that still have runs to make, and the settings of those that are finished."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from results.runs import DEPLOYED, finished
from results.spec import BASES, PRETRAINED, WORDS, Run
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
AUTO_BOUNDS = (0.01, 0.02, 0.03)
"""Bounds between which "auto" was decided; with one pass it has the last."""
CHOSEN: tuple[dict[str, Any], ...] = (
    {"objective": "troll", "passes": 4, "rate": "auto", "bound": 0.03},
    {"objective": "ppo_clip", "passes": 4, "rate": 2e-4},
    {"objective": "ppo_clip", "passes": 1, "rate": 4e-4, "steps": 20},
    {"objective": "dppo", "passes": 8, "rate": "auto", "bound": None},
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
WORD_SEEDS = {"smollm2": range(406, 416), "gemma": range(406, 411)}
"""Seeds of a pretrained model on which nothing was chosen."""
BEST: dict[str, dict[tuple[str, int], float]] = {
    "smollm2": {("ppo_clip", 1): 3e-5, ("troll", 1): 3e-5, ("dppo", 1): 3e-5, ("troll", 4): 1e-5, ("ppo_clip", 4): 3e-5},
    "gemma": {("ppo_clip", 1): 1e-6, ("troll", 1): 3e-6, ("dppo", 1): 1e-6, ("troll", 4): 1e-6},
}
"""The rate of the largest mean area on seeds 401 to 405; on Gemma 401 to 403, with four passes 401 alone."""


def words(axes: Mapping[str, Sequence[Any]], *, base: str = "smollm2", **same: Any) -> list[Run]:
    """A run of a pretrained model for every combination of values, the last axis innermost; "auto" is bounded.

    Args:
        axes: settings and their values; values of the axis `how` are several settings each, and "arm" is a pair of WORD_ARMS.
    """
    known = {"recipe": "gsm8k" if base == "qwen" else PRETRAINED, "base": base, "model": BASES[base]["model"]}
    known |= {name: int(WORDS[name]) for name in ("steps", "eval_every", "eval_size")}
    found = []
    for values in itertools.product(*axes.values()):
        row = same | dict(zip(axes, values, strict=True))
        row |= row.pop("how", {})
        row |= dict(zip(("objective", "passes"), row.pop("arm", ()), strict=False))
        found.append(Run(**known | ({"schedule": "constant", "bound": 0.03} if row["rate"] == "auto" else {}) | row))
    return found


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
    """Published runs of the embedded model at "auto", now with the search on the first batch."""
    names = [field.name for field in fields(Run)]
    known = [run for run in finished(DEPLOYED) if run["rate"] == "auto" and "passes" in run]
    return [Run(**{"bound": None} | {name: run[name] for name in names if name in run}) for run in known]


PLANS: dict[str, Callable[[], Sequence[Run]]] = {
    "auto-again": auto_again,
    "b-auto-start": smollm2_start,
    "qwen-tune": lambda: qwen(("ppo_clip",), QWEN_RATES, (401,), 8) + qwen(("troll",), QWEN_RATES[:3], (401,), 8),
    "qwen-auto-start": lambda: qwen(("troll", "ppo_clip"), ("auto", *QWEN_RATES), range(501, 506), 5),
    "b-tiny": lambda: words({"arm": WORD_ARMS}, rate=1e-5, seed=401, steps=2, eval_size=16, eval_every=2),
    "table-tiny": every_arm,
}
