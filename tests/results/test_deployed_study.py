"""The study of deployed networks: its numbers worked by hand, its plans, and a page that says what its raw data say."""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from corral.lab.report.statistics import area_under_curve
from results import packed, pages, plans, runs, spec, study
from results.deployed import arms, confirm, page, rates
from results.spec import Run


def made(seed: int = 1, *, success: dict[int, float], rewards: list[float], **settings: Any) -> packed.Row:
    """A run as the study writes it."""
    lines: list[dict[str, Any]] = [{"step": 0, "success": success[0]}] if 0 in success else []
    for step, reward in enumerate(rewards, 1):
        line: dict[str, Any] = {"step": step, "reward": reward, "tr/deployed_kl_mean": 0.01 * step, "tr/deployed_kl_p999": 1.0}
        lines.append(line | ({"success": success[step], "greedy": 0.9} if step in success else {}))
    defaults = {"objective": "troll", "arm": "off", "rate": 2e-4, "passes": 1, "bound": math.inf, "schedule": "linear"}
    defaults |= runs.DEFAULTS
    run = {"key": f"{seed}{settings}", "seed": seed, "steps": 4, "dead": False, "finished": True, "lines": lines}
    return run | defaults | settings


def test_golden_area_of_a_run_and_of_a_dead_one() -> None:
    # .2 → .4 → .6 in two steps each: (.3 · 2 + .5 · 2) / 4 = .4.
    run = made(success={0: 0.2, 2: 0.4, 4: 0.6}, rewards=[0.1, 0.2, 0.3, 0.4])
    assert runs.area(run) == pytest.approx(0.4)
    assert (runs.final(run), runs.final(run, "greedy")) == (0.6, 0.9)
    assert runs.final(run | {"end": {"success": 0.58, "greedy": 0.88}}) == 0.58  # measured again, on more problems
    # Dead after step 2, with .4 a step before: .2 → .4 in one step, → 0 in the next, then 0: (.3 + .2 + 0 + 0) / 4 = .125.
    dead = made(success={0: 0.2, 1: 0.4}, rewards=[0.1, 0.0], dead=True)
    assert runs.held_out(dead) == [(0, 0.2), (1, 0.4), (2, 0.0), (4, 0.0)]
    assert runs.area(dead) == pytest.approx(0.125)
    assert runs.final(dead) == 0.0


@pytest.mark.parametrize(
    ("rewards", "dead"),
    [
        ([None, 0.1, 0.0, 0.0, 0.0, 0.0], True),
        ([0.1, 0.0, 0.0, 0.0, 0.0, 0.1], True),  # the step in which it was told to end
        ([0.0, 0.0, 0.0, 0.1, 0.0], False),
        ([0.0, 0.0, 0.0], False),
        ([], False),
    ],
)
def test_golden_four_steps_without_any_reward_end_a_run(rewards: list[float | None], dead: bool) -> None:
    assert study.is_dead([{"reward": reward} for reward in rewards]) is dead


def test_golden_rows_of_the_page() -> None:
    points = ((302, 0.32), (301, 0.31))
    rows = [made(seed, success={0: 0.2, 5: x, 10: x + 0.19}, rewards=[0.2] * 10, steps=10) for seed, x in points]
    bounded = [run | {"arm": "on", "rate": "auto", "bound": 0.02} for run in rows[:1]]
    table = page.reuse([*rows, *bounded]).splitlines()
    # KL means of steps 1 to 10 are .01 to .1: .055 in the mean.
    assert table[2] == "| troll | 1 | .500 .510 | .900 | .055 | .510 | .900 | .055 |"
    held = made(success={0: 0.2, 10: 0.6}, rewards=[0.2] * 10, steps=10, arm="on 0.03", bound=0.03, rate=1e-2)
    (row,) = rates.sweep_rows([held])
    assert (row.contestant, row.setting) == (
        "troll", {"learning_rate": 1e-2, "deployed_bound": 0.03, "schedule": "linear"}
    )  # fmt: skip
    assert (row.final, row.auc) == (0.6, pytest.approx(0.4))
    assert not row.fell_below_start
    below = made(success={0: 0.2, 3: 0.1, 10: 0.6}, rewards=[0.2] * 10, steps=10)
    assert rates.sweep_rows([below])[0].fell_below_start


