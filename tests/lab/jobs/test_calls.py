"""Functions and environments that a chat model calls: as TRL plays them, out of the loss, evaluated, audited."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.lab.audit.models import audit_run
from corral.lab.audit.rules import Rules
from corral.lab.jobs.llm.evaluate import EvalSettings, evaluate, prepare_evaluation
from corral.lab.jobs.llm.prepare import prepare
from corral.lab.jobs.llm.problems import Problems, Sampling
from corral.lab.jobs.llm.settings import FUNCTIONS
from corral.lab.jobs.llm.train import train
from corral.lab.jobs.llm.turns import FunctionCalls, OneTurn, make_turns
from corral.lab.models.smoke import build_byte_tokenizer, build_smoke
from corral.lab.tasks.messages import answer_of, transcript
from corral.llm import CorralConfig, CorralTrainer
from corral.validate import RunError
from small_runs import Digits, small

CALLS = [
    '<tool_call>\n{"name": "double", "arguments": {"number": 7}}\n</tool_call>',
    '<tool_call>\n{"name": "guess", "arguments": {"number": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "guess", "arguments": {"letter": "x"}}\n</tool_call>',
]
"""Each is one token of the model below, so that noise calls tools."""


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: any number.
    """
    return 2 * number


class Game:
    """Counts guesses."""

    def reset(self, problem: str, prompt: Any, **columns: Any) -> str:
        self.guesses = 0
        return " Guess!"

    def guess(self, number: int) -> str:
        """Whether it is right.

        Args:
            number: your guess.
        """
        self.guesses += 1
        return "right"

    def get_reward(self) -> float:
        return min(self.guesses, 2) / 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Noise over digits, tool calls and the end: the first hidden dimension is a constant, so that the head has a bias."""
    folder = tmp_path_factory.mktemp("chat")
    network, _ = build_smoke()
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(CALLS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network.resize_token_embeddings(len(tokenizer))
        network.lm_head.weight = torch.nn.Parameter(torch.randn(len(tokenizer), 16))
        network.model.embed_tokens.weight = torch.nn.Parameter(3 * torch.randn(len(tokenizer), 16))
    network.config.tie_word_embeddings = False
    network.model.embed_tokens.weight.data[:, 0] = 10
    network.lm_head.weight.data[:, 0] = -8
    network.lm_head.weight.data[tokenizer([*"123", "<|im_end|>", *CALLS]).input_ids, 0] = torch.tensor([0.0, 0, 0, 1, 1, 1, 1])[
        :, None
    ]
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def trainer_of(model: str, folder: Path, settings: dict[str, Any] | None = None, **given: Any) -> CorralTrainer:
    args = CorralConfig(
        output_dir=str(folder), max_completion_length=200, per_device_train_batch_size=4, steps_per_generation=2,
        num_generations=4, max_steps=1, report_to=[], save_strategy="no", logging_strategy="no", learning_rate=1e-3,
        use_cpu=True, max_tool_calling_iterations=3, shuffle_dataset=False, **(settings or {}),
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": letter}] for letter in "ab"], "problem": ["a", "b"]})
    reward = [lambda completions, **_: [float(len(transcript(one))) for one in completions]]
    tokenizer = AutoTokenizer.from_pretrained(model)
    calls = make_turns("", given.get("tools") or (), given.get("environment_factory") or "")
    assert calls is not None
    calls.template(tokenizer)  # teaches it how calls are read, as `corral train` does
    return CorralTrainer(AutoModelForCausalLM.from_pretrained(model), reward, args, rows, processing_class=tokenizer, **given)


@pytest.mark.supports("kept: TRL's tools and environments", door="TRL")
@pytest.mark.parametrize(
    "given", [{"tools": [double]}, {"tools": [double], "environment_factory": Game}], ids=["tools", "game"]
)
def test_tools_are_out_of_the_region_and_played_alike_without_a_trainer(
    model: str, tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = trainer_of(model, tmp_path, **given)
    trainer.generation_config.do_sample = False
    rows = list(trainer.train_dataset)
    output = trainer._generate_and_score_completions([dict(row) for row in rows for _ in range(4)])
    calls = FunctionCalls([double], given.get("environment_factory"), max_turns=3)
    problems = Problems(
        task=Digits(),
        tokenizer=trainer.processing_class,
        instruction="{problem}",
        template=calls.template(trainer.processing_class),
    )
    found = calls.play(trainer.model, problems, ["a", "b"], Sampling(max_tokens=200, greedy=True))
    assert any(one.replies for one in found), "a greedy completion that calls nothing compares nothing"
    for one, row in zip(found, (0, 4), strict=True):  # TRL's own loop is the oracle
        live = output["completion_mask"][row].bool()
        assert output["completion_ids"][row][live].tolist() == one.tokens
        assert output["tool_mask"][row][live].tolist() == one.own
        assert output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist() == one.prompt

    trainer.generation_config.do_sample = True
    seen = []
    trainer.token_observer = lambda inputs, batch, objective: seen.append((inputs, batch))
    trainer.train()
    assert seen
    theirs = [inputs["completion_mask"].bool() & ~inputs["tool_mask"].bool() for inputs, _ in seen]
    assert sum(int(one.sum()) for one in theirs) > 0
    for (inputs, batch), tools in zip(seen, theirs, strict=True):
        assert torch.equal(batch.mask, inputs["completion_mask"].bool() & ~tools)


@pytest.mark.supports("correction: any, with TRL's tools", door="TRL")
def test_every_turn_has_the_log_probs_it_was_drawn_with(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = trainer_of(model, tmp_path, {"correction": "tis", "bf16": False}, tools=[double])
    torch.manual_seed(0)
    output = trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset for _ in range(4)])
    live = output["completion_mask"].bool()
    own, reported = live & output["tool_mask"].bool(), output["sampling_per_token_logps"]
    first_reply = (live & ~own).int().argmax(1)
    assert (own & (torch.arange(own.shape[1]) > first_reply[:, None]) & (first_reply > 0)[:, None]).any(), "no second turn"
    assert (reported - output["old_per_token_logps"])[own].abs().max() < 1e-4
    assert not reported[live & ~own].any()


@pytest.mark.supports("run: TRL's tools and environments", door="command line")
def test_a_run_with_tools_is_evaluated_and_audited_with_them(model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = small(model, steps=1, tools=f"{__file__}:double", max_completion_length=120, max_tool_calling_iterations=2)
    train(settings, out=run, quiet=True)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["tools/call_frequency"] > 0
    ours = (f"{__file__}:double",)
    job = prepare_evaluation(EvalSettings(model=str(run), tools=ours, problems=4, samples=2, device="cpu"))
    assert isinstance(job.turns, FunctionCalls)
    assert (job.turns.max_turns, job.plan()["tools"]) == (2, [f"{__file__}:double"])
    done = evaluate(EvalSettings(model=str(run), tools=ours, problems=4, samples=2, device="cpu"), quiet=True)
    shown = [row["completion"] for row in read_rows(done.path)]
    assert any('→ double({"number": 7})\n← 14' in text for text in shown)
    assert FUNCTIONS["tools"]([""]) == (), "corral eval RUN --tools ''"
    without = prepare_evaluation(EvalSettings(model=str(run), tools=(), device="cpu"))
    assert type(without.turns) is OneTurn
    with pytest.raises(RunError, match="played with transformers"):
        prepare_evaluation(EvalSettings(model=str(run), tools=ours, backend="vllm"))

    audited = audit_run(
        run, EvalSettings(model="", tools=ours, problems=2, samples=2, device="cpu"), Rules(), tmp_path / "audit", print
    )
    from corral.lab.audit.folder import read_audit

    columns = read_audit(audited)[1].to_dict("list")
    assert not any("tool_response" in text or "im_start" in text for text in columns["text"]), "what TRL masks is not judged"
    assert any(after > before + 1 for before, after in zip(columns["position"], columns["position"][1:], strict=False))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    return parquet.read_table(folder / "completions.parquet").to_pylist()


def test_an_environment_pays(model: str, tmp_path: Path) -> None:
    settings = small(model, steps=1, environment_factory=Game, max_completion_length=80)
    done = train(settings, out=tmp_path / "run", quiet=True)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "rewards/Game/mean" in line, "the environment alone, not the task's verifier"
    assert not any("verify" in key for key in line)
    assert done.summary["success_final"] in [n / 16 for n in range(17)], "of eight games, each 0, ½ or 1"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["environment_factory"] == f"{__name__}:Game"


def test_what_cannot_be_called_is_refused(model: str, tmp_path: Path) -> None:
    def silent(number):  # type: ignore[no-untyped-def]
        return number

    class Closed(Game):
        reset = None  # type: ignore[assignment]

    for given, words in (
        (("", [silent], ""), "needs a type for every argument"),
        (("", ["nowhere:f"], ""), "cannot be imported"),
        (("", (), Closed), "has no `reset`"),
        (("", (), "Game"), "module:Class"),
    ):
        with pytest.raises(ValueError, match=words):
            make_turns(*given)
    with pytest.raises(RunError, match="use one or the other"):
        small(model, tool="calculator", tools=[double])
    with pytest.raises(RunError, match="whose template has tool calls"):
        train(small("tiny", tools=[double]), out=tmp_path / "run")


def test_a_package_that_trl_misses_is_a_sentence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any, **__: Any) -> None:
        raise ImportError("Using tools with GRPOTrainer requires the jmespath library")  # releases up to 1.9

    monkeypatch.setattr("corral.lab.jobs.llm.trainer.CorralTrainer.__init__", without)
    with pytest.raises(RunError, match="requires the jmespath library"):
        train(small(model, tools=[double]), out=tmp_path / "run", quiet=True)


def test_held_out_prompts_follow_the_template_of_training(model: str) -> None:
    parts = prepare(small(model, chat_template_kwargs='{"short": true}'))
    assert parts.problems.template == {"short": True}
    tokenizer = parts.problems.tokenizer
    tokenizer.chat_template = "{% if short %}Be short. {% endif %}{{ messages[0]['content'] }}"
    assert tokenizer.decode(parts.problems.tokens(["abc"])[0]) == "Be short. abc"


def test_messages_as_text() -> None:
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": 7}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [asked, {"role": "tool", "name": "double", "content": "14"}, {"role": "assistant", "content": "It is 14."}]
    assert transcript(chat) == '→ double({"number": 7})\n← 14\nIt is 14.'
    assert answer_of(chat) == "It is 14."
    assert answer_of(chat[:2]) == "", "what a tool wrote is no answer of the model's"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "3+4?"}]
    assert transcript(turns) == "Hi\nHello\n3+4?", "messages of a prompt are told apart"
    assert answer_of("text") == transcript("text") == answer_of([{"role": "assistant", "content": "text"}]) == "text"
