"""A run folder from a stranger: reading it executes nothing, whatever its files name."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.lab.cli import main
from corral.lab.run.files import digest
from small_runs import save_model, small

EVIL = """
from pathlib import Path
Path({marker!r}).touch()
class Task:
    name = "evil"
    stops = ("=",)
    max_completion_length = 4
    def train_prompts(self, count, seed): return ["aaa"] * count
    def held_out_prompts(self, count, seed): return ["qqq"] * count
    def verify(self, prompt, completion): return 1.0
    def reply(self, problem, text): return "?"
    def reset(self, **columns): return None
def function(prompt: str, completion: str = "", answer: str = "") -> float:
    '''A tool.

    Args:
        prompt: a text.
        completion: a text.
        answer: a text.
    '''
    return 1.0
"""
"""A module that leaves a mark when it is imported."""


class Folder:
    """A copy of a run, with a module beside its files that leaves a mark when it is imported."""

    def __init__(self, run: Path, path: Path) -> None:
        self.path, self.marker = path, path.parent / "executed"
        shutil.copytree(run, path)
        (path / "evil_module.py").write_text(EVIL.format(marker=str(self.marker)))

    @property
    def code(self) -> str:
        return str(self.path / "evil_module.py")

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("checkpoint-*"))

    def set(self, **settings: Any) -> None:
        """Change settings in config.json."""
        content = json.loads((self.path / "config.json").read_text())
        content["settings"] |= settings
        (self.path / "config.json").write_text(json.dumps(content))

    def sign(self) -> None:
        """New manifests, as anybody can write them."""
        for checkpoint in self.checkpoints:
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
            listed = {str(x.relative_to(checkpoint)): {"bytes": x.stat().st_size, "sha256": digest(x)} for x in files}
            (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "files": listed}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from corral.lab.jobs.llm.train import train

    folder = tmp_path_factory.mktemp("honest")
    train(small(save_model(folder / "model"), steps=2), out=folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def stranger(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    found = Folder(run, tmp_path / "run")
    monkeypatch.chdir(found.path)  # where a module of the folder could be found by its name alone
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks whether to run a model's own code
    yield found
    for name in ("evil_module", "megatron"):
        sys.modules.pop(name, None)


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda run: ["report", run, "--out", f"{run}/page.html"],
    "eval": lambda run: ["eval", run, "--problems", "2", "--samples", "1", "--device", "cpu", "--quiet"],
    "audit": lambda run: ["audit", run, "--problems", "1", "--samples", "1", "--device", "cpu", "--quiet"],
    "audit of two": lambda run: [
        *("audit", "--old", run, "--new", run, "--problems", "1", "--samples", "1", "--device", "cpu", "--quiet"),
        *("--out", f"{run}/audit-of-two"),
    ],
    "export": lambda run: ["export", run, "--out", f"{run}/exported"],
}
"""Everything that reads a run, by name."""

SETTINGS: dict[str, Callable[[Folder], dict[str, Any]]] = {
    "a task in a file": lambda folder: {"task": f"{folder.code}:Task"},
    "a task in a module": lambda _: {"task": "evil_module:Task"},
    "a tool": lambda folder: {"tool": f"{folder.code}:Task"},
    "tools": lambda folder: {"tools": [f"{folder.code}:function"]},
    "tools as text": lambda folder: {"tools": f"{folder.code}:function"},
    "an environment": lambda folder: {"environment_factory": f"{folder.code}:Task"},
    "a reward": lambda folder: {"reward": [f"{folder.code}:function=0.5"]},
    "a verifier": lambda folder: {
        "task": "jsonl",
        "task_config": {"path": str(folder.path / "problems.jsonl"), "verifier": f"{folder.code}:function"},
    },
}
"""Every setting of a run that can name code, by what it names."""


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_in_a_run_s_own_settings_is_not_imported(
    command: str, what: str, stranger: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{number}", "answer": "1"} for number in range(20)]
    (stranger.path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stranger.set(**SETTINGS[what](stranger))
    status = main(COMMANDS[command](str(stranger.path)))
    assert not stranger.marker.exists()
    if command in ("eval", "audit", "audit of two") and what != "a reward":  # which evaluations do not use
        assert status == 1
        said = capsys.readouterr().err
        assert "evil_module" in said
        assert "type" in said
    else:
        assert status == 0


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        ("a task in a file", lambda folder: ["--task", f"{folder.code}:Task"]),
        ("a tool", lambda folder: ["--tool", f"{folder.code}:Task"]),
        ("a verifier", lambda folder: ["--set", f"task_config.verifier={folder.code}:function"]),
    ],
    ids=["task", "tool", "verifier"],
)
def test_what_the_command_line_repeats_is_imported(what: str, flags: Any, stranger: Folder) -> None:
    rows = [{"prompt": f"{number}", "answer": "1"} for number in range(20)]
    (stranger.path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stranger.set(**SETTINGS[what](stranger))
    assert main([*COMMANDS["eval"](str(stranger.path)), *flags(stranger)]) == 0
    assert stranger.marker.exists()


def test_programs_without_a_sandbox_need_the_user_s_own_word(stranger: Folder) -> None:
    """`unsafe_code_execution` runs what a model wrote: of a run's own settings it counts for nothing."""
    from corral.lab.jobs.llm.eval_settings import EvalSettings
    from corral.lab.jobs.llm.evaluate import prepare_evaluation

    test = [{"stdin": "1", "stdout": "1"}]
    rows = [{"prompt": f"write {number}", "answer": test} for number in range(10)]
    (stranger.path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"path": str(stranger.path / "problems.jsonl"), "verifier": "code", "unsafe_code_execution": True}
    stranger.set(task="jsonl", task_config=own)
    assert not prepare_evaluation(EvalSettings(model=str(stranger.path), device="cpu")).task.unsafe_code_execution
    given = EvalSettings(model=str(stranger.path), device="cpu", task_config={"unsafe_code_execution": True})
    assert prepare_evaluation(given).task.unsafe_code_execution


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def remote_model(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "modeling_evil.py").write_text(EVIL.format(marker=str(marker)))
    content = json.loads((checkpoint / "config.json").read_text())
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Task"}
    (checkpoint / "config.json").write_text(json.dumps({**content, "model_type": "evil", "auto_map": names}))