def over_rates(rate: float | str, final: float, **settings: Any) -> list[packed.Row]:
    """Two runs of ten steps at a rate, a hundredth apart."""
    ends = ((301, final - 0.005), (302, final + 0.005))
    return [made(seed, success={0: 0.2, 10: x}, rewards=[0.2] * 10, steps=10, rate=rate, **settings) for seed, x in ends]


def test_golden_usable_rates_are_by_the_best_rate_without_a_bound() -> None:
    held = {"arm": "on 0.03", "bound": 0.03, "schedule": "constant"}
    rows = over_rates(1e-4, 0.30) + over_rates(3e-4, 0.50) + over_rates(1e-3, 0.1)
    rows += over_rates(3e-4, 0.47, **held) + over_rates(1e-3, 0.50, **held) + over_rates(3e-3, 0.50, **held)
    # Best .50, so that .475 must be reached for certain: s = √(2 · .005²) = .00707 of 4 stable pairs or more, t = 2.1 or so,
    # and .50 − 2.1 · .00707 / √2 = .49 does; .47 may be .48.
    (row,) = rates.usable(rows).splitlines()[2:]
    assert row == "| troll | 1e-3 … 3e-3 (2 of 3 rates) | 0.5 to 1.0 decades, open above |"
    assert len(rates.usable(rows[:6]).splitlines()) == 2, "without bounded runs there is nothing to tell"


def test_golden_not_inferior_to_the_better_of_two_tuned_rates() -> None:
    def fresh(rate: float | str, areas: list[float], **settings: Any) -> list[packed.Row]:
        flat = [(seed, {0: x, 15: x}) for seed, x in zip(plans.FRESH, areas, strict=False)]
        return [made(seed, success=at, rewards=[0.2] * 15, steps=15, rate=rate, **settings) for seed, at in flat]

    held = {"arm": "on 0.03", "bound": 0.03}
    rows = fresh(2e-4, [0.40, 0.40, 0.40]) + fresh(4e-4, [0.42, 0.42, 0.42]) + fresh("auto", [0.42, 0.43, 0.44], **held)
    rows += fresh(3e-3, [0.36, 0.42, 0.46], **held)
    # To 4e-4: gaps 0 .01 .02, one-sided .01 − 2.920 · .01 / √3 = −.0069; of −.02 t = .03 / .00577 = 5.2, p = .018 < .05 / 2.
    # At 3e-3: gaps −.06 0 .04, mean −.0067, sd .0503: at least −.0067 − 2.920 · .0291 = −.0915.
    first, second = rates.not_inferior(rows).splitlines()[2:]
    assert first.startswith('| troll, `"auto"`, linear − 4e-4 without a bound | +1.0, at least −0.7 | ')
    assert first.endswith("| 3 seeds | **.035** |")
    assert "| −0.7, at least −9.2 |" in second
    assert second.endswith("| .35 |")  # t = (−.0067 + .02) / .0291 = .46, p = .35 in both places
    one = rates.not_worse({"1": 0.40, "2": 0.41, "3": 0.42}, {"1": 0.40, "2": 0.40, "3": 0.40})
    assert (one.mean, one.low) == (pytest.approx(0.01), pytest.approx(-0.00686, abs=1e-5))
    assert one.p == pytest.approx(0.01758, abs=1e-4)
    # Welch: .42 − .40, errors .01/√3 and .02/√3, together .01291; 2.94 degrees of freedom, t = 2.371: at least −.0106.
    apart = rates.not_worse({"a": 0.41, "b": 0.42, "c": 0.43}, {"d": 0.38, "e": 0.40, "f": 0.42})
    assert (apart.mean, apart.low) == (pytest.approx(0.02), pytest.approx(-0.0106, abs=1e-4))
    assert apart.runs == "3 and 3 runs"
    # Nothing is paired across devices.
    elsewhere = [run | {"device": "cuda"} for run in fresh("auto", [0.5, 0.5, 0.6], **held)]
    assert "| 3 and 3 runs |" in rates.not_inferior([*fresh(2e-4, [0.4, 0.41, 0.42]), *elsewhere])


