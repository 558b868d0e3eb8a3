"""The front door: refusals before torch is imported, dry runs, extended runs, exports, explanations."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from corral.lab.cli import main
from corral.lab.jobs.llm import settings as known
from corral.lab.jobs.llm.prepare import model_to_fetch
from corral.lab.jobs.llm.settings import Settings, resolve
from corral.lab.jobs.llm.train import resume, train
from corral.lab.jobs.robot.settings import ALGORITHMS
from corral.lab.jobs.robot.settings import resolve as resolve_robot
from corral.lab.jobs.robot.train import train as train_robot
from corral.lab.models import EMBEDDED
from corral.lab.models.load import load_skeleton
from corral.lab.run.folder import default_name
from corral.lab.run.life import last_words, summarise
from corral.lab.run.settings import read_recipe, recipes, toml_lines
from corral.lab.tasks import TASKS
from corral.lab.tasks.dataset import FiniteTask
from corral.objective import OBJECTIVES, objective_names
from corral.validate import RunError
from small_runs import save_model, small


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    model = save_model(tmp_path_factory.mktemp("model"))
    return train(small(model, steps=1), out=tmp_path_factory.mktemp("front") / "run", quiet=True).path


def test_names_read_from_source_are_those_that_there_are() -> None:
    assert known.trainer_types().keys() == known._imported_types().keys()
    assert known.trainer_types()["learning_rate"] == float | str


def test_an_older_trl_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    known.trainer_types.cache_clear()
    monkeypatch.setattr(known, "version", lambda package: "1.6")
    assert known.trainer_types() == {}
    with pytest.raises(RunError, match="no setting `no_such`"):  # by the settings of the class itself
        resolve([{"no_such": 1}])
    known.trainer_types.cache_clear()


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"lr": 1}, "Did you mean 'learning_rate'?"),
        ({"bound": 1}, "troll has one: --set objective_config.bound=…"),
        ({"objective": "dppo", "ratio_cap": 1}, "dppo has one: --set objective_config.ratio_cap=…"),
        ({"clip_low": 1}, "has one: --set objective_config.clip_low=…"),
        ({"n": 4}, "countdown has one: --set task_config.n=…"),
        ({"data": "x"}, "Use --task jsonl --set task_config.path=FILE."),
        ({"epsilon": 0.3}, "Use --objective ppo_clip --set objective_config.clip_low=0.2"),
        ({"algorithm": "tce"}, "such as --recipe via_point"),
        ({"objective": "grpo"}, "Did you mean 'ppo_clip'?"),
        ({"steps": "many"}, "`steps` is int; got 'many'"),
        ({"instruction": "Solve."}, "`instruction` must contain {problem}"),
    ],
)
def test_near_misses_lead_to_the_right_name(layer: dict[str, object], sentence: str) -> None:
    with pytest.raises(RunError) as refusal:
        resolve([read_recipe("demo"), layer])
    assert sentence in str(refusal.value)


REFUSED = {
    "train --lr 3": "Did you mean 'learning_rate'?",
    "train --recipe via_point --lr 3": "There are: algorithm",
    "train --learning-rate fast": "`learning_rate` is a number, or auto, which finds one; got 'fast'",
    "train --num-generations many": "`num_generations` is int or none; got 'many'",
    "train --set task_config.n=x": "`n` is a whole number in [2, 9]",
    "train --set objective_config.bnd=1": "troll: there is no setting `bnd`. Did you mean 'bound'?",
    "train --set objective_config.bound=-1": "troll: `bound` is a KL in nats and must be ≥ 0",
    "train --tool calculator --tools my.py:f": "use one or the other",
    "train --tool calc": "there is no tool 'calc'",
    "eval": "eval takes a run's folder or a model",
    "eval tiny": "say which with --task",
    "eval tiny --task countdown --samples x": "`samples` is int; got 'x'",
    "eval tiny --task countdown --video film.gif": "--video is for runs of robots",
    "compare --objectives nope": "there is no objective 'nope'",
    "compare --objectives troll --lr 3": "Did you mean 'learning_rate'?",
    "--version": "corral ",
}
"""Commands and what they answer, each without waiting for torch."""


def test_a_refusal_imports_neither_torch_nor_trl() -> None:
    program = (
        "import sys; from corral.lab.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit: pass\n"
        "    sys.stdout.flush(); found = [name for name in ('torch', 'trl', 'transformers', 'scipy') if name in sys.modules]\n"
        "    if found: sys.exit(f'{line} imports {found}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *REFUSED], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    answers = done.stdout.splitlines()
    for answer, (line, sentence) in zip(answers, REFUSED.items(), strict=True):
        assert sentence in answer, line


def test_the_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    words = text.replace(",", " ").split()
    assert {*TASKS, "demo", "via_point", "--reward", "--instruction", "--lora.r", "--dry-run"} <= set(words)


def test_a_dry_run_prints_a_file_that_means_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--set", "objective_config.bound=inf", "--instruction", 'Say "\\x"\n{problem}', "--reward", "verifier=0.5"]
    assert main(["train", "--dry-run", *argv]) == 0
    text = capsys.readouterr().out
    assert "# would fetch nothing\n" in text
    # 928 k parameters of 4 bytes: 3.71 MB of weights, as much of gradients, twice as much of AdamW's moments.
    assert "weights 3.71 MB, gradients 3.71 MB, AdamW 7.42 MB, cache while sampling" in text
    given = {"objective_config": {"bound": float("inf")}, "instruction": 'Say "\\x"\n{problem}', "reward": ["verifier=0.5"]}
    assert resolve([tomllib.loads(text)]) == resolve([read_recipe("demo"), given])
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_robot_and_of_what_must_be_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--dry-run", "--recipe", "via_point", "--smoke"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["algorithm"] == "tce"

    def offline(name: str) -> None:
        raise RunError(f"{name} could not be loaded")

    monkeypatch.setattr("corral.lab.jobs.llm.prepare.load_skeleton", offline)
    assert main(["train", "--dry-run", "--recipe", "gsm8k"]) == 0
    text = capsys.readouterr().out
    assert "would fetch the weights of Qwen/Qwen2.5-0.5B-Instruct; their size is unknown" in text
    assert "would fetch the data set openai/gsm8k" in text
    files = [("model.safetensors", 988_097_824), ("tokenizer.json", 7_000_000)]
    siblings = [type("File", (), {"rfilename": name, "size": size}) for name, size in files]
    monkeypatch.setattr(
        "corral.lab.jobs.llm.prepare.HfApi.model_info", lambda *_, **__: type("Info", (), {"siblings": siblings})
    )
    assert model_to_fetch("Qwen/Qwen2.5-0.5B-Instruct") == "the weights of Qwen/Qwen2.5-0.5B-Instruct: 0.988 GB"


def test_a_dry_run_of_every_recipe_and_task_names_what_is_fetched_and_the_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> None:
        raise RunError(f"{name} could not be loaded")

    load = load_skeleton
    monkeypatch.setattr(
        "corral.lab.jobs.llm.prepare.load_skeleton", lambda name: load(name) if name in (*EMBEDDED, "smoke") else offline(name)
    )
    monkeypatch.setattr("corral.lab.jobs.llm.prepare.is_installed", lambda name: False)
    for recipe, path in recipes().items():
        if path.parent.name == "llm":
            assert main(["train", "--recipe", recipe, "--dry-run"]) == 0, recipe
            text = capsys.readouterr().out
            assert "# would fetch " in text, recipe
            assert re.search("^# memory ([0-9.]+ [MG]B|unknown)", text, re.MULTILINE), recipe
    for task, task_cls in TASKS.items():
        if issubclass(task_cls, FiniteTask) and task_cls.hub_names():
            assert main(["train", "--task", task, "--dry-run"]) == int(task_cls.held_out == 1), task
            said = capsys.readouterr()
            assert all(name in said.out for name in task_cls.hub_names()) or "is for evaluation" in said.err, task
    assert main(["train", "--task", "words", "--dry-run"]) == 0
    assert re.findall(r"MU-NLPC/Calc-(\w+)", capsys.readouterr().out) == ["asdiv_a", "mawps", "svamp"]
    assert main(["train", "--model", "smollm2", "--dry-run"]) == 0
    assert "would fetch SmolLM2, which is not installed: `make smollm2`, 93 MB\n# memory unknown" in capsys.readouterr().out


def test_a_dry_run_counts_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--lora.r", "4", "--lora.target_modules", "['q_proj']"]) == 0
    text = capsys.readouterr().out
    assert "weights 3.73 MB, gradients 0.0" in text


def test_settings_written_as_toml_are_read_back() -> None:
    settings = {"a": 'q"\x7f\n', "b": [1, 2.5, float("inf")], "c": True, "d": None, "t": {"x y": {"z": "ü"}, "n": None}}
    assert tomllib.loads("\n".join(toml_lines(settings))) == {
        "a": 'q"\x7f\n', "b": [1, 2.5, float("inf")], "c": True, "t": {"x y": {"z": "ü"}},
    }  # fmt: skip


def test_a_run_is_extended(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in finished.rglob("*"):
        if path.is_file():
            (run / path.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
            (run / path.relative_to(finished)).write_bytes(path.read_bytes())
    before = (run / "metrics.jsonl").read_text()
    done = resume(str(run), steps=2, quiet=True)
    assert (done.summary["steps"], done.summary["stopped"]) == (2, "finished")
    assert (run / "metrics.jsonl").read_text().startswith(before)
    content = json.loads((run / "config.json").read_text())
    assert content["settings"]["steps"] == 2
    assert content["extended"] == [{"from": 1, "to": 2, "after": 1}]
    assert main(["train", "--resume", str(run), "--steps", "1"]) == 1
    assert "has done 2 steps, more than --steps 1" in capsys.readouterr().err


def test_a_run_is_a_model_to_go_on_from(finished: Path, tmp_path: Path) -> None:
    done = train(small(str(finished), steps=1).flat(), out=str(tmp_path / "next"), quiet=True)  # settings as a dict
    content = json.loads((done.path / "config.json").read_text())
    assert content["settings"]["model"] == str(finished / "checkpoints" / "checkpoint-2"), "named, so that it stays the same"


def test_a_run_is_exported_as_a_plain_model(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plain"
    assert main(["export", str(finished), "--out", str(out)]) == 0
    assert "after step 1" in capsys.readouterr().out
    assert not [path.name for path in out.iterdir() if path.name.startswith(("optimizer", "manifest", "trainer", "rng"))]
    theirs = AutoModelForCausalLM.from_pretrained(out).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(finished / "checkpoints" / "checkpoint-2").state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- corral\n")
    assert "after 1 step of training on the task digits, trained with corral. Held-out success at step 1: " in card
    for part in (
        "corral's objective `troll`",
        "| `objective_config.bound` | `0.05` |",
        "| `seed` | `0` |",
        "@misc{becker2025troll,",
    ):
        assert part in card
    assert str(finished.parent) not in card, "cards are published: no folders of this machine"
    assert main(["export", str(finished), "--out", str(out)]) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert main(["export", str(finished), "--out", str(tmp_path / "other"), "--merge"]) == 1
    assert "has no adapter to merge" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 1
    assert "is no run" in capsys.readouterr().err


def test_an_adapter_is_exported_alone_or_merged(finished: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    base = str(finished / "checkpoints" / "checkpoint-2")
    run = train(small(base, steps=1, lora=lora), out=tmp_path / "run", quiet=True).path
    for name, flags in (("adapter", []), ("merged", ["--merge"])):
        assert main(["export", str(run), "--out", str(tmp_path / name), *flags]) == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    tokens = torch.arange(8)[None]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(whole(tokens).logits, adapted(tokens).logits, atol=1e-5, rtol=0)
    assert not torch.equal(whole(tokens).logits, AutoModelForCausalLM.from_pretrained(base)(tokens).logits)


def test_a_robot_is_extended_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_robot = {"iterations": 1, "eval_size": 4, "workers": 1, "learner": {"episodes": 4, "policy_epochs": 1}}
    run = train_robot(resolve_robot([small_robot]), out=str(tmp_path / "run"), quiet=True).path
    assert main(["train", "--resume", str(run), "--iterations", "2", "--quiet"]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "arm.npz")]) == 0
    assert "after step 2" in capsys.readouterr().out
    with np.load(tmp_path / "arm.npz") as arrays:
        assert json.loads(str(arrays["about"]))["iteration"] == 2
    assert main(["export", str(run), "--merge"]) == 1
    assert "is a robot's run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("countdown", ["countdown: a recipe", "countdown: a task", "value_max = 99"]),
        ("demo", ["steps_per_generation = 8", "use it   corral train --recipe demo"]),
        ("tce", ["a robot's algorithm", "mean_bound = 0.05", "arXiv:2401.11437"]),
        ("sb3-sac", ["--algorithm sb3-sac"]),
        ("eval_every", ["steps between measurements", "corral train --eval-every VALUE"]),
        ("num_generations", ["num_generations = 8", "Number of generations"]),
        ("settings", ["  keep_checkpoints = 2\n", "num_iterations"]),
    ],
)
def test_explain_knows_more_than_objectives(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


def test_everything_that_can_be_named_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    words = listed.replace(",", " ").split()
    assert {*OBJECTIVES, *TASKS, *ALGORITHMS, *recipes()} <= set(words)
    sentences = {line.split()[0]: line.split(maxsplit=1)[1] for line in listed.splitlines() if line.startswith("  ")}
    assert len({sentences[name] for name in objective_names()}) == len(objective_names()), "one for each"
    studies = listed.partition("recipes of the studies")[2]
    assert "evidence-a, evidence-b" in studies
    assert "evidence-" not in listed.removesuffix(studies)


def test_smoke_runs_are_apart_and_names_fit_every_file_system() -> None:
    assert default_name("x", smoke=True).parent == Path("smoke-runs")
    name = default_name("my_tasks.py:Sorting-troll-0").name
    assert name.endswith("-my_tasks.py-Sorting-troll-0")
    assert ":" not in name


def test_the_end_says_what_was_measured_when() -> None:
    lines = [{"step": step, "success": value, "seconds": step} for step, value in ((0, 0.2), (1, None), (2, 0.4), (3, None))]
    stopped = summarise({}, lines, "interrupted", None, also="greedy")
    assert (stopped["success_final"], stopped["success_last"], stopped["success_last_step"]) == (None, 0.4, 2)
    assert "held-out success 20.0% → 40.0% at step 2, the last measured, 3 s" in last_words(stopped, Path("run"))
    early = summarise({}, lines[:2], "interrupted", None, also="greedy")
    assert "held-out success 20.0% before the first step, 1 s" in last_words(early, Path("run"))
    done = summarise({}, lines[:3], "finished", None, also="greedy")
    assert done["success_final"] == 0.4
    finished = "finished after 2 steps: held-out success 20.0% → 40.0%, 2 s. The run is in"
    both = done | {"greedy_start": 0.1, "greedy_final": 0.3}
    assert "held-out success 20.0% → 40.0% sampled, 10.0% → 30.0% greedy, 2 s" in last_words(both, Path("run"))
    assert last_words(done, Path("run")) == f"{finished} run\nNext: corral report run --open\n      corral eval run"
    assert last_words(done, Path("a run")).endswith("\nNext: corral report 'a run' --open\n      corral eval 'a run'")
    assert "\nNext: corral train --resume run\n      corral report run" in last_words(stopped, Path("run"))
    nothing = summarise({}, [], "interrupted", None, also="greedy")
    assert last_words(nothing, Path("run")).endswith("\nNext: corral train --resume run"), "no report of nothing"


def test_settings_need_no_torch_to_be_wrong_about() -> None:
    assert Settings(objective="troll").steps == 100
    with pytest.raises(RunError, match="no objective 'trol'"):
        Settings(objective="trol")
