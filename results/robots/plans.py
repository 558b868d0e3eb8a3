"""Plans of the robots' studies that still have runs to make: settings, seeds and steps. `study.py` runs them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

TUNED_ON = (100, 101)
"""Seeds that settings are chosen on; none of them is in a table of results."""
SEEDS = range(5)


@dataclass(frozen=True)
class Job:
    """Run of a plan: a recipe, changes to it, and a seed."""

    setting: str
    """Name of the row, for tables and folders."""
    recipe: str
    changes: tuple[tuple[str, str], ...]
    seed: int

    @property
    def name(self) -> str:
        """The run's folder."""
        return f"{self.setting}-{self.seed}"

    def arguments(self) -> list[str]:
        """Arguments of `corral train`."""
        flags = [part for key, value in self.changes for part in ("--set", f"{key}={value}")]
        return ["--recipe", self.recipe, "--seed", str(self.seed), *flags]


def jobs(setting: str, recipe: str, seeds: Sequence[int], **changes: Any) -> Iterator[Job]:
    """Yield a run for each seed; `learner__std=0.1` is the setting `learner.std`."""
    given = tuple((key.replace("__", "."), str(value)) for key, value in changes.items())
    yield from (Job(setting, recipe, given, seed) for seed in seeds)


LONG: Mapping[str, Any] = {"eval_every": 25, "checkpoint_every": 25, "keep_checkpoints": 1, "workers": 1}
"""A checkpoint a minute or so, since a piece may end at any time."""

STEP_BASED: Mapping[str, Mapping[str, Any]] = {
    "ppo-pink": {"algorithm": "sb3-ppo-pink"},
    "ppo-half-pink": {"algorithm": "sb3-ppo-pink", "learner__noise_colour": 0.5},
    "trpl": {"algorithm": "sb3-trpl"},
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "one-plan": {},
    "replan-50": {"learner__replan_every": 50},
    "replan-25": {"learner__replan_every": 25},
    "replan-50-state": {"learner__replan_every": 50, "learner__replan_from": "state"},
    "contextual": {"learner__contextual_covariance": "true"},
}


def hopper_steps() -> Iterator[Job]:
    """Hopper jump at 5 million steps with the other step-based rows: coloured noise and TRPL, with torques and through the
    controller of plans."""
    for name, changes in STEP_BASED.items():
        yield from jobs(f"hopper-5M-{name}", "hopper_jump", SEEDS[:3], **LONG, iterations=325, **changes)
        through = changes | {"learner__controller_span": 1.0}
        yield from jobs(f"hopper-5M-{name}-controller", "hopper_jump", SEEDS[:3], **LONG, iterations=325, **through)


def variants() -> Iterator[Job]:
    """Runs with several plans per episode, or a covariance of the context, on the arm and the hopper."""
    for name, changes in VARIANTS.items():
        for recipe in ("via_point", "via_point_sparse_short"):
            yield from jobs(f"{recipe}-{name}", recipe, SEEDS, **LONG, **changes)
    for name in ("one-plan", "replan-50", "replan-50-state"):
        hidden = LONG | {"environment_config__hidden_goal": "true"} | VARIANTS[name]
        yield from jobs(f"via_point-hidden-{name}", "via_point", SEEDS, **hidden)
    for every in (125, 50):
        yield from jobs(
            f"hopper-5M-replan-{every}", "hopper_jump", SEEDS[:3], **LONG, iterations=325, learner__replan_every=every
        )


DECISIVE: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "box-2M": ("box_pushing", 132, {}),
    "box-2M-planar": ("box_pushing", 132, {"environment_config__planar": "true"}),
    "box-2M-relative-goal": ("box_pushing", 132, {"prodmp__relative_goal": "true"}),
    "box-2M-slow-decay": ("box_pushing", 132, {"learner__decay_over": 2640}),
    "box-5M-spatial": ("box_pushing", 330, {"environment_config__reward": "temporal_spatial_sparse"}),
    "box-5M-spatial-floor": (
        "box_pushing", 330, {"environment_config__reward": "temporal_spatial_sparse", "learner__entropy_floor": 0.0}
    ),
    "hopper-2M-published": ("hopper_jump_published", 125, {}),
    "hopper-2M-published-takeoff": ("hopper_jump_published", 125, {"environment_config__takeoff": "true"}),
}  # fmt: skip
"""One change each of a recipe and the recipe itself: what decides which long runs are worth their hours."""


