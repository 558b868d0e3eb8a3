"""The head's benchmark: what it compares, what it calls an error, what it keeps, and where it goes on."""

import io
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import head_against
import pytest
import rows as row_files
import timing
import torch
from head_cases import SECTIONS, Section
from head_contenders import CLIP, GEMM, OBJECTIVES, OLD, OURS, TROLL
from head_problem import Problem, Reference, make_problem

import corral
import head

SOURCE = Path(corral.__file__).parents[1]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(12, 300, 16, 4, "medium", "cpu", torch.float32)


def test_no_case_is_measured_twice_and_none_is_missing() -> None:
    cases = [*SECTIONS["usual"].cases, *SECTIONS["shapes"].cases]
    keys = [tuple(case.values()) for case in cases]
    assert len(set(keys)) == len(keys)
    shapes = itertools.product((2048, 8192, 16384), (32000, 151936, 262144), (896, 4096))
    assert {(case["N"], case["V"], case["H"]) for case in cases} == set(shapes)
    assert {case["K"] for case in cases} == {16, 64, 256}
    assert {case["policy"] for case in cases} == {"peaked", "medium", "flat"}


@pytest.mark.parametrize("task", [TROLL, CLIP])
def test_updates_agree_with_float64(problem: Problem, task: str) -> None:
    reference = Reference(problem.first(8))
    for name in ("full logits", "corral", "corral, exact"):
        assert reference.of_update(OBJECTIVES[task], *OURS[task, name](problem))["gradient_error"] < 2e-5, name


def test_old_passes_agree_with_float64(problem: Problem) -> None:
    reference = Reference(problem.first(8))
    for name in ("full logits", "corral"):
        assert max(reference.of_old_pass(*OURS[OLD, name](problem)).values()) < 2e-5, name


def test_a_gradient_of_the_wrong_sign_is_an_error_of_two(problem: Problem) -> None:
    # ‖−g − g‖ / ‖g‖ = 2.
    dh, dw = OURS[CLIP, "full logits"](problem)
    assert Reference(problem.first(8)).of_update("ppo_clip", -dh, dw)["gradient_error"] == pytest.approx(2.0, abs=1e-4)


def test_padding_hides_no_token_that_is_missed(problem: Problem) -> None:
    # Two tokens, the first of them left out: log .9 − log .1 = log 9, though padding stands for no token at all.
    weight = torch.tensor([[0.9, 0.1]]).log().T
    p = replace(problem.first(1), hidden_old=torch.ones(1, 1), weight=weight, tokens=torch.tensor([1]))
    dist = corral.SparseDist(torch.tensor([[1, 1, -1]]), torch.tensor([[0.1, 0.1, 0.0]]).log(), torch.tensor([0.9]).log())
    assert Reference(p).of_old_pass(dist.logp[:, 0], dist)["missed_by"] == pytest.approx(math.log(9), rel=1e-6)


def test_contenders_run_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Medians of 1, 5, 3 and of 2, 2, 2, round by round.
    order: list[str] = []
    times = {"a": iter([1.0, 5.0, 3.0]), "b": iter([2.0] * 3)}
    runs = {name: lambda name=name: order.append(name) or name for name in "ab"}
    monkeypatch.setattr(timing, "milliseconds", lambda run, device, wall: next(times[run()]))
    assert timing.in_turns(runs, 3) == {"a": 3.0, "b": 2.0}
    assert order == ["a", "b"] * 4


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["head.py", "--threads", str(torch.get_num_threads()), *options])
        head.main()
        return capsys.readouterr().out

    return run


def test_rows_are_kept_and_no_case_is_measured_twice(tmp_path: Path, bench: Callable[..., str]) -> None:
    out = tmp_path / "rows" / "head.jsonl"
    options = ("--section", "smoke", "--out", str(out), "--rounds", "1")
    assert "three GEMMs" in bench(*options)
    rows = row_files.read_rows(out)
    assert [(row["task"], row["name"]) for row in rows] == list(OURS)
    anchor, exact = rows[0], next(row for row in rows if (row["task"], row["name"]) == (TROLL, "corral, exact"))
    assert (anchor["task"], anchor["x"]) == (GEMM, 1.0)
    assert exact["x"] == pytest.approx(exact["ms"] / anchor["ms"], rel=1e-3)
    assert exact["gradient_error"] < 2e-5
    assert exact["section"] == "smoke"
    assert len(exact["code"]) == 12
    # Measured again, rows take the place of the old ones; resumed, there is nothing to do.
    bench(*options)
    again = row_files.read_rows(out)
    assert [head.label(row) for row in again] == [head.label(row) for row in rows]
    assert bench(*options, "--resume") == ""
    # Rows of another state of the code are no reason to leave a case out.
    row_files.write_rows(out, [{**row, "code": "other"} for row in again])
    assert "three GEMMs" in bench(*options, "--resume")


