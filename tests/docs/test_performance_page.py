"""A table of benchmarks/results says what its rows do."""

import pytest
from head_contenders import CLIP, GEMM, TROLL
from head_union import UNIONS
from rows import Row

from results import timings


def usual(width: int, policy: str, task: str, name: str, x: float, section: str = "usual", **more: object) -> Row:
    """A row of the usual shape, ten milliseconds a GEMM."""
    about = {"section": section, **timings.USUAL, "H": width, "policy": policy, "task": task, "name": name}
    where = {"gpu": "card", "torch": "2", "date": "2026-01-01", "code": "abc"}
    return {**about, "ms": 10 * x, "x": x, "mib": 1.0, **where, **more}


def test_a_block_says_on_what_and_when_it_was_measured() -> None:
    rows = [usual(896, "peaked", GEMM, "one GEMM", 1.0), usual(896, "flat", GEMM, "one GEMM", 1.0, date="2026-01-02", code="d")]
    assert timings.source(rows, "usual") == (
        "card, torch 2; 2026-01-01 (code abc), 2026-01-02 (code d): `python benchmarks/head.py --section usual`.\n"
    )
    assert timings.source(rows, "shapes") == "Not measured yet.\n"


def line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_a_goal_is_bold_where_it_is_met() -> None:
    # 1.07 ≤ 1.08 at H = 4096, sustained 1.2; 2 > 1.12 at H = 896, where nothing was sustained.
    rows = [
        usual(4096, "peaked", GEMM, "one GEMM", 1.0, x_sustained=1.0),
        usual(4096, "peaked", TROLL, "corral", 1.07, x_sustained=1.2),
        usual(896, "peaked", GEMM, "one GEMM", 1.0),
        usual(896, "peaked", TROLL, "corral", 2.0),
    ]
    said = "| TROLL update, peaked, × one GEMM | ≤ 1.08 | **1.07** | 1.20 | ≤ 1.12 | 2.00 |  |"
    assert line(timings.goals(rows), "TROLL update, peaked, × one GEMM") == said


def test_the_fastest_other_head_is_another_ones() -> None:
    # 1.5 over Liger's 3: not over ours, full logits, chunks of research code, CCE's 4, or a row of another shape.
    rows = [
        usual(896, "flat", CLIP, "corral", 1.5),
        usual(896, "flat", CLIP, "full logits", 2.0),
        usual(896, "flat", CLIP, "checkpointed chunks", 2.0, "heads"),
        usual(896, "flat", CLIP, "CCE, clip", 4.0, "heads"),
        usual(896, "flat", CLIP, "Liger, fused cross-entropy", 3.0, "heads"),
        {**usual(896, "flat", CLIP, "TRL, chunked log-probs, clip", 1.0, "heads"), "N": 1},
    ]
    assert line(timings.goals(rows), "clip update, flat").endswith("| ≤ 1.05 | **0.50** |  |")
    assert line(timings.heads(rows), "Liger") == "| Liger, fused cross-entropy |  |  |  | 3.00, 1 MiB |"


def test_memory_beyond_the_gradients() -> None:
    # dH and dW in bfloat16: 2 · 896 · (8192 + 151936) bytes = 273.656 MiB.
    assert timings.beyond_gradients(usual(896, "peaked", TROLL, "corral", 1.0, mib=300.0)) == pytest.approx(26.34375)


def test_rows_that_were_not_measured_leave_gaps() -> None:
    rows = [usual(4096, "peaked", GEMM, "one GEMM", 1.0), usual(4096, "peaked", TROLL, "corral", 1.1, gradient_error=0.01)]
    assert timings.in_short(rows).splitlines()[2:] == [
        "| one GEMM, a lower bound | 10 ms |  |  |",
        "| TROLL update, peaked policy | 11 ms | -1250 MiB | 1 % |",
    ]
    assert line(timings.gains(rows), "TROLL update, peaked").count("|  |") == 3


def test_a_line_of_the_updates() -> None:
    # 100 ms over 50: twice the tokens a second. A model whose contenders were not all timed has no line.
    def row(name: str, ms: float, policy: str = "flat") -> Row:
        about = {"section": "update", "model": "one", "policy": policy, "sequences": 2, "tokens": 4, "name": name, "ms": ms}
        return {**about, "mib": 3.4, "gpu": "card", "torch": "2", "date": "2026-01-01", "code": "abc"}

    timed = [row(name, ms) for name, ms in zip(timings.CONTENDERS, (100.0, 80.0, 50.0), strict=True)]
    table = timings.updates([*timed, row("TRL, GRPO", 90.0, "peaked")])
    assert table.splitlines()[2:3] == ["| one, flat | 2 × 4 | 100 ms | 80 ms | 50 ms | 2.00 | 3, 3, 3 |"]
    assert "peaked" not in table


def test_a_line_of_the_unions() -> None:
    # Of 64 rows 9 are beyond the bound; the old support misses 4 of them, and sees half of the KL.
    def row(x: int, name: str) -> Row:
        seen = {"seen": 0.5 if x == 1 else 1.0, "beyond": 9, "missed": 4 // x}
        return usual(896, "flat", TROLL, name, x, "union", gradient_error=0.001 * x, **seen)

    rows = [row(x, name) for x, name in enumerate((name for task, name in UNIONS if task == TROLL), 1)]
    (found,) = timings.unions(rows).splitlines()[2:3]
    times = " | ".join(f"{x:.2f}, 1 MiB" for x in range(1, 6))
    assert found == f"| H = 896, flat | {times} | 0.1 %, 0.2 %, 0.5 % | 50 %, 100 % | 4, 2 of 9 |"
    assert "flat" not in timings.unions(rows[1:])


def test_rows_of_two_cards_are_not_mixed() -> None:
    rows = [usual(896, "peaked", GEMM, "one GEMM", 1.0, gpu="old"), usual(4096, "peaked", GEMM, "one GEMM", 1.0)]
    text = timings.gains(timings.of_one_gpu(rows))
    assert "card, torch 2" in text
    assert "old" not in text.replace("old pass", "")
