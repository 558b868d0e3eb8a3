"""docs/performance.md says what benchmarks/results hold of the head and the trainer, and a table says what a row does."""

from pathlib import Path

import head_figure
import head_goals
import head_kernels
import head_page
import head_tables
import pytest

SHAPE = {"N": 8, "V": 9, "H": 2, "K": 1, "policy": "flat", "dtype": "float32"}


@pytest.mark.parametrize("path", head_page.PAGES, ids=lambda path: path.name)
def test_a_page_holds_the_latest_numbers(path: Path) -> None:
    text = path.read_text()
    assert head_page.page(text) == text, "run `python benchmarks/head_page.py`"


def test_everything_measured_is_on_the_page() -> None:
    found = [name for path in head_page.PAGES for name in head_page.BLOCK.findall(path.read_text())]
    assert sorted(found) == sorted(head_page.BLOCKS)
    assert head_page.FIGURE.exists()


def test_what_is_not_measured_stays() -> None:
    old = "before\n\n<!-- measured: goals -->\nstale\n<!-- /measured -->\n\nafter\n"
    new = head_page.page(old)
    assert new.startswith("before\n\n<!-- measured: goals -->\n\n|")
    assert new.endswith("<!-- /measured -->\n\nafter\n")
    assert "stale" not in new


def test_a_table_of_three_rows() -> None:
    rows = [
        {**SHAPE, "task": "clip update", "name": "theirs", "status": "not installed"},
        {**SHAPE, "task": "products", "name": "one product", "ms": 2.0, "mib": 1.0},
        {**SHAPE, "task": "old pass", "name": "ours", "ms": 3.0, "mib": 250.4, "logp_error": 1.21e-6},
    ]
    assert head_tables.table(rows).splitlines() == [
        "| task |  | ms | × one product | MiB | error |",
        "| --- | --- | --- | --- | --- | --- |",
        "| products | one product | 2 | 1.00 | 1 |  |",
        "| old pass | ours | 3 | 1.50 | 250 | 1.2e-06 |",
        "| clip update | theirs | not installed |  |  |  |",
    ]


def test_sustained_times_are_relative_to_a_sustained_product() -> None:
    # 3 / 2 cool, 6 / 3 sustained.
    rows = [
        {**SHAPE, "task": "products", "name": "one product", "ms": 2.0, "ms_sustained": 3.0, "mib": 1.0},
        {**SHAPE, "task": "old pass", "name": "ours", "ms": 3.0, "ms_sustained": 6.0, "mib": 1.0},
    ]
    assert head_tables.table(rows).splitlines()[-1] == "| old pass | ours | 3 | 6 | 1.50 | 2.00 | 1 |  |"
    assert head_tables.ratio(rows[1], rows[0]) == "1.50 / 2.00"
    assert head_tables.ratio(rows[1], {"ms": 2.0}) == "1.50"


def usual(width: int, policy: str, task: str, name: str, ms: float, **more: float) -> dict[str, object]:
    n, v, k = head_goals.SHAPE
    return {"N": n, "V": v, "H": width, "K": k, "policy": policy, "task": task, "name": name, "ms": ms, "mib": 1.0, **more}


def test_a_goal_is_bold_where_it_is_met() -> None:
    # 10.7 / 10 = 1.07 ≤ 1.08 at H = 4096; 4 / 2 = 2 > 1.12 at H = 896. Sustained only at H = 4096: 12 / 10 = 1.2.
    rows = [
        usual(4096, "peaked", "products", "one product", 10.0, ms_sustained=10.0),
        usual(4096, "peaked", "troll update", "corral, triton", 10.7, ms_sustained=12.0),
        usual(896, "peaked", "products", "one product", 2.0),
        usual(896, "peaked", "troll update", "corral, triton", 4.0),
    ]
    line = head_goals.GOALS[0].line(head_goals.Measured(rows))
    assert line == ["TROLL update, peaked, × one product", "≤ 1.08", "**1.07**", "1.20", "≤ 1.12", "2.00", ""]


def test_the_fastest_other_head_is_another_ones() -> None:
    rows = [
        usual(896, "flat", "clip update", "corral, triton", 1.0),
        usual(896, "flat", "clip update", "full logits", 2.0),
        usual(896, "flat", "clip update", "CCE, clip", 4.0),
        usual(896, "flat", "clip update", "Liger, fused cross-entropy", 3.0),
        {**usual(896, "flat", "clip update", "TRL, chunked log-probs, clip", 1.0), "N": 1},
    ]
    assert head_goals.Measured(rows).fastest(896, "flat", "ms")["name"] == "Liger, fused cross-entropy"


def test_memory_beyond_the_gradients() -> None:
    # dH and dW in bfloat16: 2 · 896 · (8192 + 151936) bytes = 273.656 MiB.
    found = head_goals._beyond_gradients("peaked", head_goals.TROLL)
    row = {**usual(896, "peaked", *head_goals.TROLL, 1.0), "mib": 300.0}
    assert abs(found(head_goals.Measured([row]), 896, "ms") - 26.34375) < 1e-6


def test_every_kernel_counts_once() -> None:
    names = {
        "_stream_kernel": "the streamed product",
        "nvjet_sm90_tst_128x256_64x4": "other products",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel": "dH and dW",
        "Memset (Device)": "everything else",
    }
    assert {name: head_kernels.part_of(name) for name in names} == names
    # 2 + 1 in the first run, 4 in the second; a part without time stays away.
    rows = [
        {"H": 8, "run": "a", "ms": {"tiles made again": 2.0, "everything else": 1.0}},
        {"H": 9, "run": "b", "ms": {"tiles made again": 4.0}},
    ]
    assert head_kernels.kernels({head_kernels.NAME: {"rows": rows}}).splitlines()[2:] == [
        "| tiles made again | 2 | 4 |",
        "| everything else | 1 | 0 |",
        "| in all | 3 | 4 |",
    ]


def test_a_page_of_what_was_cut_short_has_gaps(tmp_path: Path) -> None:
    # One policy of one width: the lines of the other policy stay away, the other width's panel is empty.
    rows = [
        usual(4096, "peaked", *head_goals.ONE, 10.0),
        usual(4096, "peaked", *head_goals.TROLL, 11.0, gradient_error=0.01),
    ]
    results = {"head on cuda": {"machine": {"gpu": "one"}, "rows": rows}}
    assert [line.split(" | ")[1] for line in head_goals.in_short(results).splitlines()[2:]] == ["10 ms", "11 ms"]
    head_figure.plot(results, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").exists()
