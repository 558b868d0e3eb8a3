"""What starting the optimizer over changes at a rate far too large: runs of the commit before and of the one that has it."""

import json
from collections.abc import Sequence
from pathlib import Path

from study_table import Row, held_out
from study_text import group, markdown, numbers

RUNS = Path(__file__).with_name("start-over.jsonl")


def start_over(_: Sequence[Row]) -> str:
    """Success after 5 and 10 steps by objective, a number per seed."""
    runs = [json.loads(line) | {"dead": False} for line in RUNS.read_text().splitlines()]
    lines = []
    for (objective, code), members in group(runs, "objective", "code").items():
        found = [dict(held_out(run)) for run in members]
        names = {"before": "moments kept, rate down to a quarter", "after": "the optimizer starts over"}
        lines.append([str(objective), names[str(code)], *(numbers(points[step] for points in found) for step in (5.0, 10.0))])
    return markdown(("objective", "", "after 5 steps", "after 10"), lines)
