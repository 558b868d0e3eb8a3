"""Groups, results, comparisons, events, configuration, commands: every table of a report."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import write_run, write_small_set

from corral.lab.report.content import command, commands, configuration, events, make_report, versions
from corral.lab.report.figures import kl_bound, select_metrics
from corral.lab.report.outcomes import (
    RUN_COLUMNS,
    Group,
    Measure,
    by_seed,
    comparisons,
    default_threshold,
    group_runs,
    main_metric,
    pairs,
    results,
    score_runs,
)
from corral.lab.report.page import page
from corral.lab.report.read import flatten, read_run, read_runs

SUCCESS = Measure(key="success", name="success", unit="points", factor=100.0)


def compared(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Comparisons of groups by their main metric."""
    measure = main_metric([run for group in groups for run in group.runs])
    return comparisons(groups, score_runs(groups, measure), measure)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small_set(tmp_path / "runs")


def test_seeds_are_repetitions(small: Path) -> None:
    groups = group_runs(read_runs([small]))
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("dppo", ["0", "1", "2", "3"]),
        ("ppo_clip", ["0", "1", "2"]),
        ("troll", ["0", "1", "2"]),
    ]
    assert [(ours.label, theirs.label) for ours, theirs in pairs(groups)] == [
        ("ppo_clip", "dppo"),
        ("troll", "dppo"),
        ("troll", "ppo_clip"),
    ]


def test_settings_that_vary_make_groups_and_are_compared_like_with_like(tmp_path: Path) -> None:
    for rate in (1e-3, 1e-4):
        for objective in ("troll", "dppo"):
            write_run(tmp_path / f"{objective}-{rate}", objective, learning_rate=rate)
    groups = group_runs(read_runs([tmp_path]))
    assert [group.label for group in groups] == [
        "dppo learning_rate=0.0001", "troll learning_rate=0.0001", "dppo learning_rate=0.001", "troll learning_rate=0.001",
    ]  # fmt: skip
    assert [(a.label, b.label) for a, b in pairs(groups)] == [
        ("troll learning_rate=0.0001", "dppo learning_rate=0.0001"),
        ("troll learning_rate=0.001", "dppo learning_rate=0.001"),
    ]


def test_one_objectives_own_settings_are_compared(tmp_path: Path) -> None:
    for bound in (0.05, 0.1):
        write_run(tmp_path / str(bound), "troll", objective_config={"bound": bound})
    groups = group_runs(read_runs([tmp_path]))
    assert [group.objective for group in groups] == ["troll bound=0.05", "troll bound=0.1"]
    assert len(pairs(groups)) == 1


def test_problems_are_kept_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "troll", task="gsm8k")
    write_run(tmp_path / "b", "dppo", task="countdown")
    groups = group_runs(read_runs([tmp_path]))
    assert [group.problem for group in groups] == ["countdown with tiny", "gsm8k with tiny"]
    assert pairs(groups) == []


def test_a_report_does_not_open_on_smoke_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "troll", model="smoke")
    write_run(tmp_path / "b", "troll", model="tiny")
    assert [group.problem for group in group_runs(read_runs([tmp_path]))] == ["countdown with tiny", "countdown with smoke"]


def test_figures_say_how_a_kl_was_estimated(small: Path) -> None:
    """dppo and ppo_clip log no mass outside a support, for they have none: their mean is k3's, their largest a lower bound."""
    captions = {metric.key: metric.caption for metric in select_metrics(read_runs([small]))}
    assert captions["tr/kl_before"].endswith("k3's estimate from the sampled tokens, not to be compared with the largest KL")
    assert captions["tr/kl_max"].endswith("that of the sampled token against all others, a lower bound")
    assert {group.label: kl_bound(group) for group in group_runs(read_runs([small]))} == {
        "dppo": None,
        "ppo_clip": None,
        "troll": 0.05,
    }


def test_a_learning_rate_is_drawn_beside_the_deployed_kl_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "troll")
    assert "learning_rate" not in {metric.key for metric in select_metrics(read_runs([tmp_path]))}
    file = run / "metrics.jsonl"
    lines = [json.loads(line) | {"learning_rate": 1e-4, "tr/deployed_kl_mean": 0.01} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {"learning_rate", "tr/deployed_kl_mean"} <= {metric.key for metric in select_metrics(read_runs([tmp_path]))}


def test_a_difference_that_was_not_varied_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "troll", learning_rate=1e-3)
    write_run(tmp_path / "b", "dppo", learning_rate=1e-4)
    groups = group_runs(read_runs([tmp_path]))
    (row, _) = compared(groups)
    assert row["sentence"].endswith("one seed; that is too few. They also differ in learning_rate.")


