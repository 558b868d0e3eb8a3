"""docs/results/llm.md says what the raw runs hold, and verdicts say no more than their seeds."""

from typing import Any

import pytest

from results.evidence import figures as llm_figures
from results.evidence import page as llm_page
from results.evidence import tables as llm_tables
from results.evidence import words as llm_words
from results.evidence.cells import Cell, compare
from results.evidence.claims import Verdict, judge
from results.pages import new_figure


def test_claims_are_rows_with_a_corrected_p() -> None:
    assert {row[1:] == ["–", "0", "1"] for row in (list(one.row) for one in judge([]))} == {True}
    runs = [made_up("troll", seed, [0.2, 0.6 + 0.01 * (seed - 402)]) for seed in (401, 402, 403)]
    runs += [made_up("ppo_clip", seed, [0.2, 0.2]) for seed in (401, 402, 403)]
    found = judge(runs)
    # Areas .4 ± .005 against .2; one claim alone has runs, so its p is not multiplied.
    assert hot(runs).row[:3] == ["TROLL − clipping at five times that rate", "+20.0 (18.8 … 21.2)", "3"]
    assert llm_page.front(found).count(" yes |") == 1
    assert "| +20.0 (18.8 … 21.2) | 3 | yes |" in llm_page.front(found)
    asked = {name for names in llm_page.QUESTIONS.values() for name in names}
    assert asked == {one.claim.name for one in found}, "a claim is on no list of its question, so nobody reads it"


def hot(runs: list[dict[str, Any]]) -> Verdict:
    """The verdict on a claim at a large rate."""
    (found,) = (one for one in judge(runs) if one.claim.name == "troll-hot")
    return found


def made_up(objective: str, seed: int, success: list[float], rate: float = 1e-3, **more: Any) -> dict[str, Any]:
    """A run of the demo with these measurements, one a step."""
    lines = [{"step": step, "success": value, "greedy": value, "reward": value} for step, value in enumerate(success)]
    about = {"objective": objective, "rate": rate, "seed": seed, "passes": 1, "steps": 15, "schedule": "linear", "arm": "off"}
    about |= {"variant": "", "model": "tiny", "updates": 8, "sampler": "", "anchor": "auto", "reuse": None}
    about |= {"recipe": "demo", "start": "demo", "eval_every": 5, "device": "cpu", "base": "", "lag": 0}
    return {**about, "dead": False, "lines": lines, **more}


def test_golden_difference() -> None:
    # Areas by trapezia: (.2 + .4)/2 = .3 against (.2 + .2)/2 = .2, and .4 against .2: 10 and 20 points, in the mean 15.
    runs = [made_up("troll", 1, [0.2, 0.4]), made_up("ppo_clip", 1, [0.2, 0.2])]
    runs += [made_up("troll", 2, [0.2, 0.6]), made_up("ppo_clip", 2, [0.2, 0.2])]
    cells = [Cell(arm=(name, ""), rate=1e-3) for name in ("troll", "ppo_clip")]
    found = compare(cells[0], cells[1], runs)
    assert found is not None
    assert (found.mean.value, found.seeds, found.p) == (pytest.approx(15.0), 2, None)
    assert compare(cells[0], Cell(arm=("dppo", "")), runs) is None


def test_a_run_on_a_gpu_is_no_pair_of_one_on_a_cpu() -> None:
    runs = [made_up("troll", 1, [0.2, 0.4], device="cuda"), made_up("ppo_clip", 1, [0.2, 0.2])]
    cells = [Cell(arm=(name, ""), rate=1e-3) for name in ("troll", "ppo_clip")]
    assert compare(cells[0], cells[1], runs) is None
    runs += [made_up("ppo_clip", 1, [0.2, 0.1], device="cuda"), made_up("troll", 1, [0.2, 0.9])]
    found = compare(cells[0], cells[1], runs)  # (.4 − .1)/2 on the GPU, which is asked first; never .4 against .2
    assert found is not None
    assert (found.mean.value, found.seeds) == (pytest.approx(15.0), 1)


def test_a_seed_at_two_rates_counts_once() -> None:
    # Differences of areas: 10 and 20 points at the two rates, one seed: 15.
    runs = [made_up("troll", 1, [0.2, 0.4], rate) for rate in (2e-4, 3e-4)]
    runs += [made_up("ppo_clip", 1, [0.2, 0.2], 2e-4), made_up("ppo_clip", 1, [0.2, 0.0], 3e-4)]
    found = compare(Cell(arm=("troll", "")), Cell(arm=("ppo_clip", "")), runs)
    assert found is not None
    assert (found.mean.value, found.seeds) == (pytest.approx(15.0), 1)