def test_golden_mechanisms_against_the_one_that_the_trainer_has() -> None:
    def arm(name: str, means: list[float], rate: float, **more: Any) -> list[packed.Row]:
        flat = [(201 + seed, {2: x, arms.STEPS: x}) for seed, x in enumerate(means)]
        same = {"steps": arms.STEPS, "objective": "ppo_clip", "rate": rate, "held": {}, "arm": name, "schedule": "constant"}
        return [made(seed, success=points, rewards=[0.2] * arms.STEPS, **same, **more) for seed, points in flat]

    words = {"recipe": "evidence-b"}
    some = arm("auto_mean", [0.50, 0.52, 0.54], 1e-3) + arm("rate_k3", [0.40, 0.44, 0.42], 1e-3)
    some += arm("auto_mean", [0.5, 0.4], 1e-2) + arm("rate_k3", [0.0, 0.0], 1e-2) + arm("auto_mean", [0.3], 1e-3, **words)
    ships, other = arms.mechanisms(some).splitlines()[2:]
    assert ships.endswith("| .520 over the run | .450 over the run | .300 over the run |")
    # Gaps −10 −8 −12: −10 ± 4.303 · 2 / √3 = ± 4.97.
    assert other == "| rate follows k3 | −10.0 (−15.0 … −5.0) | −45.0, 2 seeds | – |"


def test_golden_first_batches_at_auto_as_it_is_now() -> None:
    def run(seed: int, reward: float, **more: Any) -> packed.Row:
        return made(seed, success={0: 0.2}, rewards=[reward] * 5, steps=5, **more)

    auto: dict[str, Any] = {"rate": "auto", "bound": 0.03, "aim": 2.0}
    some = [run(seed, 0.30 + seed / 100, **auto) for seed in (1, 2, 3)]
    some += [run(seed, 0.32 + seed / 50) for seed in (1, 2, 3)] + [run(1, 0.9, **auto | {"aim": 6.0})]
    # 31 32 33 against 34 36 38: −3 −4 −5, so −4 ± 4.303 / √3 = 2.48.
    (row,) = arms.first_batches(some).splitlines()[2:]
    assert row == "| embedded | troll | 1 | 32.0 | 36.0 | −4.0 (−6.5 … −1.5) | 3 |"


def test_the_start_is_told_and_its_best_temperature_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "starts.jsonl"
    file.write_text('{"start": "demo", "success": {"0": 0.85, "1": 0.2, "0.1": 0.86}}\n')
    found = runs.starts(file)
    assert runs.best_temperature(found["demo"]) == 0.1
    monkeypatch.setattr(runs, "starts", lambda: found)
    assert runs.with_start("x\n") == ("x\n\nBefore training, success is .200 at temperature 1 and .850 greedily.\n")


def test_a_percentile_that_was_not_published_is_a_dash() -> None:
    lines = [{"step": step, "tr/deployed_kl_mean": 0.02} for step in (1, 2)]
    assert (runs.kl([{"lines": lines}], "mean"), runs.kl([{"lines": lines}], "p999")) == (".02", "–")


def test_golden_other_tasks_and_collapses() -> None:
    def place(how: dict[str, Any], ends: list[float]) -> list[packed.Row]:
        arm = Run(seed=0, **{"steps": 10, **how}).arm
        flat = [(401 + seed, {0: 0.2, 10: x}) for seed, x in enumerate(ends)]
        same = {"steps": 10, "start": "arithmetic", **how, "arm": arm}
        return [made(seed, success=points, rewards=[0.2] * 10, **same) for seed, points in flat]

    rows = place(plans.CHOSEN[0], [0.6, 0.7, 0.8]) + place(plans.CHOSEN[1], [0.5, 0.5, 0.7])
    line = confirm.elsewhere(rows).splitlines()[2]
    # Gaps .1 .2 .1: .1333 ± 4.303 · .0577 / √3 = ± .1434.
    assert "| .600 .700 .800 | .500 .500 .700 | +13.3 (−1.0 … 27.7) |" in line
    assert confirm.places_above(rows) == (1, 1)
    fallen = place({**plans.CHOSEN[0], "bound": 0.3}, [0.1])
    assert confirm.collapses(rows + fallen) == (
        "Of 3 runs with a bound of .03 or less, 0 had a measurement below the start and 0 died; of 1 runs with a bound of "
        "more, 1 had a measurement below the start and 0 died.\n"
    )


