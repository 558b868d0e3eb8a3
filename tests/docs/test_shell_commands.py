"""Every `corral …` in a shell block of README and docs is taken: trainings up to the first step, others up to their flags."""

import argparse
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from corral.lab.cli import COMMANDS, main
from corral.lab.jobs.llm.smoke import TASK_CONFIG
from corral.lab.models.smoke import build_smoke
from corral.lab.run.settings import recipes
from corral.objective import OBJECTIVES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_commands() -> dict[str, str]:
    """Each command once, with a page that has it; comments and line ends behind backslashes are the shell's."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # OMP_NUM_THREADS=1
                    words = words[1:]
                if words and Path(words[0]).name == "corral" and "…" not in line:
                    found.setdefault(shlex.join(words[1:]), str(page.relative_to(ROOT)))
    return found


COMMAND_LINES = shell_commands()
TRAININGS = [line for line in COMMAND_LINES if line.split()[0] == "train" and "--resume" not in line]
NOT_HERE = ("--model gemma", "smollm2", "metaworld", "--simulator warp")
"""What this environment does not have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the docs find beside them."""
    here = tmp_path_factory.mktemp("docs")
    model, tokenizer = build_smoke()
    for name in ("path/to/a/model", "chat"):
        model.save_pretrained(here / name)
        tokenizer.save_pretrained(here / name)
    rows = ['{"prompt": "What is 6 times 7?", "answer": "42"}', '{"prompt": "And half of it?", "answer": 21}']
    chat = '{"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}], "answer": 2}'
    (here / "mine.jsonl").write_text("\n".join([*rows, chat]))
    (here / "sums.jsonl").write_text("\n".join(rows))
    (here / "math_train.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    (here / "math500.jsonl").write_text('{"problem": "1+2?", "answer": "3"}\n')
    (here / "mine.toml").write_text('task = "countdown"\n')
    (here / "robot.toml").write_text('environment = "corral/ViaPointReacher-v0"\n')
    (here / "rewards.py").write_text("def boxed(completions, **columns):\n    return [0.0] * len(completions)\nshort = boxed\n")
    (here / "my_rewards.py").write_text((here / "rewards.py").read_text())
    objective = (ROOT / "docs" / "tutorials" / "own-objective.md").read_text()
    (here / "mine.py").write_text(objective.partition("```python\n")[2].partition("corral.register_objective")[0])
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("tools.md", "tutorials/own-task.md"))
    own = re.findall(r"^```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)
    (here / "doubling.py").write_text(next(block for block in own if "class Doubling" in block))
    (here / "my_tools.py").write_text("\n".join(block for block in own if "class Judge" in block or "class Guess" in block))
    tutorial = (ROOT / "docs" / "tutorials" / "own-objective.md").read_text()
    (here / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)[0])
    robot = (ROOT / "docs" / "tutorials" / "own-environment.md").read_text()
    for name, text in re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", robot, re.DOTALL):
        (here / name).write_text(text)
    (here / "examples").symlink_to(ROOT / "examples")
    data = Path(str(TASK_CONFIG["gsm8k"]["path"]))
    (here / "data").mkdir()
    (here / "data" / "gsm8k").symlink_to(data)
    return here


def on_this_machine(line: str, page: str) -> list[str]:
    """A training's words, with what it names that only its reader has."""
    words = shlex.split(line)[1:]
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else "demo"
    if "mine.toml" in words and page == "docs/robots.md":
        words[words.index("mine.toml")] = "robot.toml"
    if {"robot.toml", "pusher.toml", "--environment"} & {*words} or recipes()[recipe].parent.name == "robot":
        return words
    words += ["--steps", "1", "--eval-size", "8"]  # the last one counts
    if "--model runs/" in line or "Qwen/" in line:
        words += ["--model", "chat"]
    if recipe not in ("demo", "sums", "tool_use"):
        words += ["--smoke"]  # they want a GPU and the hub
    if "gsm8k" in words and "--recipe" not in words and "path" not in line:
        words += ["--set", "task_config.path=data/gsm8k"]
    return words


@pytest.fixture
def registry() -> Iterator[None]:
    """Objectives as they were before the test: one of the commands registers its own."""
    before = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(before)


@pytest.mark.filterwarnings("ignore")  # of libraries, about settings that the docs do not care for
@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("line", TRAININGS)
def test_trainings_are_ready_to_begin(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(name in line for name in NOT_HERE):
        pytest.skip("needs what is not installed here")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    words = on_this_machine(line, COMMAND_LINES[line])
    with mock.patch.dict(OBJECTIVES):  # one registers an objective
        assert main(["train", *words, "--dry-run"]) == 0, f"{COMMAND_LINES[line]}: {capsys.readouterr().err}"
        if any(name in line for name in ("jsonl", "Doubling --set", "spell_backward", "Judge")):  # and against a chat model
            assert main(["train", *words, "--model", "chat", "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if line not in TRAININGS])
def test_other_commands_have_their_flags(line: str) -> None:
    name, *words = shlex.split(line)
    assert name in COMMANDS, f"{COMMAND_LINES[line]} has a command that does not exist"
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    module = importlib.import_module(f"corral.lab.cli.{name}")
    module.add_arguments(parser)
    _, rest = parser.parse_known_args(words)
    if name not in ("compare", "train"):  # those take every setting as a flag
        assert rest == [], f"{COMMAND_LINES[line]}: {name} has no {rest}"


def inline_comparisons() -> list[str]:
    """Comparisons that the pages of results name within a sentence or a table."""
    pages = sorted((ROOT / "docs" / "results").glob("*.md"))
    return [line for page in pages for line in re.findall(r"`corral (compare --recipe [^`…]*)`", page.read_text())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", inline_comparisons())
def test_comparisons_within_a_sentence_are_ready_to_begin(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line.replace("$'", "'").replace("--task YOURS", "--task countdown"))
    words += ["--model", "chat", "--dry-run"]  # the last model counts
    words += ["--set", "task_config.path=data/gsm8k"] if "gsm8k" in words else []
    assert main(words) == 0, capsys.readouterr().err


def test_there_are_commands_to_try() -> None:
    assert len(inline_comparisons()) > 5
    assert len(TRAININGS) > 20
    assert {"eval", "compare", "audit", "report", "export"} <= {line.split()[0] for line in COMMAND_LINES}


def test_the_readme_names_the_demo_and_the_tests() -> None:
    """Two commands do everything on a fresh machine, and the README has them beside each other."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    first, *others = ([shlex.split(line, comments=True) for line in block.splitlines()] for block in blocks)
    assert first[0][:2] == ["git", "clone"]
    assert others[0][:2] == [["make", "demo"], ["make", "test"]]


def test_the_demo_trains_the_model_that_forgets_to_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = r"^demo:.*\n\tOMP_NUM_THREADS=1 \$\(RUN\) -m corral\.lab\.cli (train .*)\n"
    words = re.findall(command, (ROOT / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(words[0]), "--dry-run"]) == 0
    settings = tomllib.loads(capsys.readouterr().out)
    assert (settings["model"], settings["task"], settings["task_config"]) == ("tiny-sums", "arithmetic", {"operations": "+"})
    assert (settings["num_iterations"], settings["learning_rate"], settings["steps"] % settings["eval_every"]) == (4, "auto", 0)
