"""Cores: as many as a process may use, by affinity and by its share of time."""

import math
import os
from pathlib import Path

import pytest

import corral.cores as module
from corral.cores import cores, share_of_time


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """A service in a slice, as systemd has them."""
    (tmp_path / "a.slice" / "b.service").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:cpu:/elsewhere\n0::/a.slice/b.service\n")
    return tmp_path


@pytest.mark.parametrize(
    ("outer", "inner", "share"),
    [
        (None, None, math.inf),
        ("max 100000", "max 100000", math.inf),
        ("max 100000", "250000 100000", 2.5),
        ("150000 100000", "400000 100000", 1.5),  # the tightest of all groups around
        ("nonsense", "50000 100000", 0.5),
    ],
)
def test_golden_shares_of_time(groups: Path, outer: str | None, inner: str | None, share: float) -> None:
    for folder, text in (("a.slice", outer), ("a.slice/b.service", inner)):
        if text is not None:
            (groups / folder / "cpu.max").write_text(text + "\n")
    assert share_of_time(groups / "cgroup", groups) == share


def test_systems_without_such_groups_have_no_limit(tmp_path: Path) -> None:
    assert share_of_time(tmp_path / "missing", tmp_path) == math.inf
    (tmp_path / "cgroup").write_text("1:cpu:/\n")  # version 1 alone
    assert share_of_time(tmp_path / "cgroup", tmp_path) == math.inf


@pytest.mark.parametrize(("share", "expected"), [(math.inf, 8), (2.5, 2), (0.5, 1), (100.0, 8)])
def test_golden_cores(share: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "share_of_time", lambda: share)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores() == expected


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_all_cores_count(counted: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "share_of_time", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert cores() == expected
