"""Rewards of a run: every column of the data, several with weights, functions, chats, and the examples of the page."""

import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from corral.lab.cli import main
from corral.lab.jobs.llm.problems import Problems
from corral.lab.jobs.llm.rewards import make_rewards
from corral.lab.jobs.llm.settings import Settings
from corral.lab.jobs.llm.smoke import letters
from corral.lab.jobs.llm.train import resume, train
from corral.lab.models.smoke import build_smoke
from corral.lab.tasks import make_task, text_of, verify_all
from corral.validate import RewardError, RunError
from small_runs import Digits, small

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
ROWS = [{"prompt": f"Double {n}.", "answer": 2 * n, "level": n if n % 2 else "even"} for n in range(1, 7)]


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings of a run on the rows, with a model that has a chat template."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"path": str(path), "verifier": "number", "held_out": 0.4}
    return {"model": "smoke", "task": "jsonl", "task_config": config, "steps": 1, "max_completion_length": 4}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def documented() -> dict[str, Any]:
    """The functions of docs/rewards.md, by name."""
    names: dict[str, Any] = {"__name__": "rewards_page"}
    for block in PYTHON.finditer(PAGE.read_text()):
        exec(block["code"], names)
    return names


@pytest.mark.supports("run: every column of the data in a reward function", door="command line")
def test_a_function_gets_every_column_and_chats(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def spy(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        return [float(len(text_of(completion))) for completion in completions]

    train(small(**jsonl(tmp_path, ROWS), reward=spy, instruction="Q: {problem}"), out=tmp_path / "run", quiet=True)
    (call,) = seen
    assert len(call["completions"]) == 8
    for prompt, completion, problem, answer, level in zip(
        *(call[key] for key in ("prompts", "completions", "problem", "answer", "level")), strict=True
    ):
        (row,) = (row for row in ROWS if row["prompt"] == problem)
        assert (answer, level) == (row["answer"], row["level"]), "whole numbers and texts in one column"
        assert prompt == [{"role": "user", "content": f"Q: {problem}"}]
        assert [message["role"] for message in completion] == ["assistant"]
    assert {"completion_ids", "trainer_state"} <= call.keys()
    assert "prompt" not in call


@pytest.mark.supports("run: several rewards with weights", door="command line")
def test_several_rewards_are_weighed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def one(completions, **_): return [1.0] * len(completions)\n")
    (tmp_path / "other.py").write_text("def one(completions, **_): return [None, *[4.0] * (len(completions) - 1)]\n")
    flags = ["train", "--smoke", "--task", "arithmetic", "--steps", "1", "--quiet", "--out", str(tmp_path / "run")]
    rewards = ["--reward", f"{tmp_path}/mine.py:one=0.5", "--reward", f"{tmp_path}/other.py:one=-.25", "--reward", "verifier"]
    assert main([*flags, *rewards]) == 0, capsys.readouterr().err
    line, config = lines(tmp_path / "run")[1], json.loads((tmp_path / "run" / "config.json").read_text())
    assert line[f"rewards/{tmp_path}/mine.py:one/mean"] == 1.0, "of one name, so each has its path"
    assert line[f"rewards/{tmp_path}/other.py:one/mean"] == 4.0
    assert line["rewards/arithmetic.verify/mean"] == 0.0
    # 4 completions: ½ − ¼ · 4 + 0 = −½ for three, and ½ + 0 for the one that the second leaves out.
    assert line["reward"] == pytest.approx((3 * -0.5 + 0.5) / 4)
    rows = pq.read_table(tmp_path / "run" / "completions.parquet").to_pylist()
    assert sorted(row["reward"] for row in rows) == [-0.5, -0.5, -0.5, 0.5]
    assert config["settings"]["reward"] == rewards[1::2]
    assert config["trainer"]["reward_weights"] == [0.5, -0.25, 1.0]


@pytest.mark.supports("run: the examples of docs/rewards.md with a chat model", door="command line")
def test_the_examples_of_the_page_run_on_a_chat_model(tmp_path: Path) -> None:
    names = documented()
    chat = small(**jsonl(tmp_path, ROWS), reward=[names["boxed"], names["close"], letters], reward_weights=[0.2, 1.0, 0.1])
    train(chat, out=tmp_path / "chat", quiet=True)
    line = lines(tmp_path / "chat")[1]
    means = [line[f"rewards/{name}/mean"] for name in ("boxed", "close", "letters")]
    assert line["reward"] == pytest.approx(0.2 * means[0] + means[1] + 0.1 * means[2])
    own = {"model": "smoke", "task": "arithmetic", "steps": 1, "max_completion_length": 4}
    train(small(**own, reward=names["right_and_short"]), out=tmp_path / "own", quiet=True)
    assert "rewards/right_and_short/mean" in lines(tmp_path / "own")[1]


def test_a_run_with_a_function_of_a_notebook_is_resumed_from_python(tmp_path: Path) -> None:
    async def length(completions: Any, **_: Any) -> list[float]:
        return [float(len(text_of(completion))) for completion in completions]

    settings = small("smoke", reward=length, steps=1, max_completion_length=4)
    out = train(settings, out=tmp_path / "run", quiet=True).path
    assert lines(out)[1]["reward"] == lines(out)[1]["rewards/length/mean"] > 0
    for checkpoint in (out / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"`reward` is module:function .*test_rewards:.*length.* cannot be imported"):
        resume(out, quiet=True)
    assert resume(out, quiet=True, reward=length).summary["stopped"] == "finished"


def test_a_function_that_can_be_imported_is_kept_by_its_path() -> None:
    settings = small("smoke", reward=[letters, "verifier=0.5"])
    assert settings.flat()["reward"] == ("corral.lab.jobs.llm.smoke:letters", "verifier=0.5")
    functions, weights = make_rewards(settings.flat()["reward"], Digits())
    assert [function.__name__ for function in functions] == ["letters", "digits.verify"]
    assert weights == [1.0, 0.5]
    assert make_rewards((), Digits())[1] is None
    assert small("smoke", reward="['a:b', 'c:d=2']").reward == ("a:b", "c:d=2"), "as --set gives it"
    assert small("smoke", reward=None).reward == Settings().reward == ()


def failing(completions: Any, **_: Any) -> list[float]:
    raise KeyError(text_of(completions[0]))


@pytest.mark.refuses("run: rewards that cannot be told apart, weighed or called", door="command line")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": ["m:f=often"]}, r"`reward` is module:function or file.py:function, .*; got 'm:f=often'"),
        ({"reward": ["m:f=inf"]}, "got 'm:f=inf'"),
        ({"reward": [3]}, "a Python function, or a list of these; got 3"),
        ({"reward": ["m"]}, "got 'm'"),
        ({"reward": ["no_such.py:f"]}, r"'no_such.py:f' cannot be imported: .*No such file"),
        ({"reward": ["corral.lab.models.smoke:TEMPLATE"]}, "'corral.lab.models.smoke:TEMPLATE' is str, which cannot be called"),
        (
            {"reward": [letters, "corral.lab.jobs.llm.smoke:letters"]},
            "two rewards are corral.lab.jobs.llm.smoke:letters. Give it once",
        ),
        ({"reward": [letters], "reward_weights": [1.0, 2.0]}, r"`reward_weights` are \[1.0, 2.0\], and the rewards corral"),
        ({"reward": ["verifier=2"], "reward_weights": [1.0]}, "none behind the names"),
        ({"reward_weights": [1.0, 2.0]}, "and the rewards verifier"),
    ],
)
def test_mistakes_get_a_sentence_and_leave_no_folder(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        train(small("smoke", **settings), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_column_with_an_arguments_name_is_refused_where_it_matters(tmp_path: Path) -> None:
    given = jsonl(tmp_path, [{**row, "prompts": 1} for row in ROWS])
    with pytest.raises(RunError, match="jsonl has a column `prompts`, and reward functions get something else"):
        train(small(**given, reward=letters), out=tmp_path / "run", quiet=True)
    assert train(small(**given), out=tmp_path / "run", quiet=True).summary["stopped"] == "finished"


def test_a_function_that_fails_is_named_with_its_completion_in_a_chat(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"test_rewards:failing raised KeyError: .*The completion was '"):
        train(small(**jsonl(tmp_path, ROWS), reward=failing), out=tmp_path / "run", quiet=True)


def judge(given: Any, completions: list[Any]) -> list[float | None]:
    """The rewards of a function that gives `given`, or calls it."""

    def own(completions: list[Any], **_: Any) -> Any:
        return given() if callable(given) else given

    ((reward,), _) = make_rewards([own], Digits())
    return reward(prompts=["p"] * len(completions), completions=completions, problem=["1+1"] * len(completions))


NUMBERS = [
    1,
    0.5,
    True,
    None,
    -torch.finfo(torch.float32).max,
    np.float32(2),
    np.int64(3),
    torch.tensor(0.25),
    torch.tensor([4]),
    Fraction(1, 2),
]


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda values: (value for value in values)])
def test_a_list_of_numbers_is_paid_whatever_has_made_it(kind: Any) -> None:
    assert judge(kind(NUMBERS), ["c"] * 10) == [1.0, 0.5, 1.0, None, NUMBERS[4], 2.0, 3.0, 0.25, 4.0, 0.5]
    assert judge(np.array([1.0, 2.0]), ["c"] * 2) == judge(torch.tensor([1.0, 2.0]), ["c"] * 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({0.5: "a", 1.0: "b"}, "a dict"),
        ({0.5, 1.0}, "a set"),
        ("01", "a str"),
        (b"01", "a bytes"),
        (1.0, "a float"),
        (7, "an int"),
    ],
)
def test_what_is_no_list_is_not_paid(given: Any, kind: str) -> None:
    with pytest.raises(RewardError, match=f"own gave {kind}. It must give a list with one reward for each completion"):
        judge(given, ["c", "d"])


