"""The forest plot's data: who is ahead, sorted, with the intervals of the sentences."""

from dataclasses import replace
from typing import Any

import pytest
from report.synthetic import write_small_set

from corral.lab.report.content import RunReport, make_report
from corral.lab.report.html import macros
from corral.lab.report.outcomes import sort_pairs
from corral.lab.report.page import page_data, sentence_pairs
from corral.lab.report.read import read_runs


def pair(ours: str, theirs: str, difference: float, claimed: bool, problem: str = "countdown with tiny") -> dict[str, Any]:
    low, high = (difference - 3, difference + 3) if claimed else (difference - 30, difference + 30)
    return {
        "problem": problem, "ours": ours, "theirs": theirs, "our_objective": ours, "their_objective": theirs, "unit": "points",
        "difference": difference, "low": low, "high": high, "claimed": claimed, "sentence": f"{ours} {theirs} {difference}",
        "measure": "final",
    }  # fmt: skip


ROWS = [pair("dppo", "ppo_clip", -10.0, True), pair("troll", "dppo", 4.0, False), pair("troll", "ppo_clip", 20.0, True)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return make_report(read_runs([write_small_set(tmp_path_factory.mktemp("runs"))]))


def figures_of(report: RunReport, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page_data(replace(report, tables={**report.tables, "comparisons": rows}))["forest"]
    return found


def test_pairs_are_seen_from_who_is_ahead_claims_first_and_large_ones_first() -> None:
    found = [(row["ours"], row["theirs"], row["difference"], row["low"], row["high"]) for row in sort_pairs(ROWS)]
    assert found == [
        ("troll", "ppo_clip", 20.0, 17.0, 23.0), ("ppo_clip", "dppo", 10.0, 7.0, 13.0), ("troll", "dppo", 4.0, -26.0, 34.0),
    ]  # fmt: skip


def test_golden_rows_of_the_figure(report: RunReport) -> None:
    (figure,) = figures_of(report, ROWS)
    assert [row["name"] for row in figure["rows"]] == ["troll − ppo_clip", "ppo_clip − dppo", "troll − dppo"]
    assert [(row["value"], row["low"], row["high"]) for row in figure["rows"]] == [(20, 17, 23), (10, 7, 13), (4, -26, 34)]
    assert [row["hollow"] for row in figure["rows"]] == [False, False, True]
    assert figure["rows"][0]["numbers"] == "+20.0 [17.0…23.0]"
    assert (min(figure["ends"]), max(figure["ends"])) == (-26, 34)
    assert figure["of"] == "final success, points"


def test_many_ties_are_drawn_to_a_limit_and_problems_kept_apart(report: RunReport) -> None:
    names = ("troll", "dppo", "ppo_clip")
    many = [pair(ours, theirs, 1.0, False) for ours in names for theirs in names] + [pair("troll", "dppo", 9.0, True)]
    (figure,) = figures_of(report, many * 5)
    assert [row["kind"] for row in figure["rows"]] == ["pair claim"] * 5 + ["pair tie"] * 35
    found = macros("report.html").verdict(sentence_pairs(sort_pairs(many)))
    assert "No difference can be claimed between 9 of 10 pairs" in found
    assert found.count('id="forest"') == 1
    groups = [*report.groups[:-1], replace(report.groups[-1], problem="other")]
    two = figures_of(replace(report, groups=groups), [*ROWS, pair("troll", "dppo", 1.0, False, "other")])
    assert [figure["title"].partition(": ")[2] for figure in two] == ["countdown with tiny", "other"]
    assert figures_of(report, []) == []