def test_a_difference_is_said_though_a_setting_with_a_longer_name_was_varied(tmp_path: Path) -> None:
    for warm in (1, 2):
        write_run(tmp_path / f"a{warm}", "troll", steps=8, warmup_steps=warm)
        write_run(tmp_path / f"b{warm}", "dppo", steps=12, warmup_steps=warm)
    said = [row["sentence"] for row in compared(group_runs(read_runs([tmp_path])))]
    assert len(said) == 4
    assert all(sentence.endswith("They also differ in steps.") for sentence in said)


def test_only_runs_that_ended_count(small: Path) -> None:
    dppo = group_runs(read_runs([small]))[0]
    scores = score_runs([dppo], SUCCESS)
    assert sorted(by_seed(scores, dppo)) == sorted(by_seed(scores, dppo, "area")) == ["0", "1", "2"]


def test_results(small: Path) -> None:
    groups = group_runs(read_runs([small]))
    scores = score_runs(groups, SUCCESS)
    threshold = default_threshold(scores, SUCCESS)
    dppo, ppo, troll = results(groups, scores, threshold)
    assert (dppo["runs"], dppo["counted"], dppo["collapsed"], ppo["collapsed"]) == (4, 3, 0, 1)
    ends = sorted(json.loads((small / f"troll-{seed}/summary.json").read_text())["success_final"] for seed in range(3))
    assert troll["final"] == pytest.approx(sum(ends) / 3)  # a quarter of three runs is none: the mean
    assert threshold == pytest.approx(0.9 * troll["final"])
    assert (troll["steps_to_threshold"], troll["reached"]) == (6, 3)
    assert (dppo["steps_to_threshold"], dppo["reached"]) == (None, 0)
    assert troll["final_low"] <= troll["final"] <= troll["final_high"]


def test_comparisons(small: Path) -> None:
    rows = compared(group_runs(read_runs([small])))
    assert [row["measure"] for row in rows] == ["final"] * 3 + ["area"] * 3
    assert rows[1]["sentence"].startswith("troll beats dppo on final success: +13.6 points, 95 % interval 10.8…16.4, 3 seeds.")
    assert rows[0]["sentence"].startswith("No difference can be claimed between dppo and ppo_clip on final success: +20.0")
    assert [row["claimed"] for row in rows[:3]] == [False, True, False]
    assert rows[1]["probability"] == 1.0


@pytest.mark.parametrize(
    ("dppo", "troll", "own", "why"),
    [
        ({"loss_type": "dapo"}, {"loss_type": "dapo"}, True, None),
        ({"loss_type": "dr_grpo"}, {"loss_type": "dapo"}, True, "their reductions differ (troll dapo, dppo dr_grpo)"),
        ({"advantage": None}, {"advantage": "rloo"}, True, "their advantages differ (troll rloo, dppo default)"),
        ({"loss_type": "dapo"}, {"loss_type": "dapo"}, False, "dppo was averaged by dapo, which is not its own reduction."),
    ],
)
def test_a_claim_between_objectives_needs_one_reduction_and_advantage(
    small: Path, dppo: dict[str, str | None], troll: dict[str, str | None], own: bool, why: str | None
) -> None:
    for run in small.iterdir():
        config = json.loads((run / "config.json").read_text())
        mine = troll if config["objective"]["name"] == "troll" else dppo
        config["settings"] |= mine
        config["trainer"] |= mine
        config["reduction"] = {"own": own or config["objective"]["name"] != "dppo"}
        (run / "config.json").write_text(json.dumps(config))
    row = compared(group_runs(read_runs([small])))[1]
    assert (row["ours"], row["theirs"], row["claimed"]) == ("troll", "dppo", why is None)
    if why is None:
        assert row["sentence"].startswith("troll beats dppo on final success: +13.6 points")
    else:
        assert "No difference can be claimed between troll and dppo on final success: +13.6 points" in row["sentence"]
        assert f"3 seeds; {why}" in row["sentence"]
        assert "They also differ" not in row["sentence"], "it is said once"


def test_settings_of_one_objective_may_differ_in_their_reduction(tmp_path: Path) -> None:
    for seed in range(3):
        for how, gain in (("dapo", 0.4), ("grpo", 0.1)):
            folder = write_run(tmp_path / f"{how}{seed}", "troll", seed, gain=gain, loss_type=how)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "trainer": {"loss_type": how}}))
    assert compared(group_runs(read_runs([tmp_path])))[0]["claimed"], "that is what was compared"


def test_a_run_without_success_is_judged_by_its_reward(tmp_path: Path) -> None:
    path = tmp_path / "robot"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"settings": {"task": "via_point", "objective": "tce", "seed": 1, "steps": 2}})
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": -3.0 + step}) + "\n" for step in range(3)))
    (path / "summary.json").write_text('{"stopped": "finished"}')
    run = read_run(path)
    measure = main_metric([run])
    assert (measure.key, measure.unit) == ("reward", "")
    groups = group_runs([run])
    (row,) = results(groups, score_runs(groups, measure), None)
    assert (row["final"], row["area"], row["seconds"]) == (-1.0, -2.0, None)
    report = make_report([run, replace(run, path=tmp_path / "again")])
    assert {row["seconds"] for name in ("results", "runs") for row in report.tables[name]} == {None}


