"""Evaluations of a model of a few thousand weights: what is kept, what can be gone on with, what is refused."""

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corral.lab.jobs.llm.eval_results import (
    Estimate,
    EvalFolder,
    compare,
    summarise,
)
from corral.lab.jobs.llm.eval_settings import find_subject
from corral.lab.jobs.llm.evaluate import EvalSettings, Evaluation, default_problems, draw_seed, evaluate, prepare_evaluation
from corral.lab.jobs.llm.problems import Sampling, cut_at_end, end_tokens, generate
from corral.lab.jobs.llm.sampler import TransformersSampler, choose_backend, choose_dtype
from corral.lab.jobs.llm.train import train
from corral.lab.models.smoke import build_smoke
from corral.lab.tasks import TASKS
from corral.validate import RewardError, RunError
from small_runs import Digits, save_model, small


@dataclass(frozen=True, kw_only=True)
class Letters:
    """A finite task: five problems are held out. A completion is right if it starts with a letter; a digit is half right."""

    name: ClassVar[str] = "letters"
    size: int = 5

    max_completion_length: ClassVar[int] = 3

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, self.size

    def train_prompts(self, count: int, seed: int) -> list[str]:
        return ["z:"] * count

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        return [f"{letter}:" for letter in "abcdefgh"[: self.size]][:count]

    def verify(self, prompt: str, completion: str) -> float:
        return 1.0 if completion[:1].isalpha() else 0.5 if completion[:1].isdigit() else 0.0


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "letters", Letters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, each with a checkpoint; success was measured after the second and the third."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(small(model, instruction="<{problem}>"), out=out, quiet=True)
    return out


def asked(model: str, **changes: Any) -> EvalSettings:
    return EvalSettings(**{"model": model, "task": "letters", "device": "cpu", "samples": 3, "batch_size": 4, **changes})


def done(settings: EvalSettings, out: Path) -> Evaluation:
    return evaluate(settings, out=out, quiet=True)


def rows(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out / "completions.parquet").to_pylist()


def test_an_evaluation_leaves_numbers_and_completions(model: str, tmp_path: Path) -> None:
    outcome = done(asked(model), tmp_path / "e")
    assert sorted(path.name for path in outcome.path.iterdir() if path.name != ".lock") == ["completions.parquet", "eval.json"]
    written = json.loads((outcome.path / "eval.json").read_text())
    assert written == json.loads(json.dumps(outcome.result))
    assert (written["problems"], written["samples"], written["level"]) == (5, 3, 0.95)
    assert {"pass@1", "avg@3", "pass@2", "pass@3", "greedy"} <= set(written["estimates"])
    assert {"versions", "commit", "command", "seconds"} <= set(written)
    plan = written["settings"]
    assert (plan["task"], plan["seed"], plan["temperature"]) == ({"name": "letters", "size": 5}, 0, 1.0)
    assert (plan["max_tokens"], plan["backend"], plan["instruction"]) == (4, "transformers", "{problem}")
    kept = rows(outcome.path)
    assert [(row["problem"], row["sample"], row["greedy"]) for row in kept] == [
        *((problem, 0, True) for problem in range(5)),
        *((problem, sample, False) for problem in range(5) for sample in range(3)),
    ]
    assert all(row["prompt"] == f"{'abcde'[row['problem']]}:" for row in kept)
    assert all(row["reward"] == Letters().verify(row["prompt"], row["completion"]) for row in kept)
    assert all(1 <= row["tokens"] <= 4 and (row["ended"] or row["tokens"] == 4) for row in kept)
    # The numbers once more, straight from the completions.
    right = [[row["reward"] == 1 for row in kept if row["problem"] == problem and not row["greedy"]] for problem in range(5)]
    assert written["estimates"]["pass@1"]["value"] == pytest.approx(sum(map(sum, right)) / 15)
    assert written["estimates"]["pass@3"]["value"] == pytest.approx(sum(map(any, right)) / 5)
    greedy = [row["reward"] for row in kept if row["greedy"]]
    assert written["estimates"]["greedy"]["value"] == pytest.approx(sum(reward == 1 for reward in greedy) / 5)


