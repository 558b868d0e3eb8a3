"""The sections of the head's benchmark: which cases each has, and who runs in a case. One table, `SECTIONS`."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import update_phase
from head_contenders import GEMM, HEADS, OBJECTIVES, OLD, OURS, TROLL, UPCAST, Contender, overshoot
from head_problem import Problem, Reference, make_problem
from head_union import UNIONS, UnionReference, check_union
from timing import Run
from update_phase import CONTENDERS

Key = tuple[str, str]
"""Task and name of a contender."""
About = dict[str, Any]
"""What tells a case from others of its section: shape and policy, or model and batch."""
ANCHOR = (GEMM, "one GEMM")
CHECKED = 64
"""Rows whose results are compared with float64."""
USUAL = [(8192, 151936, h) for h in (4096, 896)]
OTHERS = [(n, v, h) for h in (896, 4096) for n in (2048, 8192, 16384) for v in (32000, 151936, 262144)]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The contenders of a case, ready to run in turns."""

    runs: dict[Key, Run]
    anchor: Key
    """Whose time the others' are divided by."""
    check: Callable[[Key, Any], dict[str, float]]
    """A contender and what it returned → its errors."""
    wall: bool = False
    """Time by the clock on the wall: the host's part counts."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A question, its cases, and how often a case's contenders run."""

    question: str
    cases: list[About]
    prepare: Callable[[About, str], Prepared]
    rounds: int = 7
    pause: float = 0.1
    sustained: float = 0.3
    """Seconds of a busy GPU before a sustained time counts; 0 takes none."""
    device: str = "cuda"
    needs: str = "torch"
    """The package without which there is nothing to measure."""

    def missing(self) -> str | None:
        """Why it cannot run here, if it cannot."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "there is no GPU here"
        return None if importlib.util.find_spec(self.needs) else f"{self.needs} is not installed"


def shape(sizes: tuple[int, int, int], k: int, policy: str, dtype: str = "bfloat16") -> About:
    return {**dict(zip("NVH", sizes, strict=True)), "K": k, "policy": policy, "dtype": dtype}


def prepare_head(about: About, device: str, *, contenders: dict[Key, Contender]) -> Prepared:
    """Contenders at a shape, on random weights."""
    p = _problem(about, device)
    reference = Reference(p.first(CHECKED))

    def check(key: Key, output: Any) -> dict[str, float]:
        task, name = key
        if task == GEMM or "cross" in name or "GRPO" in name:  # no result, or that of another loss
            return {}
        if task == OLD:
            return reference.of_old_pass(*output)
        errors = reference.of_update(OBJECTIVES[task], *output)
        return errors | ({"kl_error": overshoot(p)} if key == (TROLL, "corral") else {})

    # Chunks take the same time for every policy, and are not the fastest.
    with_chunks = about["policy"] == "peaked"
    chosen = {key: run for key, run in contenders.items() if with_chunks or not key[1].startswith("checkpointed")}
    return Prepared(runs={key: partial(run, p) for key, run in chosen.items()}, anchor=ANCHOR, check=check)


def prepare_union(about: About, device: str) -> Prepared:
    """TROLL on the old support, on the union, and that on the torch path."""
    p = _problem(about, device)
    check = partial(check_union, p, UnionReference(p.first(CHECKED)))
    return Prepared(runs={key: partial(run, p) for key, run in UNIONS.items()}, anchor=ANCHOR, check=check)


def _problem(about: About, device: str) -> Problem:
    p = make_problem(*(about[name] for name in ("N", "V", "H", "K", "policy")), device, getattr(torch, about["dtype"]))
    assert p.batch.dist_old is not None  # the old pass is not to be timed
    return p


def prepare_update(about: About, device: str) -> Prepared:
    """Prepare an update of TRL's trainer and of corral's."""
    updates = update_phase.make_updates(about, device)
    runs: dict[Key, Run] = {("update", name): update for name, update in updates.items()}
    return Prepared(runs=runs, anchor=("update", CONTENDERS[0]), check=lambda key, _: updates[key[1]].metrics(), wall=True)


_ours = partial(prepare_head, contenders=OURS)
_heads = partial(prepare_head, contenders={ANCHOR: OURS[ANCHOR], **HEADS})
_peaked_and_flat = [shape(sizes, 64, policy) for policy in ("peaked", "flat") for sizes in USUAL]
_on_cpu = [shape(sizes, 64, "medium", dtype) for sizes in [(512, 49152, 576)] for dtype in ("float32", "bfloat16")]
SECTIONS = {
    "usual": Section(question="time, memory and errors against full logits", cases=_peaked_and_flat, prepare=_ours),
    "update": Section(
        question="an update of the trainer against TRL's own", cases=update_phase.CASES, prepare=prepare_update, rounds=9,
        pause=0.0, sustained=0.0, needs="trl",
    ),
    "heads": Section(question="the fused heads of others", cases=_peaked_and_flat, prepare=_heads),
    "shapes": Section(
        question="other shapes, policies and supports, briefly", prepare=_ours, rounds=3, pause=0.02, sustained=0.1,
        cases=[
            *(shape(sizes, 64, "medium") for sizes in USUAL),
            *(shape(sizes, k, "peaked") for k in (16, 256) for sizes in USUAL),
            *(shape(sizes, 64, "peaked") for sizes in OTHERS if sizes not in USUAL),
        ],
    ),
    "union": Section(
        question="TROLL on the union of both supports: time, memory, errors, and what it sees", prepare=prepare_union, rounds=5,
        pause=0.02, sustained=0.0,
        cases=[
            *(shape(sizes, 64, "peaked") for sizes in USUAL),
            *(shape((8192, 151936, 896), 64, policy) for policy in ("gathered", "medium", "flat")),
        ],
    ),
    "cpu": Section(
        question="time, memory and errors on a CPU", cases=_on_cpu, device="cpu", pause=0.0, sustained=0.0,
        prepare=partial(prepare_head, contenders={**OURS, **UPCAST}),
    ),
    "smoke": Section(
        question="the smallest case, to see that all of it runs", cases=[shape((12, 300, 16), 4, "medium", "float32")],
        prepare=_ours, rounds=2, pause=0.0, sustained=0.0, device="cpu",
    ),
    "smoke union": Section(
        question="the same of a union", cases=[shape((12, 300, 16), 4, "gathered", "float32")], prepare=prepare_union, rounds=2,
        pause=0.0, sustained=0.0, device="cpu",
    ),
    "smoke update": Section(
        question="the same of an update", cases=[update_phase.SMOKE], prepare=prepare_update, rounds=2, pause=0.0,
        sustained=0.0, device="cpu", needs="trl",
    ),
}  # fmt: skip
"""Those of a GPU in the order of their importance."""
