"""Dumps as engines write them: a few completions each, by hand or drawn."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.audit.dump import auditable, find_dump
from corral.lab.audit.rules import Rules
from corral.lab.audit.tally import Audit, DumpAudit
from corral.lab.audit.tokens import Floats, make_tokens

LINE = {
    "step": 3,
    "tokens": [5, 6, 7, 8],
    "mask": [1, 1, 1, 0],
    "advantages": 1.0,
    "logp_old": [-1.0, -2.0, -0.5, None],
    "logp_new": [-0.5, -2.0, -1.5, None],
}
"""Three tokens: ρ = e^½, 1, e⁻¹."""

EXPORT = {
    "schema_version": 1, "step": 9, "export_step": 4, "rank": 0, "micro_step": 0, "micro_sequence_idx": 0,
    "export_sequence_idx": 0, "run_id": None, "env_name": "math", "token_ids": [1, 2, 3, 4], "position_ids": [0, 1, 2, 3],
    "loss_mask": [False, True, True, True], "advantages": [0.5, 0.5, 0.5, None], "rewards": [1.0, 1.0, 1.0, 1.0],
    "inference_logprobs": [0.0, -1.0, None, -3.0], "trainer_logprobs": [-2.0, -1.5, -1.0, -3.0],
    "entropy": [1.0, 0.5, 0.2, 0.1], "mismatch_kl": [None, 0.1, 0.1, 0.1], "is_masked": [None, False, False, False],
}  # fmt: skip
"""A line of prime-rl's token_exports: one token is the prompt's, one has no log-prob, one no advantage."""


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_exports(folder: Path, steps: Iterable[int], *, stable: bool = True, lines: int = 1) -> Path:
    for step in steps:
        below = folder / "token_exports" / f"step_{step}"
        write_lines(below / "rank_0.jsonl", [{**EXPORT, "export_step": step}] * lines)
        if stable:
            (below / "STABLE").touch()
    return folder


def drawn_line(seed: int, length: int = 40, step: int = 1, size: float = 0.4, **given: Any) -> dict[str, Any]:
    """A completion of random log-probs."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, length)
    old, new, rollout = (-np.log1p(np.exp(-(logits + x))) for x in (0.0, size * rng.standard_normal(length), 0.02))
    return {
        "step": step,
        "tokens": rng.integers(0, 99, length).tolist(),
        "advantages": [-1.0, 0.0, 1.0, 1.5][seed % 4],
        "logp_old": old.tolist(),
        "logp_new": new.tolist(),
        "logp_rollout": rollout.tolist(),
        "reward": float(seed % 2),
        "sampled_at": step - seed % 3,
        **given,
    }


def logged(advantage: Floats, logp_old: Floats, logp_new: Floats, logp_rollout: Floats | None = None) -> pd.DataFrame:
    """A completion of logged tokens."""
    count = len(advantage)
    found = {"token": np.arange(count), "mask": np.ones(count, dtype=np.bool_), "step": 1, "advantage": advantage}
    rollout = {} if logp_rollout is None else {"logp_rollout": logp_rollout}
    rows = auditable({**found, "logp_old": logp_old, "logp_new": logp_new, **rollout}, lambda *_: None)
    return make_tokens(rows)


def audit_dump(path: Path) -> Audit:
    """The audit of everything in a dump, by default rules."""
    dump, audit = find_dump(path), DumpAudit(Rules())
    audit.read(dump, lambda _: None)
    return audit.result(dump)