def test_golden_steps_to_a_success() -> None:
    # .2 → .5 → .7 in four steps each: .6 is halfway between the fourth and the eighth.
    run = made(success={0: 0.2, 4: 0.5, 8: 0.7}, rewards=[0.1] * 8, steps=8)
    assert confirm.steps_to(run, 0.6) == pytest.approx(6.0)
    assert confirm.steps_to(run, 0.5) == pytest.approx(4.0)
    assert confirm.steps_to(run, 0.71) == math.inf


def test_golden_fresh_seeds() -> None:
    def fresh(place: int, *areas: float) -> list[packed.Row]:
        how = {"steps": 10, **plans.CHOSEN[place]}
        arm = Run(seed=0, **how).arm
        flat = [(seed, {0: x, how["steps"]: x}) for seed, x in zip(plans.FRESH, areas, strict=False)]
        return [made(seed, success=points, rewards=[0.2] * how["steps"], **how | {"arm": arm}) for seed, points in flat]

    some = fresh(0, 0.50, 0.53, 0.56) + fresh(1, 0.40, 0.42, 0.44) + fresh(2, 0.40)
    first, second, third = confirm.confirmed(some)
    # Deviation .03 of three: 4.303 · .03 / √3 = .0745.
    assert first[1:4] == ["3", ".530 ± .075", ".530 ± .075"]
    assert (second[1], third[1], third[2]) == ("3", "1", ".400")
    # Differences .10 .11 .12: .11 ± 4.303 · .01 / √3 = .11 ± .0248, p = .003; one comparison of one.
    (said,) = confirm.compared(some).splitlines()[2:]
    assert said.endswith("− clipping, 4 passes at 2e-4 | +11.0 (8.5 … 13.5) | 3 | **.0027** |")


def test_golden_bounds_with_a_constant_schedule() -> None:
    same: dict[str, Any] = {"rewards": [0.1] * 10, "steps": 10, "schedule": "constant", "passes": 4}
    some = [
        made(seed, success={0: 0.2, 10: end}, rate=rate, **same) for rate, end, seed in ((1e-4, 0.5, 301), (2e-4, 0.4, 301))
    ]
    held: dict[str, Any] = {"rate": "auto", "arm": "on 0.01", "bound": 0.01, **same}
    some += [made(seed, success={0: 0.2, 10: 0.3 + seed / 1000}, **held) for seed in (301, 302)]
    assert page.bounds(some).splitlines()[2] == "| troll | 4 | 1e-4: .500 | .601 .602 |"


def test_golden_held_runs_of_a_pretrained_model_beside_its_best_unheld_rate() -> None:
    # Areas of two measurements are their means. Unheld .30, .32 at 1e-5 and .40, .42 at 3e-5, the best; held .45, .45: the
    # pairs differ by .05 and .03, so .04 ± 12.706 · .01 = .127.
    same: dict[str, Any] = {"recipe": "evidence-b", "base": "smollm2", "rewards": [0.1] * 2, "objective": "troll", "passes": 1}

    def run(seed: int, value: float, **others: Any) -> packed.Row:
        found = made(seed, success={0: value - 0.2, 2: value + 0.2}, **same, **others)
        return found | {"lines": [line | {"tr/deployed_kl_mean": 0.01, "tr/deployed_kl_p999": 1.0} for line in found["lines"]]}

    off: dict[str, Any] = {"arm": "off", "bound": math.inf, "schedule": "linear"}
    some = [run(seed, value, rate=1e-5, **off) for seed, value in ((401, 0.3), (402, 0.32))]
    some += [run(seed, value, rate=3e-5, **off) for seed, value in ((401, 0.4), (402, 0.42))]
    some += [run(seed, 0.45, rate="auto", arm="on 0.03", bound=0.03, schedule="constant") for seed in (401, 402)]
    table = arms.pretrained_table(some).splitlines()
    assert table[2] == "| troll | 1 | no | 3e-5 | .410 | – | .610 | .900 | .01 | 0 of 2 |"
    assert table[3] == "| troll | 1 | .03, constant | auto | .450 | +4.0 | .650 | .900 | .01 | 0 of 2 |"