def test_what_is_not_measured_is_said(bench: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "smoke: not measured, the minutes are over: {'N': 12" in bench("--section", "smoke", "--minutes", "-1")
    if not torch.cuda.is_available():
        assert bench("--section", "usual") == "usual: not measured, there is no GPU here\n"
    lacking = replace(SECTIONS["smoke update"], needs="not_a_package")
    assert lacking.missing() == "not_a_package is not installed"
    with pytest.raises(SystemExit):
        bench("--resume")
    assert "name it with --out" in capsys.readouterr().err


def section(**runs: Callable[[], object]) -> Section:
    """A section with these contenders; the first is the anchor."""
    from head_cases import Prepared

    keys = {("task", name.replace("_", " ")): run for name, run in runs.items()}
    prepared = Prepared(runs=keys, anchor=next(iter(keys)), check=lambda key, output: {})
    return Section(question="", cases=[{}], prepare=lambda about, device: prepared, rounds=1, pause=0.0, device="cpu")


def test_a_head_of_others_may_fail_and_ours_may_not() -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'x'")

    def broken() -> None:
        raise TypeError("no such argument")

    rows = head.measure(section(one_GEMM=lambda: None, theirs=absent, another=broken), {})
    assert [row.get("status") for row in rows] == [None, "not installed", "TypeError: no such argument"]
    with pytest.raises(TypeError, match="no such argument"):
        head.measure(section(one_GEMM=lambda: None, corral=broken), {})


@pytest.mark.slow
def test_two_trees_take_turns(tmp_path: Path, bench: Callable[..., str]) -> None:
    other, out = tmp_path / "src", tmp_path / "head.jsonl"
    other.symlink_to(SOURCE)
    said = bench("--section", "smoke", "--rounds", "2", "--against", f"{tmp_path}/not/../src", "--out", str(out))
    assert "ratio_low" in said
    rows = row_files.read_rows(out)
    assert {row["section"] for row in rows} == {"smoke, against"}
    assert [(row["task"], row["name"]) for row in rows][:2] == [(GEMM, "one GEMM"), (OLD, "corral")]
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)


def test_a_ratio_is_that_of_a_round() -> None:
    # Rounds of 2/1, 3/2, 8/2: ratios 2, 1.5, 4 with the quartiles 1.75 and 3; medians 3 and 2.
    row = head_against._row("troll update: corral", [2.0, 3.0, 8.0], [1.0, 2.0, 2.0])
    assert row == {
        "task": TROLL, "name": "corral", "ms": 3.0, "ms_other": 2.0, "ratio": 2.0, "ratio_low": 1.75, "ratio_high": 3.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_folder_without_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    with pytest.raises(ValueError, match=r"wants a source folder, with corral in it: .* gives"):
        head_against.Comparison(tmp_path)


def test_a_worker_prepares_a_case_and_times_a_round_whenever_asked() -> None:
    case = {"section": "smoke", "about": SECTIONS["smoke"].cases[0], "threads": torch.get_num_threads()}
    questions, answers = io.StringIO(json.dumps(case) + "\n{}\n"), io.StringIO()
    head_against.serve(questions, answers)
    where, ready, times = (json.loads(line) for line in answers.getvalue().splitlines())
    assert (Path(where), ready) == (SOURCE, "ready")
    assert list(times) == [f"{task}: {name}" for task, name in OURS if "corral" in name or name == "one GEMM"]


def test_the_union_sees_what_the_old_support_does_not() -> None:
    _, old, *unions = head.measure(SECTIONS["smoke union"], SECTIONS["smoke union"].cases[0], rounds=1)
    assert all(row["gradient_error"] < 2e-5 for row in (old, *unions))
    assert all(row["seen"] > 0.95 > old["seen"] for row in unions)


def test_a_tree_without_unions_can_still_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "corral", ModuleType("corral"))  # with none of its names
    path = Path(head.__file__).with_name("head_union.py")
    spec = spec_from_file_location("older", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert next(iter(module.UNIONS)) == (GEMM, "one GEMM")


def test_an_update_of_every_trainer_is_timed_on_its_own_rollouts() -> None:
    import update_phase

    about = SECTIONS["smoke update"].cases[0]
    rows = {row["name"]: row for row in head.measure(SECTIONS["smoke update"], about, rounds=1)}
    assert list(rows) == list(update_phase.CONTENDERS)
    assert all(row["ms"] > 0 and row["entropy"] > 0 for row in rows.values())
    assert rows["TRL, GRPO"]["x"] == 1.0
    assert 0 <= rows["corral, troll"]["tr/rest_mass"] < 1
    # The old policy is an old one: weights have moved since.
    assert rows["corral, ppo_clip"]["tr/active_frac"] > 0


def test_rows_of_a_benchmark_are_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(row_files, "FOLDER", tmp_path)
    row_files.finish("one", [{"way": "ours", "ms": 1.23456}, {"way": "theirs"}], save=True)
    assert capsys.readouterr().out == "   way     ms\n  ours  1.235\ntheirs       \n"
    (first, second), here = row_files.read_rows(tmp_path / "one.jsonl"), row_files.stamp()
    assert first == {**here, "way": "ours", "ms": 1.235}
    assert second == {**here, "way": "theirs"}


def test_options_have_the_types_of_their_defaults() -> None:
    parser = row_files.arguments("what", rows=3, bound=[0.5])
    args = parser.parse_args(["--rows", "4", "--bound", "1", "2"])
    assert (args.rows, args.bound, args.save) == (4, [1.0, 2.0], False)
