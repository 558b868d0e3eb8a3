"""The head's benchmark itself: what it compares, what it calls an error, and what it keeps of real rollouts."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import head_rollouts
import head_sampling
import head_timing
import head_vs_naive
import pytest
import torch
from head_contenders import CLIP, OLD, TROLL, contenders
from head_errors import Reference
from head_problem import Problem, make_problem
from head_rollouts import problem_of, routing_of, statistics_of
from head_sampling import closeness, eight_bits, weight_of
from results import read_results

import corral


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(12, 300, 16, 4, "medium", "cpu", torch.float32).with_support()


def test_no_case_is_measured_twice_and_none_is_missing() -> None:
    listed = head_vs_naive.cases("cuda", quick=False)
    keys = [(case.shape, case.k, case.policy) for case in listed]
    assert len(set(keys)) == len(keys)
    shapes = itertools.product((2048, 8192, 16384), (32000, 151936, 262144), (896, 4096))
    assert {case.shape for case in listed} == set(shapes)
    assert {case.k for case in listed} == {16, 64, 256}
    assert {case.policy for case in listed} == {"peaked", "medium", "flat"}


def test_rows_are_kept_by_device_and_threads() -> None:
    assert head_vs_naive.title("cpu", 1, others=False) == "head on cpu, 1 thread"
    assert head_vs_naive.title("cpu", 2, others=False) == "head on cpu, 2 threads"
    assert head_vs_naive.title("cuda", 16, others=True) == "head on cuda, other shapes"


@pytest.mark.parametrize("task", [OLD, TROLL, CLIP])
def test_full_logits_and_corral_agree_with_float64(problem: Problem, task: str) -> None:
    reference = Reference(problem.first(8))
    for name in ("full logits", "corral, torch"):
        errors = reference.errors(task, contenders("cpu", torch.float32)[task, name](problem))
        assert max(errors.values()) < 2e-5, name


def test_a_gradient_of_the_wrong_sign_is_an_error_of_two(problem: Problem) -> None:
    # ‖−g − g‖ / ‖g‖ = 2.
    reference = Reference(problem.first(8))
    dh, dw = contenders("cpu", torch.float32)[CLIP, "full logits"](problem)
    assert reference.errors(CLIP, (-dh, dw))["gradient_error"] == pytest.approx(2.0, abs=1e-4)


def test_a_member_of_the_support_that_is_missed_is_an_error(problem: Problem) -> None:
    reference = Reference(problem)
    logp, dist = contenders("cpu", torch.float32)[OLD, "full logits"](problem)
    ids = dist.ids.clone()
    ids[0, 0] = reference.logp_old[0].argmin()
    errors = reference.errors(OLD, (logp, replace(dist, ids=ids)))
    assert errors["missed_by"] > 1.0


def test_padding_hides_no_token_that_is_missed(problem: Problem) -> None:
    # Two tokens, the first of them left out: log .9 − log .1 = log 9, though padding stands for no token at all.
    weight = torch.tensor([[0.9, 0.1]]).log().T
    some = problem.first(1)
    p = replace(some, hidden_old=torch.ones(1, 1), weight=weight, tokens=torch.tensor([1]))
    dist = corral.SparseDist(torch.tensor([[1, 1, -1]]), torch.tensor([[0.1, 0.1, 0.0]]).log(), torch.tensor([0.9]).log())
    errors = Reference(p).errors(OLD, (dist.logp[:, 0], dist))
    assert errors["missed_by"] == pytest.approx(math.log(9), rel=1e-6)


def test_every_contender_runs_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    # Medians of 1, 5, 3 and of 2, 2, 2, round by round.
    order: list[str] = []
    times = {"a": iter([1.0, 5.0, 3.0]), "b": iter([2.0] * 3)}
    monkeypatch.setattr(head_timing, "milliseconds", lambda run, device: next(times[run()]))
    runs = {name: lambda name=name: order.append(name) or name for name in "ab"}
    assert head_timing.interleaved(runs, "cpu", 3, 0.0) == {"a": 3.0, "b": 2.0}
    assert order == ["a", "b"] * 3


def test_a_weight_survives_its_eight_bits_or_is_refused() -> None:
    scale = torch.rand(5, 2, 1).half().float()
    whole = torch.randint(-126, 127, (5, 2, 32)).float()
    whole[..., 0] = 127
    weight = (whole * scale).flatten(-2)
    assert torch.equal(weight_of(eight_bits(weight)), weight)
    with pytest.raises(ValueError, match="8 bits"):
        eight_bits(torch.randn(5, 64))


def test_closeness_counts_the_last_number() -> None:
    assert closeness("2 + 3 = 5", 5) == 1.0
    assert closeness("about 7", 5) == pytest.approx(1 / 3)
    assert closeness("five", 5) == 0.0


def stored(logits: torch.Tensor, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A set whose every row has these logits: the weight is diagonal."""
    hidden = logits.repeat(rows, 1)
    return {"old": hidden, "new": hidden, "tokens": torch.zeros(rows, dtype=torch.int32)}, torch.eye(len(logits))


