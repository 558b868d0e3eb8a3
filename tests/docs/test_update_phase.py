"""The benchmark of the trainer's updates, at the size of a smoke test: what it keeps, where it goes on, what its table says."""

import sys
from pathlib import Path
from typing import Any

import pytest
import results
import update_tables
from update_tables import CONTENDERS

pytestmark = pytest.mark.llm


def test_every_contender_is_timed_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import update_phase

    file = tmp_path / "update_phase.json"
    size = ["--models", "smoke", "--policies", "peaked", "--sequences", "2", "--tokens", "4", "--rounds", "2"]
    monkeypatch.setattr(update_tables, "ROUNDS", 2)
    monkeypatch.setattr(sys, "argv", ["update_phase.py", *size, "--save", "--resume", "--file", str(file)])
    update_phase.main()
    rows = results.read_results(file)["smoke, on cpu"]["rows"]
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    assert all(row["rounds"] == 2 and row["ms"] > 0 for row in rows)
    assert all(row["entropy"] > 0 for row in rows)
    assert 0 <= rows[-1]["tr/rest_mass"] < 1
    assert "first updates" in capsys.readouterr().out
    # Another policy is measured beside it; the first is not measured again.
    sys.argv[sys.argv.index("peaked")] = "flat"
    update_phase.main()
    assert "peaked" not in capsys.readouterr().out
    again = results.read_results(file)["smoke, on cpu"]["rows"]
    assert again[:3] == rows
    assert [row["policy"] for row in again] == ["peaked"] * 3 + ["flat"] * 3


def row(contender: str, ms: float, **more: Any) -> dict[str, Any]:
    about = {
        "policy": "flat",
        "contender": contender,
        "sequences": 2,
        "tokens": 4,
        "ms": ms,
        "tokens_per_s": 1 / ms,
        "mib": 3.4,
    }
    return about | more


def test_a_line_of_the_table() -> None:
    # 1/50 over 1/100: twice the tokens a second. Nobody has looked for the second's longest micro-batch.
    three = [
        row(CONTENDERS[0], 100.0, longest=8, too_long=9),
        row(CONTENDERS[1], 80.0),
        row(CONTENDERS[2], 50.0, longest=10, too_long=11),
    ]
    lines = update_tables.updates({update_tables.section(update_tables.SMALL): {"rows": three}}).splitlines()
    assert lines[2:] == [
        "| SmolLM2-135M's shape | flat | 2 × 4 | 100 ms | 80 ms | 50 ms | 2.00 | 3, 3, 3 | 8–9, not measured, 10–11 |"
    ]
    assert len(update_tables.updates({update_tables.section(update_tables.SMALL): {"rows": three[:2]}}).splitlines()) == 2