def test_plans_run_where_no_report_can_be_made() -> None:
    """A machine that trains needs neither rliable nor matplotlib; the page alone does."""
    absent = "'rliable', 'matplotlib', 'corral.lab.report.statistics'"
    script = f"import sys\nsys.modules |= dict.fromkeys(({absent}))\nimport results.study"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120, cwd=pages.ROOT)


def test_the_area_is_that_of_reports() -> None:
    run = made(success={0: 0.2, 1: 0.7, 4: 0.1}, rewards=[0.1] * 4)
    assert runs.area(run) == pytest.approx(area_under_curve(runs.held_out(run), 4))


def test_unfinished_runs_are_run_again(tmp_path: Path) -> None:
    rows = [made(1, success={}, rewards=[0.1]), made(2, success={}, rewards=[0.1], finished=False)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [run["key"] for run in runs.finished(tmp_path, tmp_path / "none.parquet")] == [rows[0]["key"]]


def test_one_slow_run_does_not_keep_others_of_its_group_from_starting() -> None:
    same = {"passes": 1, "eval_size": 512, "eval_every": 5, "steps": 10}
    some = [same | {"cpu": seconds} for seconds in (45.0, 60.0, 3000.0)]
    assert study.durations(some) == {spec.cost_group(asdict(Run(objective="troll", rate=1e-4, seed=1))): pytest.approx(7.2)}
    on_gpu = [same | {"cpu": 20.0, "device": "cuda"}]
    assert study.durations(on_gpu) == {"cuda x1 512/5 0": pytest.approx(2.4)}


def test_runs_are_the_same_on_both_devices_and_wait_for_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(objective="troll", rate=1e-4, seed=1)
    there = replace(run, device="cuda")
    assert (there.key, there.layer()) == (run.key, run.layer() | {"device": "cuda", "bf16": False})
    assert study.can_start(run)
    monkeypatch.chdir(tmp_path)
    waits = replace(run, start="start2")
    assert not study.can_start(waits)
    (tmp_path / "runs/starts/llama-2").mkdir(parents=True)
    assert study.can_start(waits)


def test_a_run_that_fails_is_written_down_and_one_without_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Run, deadline: float) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(study, "run", fail)
    run = Run(objective="troll", rate=1e-4, seed=1)
    found = study.attempt(run, "cpu", math.inf, {})
    assert found is not None
    assert (found["key"], found["finished"]) == (run.key, False)
    assert "no kernel image" in found["error"]
    expected = {spec.cost_group(asdict(run)): 10.0}
    assert study.attempt(run, "cpu", time.time() + study.STARTUP + 10 * run.steps - 1, expected) is None


@pytest.mark.slow
def test_a_plan_runs_in_processes_and_ends_where_every_run_fails(tmp_path: Path) -> None:
    small = Run(objective="troll", rate=1e-3, seed=1, steps=1, eval_every=1, eval_size=2)
    wrong = [replace(small, objective=f"none{place}") for place in range(6)]
    options, deadline = argparse.Namespace(device="cpu", workers=1, fresh=False, commit="x"), time.time() + 300
    assert study.study([small], options, tmp_path / "one.jsonl", {}, deadline)
    assert [run["finished"] for run in packed.read(tmp_path / "one.jsonl")] == [True]
    assert not study.study(wrong, options, tmp_path / "wrong.jsonl", {}, deadline)
    assert len(packed.read(tmp_path / "wrong.jsonl")) == study.FAILURES


def test_the_end_is_measured_on_held_out_problems_by_temperature() -> None:
    from corral.lab.jobs.llm.evaluate import EvalSettings

    found = study.measure(EvalSettings(model="tiny", task="countdown", problems=24, seed=1, device="cpu"), (1.0, 0.01))
    assert found[0.01] == pytest.approx(found[0.0], abs=1 / 24)  # hardly any draw differs from the likeliest token
    assert found[1.0] < found[0.0]
