"""Completions in several turns: who wrote which token, with which log-prob, and a run that trains on the model's alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.lab.audit.folder import read_audit
from corral.lab.audit.models import audit_run
from corral.lab.audit.rules import Rules
from corral.lab.jobs.llm.evaluate import EvalSettings, evaluate
from corral.lab.jobs.llm.prepare import prepare
from corral.lab.jobs.llm.problems import Sampling
from corral.lab.jobs.llm.settings import resolve
from corral.lab.jobs.llm.train import train
from corral.lab.jobs.llm.turns import Dialogue, TextTool, converse
from corral.lab.run.settings import read_recipe
from corral.validate import RewardError, RunError
from small_runs import save_model, small

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Shout:
    """Answers every letter with `!!`."""

    stops = tuple(LETTERS)

    def reply(self, problem: str, text: str) -> str | None:
        assert any(text.endswith(stop) for stop in self.stops)
        return None if text.count("!!") == 2 else "!!"


class Broken(Shout):
    def reply(self, problem: str, text: str) -> str | None:
        raise KeyError("no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_have_their_writer_and_their_log_prob(model: str, temperature: float) -> None:
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    prompts = tokenizer(["q", "qqq"] * 6)["input_ids"]
    torch.manual_seed(0)
    found = converse(network, tokenizer, ["q"] * 12, prompts, Shout(), Sampling(max_tokens=20, temperature=temperature))
    assert any(one.replies for one in found)
    for one in found:
        assert len(one.tokens) == len(one.own) == len(one.logps) <= 20
        theirs = tokenizer.decode([t for t, own in zip(one.tokens, one.own, strict=True) if not own], skip_special_tokens=True)
        assert ("!!" * one.replies).startswith(theirs)
        assert theirs == "!!" * one.replies or len(one.tokens) == 20, "there was no room for the whole reply"
        with torch.no_grad():  # an independent way to the log-probs: one pass over everything
            logits = network(torch.tensor([one.prompt + one.tokens])).logits[0, len(one.prompt) - 1 : -1] / temperature
        right = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0] * torch.tensor(one.own)
        torch.testing.assert_close(torch.tensor(one.logps), right, atol=1e-4, rtol=1e-4)


def test_a_tool_may_end_a_completion(model: str) -> None:
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    found = converse(network, tokenizer, ["q"] * 16, tokenizer(["q"] * 16)["input_ids"], Shout(), Sampling(max_tokens=30))
    ended: list[Dialogue] = [one for one in found if one.replies == 2 and not one.own[-1]]
    assert ended, "after two replies and a third letter"
    assert all(one.tokens[-1] == tokenizer.eos_token_id for one in ended)


def test_a_tool_that_fails_is_named(model: str) -> None:
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    with pytest.raises(RewardError, match="the tool Broken raised KeyError"):
        converse(network, tokenizer, ["q"] * 16, tokenizer(["q"] * 16)["input_ids"], Broken(), Sampling(max_tokens=30))


@pytest.mark.supports("run: tools that answer within a completion", door="command line")
@pytest.mark.parametrize("objective", ["troll", "dppo"])
def test_a_run_with_a_tool(model: str, tmp_path: Path, objective: str) -> None:
    settings = small(model, steps=1, tool=f"{__file__}:Shout", objective=objective)
    done = train(settings, out=tmp_path / "run", quiet=True)
    assert done.summary["stopped"] == "finished"
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["tools/replies"] > 0
    assert line["completions/mean_length"] < 5, "what the tool wrote does not count"
    if objective == "troll":
        found = evaluate(EvalSettings(model=str(done.path), tool=settings.tool, problems=8, samples=1), quiet=True)
        assert found.result["settings"]["tool"].endswith(":Shout")
        page = audit_run(
            done.path, EvalSettings(model="", tool=settings.tool, problems=4, samples=2), Rules(), tmp_path / "audit", print
        )
        assert "!" not in read_audit(page)[1]["text"].tolist(), "what the tool wrote is not judged"


def test_the_recipe_is_what_it_says() -> None:
    parts = prepare(resolve([read_recipe("tool_use"), {"steps": 1}]))
    assert isinstance(parts.turns, TextTool)
    assert type(parts.turns.tool).__name__ == "Calculator"
    with pytest.raises(RunError, match="no tool 'calc'"):
        prepare(resolve([read_recipe("tool_use"), {"tool": "calc"}]))
