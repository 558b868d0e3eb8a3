"""The head's benchmark itself: what it compares, what it calls an error, and what it keeps of real rollouts."""

import itertools
import math
from dataclasses import replace

import head_timing
import head_vs_naive
import pytest
import torch
from head_contenders import CLIP, OLD, TROLL, contenders
from head_errors import Reference
from head_problem import Problem, make_problem
from head_rollouts import problem_of, routing_of, statistics_of
from head_sampling import closeness, eight_bits, weight_of


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