def test_two_seeds_are_too_few_and_a_clear_difference_of_five_is_significant() -> None:
    def pair(seeds: int) -> bool:
        runs = [made_up("troll", seed, [0.2, 0.5 + (seed - 400) / 100]) for seed in range(401, 401 + seeds)]
        runs += [made_up("ppo_clip", seed, [0.2, 0.1 - (seed - 400) / 100]) for seed in range(401, 401 + seeds)]
        return hot(runs).is_significant

    old = [made_up(name, seed, [0.2, 0.1 + 0.3 * (name == "troll")]) for name in ("troll", "ppo_clip") for seed in range(5)]
    assert hot(old).found is None, "settings were chosen on such seeds"
    assert [pair(seeds) for seeds in (0, 2, 5)] == [False, False, True]


def test_the_opposite_is_a_difference_below_zero_and_a_tie_has_a_large_p() -> None:
    runs = [made_up("troll", seed, [0.2, 0.1 + (seed - 400) / 100]) for seed in range(401, 406)]
    runs += [made_up("ppo_clip", seed, [0.2, 0.5 - (seed - 400) / 100]) for seed in range(401, 406)]
    found = hot(runs)
    assert found.is_significant
    assert found.row[1].startswith("−")
    runs = [made_up("ppo_clip", seed, [0.2, 0.5]) for seed in range(401, 407)]
    runs += [made_up("troll", seed, [0.2, 0.499 + seed % 2 / 500]) for seed in range(401, 407)]
    assert hot(runs).p > 0.9


def test_a_run_that_died_counts_as_nothing_from_there_on() -> None:
    run = made_up("reinforce", 1, [0.2, 0.1], dead=True)
    row = llm_tables.cells_of("reinforce", [run])
    assert (row[3], row[-1]) == (".000", "1 of 1")


def test_clipping_lifted_for_rare_tokens_is_a_table_of_four_passes() -> None:
    four: dict[str, Any] = {"passes": 4, "steps": 10, "eval_every": 2}
    lifted = made_up("rare_clip", 401, [0.2, 0.6], 2e-4, variant="below .1", **four)
    shown = llm_tables.rare(
        [made_up("ppo_clip", 401, [0.2, 0.5], 2e-4), made_up("ppo_clip", 401, [0.2, 0.4], 2e-4, **four), lifted]
    )
    assert "| ppo_clip | 1 | .300 |" in shown
    assert "| rare_clip, below .1 | 1 | .400 |" in shown


def test_advice_has_the_differences_of_its_claims_and_of_auto() -> None:
    about: dict[str, Any] = {"recipe": "evidence-b", "base": "smollm2", "steps": 12, "eval_every": 4, "device": "cuda"}
    runs = [made_up("ppo_clip", 406, [0.2, 0.4], 3e-5, **about), made_up("dppo", 406, [0.2, 0.5], 3e-5, **about)]
    runs += [made_up("ppo_clip", 406, [0.2, 0.6], 0.0, schedule="constant", **about) | {"rate": "auto"}]
    lines = llm_page.advice(runs, {one.claim.name: one for one in judge(runs)}).splitlines()
    # Areas .30, .35 and .40.
    assert "| a good rate, one pass | `dppo` | +5.0 | 1 | 1 | SmolLM2 | learning |" in lines
    assert "| +10.0 | 1 | – | SmolLM2 | learning |" in next(line for line in lines if "auto" in line)


def test_other_starts_are_told_against_clipping() -> None:
    ends = {"troll": 0.6, "dppo": 0.3, "ppo_clip": 0.4}
    runs = [
        made_up(arm, seed, [0.2, end], 1e-3, model="runs/starts/qwen3-1") for arm, end in ends.items() for seed in (401, 402)
    ]
    assert len(llm_tables.starts(runs[:4]).splitlines()) == 2, "there is no clipping to compare with"
    # Areas are (.2 + .6)/2, (.2 + .3)/2 and (.2 + .4)/2.
    (row,) = llm_tables.starts(runs).splitlines()[2:]
    assert row.startswith("| qwen3-1 | 1e-3 | .400 | .250 | .300 | +10.0")
    assert "| −5.0" in row
    assert row.endswith("| 2 |")


def test_golden_costs_are_compared_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"device": "cuda", "model": "small", "mib": 100.0}
    taken = {"ppo_clip": [(2.0, 2.0), (4.0, 4.0), (4.0, 4.0)], "troll": [(2.2, 1.0), (4.8, 1.0), (5.2, 3.0)]}
    rows = [
        {**about, "name": name, "round": turn, "step": step, "updates": updates}
        for name, rounds in taken.items()
        for turn, (step, updates) in enumerate(rounds)
    ]
    monkeypatch.setattr(llm_words, "raw", lambda _: rows)
    # A step +10, +20, +30 %: 20 ± t(.975, 2) · 10 / √3 = 20 ± 24.8; updates −50, −75, −25 %: −50 ± 62.1; memory is the same.
    clip, troll = llm_words.costs().splitlines()[2:]
    assert clip == "| small, cuda | ppo_clip | 3 | – | – | – | 2.00 – 4.00 |"
    assert troll == "| small, cuda | troll | 3 | +20.0 (−4.8 … 44.8) | −50.0 (−112.1 … 12.1) | +0.0 | 2.20 – 5.20 |"