def remote_tokenizer(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "modeling_evil.py").write_text(EVIL.format(marker=str(marker)))
    content = json.loads((checkpoint / "tokenizer_config.json").read_text())
    content |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["modeling_evil.Task", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(content))


def custom_generate(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "custom_generate").mkdir()
    (checkpoint / "custom_generate" / "generate.py").write_text(EVIL.format(marker=str(marker)))
    content = json.loads((checkpoint / "generation_config.json").read_text())
    content |= {"custom_generate": str(checkpoint), "trust_remote_code": True}
    (checkpoint / "generation_config.json").write_text(json.dumps(content))


def pickled_weights(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save({"weight": Payload(marker)}, checkpoint / "pytorch_model.bin")


def pickled_training(checkpoint: Path, marker: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "state.pt"):
        (checkpoint / name).write_bytes(pickle.dumps(Payload(marker)))


def adapter_of_a_library(checkpoint: Path, marker: Path) -> None:
    """peft imports the module that `megatron_core` names, which recent releases want to be megatron's: or of that name."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint.parents[1] / "megatron").mkdir(exist_ok=True)
    (checkpoint.parents[1] / "megatron" / "__init__.py").write_text(EVIL.format(marker=str(marker)))
    base = checkpoint / "base"
    save_model(base)
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "base_model_name_or_path": str(base), "megatron_config": {"tensor": 1}, "megatron_core": "megatron.core",
    }  # fmt: skip
    (checkpoint / "config.json").unlink()
    (checkpoint / "adapter_config.json").write_text(json.dumps(content))


def adapter_beside_a_model(checkpoint: Path, marker: Path) -> None:
    """transformers puts an adapter into the whole model beside it."""
    config = (checkpoint / "config.json").read_text()
    adapter_of_a_library(checkpoint, marker)
    shutil.copy(checkpoint / "base" / "model.safetensors", checkpoint)
    (checkpoint / "config.json").write_text(config)


def adapter_of_adapters(checkpoint: Path, marker: Path) -> None:
    """X-LoRA loads further adapters, whose files peft alone reads."""
    adapter_of_a_library(checkpoint, marker)
    shutil.copytree(checkpoint / "base", checkpoint / "inner")
    config = json.loads((checkpoint / "base" / "config.json").read_text())
    (checkpoint / "base" / "config.json").write_text(json.dumps(config | {"use_cache": False}))  # X-LoRA asks for this
    adapter = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "inner" / "adapter_config.json").write_text(json.dumps(adapter))
    base = {"task_type": "CAUSAL_LM", "base_model_name_or_path": adapter["base_model_name_or_path"]}
    content = {"peft_type": "XLORA", "hidden_size": 16, "adapters": {"0": str(checkpoint / "inner")}}
    (checkpoint / "adapter_config.json").write_text(json.dumps(base | content))


MODELS = (
    *(remote_model, remote_tokenizer, custom_generate, pickled_weights, pickled_training),
    *(adapter_of_a_library, adapter_of_adapters, adapter_beside_a_model),
)
"""Ways to put code into a checkpoint."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", MODELS)
@pytest.mark.parametrize("command", [*COMMANDS, "train from it", "dry run from it", "resume", "merge"])
def test_code_in_a_checkpoint_is_not_executed(
    command: str, damage: Callable[[Path, Path], None], stranger: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in stranger.checkpoints:
        damage(checkpoint, stranger.marker)
    stranger.sign()
    path = str(stranger.path)
    train = ["train", "--model", path, "--smoke", "--device", "cpu", "--quiet", "--out", f"{path}/new"]
    more = {
        "train from it": train,
        "dry run from it": [*train[:-2], "--dry-run"],
        "resume": ["train", "--resume", path, "--steps", "3", "--quiet"],
        "merge": ["export", path, "--merge", "--out", f"{path}/merged"],
    }
    capsys.readouterr()  # progress bars of the weights saved above
    status = main(more[command] if command in more else COMMANDS[command](path))
    assert not stranger.marker.exists()
    assert status in (0, 1)
    if status:
        assert capsys.readouterr().err.startswith("corral: ")


def test_no_link_is_exported(stranger: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link would put a file of the user's into a folder that is sent around."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    for checkpoint in stranger.checkpoints:
        (checkpoint / "notes.txt").symlink_to(secret)
    stranger.sign()
    assert main(["export", str(stranger.path), "--out", str(tmp_path / "out")]) == 1
    assert "notes.txt is no file of its own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["task", "reward", "tool", "tools", "environment_factory"])
def test_a_resume_says_what_it_imports_before_it_does(
    name: str, stranger: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def stop(*arguments: Any, **_: Any) -> None:
        said.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("corral.lab.jobs.llm.train.prepare", stop)
    value = f"{stranger.code}:Task"
    stranger.set(**{name: [value] if name in ("reward", "tools") else value})
    assert main(["train", "--resume", str(stranger.path), "--steps", "3"]) == 130
    assert value in said[0].replace("\n", "")
    assert not stranger.marker.exists()


def test_a_resumed_comparison_says_it_too(
    stranger: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compare", "--smoke", "--objectives", "troll,ppo_clip", "--seeds", "1", "--out", "comparison", "--quiet"]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("corral.lab.compare.job.run_comparison", stop)
    assert main(argv) == 130
    file = stranger.path / "comparison" / "compare.json"
    content = json.loads(file.read_text())
    content["train"]["settings"] |= {"task": "evil_module:Task", "reward": [f"{stranger.code}:function"]}
    content["train"]["unsafe_code_execution"] = True
    file.write_text(json.dumps(content))
    said: list[str] = []

    def note(*_: Any, **__: Any) -> None:
        said.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("corral.lab.compare.job.set_up", note)
    assert main(["compare", "--resume", "comparison"]) == 130
    for part in ("--task evil_module:Task", f"{stranger.code}:function", "--unsafe-code-execution"):
        assert part in said[0]
    assert not stranger.marker.exists()
