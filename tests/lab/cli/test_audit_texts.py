"""`corral audit TEXTS --model OLD --model NEW`: what verl and TRL logged, rescored over the whole vocabulary."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from audit.dumps import write_lines
from transformers import AutoModelForCausalLM

from corral.lab.audit.folder import read_audit
from corral.lab.cli import main
from corral.lab.models.tiny import tiny_tokenizer
from small_runs import save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model, and the same a little further on."""
    old, new = (save_model(tmp_path_factory.mktemp(name)) for name in ("old", "new"))
    moved = AutoModelForCausalLM.from_pretrained(new)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    moved.save_pretrained(new)
    return ["--model", old, "--model", new]


def verl_line(output: str, score: float, step: int = 1, given: str = "1 + 1") -> dict[str, Any]:
    return {"input": given, "output": output, "gts": "2", "score": score, "step": step, "acc": True}


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of two prompts; one completion has a character that the tokenizer does not know."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        lines = [verl_line("2", 1.0, step), verl_line("13", 0.0, step), verl_line("☃", 0.0, step)]
        write_lines(tmp_path / "rollouts" / f"{step}.jsonl", [*lines, verl_line("4", 1.0, step, "2 + 2")])
    return tmp_path / "rollouts"


def test_verl(verl: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(verl), *models, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "10 tokens of 8 completions, logged by verl and rescored by" in printed
    assert "in 2 completions of 8 (25 %) the tokens do not spell the text" in printed
    info, columns = read_audit(Path("audits/rollouts"))
    assert sorted(set(columns["update"].tolist())) == [1, 2]
    # Rewards 1, 0, 0 of one prompt: GRPO's (1 − ⅓)/(.5774 + 1e-4) = 1.1545; the other prompt is alone in its group.
    first = columns["update"] == 1
    assert columns["advantage"][first].tolist() == pytest.approx([1.1545, -0.5773, -0.5773, -0.5773, 0.0], abs=1e-3)
    # The second completion by hand: both models' softmax over everything, after the prompt.
    tokenizer = tiny_tokenizer()
    prompt, completion = tokenizer("1 + 1")["input_ids"], tokenizer("13", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        old, new = (
            AutoModelForCausalLM.from_pretrained(name)(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            for name in models[1::2]
        )
    here = first & (columns["sequence"] == 1)
    assert columns["kl"][here].tolist() == pytest.approx((new.exp() * (new - old)).sum(-1).tolist(), rel=1e-3, abs=1e-6)
    page = Path("audits/rollouts/audit.html").read_text()
    assert 'id="threshold"' in page
    assert "The texts were tokenised again." in page
    assert info["settings"]["format"] == "verl"


def test_a_few_prompts_and_a_temperature(verl: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["audit", str(verl), *models, "--device", "cpu", "--problems", "1", "--temperature", "2", "--json", "-"]
    assert main([*argv, "--out", "here"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sequences"], found["measure"]) == (6, "whole")
    assert read_audit(Path("here"))[0]["settings"]["temperature"] == 2.0


@pytest.mark.parametrize("messages", [False, True])
def test_trl(
    messages: bool, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: dict[str, Any] = {"step": ["10", "10"], "advantage": [0.5, -0.5], "reward": [1.0, 0.0]}
    rows |= {"prompt": ["1 + 1", "1 + 1"], "completion": ["2", "30"]}
    if messages:
        rows["prompt"] = [[{"role": "user", "content": "1 + 1"}]] * 2
        rows["completion"] = [[{"role": "assistant", "content": text}] for text in rows["completion"]]
    folder = tmp_path / "out" / "completions"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(rows), folder / "completions_00010.parquet")
    argv = ["audit", str(tmp_path / "out"), *models, "--device", "cpu", "--quiet"]
    if messages:
        assert main(argv) == 1
        assert "the model's chat template cannot render the logged messages" in capsys.readouterr().err
        (Path(models[1]) / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(argv) == 0
    _, columns = read_audit(Path("audits/out"))
    assert columns["advantage"].tolist() == [0.5, -0.5, -0.5]
    assert columns["text"].tolist() == ["2", "3", "0"]
    assert set(columns["update"].tolist()) == {10}


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ([verl_line("2", 1.0)], [], "name the model that sampled and the one that came out of training"),
        ([verl_line("2", 1.0)], ["--model", "tiny"], "--model OLD --model NEW"),
        ([verl_line("2", 1.0)], ["--task", "countdown"], "holds logged texts, so --task cannot be given with it"),
        ([verl_line("2", 1.0)], ["--problems", "0", "TWO"], "`problems`"),
        ([{**verl_line("2", 1.0), "score": "high"}], ["TWO"], "`score` should hold numbers"),
        ([{**verl_line("2", 1.0), "score": None}], ["TWO"], "`score` is a number"),
        ([{**verl_line("2", 1.0), "output": 7}], ["TWO"], "`output` is a text; got 7"),
        ([verl_line("", 1.0)], ["TWO"], "has no completion with a token"),
    ],
)
def test_mistakes_get_a_sentence(
    lines: list[Any], flags: list[str], message: str, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "1.jsonl", lines)
    given = [item for flag in flags for item in (models if flag == "TWO" else [flag])]
    assert main(["audit", str(path), "--device", "cpu", "--out", str(tmp_path / "audit"), *given]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "audit").exists(), "nothing is written before everything is measured"


def test_tables_that_are_not_trls(models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, columns in {
        "prompt": {"prompt": [1], "completion": ["x"], "advantage": [1.0]},
        "advantage": {"prompt": ["x"], "completion": ["x"], "advantage": ["far"]},
        "none": {"other": [1]},
    }.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        assert main(["audit", str(tmp_path / f"{name}.parquet"), *models, "--out", str(tmp_path / "audit")]) == 1
        assert capsys.readouterr().err.count("\n") == 1
