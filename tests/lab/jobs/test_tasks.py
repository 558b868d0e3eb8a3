"""Every kind of task trains: a procedural one, a data set, a user's own class and a user's own file, two steps each."""

import json
from pathlib import Path
from typing import Any

import pytest

from corral.lab.cli import main
from corral.lab.jobs.llm.train import resume, train
from corral.lab.models.tiny import tiny_tokenizer
from corral.lab.tasks import names
from corral.validate import RunError
from small_runs import save_model, small

GSM8K = Path(__file__).parents[1] / "tasks" / "gsm8k"

OWN = '''
from dataclasses import dataclass
from typing import ClassVar
from corral.lab.tasks.procedural import in_held_out_share

@dataclass(frozen=True, kw_only=True)
class Vowels:
    """Write as many vowels as there are letters."""
    name: ClassVar[str] = "vowels"
    length: int = 4
    @property
    def max_completion_length(self): return 4
    def train_prompts(self, count, seed): return ["abcd"[: self.length]] * count
    def held_out_prompts(self, count, seed): return ["efgh"[: self.length]] * count
    def verify(self, prompt, completion): return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Room for the problems of GSM8K; every character is a token."""
    folder = tmp_path_factory.mktemp("model")
    path = save_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1100}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def two_steps(model: str, out: Path, **changes: Any) -> dict[str, Any]:
    settings = small(model, steps=2, eval_every=2, eval_size=4, max_completion_length=8, checkpoint_every=2, **changes)
    outcome = train(settings, out=out, quiet=True)
    assert outcome.summary["stopped"] == "finished"
    assert outcome.summary["success_final"] is not None
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", ["arithmetic", "expression", "countdown", "reasoning_gym"])
def test_procedural_tasks_train(name: str, model: str, tmp_path: Path) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    config = two_steps(model, tmp_path / "run", task=name)
    assert config["task"]["name"] == name
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_data_set_trains(model: str, tmp_path: Path) -> None:
    # The format reward differs from sample to sample even where nothing is right.
    task_config = {"path": str(GSM8K), "format_weight": 0.5}
    config = two_steps(model, tmp_path / "run", task="gsm8k", task_config=task_config)
    assert config["task"] == {
        "name": "gsm8k",
        "path": str(GSM8K),
        "held_out": None,
        "skip_malformed": False,
        "max_completion_length": 512,
        "form": "boxed",
        "format_weight": 0.5,
        "time_limit": 2.0,
    }, "settings, and not the problems themselves"


def test_competition_mathematics_trains(model: str, tmp_path: Path) -> None:
    rows = [{"problem": f"What is {i} over {i + 1}?", "answer": rf"\frac{{{i}}}{{{i + 1}}}"} for i in range(8)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task_config = {"path": str(tmp_path / "math.jsonl"), "held_out": 0.5}
    two_steps(model, tmp_path / "run", task="math500", task_config=task_config)


def test_a_task_for_evaluation_says_how_to_train_on_it(model: str, tmp_path: Path) -> None:
    (tmp_path / "aime.jsonl").write_text('{"problem": "a", "answer": "1"}\n')
    with pytest.raises(RunError, match=r"aime24 is for evaluation: all of its problems are held out.* or hold out a share"):
        small(model, task="aime24", task_config={"path": str(tmp_path / "aime.jsonl")})


def test_a_task_of_the_users_own_trains_and_resumes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vowel_tasks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    changes = {"task": "vowel_tasks:Vowels", "task_config": {"length": 3}}
    config = two_steps(model, tmp_path / "run", **changes)
    assert config["task"] == {"name": "vowels", "length": 3}
    assert resume(tmp_path / "run", quiet=True).summary["task"] == "vowel_tasks:Vowels"
    with pytest.raises(RunError, match=r"'vowel_tasks:Missing' cannot be imported"):
        train(small(model, task="vowel_tasks:Missing"), out=tmp_path / "none", quiet=True)


def test_a_file_of_the_users_own_from_the_command_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Write {letter}", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = main(
        [
            *("train", "--task", "jsonl", "--model", model, "--steps", "1", "--out", str(tmp_path / "run"), "--quiet"),
            *("--set", f"task_config.path={tmp_path / 'mine.jsonl'}", "--set", "task_config.verifier=exact"),
            *("--set", "task_config.held_out=0.25", "--set", "max_completion_length=2", "--set", "eval_size=2"),
            *("--per-device-train-batch-size", "4", "--num-generations", "4", "--steps-per-generation", "2"),
        ]
    )
    assert status == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"]["verifier"] == "exact"


def test_the_embedded_model_reads_every_procedural_task() -> None:
    from corral.lab.tasks import make_task

    tokenizer = tiny_tokenizer()
    for name in ("arithmetic", "countdown", "expression"):
        assert name in names()
        task = make_task(name)
        for prompt, answer in task.demonstrations(50, 0):
            ids = tokenizer(prompt + answer)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + answer
        assert max(map(len, task.train_prompts(1_000, 0))) + task.max_completion_length + 2 <= 512
