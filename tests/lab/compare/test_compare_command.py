"""`corral compare`: mistakes get a sentence, a dry run says what it would do, and small comparisons run from end to end."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from corral.lab.cli import main
from corral.lab.compare import local
from corral.lab.compare.plan import (
    Budget,
    Training,
    check_plan,
    make_plan,
    make_run,
    rate_grid,
    resolve_run,
    run_arguments,
    share_reduction,
    trainer_configs,
)
from corral.lab.compare.record import open_log, read
from corral.lab.report.read import FILE, read_run
from corral.lab.run.text import duration
from corral.validate import RunError, pip_install


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The sentence with which a command is refused."""
    assert main(["compare", *argv]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("corral: ")
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "whom to compare? --objectives ppo_clip,troll"),
        (["--recipe", "via_point"], "whom to compare? --algorithms tce,bbrl"),
        (["--objectives", "troll,dpo"], "there is no objective 'dpo'. Did you mean 'dppo'?"),
        (["--objectives", "troll,"], "there is no objective ''"),
        (["--recipe", "via_point", "--algorithms", "tce,brl"], "there is no algorithm 'brl'. Did you mean 'bbrl'?"),
        (["--recipe", "via_point", "--objectives", "troll,dppo"], "here a robot learns, and its contestants are algorithms"),
        (["--algorithms", "tce,bbrl"], "are objectives: --objectives ppo_clip,troll. For a robot, name its recipe: --recipe"),
        (["--recipe", "dem", "--objectives", "troll,dppo"], "there is no recipe 'dem'. Did you mean 'demo'?"),
        (["--objectives", "troll,troll"], "contestants: troll is there twice"),
        (["--objectives", "troll:bound,dppo"], "a contestant with settings of its own is troll:KEY=VALUE; got troll:bound."),
        (["--objectives", "troll:bond=1,dppo"], "there is no setting `bond`"),
        (["--objectives", "troll:bound=-1,dppo"], "`bound` is a KL in nats and must be ≥ 0"),
        (["--recipe", "via_point", "--algorithms", "tce:x=1,bbrl"], "algorithms have no settings of their own here: tce:x=1"),
        (["--objectives", "troll"], "troll alone has nothing to be compared with"),
        (["--objective", "troll"], "compare takes several: --objectives troll,"),
        (["--objectives", "troll,dppo", "--set", "objective=troll"], "compare takes several: --objectives troll,"),
        (["--objectives", "troll,dppo", "--seeds", "0"], "--seeds must be at least 1; got 0"),
        (["--objectives", "troll,dppo", "--jobs", "0"], "--jobs must be at least 1; got 0"),
        (["--objectives", "troll,dppo", "--threads", "0"], "--threads must be at least 1; got 0"),
        (["--objectives", "troll,dppo", "--stall", "0"], "--stall is in seconds"),
        (["--objectives", "troll,dppo", "--retry-failed"], "--retry-failed goes with --resume"),
        (["--objectives", "troll,dppo", "--choose-seeds", "2"], "--choose-seeds goes with --sweep"),
        (["--objectives", "troll,dppo", "--sweep", "num_iterations"], "--sweep num_iterations needs values"),
        (["--objectives", "troll,dppo", "--sweep", "learning_rate="], "a value is empty"),
        (["--objectives", "troll,dppo", "--sweep", "learning_rate=1e-4,1e-4"], "1e-4 is there twice"),
        (["--objectives", "troll,dppo", "--sweep", "learning_rate=1e-3,.001"], "1e-3 is there twice"),
        (["--objectives", "troll,dppo", "--sweep", "num_iteration=1,2"], "there is no setting `num_iteration`"),
        (["--objectives", "troll,dppo", "--sweep", "beta=0.1,x"], "troll beta=x: `beta` is float"),
        (["--objectives", "troll,dppo", "--step", "3"], "there is no setting `step`"),
        (["--objectives", "troll,dppo", "--set", "task_config.numbers=4"], "countdown: there is no setting `numbers`"),
        (
            ["--objectives", "troll,dppo", "--learning-rate", "1e-4", "--sweep", "learning_rate=1e-4,2e-4"],
            "`learning_rate` is both given and swept",
        ),
        (
            ["--objectives", "troll,reinforce", "--set", "objective_config.bound=0.1"],
            "corral: reinforce: there is no setting `bound`",
        ),
        (
            ["--objectives", "troll,dppo", "--sweep", "steps_per_generation=4,8"],
            "budgets differ: troll steps_per_generation=4 would have 40 steps of 256 completions, troll steps_per_generation=8 "
            "40 steps of 512 completions",
        ),
        (
            ["--recipe", "via_point", "--algorithms", "tce,sb3-ppo", "--sweep", "learner.policy_rate=1e-3,1e-2"],
            "sb3-ppo learner.policy_rate=1e-3: there is no setting `policy_rate`",
        ),
        (["--recipe", "via_point", "--algorithms", "tce,bbrl", "--common"], "--common is about objectives"),
        (["--objectives", "troll,dppo", "--common", "--sweep", "loss_type=grpo,dapo"], "--common keeps `loss_type` the same"),
        (
            ["--objectives", "troll,gspo", "--common", "--set", "loss_type=dapo"],
            "no reduction that was asked for is every objective's own. They are: troll token-mean, ",
        ),
        (["--objectives", "troll,gspo", "--common", "--set", "objective_config.clip=1"], "troll: there is no setting `clip`"),
        (["--resume", "nowhere"], "nowhere holds no comparison: it has no compare.json"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_mistakes_get_a_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = [] if "--resume" in argv else ["--out", str(tmp_path / "out")]
    assert message in refused(capsys, *argv, *out)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "rliable" else known(name, *rest))
    words = ["--objectives", "troll,dppo"]
    assert f"comparisons need rliable. Install them: {pip_install('report')}." in refused(capsys, *words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "trl" else known(name, *rest))
    assert f"training needs trl. Install them: {pip_install('llm')}." in refused(capsys, *words)