def test_runs_table(small: Path) -> None:
    rows = score_runs(group_runs(read_runs([small])), SUCCESS)[[*RUN_COLUMNS]].to_dict("records")
    assert len(rows) == 10
    assert (rows[3]["stopped"], rows[3]["steps"], rows[3]["planned"]) == ("not ended", 4, 8)
    assert rows[-1]["tokens"] == 96000.0


def test_events(small: Path) -> None:
    rows = events(group_runs(read_runs([small])))
    kinds = [(row["objective"], row["seed"], row["step"], row["kind"]) for row in rows]
    assert ("ppo_clip", "1", 7, "guard") in kinds
    assert ("dppo", "3", 4, "left out") in kinds
    assert ("dppo", "3", None, "file") in kinds


def test_two_runs_with_the_same_seed(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    rows = events(group_runs(read_runs([tmp_path])))
    assert [row["kind"] for row in rows] == ["twice", "twice"]


@pytest.mark.parametrize("stopped", ["failed", "interrupted"])
def test_a_run_that_failed_says_why_and_is_left_out(tmp_path: Path, stopped: str) -> None:
    write_run(tmp_path / "a", stopped=stopped)
    groups = group_runs(read_runs([tmp_path]))
    rows = events(groups)
    assert (rows[0]["kind"], rows[0]["what"]) == (stopped, f"it was {stopped}")
    assert rows[1]["what"] == f"{stopped} after 8 of 8 steps: not in the statistics."
    assert by_seed(score_runs(groups, SUCCESS), groups[0]) == {}


def test_configuration(small: Path) -> None:
    differ, same = configuration(group_runs(read_runs([small])))
    assert {"setting": "objective.bound", "dppo": "—", "ppo_clip": "—", "troll": "0.05"} in differ
    assert {"setting": "settings.learning_rate", "value": "0.0008"} in same
    text = json.dumps([differ, same])
    assert "hf_secret" not in text
    assert 'settings.objective"' not in text
    assert "trainer.learning_rate" not in text  # it is among the settings


def test_versions_and_commands(small: Path) -> None:
    config = json.loads((small / "troll-0/config.json").read_text())
    config["versions"]["torch"] = "2.12.0"
    config["command"] = ["-c"]
    (small / "troll-0/config.json").write_text(json.dumps(config))
    groups = group_runs(read_runs([small]))
    assert {"package": "torch", "versions": "2.12.0, 2.13.0", "differ": True} in versions(groups)
    rows = commands(groups)
    assert rows[0]["command"] == "corral train --objective dppo --seed 0"
    assert rows[7]["command"] is None
    assert json.loads(rows[7]["settings"])["objective"] == "troll"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x/__main__.py", "train", "--hub-token", "hf_abc", "--seed", "1"], "corral train --hub-token '…' --seed 1"),
        (["corral", "train", "--hub-token=hf_abc", "--out=x"], "corral train '--hub-token=…'"),
        (["corral", "train", "--set", "task_config.api_key=abc"], "corral train --set 'task_config.api_key=…'"),
        (["corral", "train", "--set=task_config.api_key=abc"], "corral train '--set=task_config.api_key=…'"),
        (["corral", "train", "--set=task_config.path=a=b"], "corral train --set=task_config.path=a=b"),
        (["corral", "train", "--instruction", "a 'b' $(c)"], "corral train --instruction 'a '\"'\"'b'\"'\"' $(c)'"),
        ("train", None),
        (None, None),
    ],
)
def test_commands_hide_secrets_and_quote_the_rest(tmp_path: Path, words: object, expected: str | None) -> None:
    path = write_run(tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "command": words}))
    assert command(read_run(path)) == expected


def test_secrets_within_settings_are_left_out(tmp_path: Path) -> None:
    for seed, key in enumerate(("hf_one", "hf_two")):
        path = write_run(tmp_path / f"run-{seed}", "troll", seed)
        config = json.loads((path / "config.json").read_text())
        config["settings"] |= {"task_config": {"api_key": key, "numbers": 3}, "hub_token": key}
        (path / "config.json").write_text(json.dumps(config))
    report = make_report(read_runs([tmp_path]))
    assert [len(group.runs) for group in report.groups] == [2]  # who pays makes no other method
    text = page(report) + json.dumps(report.tables)
    assert "task_config.numbers" in text
    assert "hf_one" not in text
    assert "hf_two" not in text


def test_flat() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": "x", "e": None}) == {"a.b": "1", "a.c": "{}", "d": "x", "e": "null"}