def test_golden_summary() -> None:
    # Two problems, two samples. Greedy: right, half right. Samples: (1, 0) and (0, 0).
    def row(problem: int, sample: int, greedy: bool, reward: float, ended: bool = True) -> dict[str, Any]:
        return {"problem": problem, "sample": sample, "greedy": greedy, "reward": reward, "tokens": 2 + sample, "ended": ended}

    found = summarise(
        [row(0, 0, True, 1.0), row(1, 0, True, 0.5), row(0, 1, False, 0.0), row(0, 0, False, 1.0), row(1, 0, False, 0.0),
         row(1, 1, False, 0.0, ended=False)]
    )  # fmt: skip
    values = {name: estimate["value"] for name, estimate in found["estimates"].items()}
    assert values == {"greedy": 0.5, "pass@1": 0.25, "avg@2": 0.25, "pass@2": 0.5, "greedy reward": 0.75}
    assert found["tokens"] == {"mean": pytest.approx(14 / 6), "longest": 3, "cut": pytest.approx(1 / 6)}


def test_the_same_seed_gives_the_same_and_another_does_not(model: str, tmp_path: Path) -> None:
    one, same = (rows(done(asked(model), tmp_path / name).path) for name in "ab")
    other = rows(done(asked(model, seed=1), tmp_path / "c").path)
    assert one == same
    assert [row["completion"] for row in one] != [row["completion"] for row in other]
    before = torch.random.get_rng_state()
    done(asked(model), tmp_path / "d")
    assert torch.equal(before, torch.random.get_rng_state()), "nobody else's numbers are drawn"


def test_what_batches_change_and_what_not(model: str, tmp_path: Path) -> None:
    """With transformers a batch is one stream: another size draws other samples, of the same problems."""
    small_, large = (rows(done(asked(model, batch_size=size), tmp_path / str(size)).path) for size in (3, 100))
    assert [row["prompt"] for row in small_] == [row["prompt"] for row in large]
    assert [row for row in small_ if row["greedy"]] == [row for row in large if row["greedy"]]
    assert [row["completion"] for row in small_] != [row["completion"] for row in large]