def test_a_dry_run_says_what_it_would_do_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from earlier runs
    argv = ["compare", "--objectives", "troll,dppo", "--sweep", "learning_rate", "--out", str(tmp_path / "out"), "--dry-run"]
    assert main([*argv, "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    # 2 contestants × 5 rates × 2 seeds, then 2 contestants × 3 seeds.
    assert "runs       26: 2 contestants × 5 settings × 2 seeds, then 2 contestants × 3 seeds" in printed
    assert "sweep      learning_rate 2e-5, 6.3e-5, 2e-4, 6.3e-4, 2e-3" in printed
    assert "seeds      2, 3, 4; settings are chosen on 0, 1" in printed
    assert "budget     40 steps of 512 completions, for every run" in printed
    # 13 rounds of two, each 10 s + 40 × 3.4 s: 31.6 minutes.
    assert "time       about 32 min (3.4 s a step, as demo took on one core elsewhere)" in printed
    assert printed.count("\n  troll learning_rate=") == 10
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_whether_reductions_are_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["compare", "--objectives", "gspo,troll", "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(argv) == 0
    said = "reduction  grpo for gspo, dr_grpo for troll. Where they differ, no difference between objectives can be claimed"
    assert said in capsys.readouterr().out
    assert main([*argv, "--common"]) == 0
    assert "reduction  grpo, for every run" in capsys.readouterr().out
    assert main([*argv, "--set", "loss_type=dapo"]) == 0
    printed = capsys.readouterr().out
    assert "reduction  dapo, for every run" in printed
    assert "note       loss_type='dapo' is token-mean, which gives gspo another gradient than its own." in printed


def test_a_common_reduction_is_every_objective_s_own() -> None:
    demo = Training(recipe="demo")
    for contestants, common in (
        (("gspo", "troll"), "grpo"),
        (("troll", "gspo", "gmpo"), "grpo"),
        (("dppo", "ppo_clip", "troll"), "dr_grpo"),  # the recipe's
    ):
        training = share_reduction("llm", contestants, demo, ())
        assert (training.common, dict(training.settings)) == (True, {"loss_type": common})
        assert {args.loss_type for args in trainer_configs(contestants, training).values()} == {common}
        words = run_arguments("llm", training, make_run("troll", {}, 0, "report"), Path("x"))
        assert f"--loss-type={common}" in words


def test_every_reward_reaches_every_run() -> None:
    rewards = ["verifier", "corral.lab.jobs.llm.smoke:letters=0.5"]
    training, run = Training(recipe="demo", settings={"reward": rewards}), make_run("troll", {}, 0, "report")
    words = run_arguments("llm", training, run, Path("out"))
    assert [word for word in words if word.startswith("--reward")] == [f"--reward={reward}" for reward in rewards]
    assert resolve_run("llm", training, run).reward == tuple(rewards)


def test_a_file_of_settings_is_kept_with_the_comparison(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'environment = "corral/ViaPointReacher-v0"\niterations = 3\n[learner]\nepisodes = 2\n[bbrl]\nepisodes = 4\n'
    )
    training = Training(config="settings.toml")
    with pytest.raises(RunError, match="budgets differ: tce would have 3 steps of 2 episodes, bbrl 3 steps of 4 episodes"):
        check_plan(make_plan("robot", ["tce", "bbrl"], {}, seeds=1, choosing=1), training, path)
    path.write_text(path.read_text().replace("[bbrl]\nepisodes = 4\n", ""))
    budget = check_plan(make_plan("robot", ["tce", "sb3-sac"], {}, seeds=1, choosing=1), training, path)
    assert budget == Budget(steps=3, samples=2, what="episodes")


def test_robots_rates_have_one_grid() -> None:
    # via_point: tce 2e-3, bbrl 1e-3, stable-baselines3 3e-4. From 3e-5 in half-decades to at most 2e-2.
    grid = rate_grid("robot", ("tce", "bbrl", "sb3-ppo"), Training(recipe="via_point"))
    assert grid == [3e-5, 9.5e-5, 3e-4, 9.5e-4, 3e-3, 9.5e-3]
    run = make_run("sb3-ppo", {"learning_rate": 9.5e-3}, 4, "sweep")
    settings = resolve_run("robot", Training(recipe="via_point"), run)
    assert (settings.learner["rate"], settings.seed, settings.algorithm) == (9.5e-3, 4, "sb3-ppo")
    given = rate_grid("llm", ("troll", "dppo"), Training(recipe="demo", settings={"learning_rate": "1e-3"}))
    assert given == [1e-4, 3.2e-4, 1e-3, 3.2e-3, 1e-2]


def test_durations_in_words() -> None:
    assert [duration(seconds) for seconds in (7, 840, 7500)] == ["7 s", "14 min", "2 h 5 min"]


SMALL = ["--smoke", "--eval-size", "1", "--jobs", "2"]


def run_here(command: list[str], folder: Path, environment: dict[str, str]) -> mock.Mock:
    """The command of a job in this process, which has imported TRL already; the robots' comparison starts processes."""
    with os.fdopen(open_log(folder), "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        status = main(command[len(local.PROGRAM) :])
    return mock.Mock(spec=subprocess.Popen, poll=lambda: status)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished comparison of two objectives with one seed, and what was printed."""
    out, printed = tmp_path_factory.mktemp("llm") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(local, "start_process", run_here)
        assert main(["compare", "--objectives", "ppo_clip,troll", "--seeds", "1", *SMALL, "--out", str(out)]) == 0
    return out, printed.getvalue()


@pytest.mark.supports("comparison: objectives, seeds, a page", door="TRL")
def test_two_objectives_from_end_to_end(llm: tuple[Path, str]) -> None:
    out, printed = llm
    content = json.loads((out / FILE).read_text())
    assert (content["version"], content["kind"], content["recipe"]) == (1, "llm", "demo")
    assert (content["contestants"], content["sweep"], content["chosen"]) == (["ppo_clip", "troll"], {}, {})
    assert (content["choose_seeds"], content["report_seeds"]) == ([], [0])
    assert [entry["folder"] for entry in content["runs"]] == ["ppo_clip_seed0", "troll_seed0"]
    assert all(entry["state"] == "finished" and entry["error"] is None for entry in content["runs"])
    assert content["runs"][1] == {
        "folder": "troll_seed0", "contestant": "troll", "setting": {}, "seed": 0, "stage": "report", "state": "finished",
        "error": None,
    }  # fmt: skip
    for entry in content["runs"]:
        run = read_run(out / entry["folder"])
        assert (run.objective, run.seed, run.stopped) == (entry["contestant"], str(entry["seed"]), "finished")
        assert "finished after 2 steps" in (out / entry["folder"] / "log.txt").read_text()
    assert "No difference can be claimed between troll and ppo_clip on final success" in printed
    assert "that is too few" in printed
    assert "<html" in (out / "report.html").read_text()[:200]
    assert f"The report is in {out / 'report.html'}" in printed


def test_a_finished_comparison_is_shown_again_and_runs_nothing(
    llm: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, printed = llm
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert main(["compare", "--resume", str(out), "--objectives", "ppo_clip,troll", "--seeds", "1", "--eval-size", "1"]) == 0
    again = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")} == before
    assert "running" not in again
    assert printed[printed.index("contestant  runs") :] == again[again.index("contestant  runs") :]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--out", "{}", "--objectives", "ppo_clip,troll", "--seeds", "1", *SMALL],
            "holds this comparison already. Resume with",
        ),
        (
            ["--out", "{}", "--objectives", "ppo_clip,dppo", "--seeds", "1", *SMALL],
            "contestants is ppo_clip,troll there and ppo_",
        ),
        (["--out", "{}", "--objectives", "ppo_clip,troll", *SMALL], "seeds is 1 there and 3 here"),
        (["--resume", "{}", "--seeds", "3"], "is another comparison: seeds is 1 there and 3 here"),
        (["--resume", "{}", "--objectives", "dppo,troll"], "contestants is ppo_clip,troll there and dppo,troll here"),
        (["--resume", "{}", "--learning-rate", "1e-3"], "learning_rate is not given there and 1e-3 here"),
        (["--resume", "{}", "--sweep", "learning_rate=1e-3"], "sweep learning_rate is not given there and 0.001 here"),
        (["--resume", "{}", "--threads", "2"], "threads is 1 there and 2 here"),
        (["--resume", "{}", "--recipe", "gsm8k"], "recipe is demo there and gsm8k here"),
        (["--resume", "{}", "--unsafe-code-execution"], "unsafe_code_execution is False there and True here"),
        (["--resume", "{}", "--common"], "common is False there and True here"),
        (["--resume", "{}", "--seed", "4"], "seed is 0 there and 4 here"),
        (["--resume", "{}", "--out", "elsewhere"], "--out and --config cannot be given with it"),
    ],
)
@pytest.mark.refuses("comparison: settings that differ from those it was begun with", door="TRL")
def test_another_comparison_is_refused(
    llm: tuple[Path, str], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *(word.replace("{}", str(llm[0])) for word in argv))


def test_folders_that_hold_something_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").touch()
    argv = ["--objectives", "ppo_clip,troll", *SMALL, "--out", str(tmp_path)]
    assert "is there already and is no comparison: choose another --out" in refused(capsys, *argv)
    (tmp_path / FILE).write_text("{")
    assert "compare.json cannot be read" in refused(capsys, *argv)
    (tmp_path / FILE).write_text('{"version": 2}')
    assert "is of version 2, and this corral reads version 1" in refused(capsys, "--resume", str(tmp_path))


@pytest.mark.supports("comparison: a sweep, settings chosen on some seeds and reported on others", door="robots")
def test_a_sweep_of_robots_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = ["--recipe", "via_point", "--algorithms", "tce", "--seeds", "1", "--sweep", "learning_rate=3e-3"]
    assert main(["compare", *argv, "--choose-seeds", "1", *SMALL, "--quiet", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    comparison = read(out)
    assert comparison.plan.sweep == {"learning_rate": (3e-3,)}
    assert comparison.chosen == {"tce": {"learning_rate": 3e-3}}
    assert [record.stage for record in comparison.records] == ["sweep", "report"]
    config: dict[str, Any] = json.loads((out / "tce_learning_rate=3e-3_seed0" / "config.json").read_text())
    assert (config["settings"]["learner"]["policy_rate"], config["settings"]["workers"]) == (3e-3, 1)
    assert "Usable range of learning_rate" in printed
    assert "tce: cannot be told from one run" in printed
    assert (out / "report.html").is_file()


def test_a_contestant_with_settings_of_its_own() -> None:
    """The objective's own settings go to its table, others to the run; a sweep's value comes on top."""
    run = make_run("troll bound=0.1 support=union", {"learning_rate": 1e-3}, 7, "report")
    words = run_arguments("llm", Training(recipe="demo"), run, Path("x"))
    assert words[1:-1] == [
        "--recipe=demo", "--objective=troll", "--objective-config.bound=0.1", "--support=union", "--learning-rate=0.001",
        "--seed=7",
    ]  # fmt: skip
    settings = resolve_run("llm", Training(recipe="demo"), run)
    assert settings.objective_config == {"bound": 0.1}
    assert (settings.trainer["support"], settings.trainer["learning_rate"]) == ("union", 1e-3)


@pytest.mark.parametrize(("name", "runs"), [("a", 7 * 4 * 2), ("b", 4 * 3 * 2), ("f", 5 * 5), ("g", 15 * 2 * 2), ("h", 5 * 2)])
def test_recipes_of_the_evidence_say_whom_to_compare(
    name: str, runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", "--recipe", f"evidence-{name}", "--smoke", "--dry-run", *out]) == 0
    labels = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(labels) == runs


def test_flags_win_over_what_a_recipe_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--objectives", "troll:bound=0.1,dppo", "--seeds", "2", "--sweep", "learning_rate=1e-4"]
    assert main(["compare", "--recipe", "evidence-a", *flags, "--choose-seeds", "1", "--dry-run", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "troll bound=0.1 learning_rate=1e-4 seed 0" in printed
    assert "ppo_clip" not in printed
    assert "seeds      1, 2; settings are chosen on 0" in printed