def test_a_uniform_policy_is_dense_and_a_certain_one_sparse() -> None:
    # 256 equal tokens: H = log 256, all of them are needed, 192 / 256 lies outside the 64.
    p = problem_of(*stored(torch.zeros(256), 6))
    found = statistics_of(p)
    assert found["entropy"] == pytest.approx(math.log(256))
    assert found["support_median"] == 256
    assert found["outside_mean"] == pytest.approx(0.75)
    assert routing_of(p)["dense_share"] == 1.0
    # Two tokens 30 nats above the others: all mass and all gradient on them, and nothing to be left out.
    certain = torch.zeros(256)
    certain[:2] = 30.0
    p = problem_of(*stored(certain, 6))
    assert statistics_of(p)["support_fits"] == 1.0
    assert routing_of(p)["dense_share"] == 0.0


def test_a_set_is_repeated_with_its_advantages() -> None:
    given, weight = stored(torch.zeros(80), 3)
    p = problem_of(given, weight, 7)
    assert len(p.tokens) == 7
    assert torch.equal(p.advantages[:3], p.advantages[3:6])


@pytest.mark.llm
def test_rollouts_are_drawn_and_measured_set_by_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A model of 16 dimensions in SmolLM2's place, its head in 8 bits with a scale for every 16.
    from corral.llm.smoke import build_smoke

    model, tokenizer = build_smoke()
    head = model.get_output_embeddings().weight.data
    head.copy_((127 * head / head.abs().amax(-1, keepdim=True).clamp(min=1e-9)).round() * 2.0**-9)
    monkeypatch.setattr("corral.llm.models.load_smollm2", lambda: (model, tokenizer))
    monkeypatch.setattr(head_sampling, "BLOCK", 16)
    drawn, file = tmp_path / "runs" / "rollouts.pt", tmp_path / "head_rollouts.json"

    def run(command: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["head_rollouts.py", command, str(drawn), *options])
        head_rollouts.main()
        return capsys.readouterr().out

    run("collect", "--steps", "1", "--every", "1", "--rows", "16")
    stored = torch.load(drawn)
    assert len(stored["rewards"]) == 2
    assert len(stored["sets"]) == 10
    assert torch.equal(weight_of(stored), head)
    kept = ("--device", "cpu", "--save", "--resume", "--file", str(file))
    run("measure", "--sets", "1", *kept)
    said = run("measure", "--sets", "2", *kept)
    assert "GSM8K answers" not in said  # it is there already
    rewards, *rows = read_results(file)["rollouts on cpu"]["rows"]
    assert len(rewards["rewards"]) == 2
    assert list(dict.fromkeys(row["set"] for row in rows)) == ["GSM8K answers, before", "small sums, before"]
    assert all(row["logp_error"] < 1e-4 for row in rows if row.get("name") == "corral, torch" and row["task"] == OLD)