@pytest.mark.parametrize(
    "value", [1e300, -1e300, 3.5e38, 10**400, math.inf, math.nan, "1.0", b"1", "x", {}, [1.0], 1j, torch.tensor([1.0, 2.0])]
)
def test_a_reward_is_a_number_that_float32_can_hold(value: Any) -> None:
    with pytest.raises(
        RewardError, match=r"own gave .* for the completion 'd'\. A reward is a finite number that fits into float32"
    ):
        judge([0.0, value], ["c", "d"])


@pytest.mark.parametrize("status", ["0", "", "'why'"])
def test_leaving_is_an_error_of_the_reward(status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RewardError, match=r"own raised SystemExit: .*\. The completion was 'c'"):
        judge(lambda: sys.exit(0), ["c"])
    (tmp_path / "mine.py").write_text(f"import sys\ndef leave(completions, **_): sys.exit({status})\n")
    flags = ["train", "--smoke", "--task", "arithmetic", "--steps", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*flags, "--reward", f"{tmp_path}/mine.py:leave"]) != 0
    assert "mine.py:leave raised SystemExit" in capsys.readouterr().err


def test_leaving_in_a_verifier_or_a_module_is_an_error_too(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RunError, match=r"leaves\.py:f' cannot be imported: it raised SystemExit \(0\)"):
        make_rewards([f"{tmp_path}/leaves.py:f"], Digits())
    (tmp_path / "verifiers.py").write_text("import sys\ndef leave(prompt, completion, answer): sys.exit(0)\n")
    given = jsonl(tmp_path, ROWS)["task_config"] | {"verifier": f"{tmp_path}/verifiers.py:leave"}
    task = make_task("jsonl", **given)
    for together in (True, False):  # a task's own verify_all, and one verify after another
        prompts = task.train_prompts(1, 0)
        one = task if together else Alone(task)
        with pytest.raises(ValueError, match=r"jsonl: its verifier raised SystemExit \(0\)"):
            verify_all(one, prompts, ["42"])


class Alone(Digits):
    """A task of which only `verify` is known."""

    def __init__(self, task: Any) -> None:
        self.name, self.verify = task.name, task.verify  # type: ignore[misc]


def test_a_prompt_of_several_messages_keeps_them(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": [system, {"role": "user", "content": f"Double {n}."}], "answer": 2 * n} for n in range(6)]
    task = make_task("jsonl", **jsonl(tmp_path, rows)["task_config"])
    _, tokenizer = build_smoke()
    problems = Problems(task=task, tokenizer=tokenizer, instruction="Q: {problem}")
    (problem,) = task.train_prompts(1, 0)
    question = problem.rpartition("user: ")[2]
    assert problems.prompt(problem) == [system, {"role": "user", "content": f"Q: {question}"}]
    (ids,) = problems.tokens([problem])
    assert f"Be brief.<|im_end|>\n<|im_start|>user\nQ: {question}<|im_end|>" in tokenizer.decode(ids)
    tokenizer.chat_template = None
    assert problems.prompt(problem) == f"Q: system: Be brief.\n\nuser: {question}"
