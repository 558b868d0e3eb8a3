"""Rows of benchmarks/results/update_phase.json: what belongs to them, when a model's are whole, and the table they make."""

from collections.abc import Sequence
from typing import Any

from head_tables import Row, markdown

CONTENDERS = ("TRL, GRPO", "corral, ppo_clip", "corral, troll")
SMALL, MIDDLE, LARGE, OWN = "smollm2, its shape", "0.5B, 6 of 24 layers", "8B, 4 of 36 layers", "smollm2"
SHAPES = [LARGE, MIDDLE, SMALL]
"""Models with random weights, what is wanted most first: the larger, the more the head has to do."""
TITLES = {
    SMALL: "SmolLM2-135M's shape",
    OWN: "SmolLM2-135M",
    MIDDLE: "Qwen2.5-0.5B's, 6 of 24 layers",
    LARGE: "Qwen3-8B's, 4 of 36 layers",
}
ROUNDS = 9


def section(model: str, device: str = "cuda") -> str:
    """Under which name a model's rows are kept."""
    return f"{model}, on {device}"


def policies_of(model: str, wanted: Sequence[str] = ("peaked", "flat")) -> Sequence[str]:
    return ["real"] if model == OWN else wanted


def finished(rows: list[Row], policy: str) -> bool:
    """Whether all contenders were timed often enough, and their longest micro-batch found where one is looked for."""
    three = [row for row in rows if row["policy"] == policy]
    timed = all(row.get("rounds", 0) >= ROUNDS for row in three)
    return len(three) == len(CONTENDERS) and timed and (policy == "peaked" or all("longest" in row for row in three))


def updates(results: dict[str, Any]) -> str:
    """A line for every model and policy that was timed."""
    head = ["model", "policy", "sequences × tokens", *CONTENDERS, "tokens/s: troll × TRL"]
    head += ["MiB: TRL, ppo_clip, troll", "longest: TRL, ppo_clip, troll"]
    lines = []
    for model, title in TITLES.items():
        rows = results.get(section(model), {"rows": []})["rows"]
        for policy in ("peaked", "flat", "real"):
            three = [row for name in CONTENDERS for row in rows if (row["policy"], row["contender"]) == (policy, name)]
            if len(three) == len(CONTENDERS) and all("ms" in row for row in three):
                lines.append([title, policy, *_cells(three)])
    return markdown(head, lines)


def _cells(three: list[Row]) -> list[str]:
    times = [f"{row['ms']:.3g} ms" for row in three]
    ratio = three[-1]["tokens_per_s"] / three[0]["tokens_per_s"]
    found = [f"{row['longest']}–{row['too_long']}" if "longest" in row else "not measured" for row in three]
    longest = ", ".join(found) if any("longest" in row for row in three) else ""
    memory = ", ".join(f"{row['mib']:.0f}" for row in three)
    return [f"{three[0]['sequences']} × {three[0]['tokens']}", *times, f"{ratio:.2f}", memory, longest]