def test_seeds_of_completions_are_all_different() -> None:
    drawn = {draw_seed(seed, problem, sample) for seed in range(4) for problem in range(50) for sample in range(8)}
    assert len(drawn) == 4 * 50 * 8
    assert all(0 <= one < 2**63 for one in drawn)


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_evaluation_goes_on_where_it_was(
    after: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = done(asked(model), tmp_path / "whole")
    complete, calls = TransformersSampler.complete, []

    def interrupted(self: TransformersSampler, *args: Any, **kwargs: Any) -> Any:
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(args)
        return complete(self, *args, **kwargs)

    monkeypatch.setattr(TransformersSampler, "complete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        done(asked(model), tmp_path / "broken")
    assert len(list((tmp_path / "broken" / "parts").iterdir())) == after
    assert not (tmp_path / "broken" / "eval.json").exists()
    assert not (tmp_path / "broken" / "completions.parquet").exists()
    calls = [()] * 100  # from here on, no signal
    answered: list[Any] = []
    monkeypatch.setattr(
        TransformersSampler, "complete", lambda self, *args, **kw: answered.append(1) or complete(self, *args, **kw)
    )
    resumed = done(asked(model), tmp_path / "broken")
    assert len(answered) == 6 - after, "2 batches of greedy answers, 4 of samples"
    assert rows(resumed.path) == rows(whole.path)
    assert resumed.result["estimates"] == whole.result["estimates"]
    assert done(asked(model), tmp_path / "broken").result == resumed.result
    assert len(answered) == 6 - after, "nothing is answered twice"


def test_a_damaged_part_is_answered_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lab.jobs.llm.evaluate.summarise", lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        done(asked(model), tmp_path / "e")
    monkeypatch.undo()
    monkeypatch.setitem(TASKS, "letters", Letters)
    part = tmp_path / "e" / "parts" / "000002.parquet"
    part.write_bytes(part.read_bytes()[:100])
    assert rows(done(asked(model), tmp_path / "e").path) == rows(done(asked(model), tmp_path / "whole").path)


def test_a_folder_holds_one_evaluation(model: str, tmp_path: Path) -> None:
    out = done(asked(model), tmp_path / "e").path
    with pytest.raises(RunError, match=r"another evaluation: temperature differ \(temperature 1.0 there, temperature 0.5 now"):
        done(asked(model, temperature=0.5), out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is there already and is no evaluation"):
        done(asked(model), tmp_path / "mine")


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"settings": 3}', "{"])
def test_a_foreign_result_gets_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(content)
    for read in (lambda: EvalFolder(tmp_path).read_result({}), lambda: compare(tmp_path, tmp_path)):
        with pytest.raises(RunError, match=r"eval.json (is not what an evaluation writes|cannot be read)"):
            read()


def test_what_else_cannot_be_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunError, match="is there already and is no evaluation"):
        EvalFolder(tmp_path / "notes.txt").read_result({})
    (tmp_path / "eval.json").write_text('{"settings": {}}')
    for damage in (lambda: None, lambda: (tmp_path / "completions.parquet").write_bytes(b"half")):
        damage()
        with pytest.raises(RunError, match=r"completions.parquet cannot be read"):
            compare(tmp_path, tmp_path)


def test_the_default_folder_is_found_again(model: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, same, other = (evaluate(asked(model, seed=seed), quiet=True).path for seed in (0, 0, 1))
    assert one == same != other
    assert one.parent == Path("evals")
    assert one.name.startswith("letters-")
    of_run = evaluate(asked(str(run), problems=2, samples=1), quiet=True).path
    assert of_run.parent == run / "evals"
    assert of_run.name.startswith("letters-step3-")


def test_a_run_brings_its_task_instruction_and_length(run: Path, tmp_path: Path) -> None:
    outcome = done(EvalSettings(model=str(run), device="cpu", samples=2, problems=3), tmp_path / "e")
    plan = outcome.result["settings"]
    assert plan["task"]["name"] == "digits"
    assert (plan["instruction"], plan["max_tokens"], plan["step"]) == ("<{problem}>", 5, 3)
    assert plan["problems"] == 3
    with_own = done(asked(str(run), instruction="{problem}!", max_tokens=2), tmp_path / "f").result["settings"]
    assert (with_own["instruction"], with_own["max_tokens"], with_own["task"]["name"]) == ("{problem}!", 2, "letters")


@pytest.mark.parametrize(("trained_in_half", "on_gpu"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_run_is_evaluated_in_the_precision_of_its_training(
    run: Path, tmp_path: Path, trained_in_half: bool, on_gpu: torch.dtype
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    content = json.loads((run / "config.json").read_text())
    assert "bf16" in content["trainer"]
    content["trainer"]["bf16"] = trained_in_half
    (run / "config.json").write_text(json.dumps(content))
    subject = find_subject(str(run), None)
    assert choose_dtype(subject, "cuda") == on_gpu
    assert choose_dtype(subject, "cpu") == torch.float32


@pytest.mark.parametrize(("needed", "longest"), [(3, 5), (7, 8)])
def test_another_task_is_given_the_length_that_it_needs(
    run: Path, monkeypatch: pytest.MonkeyPatch, needed: int, longest: int
) -> None:
    monkeypatch.setattr(Letters, "max_completion_length", needed)  # and one for the end; the run itself has 5
    assert prepare_evaluation(asked(str(run))).sampling.max_tokens == longest
    assert prepare_evaluation(asked(str(run), max_tokens=2)).sampling.max_tokens == 2


def test_checkpoints_by_name(run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    lines = [{"step": step, "success": success} for step, success in enumerate((0.9, None, 0.5, 0.4))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [find_subject(str(run), which).step for which in (None, "latest", "best", "1")] == [3, 3, 2, 1]
    one, three = find_subject(str(run), "1"), find_subject(str(run), "3")
    assert one.identity != three.identity
    assert Path(three.model).name == "checkpoint-6"
    with pytest.raises(RunError, match=r"keeps no whole checkpoint of step 7. It has whole checkpoints of steps 1, 2, 3"):
        find_subject(str(run), "7")
    with pytest.raises(RunError, match="latest, best or the number of a step"):
        find_subject(str(run), "newest")
    (run / "checkpoints" / "checkpoint-6" / "model.safetensors").write_bytes(b"torn")
    found = find_subject(str(run), None)
    assert found.step == 2
    (complaint,) = found.complaints
    assert complaint.startswith("checkpoint-6 is damaged (model.safetensors has 4 bytes instead of ")


def test_what_cannot_be_evaluated_is_refused(run: Path, model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(RunError, match=r"has no whole checkpoint. It ended before the first"):
        find_subject(str(empty), None)
    with pytest.raises(RunError, match=r"no checkpoint of .* is of a step where success was measured"):
        find_subject(str(empty), "best")
    (tmp_path / "nothing").mkdir()
    for name, message in (
        (str(tmp_path / "no-such"), "there is no run or model folder"),
        ("runs/20261115-nothing", "there is no run or model folder"),
        (str(tmp_path / "nothing"), "neither a run nor a model"),
    ):
        with pytest.raises(RunError, match=message):
            find_subject(name, None)
    (tmp_path / "nothing" / "checkpoint-16").mkdir()
    with pytest.raises(RunError, match=r"It holds a trainer's checkpoints: give one of them, such as .*checkpoint-16"):
        find_subject(str(tmp_path / "nothing"), None)
    with pytest.raises(RunError, match="--checkpoint chooses among those of a run"):
        find_subject(model, "best")
    with pytest.raises(RunError, match="has no task of its own"):
        prepare_evaluation(EvalSettings(model=model))
    with pytest.raises(RunError, match="no held-out problems"):
        prepare_evaluation(asked(model, task_config={"size": 0}))
    with pytest.raises(RunError, match="there is no task 'leters'"):
        prepare_evaluation(asked(model, task="leters"))
    with pytest.raises(RunError, match="more than the 32 positions of the model"):
        done(asked(model, instruction="x" * 40 + "{problem}"), tmp_path / "long")
    assert not (tmp_path / "long").exists(), "nothing is written before everything is checked"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "`samples` is a whole number ≥ 1; got 0"),
        ({"problems": 0}, "`problems` is a whole number ≥ 1, or None; got 0"),
        ({"temperature": 0.0}, "`temperature` must be > 0"),
        ({"top_p": 0.0}, r"`top_p` must lie in \(0, 1\]"),
        ({"instruction": "Solve it."}, "must contain {problem}"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        EvalSettings(model="tiny", **changes)


def test_all_problems_of_a_data_set_and_512_of_any_other(model: str) -> None:
    assert default_problems(Letters()) == 5
    assert default_problems(Digits()) == 512
    assert len(prepare_evaluation(asked(model, problems=2)).held_out) == 2
    assert len(prepare_evaluation(asked(model, problems=50)).held_out) == 5


def test_a_verifier_that_fails_ends_it_with_a_sentence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "verify", lambda self, prompt, completion: 1.5)
    with pytest.raises(RewardError, match=r"letters.verify gave 1.5 .* needs rewards in 0..1"):
        done(asked(model), tmp_path / "e")
    monkeypatch.setattr(Letters, "verify", lambda self, prompt, completion: 1 / 0)
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        done(asked(model), tmp_path / "f")


def test_temperature_and_top_p_reach_the_model(model: str) -> None:
    """Near temperature 0, or with next to no probability to draw from, samples are the greedy answer."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(["a", "b", "c"])["input_ids"]
    greedy = generate(loaded, tokenizer, ids, Sampling(max_tokens=6, greedy=True))
    assert generate(loaded, tokenizer, ids, Sampling(max_tokens=6, temperature=1e-4)) == greedy
    assert generate(loaded, tokenizer, ids, Sampling(max_tokens=6, top_p=1e-6)) == greedy
    assert generate(loaded, tokenizer, ids, Sampling(max_tokens=6)) != greedy


def test_penalties_in_a_model_s_folder_are_no_part_of_its_policy(model: str) -> None:
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(["a", "b", "c"])["input_ids"]
    plain = generate(loaded, tokenizer, ids, Sampling(max_tokens=6, greedy=True))
    loaded.generation_config.repetition_penalty = 10.0
    loaded.generation_config.no_repeat_ngram_size = 1
    loaded.generation_config.min_p = 0.9
    assert generate(loaded, tokenizer, ids, Sampling(max_tokens=6, greedy=True)) == plain


def test_tokens_end_with_the_first_end() -> None:
    assert cut_at_end([5, 6, 2, 0, 0], {2, 3}) == [5, 6, 2]
    assert cut_at_end([5, 3, 2], {2, 3}) == [5, 3]
    assert cut_at_end([5, 6], {2}) == [5, 6]
    assert cut_at_end([], {2}) == []


@pytest.mark.parametrize(("of_model", "ends"), [(0, {0}), ([0, 7], {0, 7}), (None, {5})])
def test_the_models_own_ends_come_first(of_model: Any, ends: set[int]) -> None:
    model, tokenizer = build_smoke()
    model.generation_config.eos_token_id = of_model
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    assert end_tokens(model, tokenizer) == ends


class FakeEngine:
    """vLLM as far as it is used: echoes the seed and how it was asked."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **settings: Any) -> None:
        self.made.append(settings)

    def generate(self, prompts: list[dict[str, list[int]]], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        outputs = []
        for prompt, one in zip(prompts, parameters, strict=True):
            text = "A" if one.temperature == 0 else f"{one.seed % 7}{len(prompt['prompt_token_ids'])}"
            output = SimpleNamespace(text=text, token_ids=[1] * len(text), finish_reason="stop" if len(text) < 2 else "length")
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    vars(module).update(LLM=FakeEngine, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("corral.lab.jobs.llm.evaluate.choose_device", lambda asked: "cuda")
    FakeEngine.made.clear()
    return FakeEngine


def test_vllm_is_used_where_it_is(model: str, tmp_path: Path, vllm: type[FakeEngine]) -> None:
    outcome = done(asked(model), tmp_path / "e")
    assert outcome.result["settings"]["backend"] == "vllm"
    # <bos>, two characters, and room for 4 tokens.
    assert vllm.made == [{"model": model, "dtype": "bfloat16", "seed": 0, "max_model_len": 3 + 4}]
    kept = rows(outcome.path)
    assert [row["completion"] for row in kept if row["greedy"]] == ["A"] * 5
    assert [row["completion"] for row in kept if not row["greedy"]] == [
        f"{draw_seed(0, problem, sample) % 7}3" for problem in range(5) for sample in range(3)
    ]
    assert {(row["tokens"], row["ended"]) for row in kept} == {(1, True), (2, False)}
    assert outcome.result["estimates"]["greedy"]["value"] == 1.0
    larger = done(asked(model, batch_size=100), tmp_path / "f")
    assert rows(larger.path) == kept, "every prompt has a seed of its own"


def test_who_writes_is_chosen_with_reasons(
    model: str, vllm: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, tiny = find_subject(model, None), find_subject("tiny", None)
    assert choose_backend("auto", subject, "cuda") == "vllm"
    assert choose_backend("auto", subject, "cpu") == choose_backend("auto", tiny, "cuda") == "transformers"
    assert choose_backend("transformers", subject, "cuda") == "transformers"
    assert choose_backend("vllm", subject, "cpu") == "vllm", "it has a build for processors, which is used if asked for"
    with pytest.raises(RunError, match="tiny is built into corral"):
        choose_backend("vllm", tiny, "cuda")
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr("corral.lab.jobs.llm.sampler.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"vLLM is not installed. Install it: pip install vllm"):
        choose_backend("vllm", subject, "cuda")
    assert choose_backend("auto", subject, "cuda") == "transformers"


def test_a_run_with_an_adapter_is_evaluated_with_it(
    model: str, tmp_path: Path, vllm: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small(model, steps=1, lora={"r": 2}), out=tmp_path / "run", quiet=True)
    subject = find_subject(str(tmp_path / "run"), None)
    assert list(subject.identity) == ["adapter_model.safetensors"]
    with pytest.raises(RunError, match="this checkpoint is an adapter"):
        choose_backend("vllm", subject, "cuda")
    monkeypatch.setattr("corral.lab.jobs.llm.evaluate.choose_device", lambda asked: "cpu")
    assert done(EvalSettings(model=str(tmp_path / "run"), problems=2), tmp_path / "e").result["problems"] == 2
    sampler = TransformersSampler(subject, "cpu")
    assert any("lora" in name for name, _ in sampler.model.named_parameters())


def test_two_evaluations_of_the_same_problems_are_compared(model: str, run: Path, tmp_path: Path) -> None:
    one, two = done(asked(model), tmp_path / "one").path, done(asked(str(run)), tmp_path / "two").path
    found = compare(one, two)
    assert list(found) == ["greedy", "pass@1", "avg"]
    values = [json.loads((path / "eval.json").read_text())["estimates"] for path in (one, two)]
    for name, key in (("greedy", "greedy"), ("pass@1", "pass@1"), ("avg", "avg@3")):
        assert found[name].value == pytest.approx(values[1][key]["value"] - values[0][key]["value"])
        assert isinstance(found[name], Estimate)
    other = done(asked(model, problems=2), tmp_path / "other").path
    with pytest.raises(RunError, match="asked different problems"):
        compare(one, other)
    with pytest.raises(RunError, match="cannot be read"):
        compare(one, tmp_path)


def test_views(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    evaluate(asked(model), out=tmp_path / "e")
    printed = capsys.readouterr().out
    assert "20/20" in printed
    assert "pass@3" in printed


def test_a_second_process_waits_its_turn(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = TransformersSampler.complete

    def intruded(self: TransformersSampler, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(TransformersSampler, "complete", complete)
        with pytest.raises(RunError, match="another process is writing"):
            done(asked(model), tmp_path / "e")
        return complete(self, *args, **kwargs)

    monkeypatch.setattr(TransformersSampler, "complete", intruded)
    done(asked(model), tmp_path / "e")


def test_a_model_without_a_padding_token_is_padded_with_its_end(model: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = None
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    assert AutoTokenizer.from_pretrained(tmp_path / "m").pad_token is None
    assert AutoConfig.from_pretrained(tmp_path / "m").vocab_size == len(tokenizer)
    assert done(asked(str(tmp_path / "m"), instruction="{problem} and more"), tmp_path / "e").result["problems"] == 5