def decisive() -> Iterator[Job]:
    """Short runs that differ in one setting: poses by cosine and sine, goals as offsets, rates that fall over 40 million steps,
    an entropy floor where the reward is sparse, and a hopper that observes its take-off."""
    for name, (recipe, batches, changes) in DECISIVE.items():
        yield from jobs(name, recipe, SEEDS[:3], **LONG | {"iterations": batches, "eval_every": batches // 5}, **changes)


BBRL_PUBLISHED: Mapping[str, Any] = {"algorithm": "bbrl", "prodmp__tau": 1.5}
"""Box pushing's trajectory belongs to the recipe, and BBRL's was published shorter."""


def published() -> Iterator[Job]:
    """Box pushing, dense, by the published rules at 10 million steps, five seeds of TCE and BBRL; the hopper's TCE at 4
    million with three, for its height; two of Meta-World's tasks at 10 million with three, which need corral[metaworld]."""
    ten = LONG | {"iterations": 658, "eval_every": 47}
    yield from jobs("box-10M-published-tce", "box_pushing_published", SEEDS, **ten)
    yield from jobs("box-10M-published-bbrl", "box_pushing_published", SEEDS, **ten | BBRL_PUBLISHED)
    for recipe in ("hopper_jump", "hopper_jump_published"):
        yield from jobs(f"{recipe}-4M-height", recipe, SEEDS[:3], **LONG, iterations=250)
    for task in (METAWORLD[1], METAWORLD[4]):
        length = LONG | {"iterations": 1250, "eval_every": 50, "eval_size": 32, "environment_config__task": task}
        yield from jobs(f"metaworld-10M-published-{task}", "metaworld_published", SEEDS[:3], **length)


def published_40m() -> Iterator[Job]:
    """Box pushing at 40 million steps: both rules and both rows with three seeds, dense; the recipe's TCE with two where the
    reward is paid in the last step."""
    length = LONG | {"iterations": 2640, "eval_every": 132}
    for row in ("tce", "bbrl"):
        yield from jobs(f"box-40M-{row}", "box_pushing", SEEDS[:3], **length, algorithm=row)
    yield from jobs("box-40M-published-tce", "box_pushing_published", SEEDS[:3], **length)
    yield from jobs("box-40M-published-bbrl", "box_pushing_published", SEEDS[:3], **length | BBRL_PUBLISHED)
    sparse = length | {"environment_config__reward": "temporal_sparse"}
    yield from jobs("box-40M-temporal_sparse-tce", "box_pushing", SEEDS[:2], **sparse)


METAWORLD = ("reach-v3", "door-open-v3", "button-press-v3", "assembly-v3", "pick-place-wall-v3")
"""Three that are learned early elsewhere, and two that Meta-World's own authors count among the hard and the very hard."""


_BY_CRITIC: Mapping[str, Any] = {
    "learner__plans_per_context": 1, "learner__mirrored": "false", "learner__normalise_contexts": "false",
    "learner__policy_epochs": 50, "learner__critic_epochs": 50, "learner__critic_hidden": [128, 128],
}  # fmt: skip
METAWORLD_TRIED: Mapping[str, Mapping[str, Any]] = {
    "recipe": {},
    "as-they-come": {"learner__normalise_contexts": "false"},
    "critic-small-steps": _BY_CRITIC | {"learner__policy_rate": 3e-4},
    "critic": _BY_CRITIC | {"learner__mean_bound": 0.3, "learner__cov_bound": 0.02},
}
"""Settings for TCE and BBRL, as changes of the recipe metaworld; the last is what the recipe had before."""


def metaworld_tune() -> Iterator[Job]:
    """Half a million steps of reach with each setting of TCE and BBRL, on a seed of its own; needs corral[metaworld]."""
    for (name, changes), row in product(METAWORLD_TRIED.items(), ("tce", "bbrl")):
        length = LONG | {"iterations": 64, "eval_every": 16, "eval_size": 32, "algorithm": row}
        yield from jobs(f"metaworld-tune-{row}-{name}", "metaworld", TUNED_ON[:1], **length, **changes)


def metaworld() -> Iterator[Job]:
    """Five of Meta-World's tasks at 2 million steps, three seeds of TCE, BBRL and PPO; needs corral[metaworld]."""
    for task, row in product(METAWORLD, ("tce", "bbrl", "sb3-ppo")):
        length = LONG | {"iterations": 250, "eval_size": 32, "algorithm": row, "environment_config__task": task}
        yield from jobs(f"metaworld-2M-{task}-{row}", "metaworld", SEEDS[:3], **length)


def top_erl() -> Iterator[Job]:
    """TOP-ERL on a GPU against TCE at equal steps: box pushing, dense and sparse, 5 million; hopper jump, 3.2 million; two of
    Meta-World's tasks, 2 million, which need corral[metaworld]."""
    box, hopper, tasks = ({"iterations": batches, "eval_every": batches // 10} for batches in (330, 200, 250))
    for seed, (row, own) in product(SEEDS[:3], {"tce": {}, "top_erl": {"learner__device": "cuda"}}.items()):
        how = LONG | {"algorithm": row} | own
        for reward in ("dense", "temporal_sparse"):
            yield from jobs(f"box-5M-{reward}-{row}", "box_pushing", [seed], **how | box, environment_config__reward=reward)
        yield from jobs(f"hopper-3M-{row}", "hopper_jump", [seed], **how | hopper)
        for task in METAWORLD[1:3]:
            yield from jobs(f"metaworld-2M-{task}-{row}", "metaworld", [seed], **how | tasks, environment_config__task=task)


def top_erl_arm() -> Iterator[Job]:
    """TOP-ERL against TCE on the arm in 0.2 million steps, batches of 16 episodes each, on a CPU."""
    small = {"learner__episodes": 16, "iterations": 125, "eval_every": 6}
    updates = {"learner__critic_epochs": 80, "learner__policy_epochs": 40}
    for recipe, seed in product(("via_point", "via_point_sparse_short"), SEEDS[:3]):
        yield from jobs(f"{recipe}-16-tce", recipe, [seed], **LONG | small)
        yield from jobs(f"{recipe}-16-top_erl", recipe, [seed], **LONG | small, algorithm="top_erl", **updates)


PLANS = {
    "hopper-steps": hopper_steps,
    "decisive": decisive,
    "published": published,
    "published-40M": published_40m,
    "metaworld-tune": metaworld_tune,
    "metaworld": metaworld,
    "variants": variants,
    "top-erl": top_erl,
    "top-erl-arm": top_erl_arm,
}
