"""The command line: layers of settings, sentences for mistakes, and what is printed where."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import pytest

import corral
from corral.lab.cli import doctor, main
from corral.lab.cli.explain import field_docs
from corral.lab.jobs.llm.settings import TABLES, Settings, resolve, trainer_types
from corral.lab.run.settings import RECIPES, nested, read_recipe
from corral.objective import OBJECTIVES, make_objective
from corral.objective.config import TROLLConfig
from corral.objective.correction import CORRECTIONS
from corral.trl import IncompatibleTRL
from corral.validate import RunError, pip_install
from small_runs import save_model

SMALL = "--task digits --eval-size 8 --per-device-train-batch-size 4 --steps-per-generation 2 --num-generations 4 --device cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """The settings that a command line would train with."""
    seen: list[Any] = []

    def remember(settings: Settings, **how: Any) -> Any:
        seen.append(settings)
        return type("Outcome", (), {"summary": {"stopped": "finished"}})

    monkeypatch.setattr("corral.lab.jobs.llm.train.train", remember)

    def run(*argv: str) -> Settings:
        assert main(["train", *argv]) == 0
        return seen[-1]

    return run


def test_no_arguments_mean_the_demo(settings_of: Callable[..., Settings]) -> None:
    settings = settings_of()
    assert settings == resolve([read_recipe("demo")])
    assert (settings.model, settings.task, settings.objective) == ("tiny", "countdown", "troll")


@pytest.mark.supports("run: recipe, file and flags in layers", door="command line")
def test_flags_win_over_the_file_and_the_file_over_the_recipe(settings_of: Callable[..., Settings], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("seed = 5\nsteps = 7\nlearning_rate = 1e-3\n[objective_config]\nbound = 0.1\nregression = 2.0\n")
    settings = settings_of(
        "--recipe", "demo", "--config", str(path), "--steps", "9", "--set", "objective_config.bound=inf", "--beta=0.5"
    )  # fmt: skip
    assert (settings.seed, settings.steps, settings.trainer["learning_rate"]) == (5, 9, 1e-3)
    assert settings.objective_config == {"bound": float("inf"), "regression": 2.0}
    assert settings.trainer["beta"] == 0.5
    assert settings.trainer["num_generations"] == read_recipe("demo")["num_generations"]
    assert "num_generations" not in settings_of("--config", str(path)).trainer, "a file alone has no recipe under it"


def test_yaml_is_read_as_well(settings_of: Callable[..., Settings], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("objective: dppo\nlearning_rate: 1e-4\nbf16: false\nobjective_config:\n  divergence: kl\n")
    settings = settings_of("--config", str(path))
    assert settings.trainer == {"learning_rate": 1e-4, "bf16": False}
    assert (settings.objective, settings.objective_config) == ("dppo", {"divergence": "kl"})


def test_another_objective_does_not_inherit_settings() -> None:
    troll = {"objective": "troll", "objective_config": {"regression": 2.0}}
    assert resolve([troll, {"objective": "dppo"}]).objective_config == {}
    assert resolve([troll, {"objective": "troll"}]).objective_config == {"regression": 2.0}
    assert resolve([troll, {"objective": "dppo", "objective_config": {"bound": 0.1}}]).objective_config == {"bound": 0.1}


def test_a_recipe_s_reduction_holds_for_objectives_whose_own_it_is() -> None:
    demo = read_recipe("demo")
    assert demo["loss_type"] == "dr_grpo"
    assert resolve([demo, {"objective": "ppo_clip"}]).trainer["loss_type"] == "dr_grpo"
    for other in ({"objective": "gspo"}, {"objective": "gmpo"}, {"objective_config": {"level": "sequence"}}):
        settings = resolve([demo, {"steps": 2}, other, {"seed": 1}])
        assert "loss_type" not in settings.trainer
        assert resolve([settings.flat()]) == settings
        # Asked for beside the objective, or after it, it is what the user wants.
        assert resolve([demo, {**other, "loss_type": "dapo"}]).trainer["loss_type"] == "dapo"
        assert resolve([demo, other, {"loss_type": "dapo"}]).trainer["loss_type"] == "dapo"
    with pytest.raises(RunError, match="gspo: there is no setting `clip`"):
        resolve([demo, {"objective": "gspo", "objective_config": {"clip": 1}}])


def test_an_adapter_is_a_table_of_settings(settings_of: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[lora]\nr = 4\nlora_alpha = 8\n")
    given = settings_of("--config", str(tmp_path / "mine.toml"), "--lora.r", "16", "--set", "lora.target_modules=['q_proj']")
    assert given.lora == {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert settings_of("--lora", "{r = 2}").lora == {"r": 2}


def test_every_reward_counts_however_it_is_given(settings_of: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('reward = ["a:b", "verifier=2"]\n')
    assert settings_of("--config", str(tmp_path / "mine.toml")).reward == ("a:b", "verifier=2")
    given = settings_of(
        "--config", str(tmp_path / "mine.toml"), "--reward", "c.py:d=0.5", "--set", "reward=e:f", "--reward=g:h"
    )
    assert given.reward == ("c.py:d=0.5", "g:h", "e:f"), "flags win over the file"
    assert settings_of("--set", "reward=['a:b', 'c:d']").reward == ("a:b", "c:d")


def test_a_flag_without_a_value_is_true(settings_of: Callable[..., Settings]) -> None:
    assert settings_of("--mask-truncated-completions", "--seed", "3").trainer["mask_truncated_completions"] is True


def test_recipes_fit_on_a_screen_and_resolve() -> None:
    recipes = sorted((RECIPES / "llm").glob("*.toml"))
    assert recipes
    for path in recipes:
        assert len(path.read_text().splitlines()) <= 40
        resolve([read_recipe(path.stem)])


def test_settings_survive_being_saved() -> None:
    settings = resolve([read_recipe("demo"), nested([("objective_config.bound", "0.2"), ("seed", "4")], TABLES)])
    assert resolve([json.loads(json.dumps(settings.flat()))]) == settings


@pytest.mark.supports("run: plain lines in a pipe", door="command line")
def test_a_run_in_a_pipe_prints_plain_lines(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", *SMALL.split(), "--model", model, "--steps", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed, "no colours, no cursor moves"
    rows = printed.splitlines()
    assert [row.split()[0] for row in rows[:6]] == ["corral", "objective", "reduction", "step", "device", "run"]
    assert rows[1] == "objective  troll", "every setting has its default, and config.json has them all"
    assert [row.split("  ")[0] for row in rows if row.startswith("step ") and "/" in row[:9]] == [
        "step 0/2",
        "step 1/2",
        "step 2/2",
    ]
    assert all(word in printed for word in ("success", "reward", "entropy", "tr/kl_after", "left"))
    assert "tr/active_frac" not in printed, "five numbers"
    assert rows[-3].startswith("finished after 2 steps: held-out success")
    assert rows[-3].endswith(f"The run is in {out}")
    assert rows[-2:] == [f"Next: corral report {out} --open", f"      corral eval {out}"]
    saved = json.loads((out / "config.json").read_text())
    assert saved["settings"]["loss_type"] == "dr_grpo", "from the recipe"
    assert main(["train", *SMALL.split(), "--model", model, "--out", str(out)]) == 1
    assert f"continue that run with --resume {out}" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--steps", "3", "--verbose"]) == 0
    printed = capsys.readouterr().out
    heading = ("(bound=0.05, regression=1.0, ", "anchor  ", "support  ", "; TRL ")
    assert all(word in printed for word in (*heading, "tokens/s", "tr/active_frac", "tr/kl_max"))
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", str(out), "--quiet", "--verbose"])


@pytest.mark.supports("scale: {launcher}", door="command line")
@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("`torchrun`, two processes", ["torch.distributed.run", "--nproc-per-node", "2"]),
        pytest.param(
            "`accelerate launch`, one process",
            ["accelerate.commands.launch", "--cpu", "--num_processes", "1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_a_run_under_a_launcher(launcher: str, command: list[str], tmp_path: Path) -> None:
    sizes = "--steps 2 --eval-size 4 --per-device-train-batch-size 4 --steps-per-generation 2 --num-generations 4 --device cpu"
    argv = [sys.executable, "-m", *command, "-m", "corral.lab.cli", "train", *sizes.split(), "--out", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 2 steps") == 1, "one process speaks"
    assert ("2 processes" in done.stdout) == ("two" in launcher)
    prompts = 4 if "two" in launcher else 2  # 2 micro-batches of 4 completions in each process, 4 to a prompt
    assert f"{prompts} prompts × 4 completions, then 2 updates" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "finished"


def test_quiet_says_only_how_it_ended(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL.split(), "--model", model, "--steps", "1", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["train", *argv]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["finished", "Next:", "corral"]
    assert printed.out.startswith("finished after 1 step:")
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0, "a finished run stays finished"


@pytest.mark.parametrize("name", [*OBJECTIVES, *CORRECTIONS])
def test_explain_knows_every_objective_and_correction(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}\n")
    assert "settings\n" in text
    assert "Args:" not in text
    if name in OBJECTIVES:
        assert "Ref:" in text
        assert "needs    advantages," in text
        assert "anchor   " in text
        assert f"reduced  {make_objective(name).config.reductions[0]}\n" in text


def test_explain_shows_defaults_and_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "troll"])
    text = capsys.readouterr().out
    assert "  bound = 0.05\n      Bound ε on KL(projected‖centre) of every token" in text
    assert "L_t = − (π̃(a_t) / π_old(a_t)) Â_t" in text
    assert "  gradient = 'exact' (or 'constant_dual', 'unprojected')\n" in text
    assert set(field_docs(TROLLConfig)) == {
        "bound", "regression", "tail", "vocab_size", "level", "gradient", "ratio_cap", "project", "centre",
    }  # fmt: skip


def test_explain_lists_and_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in [*OBJECTIVES, *CORRECTIONS])
    assert main(["explain", "dpo"]) == 2
    assert "no objective, recipe, task, algorithm or setting 'dpo'. Did you mean 'dppo'?" in capsys.readouterr().err
    assert main(["explain", "troll", "dppo"]) == 2
    assert main(["explain", "lr"]) == 2
    assert "setting 'lr'. Did you mean 'learning_rate'? There are: aime24, " in capsys.readouterr().err


def test_explain_without_trl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    trainer_types.cache_clear()
    monkeypatch.setattr("corral.lab.jobs.llm.settings.version", missing)
    assert main(["explain", "learning_rat"]) == 2
    assert "no objective, recipe, task, algorithm or setting 'learning_rat'." in capsys.readouterr().err
    assert main(["explain", "settings"]) == 0
    assert "they are in TRL, which is not installed" in capsys.readouterr().out
    trainer_types.cache_clear()


def test_doctor_finds_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    text = capsys.readouterr().out
    for name in ("python", "torch", "trl", "transformers", "device", "embedded", "vllm"):
        assert f"\n{name} " in text
    assert text.startswith(f"corral            {corral.__version__}")
    assert ("`corral train` can run." in text) is (status == 0)
    assert main(["doctor", "please"]) == 2


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"trl": None, "transformers": "5.1.0"}
    found = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: known.get(name, found(name)))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"missing: trl<2,>=1.7: {pip_install('llm')}" in text
    assert "missing: transformers<6,>=5.17, found 5.1.0" in text
    known |= {"transformers": "6.0.0", "trl": "2.0.0"}
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "missing: transformers<6,>=5.17, found 6.0.0" in text
    assert "missing: trl<2,>=1.7, found 2.0.0" in text
    known |= {"trl": "1.17.0"}
    main(["doctor"])
    assert "\ntrl               1.17.0         newer than 1.7 to 1.16, which were tested\n" in capsys.readouterr().out


def test_a_trl_that_does_not_fit_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_with_another_trl(*_: object) -> NoReturn:
        raise IncompatibleTRL("tested with others.")

    monkeypatch.setattr("corral.lab.cli.train.run", run_with_another_trl)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "corral: tested with others.\n"


def test_doctor_reads_what_is_needed_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch<3,>=2.6", "trl<2,>=1.7; extra == 'llm'", "triton<4; (platform_system == 'Linux') and extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    assert doctor.requirements(None) == {"torch": "<3,>=2.6"}
    assert doctor.requirements("llm") == {"trl": "<2,>=1.7"}


def test_the_front_door(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:\n  train" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    assert "--objective" in capsys.readouterr().out


def test_it_runs_as_a_module_without_loading_trl() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "corral.lab.cli", "explain", "dpo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Did you mean 'dppo'?" in done.stderr
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "torch" in imported
    assert "trl" not in imported