def test_golden_fresh_seeds_are_a_table_of_their_own() -> None:
    about: dict[str, Any] = {
        "recipe": "evidence-b",
        "base": "smollm2",
        "steps": 12,
        "eval_every": 4,
        "device": "cuda",
        "seconds": 1.0,
    }
    grid = [made_up("ppo_clip", 401, [0.2, 0.8], 3e-5, **about), made_up("dppo", 401, [0.2, 0.2], 3e-5, **about)]
    assert len(llm_words.confirmed(grid, "smollm2").splitlines()) == 2, "the grid has its own seeds"
    runs = [made_up("ppo_clip", seed, [0.2, 0.4], 3e-5, **about) for seed in (406, 407)]
    runs += [made_up("dppo", 406, [0.2, 0.5], 3e-5, **about), made_up("troll", 407, [0.2, 0.3], 1e-5, passes=4, **about)]
    held = [made_up("ppo_clip", 407, [0.2, 0.6], 0.0, schedule="constant", **about) | {"rate": "auto"}]
    # Areas .3; .35 and a half of .1 at the end more; at another rate and with four passes .25; held .4.
    clip, dppo, reused, automatic = llm_words.confirmed(grid + runs + held, "smollm2").splitlines()[2:]
    assert clip.startswith("| ppo_clip, 8 updates, 3e-5 | 2 | .300 | .400 |")
    assert clip.endswith("| – | – |")
    assert dppo.startswith("| dppo, 8 updates, 3e-5 | 1 | .350 |")
    assert dppo.endswith("| +5.0 | +10.0 |")
    assert reused.startswith("| troll, 32 updates, 1e-5 | 1 | .250 |")
    assert reused.endswith("| −5.0 | −10.0 |")
    assert automatic.startswith('| ppo_clip, 8 updates, "auto" | 1 | .400 |')
    assert automatic.endswith("| +10.0 | +20.0 |")


def test_runs_at_a_rate_that_nobody_tuned_stand_beside_the_rates() -> None:
    about: dict[str, Any] = {"recipe": "evidence-b", "base": "smollm2", "steps": 12, "eval_every": 4, "device": "cuda"}
    runs = [made_up("troll", 401, [0.2, 0.4], rate, **about) for rate in (1e-5, 3e-5)]
    held = [made_up("troll", seed, [0.2, end], 0.0, **about) | {"rate": "auto"} for seed, end in ((401, 0.5), (402, 0.7))]
    _, (plain, beside, other) = new_figure(3)
    assert all(llm_figures.PAINTS["words"](axes, some) for axes, some in ((plain, runs), (beside, runs + held)))
    assert [label.get_text() for label in plain.get_xticklabels()] == ["1e-5", "3e-5", "1e-4"]
    assert [label.get_text() for label in beside.get_xticklabels()] == ["1e-5", "3e-5", "1e-4", '"auto"']
    assert beside.lines[-1].get_ydata() == pytest.approx([0.4, 0.4])  # areas .35 and .45
    assert not any(llm_figures.PAINTS[name](other, runs + held) for name in ("words-gemma", "map"))


def test_the_noise_floor_is_told() -> None:
    # Areas .3 and .3: the same. Areas .3 and .5: their standard deviation is .1·√2, 14 points.
    same = [made_up(name, 401, [0.2, 0.4], updates=1) for name in ("troll", "dppo")]
    assert "2 runs of them, equal in seed and rate, have the same measurements" in llm_tables.floor(same)
    assert "differ by 14" in llm_tables.floor([same[0], made_up("dppo", 401, [0.2, 0.8], updates=1)])


def test_routing_is_told_by_model_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    gap = {"mean": 0.01, "p999": 0.2, "max": 1.5}
    dense = {"model": "tiny", "precision": "fp8", "tokens": 1000, "all": gap, "same": gap}
    moe = {**dense, "model": "moe-1", "flipped": gap, "flipped_places": 0.05, "flipped_tokens": 0.125}
    monkeypatch.setattr(llm_words, "raw", lambda _: [dense, moe])
    lines = llm_words.routing().splitlines()
    assert lines[2] == "| tiny | fp8 | 1,000 | – | – | .01 / .2 / 1.5 | – | .01 / .2 / 1.5 |"
    assert lines[3] == "| moe-1 | fp8 | 1,000 | 5.0 % | 12.5 % | .01 / .2 / 1.5 | .01 / .2 / 1.5 | .01 / .2 / 1.5 |"
