"""AsyncCorralTrainer: TRL's asynchronous trainer with a corral objective, on a CPU with a queue in the place of vLLM."""

import math
import queue
from itertools import pairwise
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs TRL")

from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from corral import TokenBatch, make_objective
from corral.engines.adapter import sampled_token_names
from corral.engines.async_grpo import AsyncCorralConfig, AsyncCorralTrainer
from corral.lab.models.smoke import build_smoke
from corral.trl import api
from tolerance import assert_close

VOCABULARY = 259


class Worker:
    """A rollout worker whose queue was filled beforehand, twice: the data loader reads a micro-batch ahead."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples + samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the queue is empty: the trainer wants more rows than it was given")


class NoTransfer:
    """A weight synchronisation that sends nothing."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def tree_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """TRL's attention over a trie of rows, segment by segment: FlashAttention 3, which it uses, is for GPUs."""
    outputs, places = [], kwargs["tree_kv_index"]
    starts, paths = kwargs["tree_cu_seqlens_q"].tolist(), kwargs["tree_cu_seqlens_k"].tolist()
    for (a, b), (c, d) in zip(pairwise(starts), pairwise(paths), strict=True):
        keys, values = (x[:, :, places[c:d]] for x in (key, value))
        causal = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))  # a segment ends its own path
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, a:b], keys, values, causal, scale=kwargs["scaling"], enable_gqa=True
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = build_smoke()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "tree_attention", tree_attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks CUDA


def rows(count: int, version: int = 0) -> list[RolloutSample]:
    """Rows of a shared prompt and completions of 3 to 6 tokens; sampler's log-probs near those of a uniform policy."""
    draw = np.random.default_rng(count)
    prompt, found = draw.integers(3, VOCABULARY, 5), []
    for index in range(count):
        length = 3 + index % 4
        ids = np.concatenate([prompt, draw.integers(3, VOCABULARY, length)])
        mask = np.array([0] * 5 + [1] * length)
        logps = np.where(mask, -math.log(VOCABULARY) + 0.6 * draw.normal(size=5 + length), 0.0).astype(np.float32)
        credit = float(draw.normal())
        found.append(RolloutSample([], [], ids, mask, logps, credit, version, index // 2, {"reward": credit}))
    return found


def make(folder: Path, out: Path, samples: list[RolloutSample], cls: type = AsyncCorralTrainer, **settings: Any) -> Any:
    config = AsyncCorralConfig if cls is AsyncCorralTrainer else AsyncGRPOConfig
    adapter = settings.pop("peft_config", None)
    own = {"per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 1e9, "dtype": "float32"}
    settings = own | settings
    args = config(
        str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], logging_steps=1, save_strategy="no",
        token_budget=0, disable_tqdm=True, num_generations=2, **settings,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["unused"]})
    return cls(
        str(folder), lambda **_: [], args, train_dataset=data, rollout_worker=Worker(samples), weight_transfer=NoTransfer(),
        peft_config=adapter,
    )  # fmt: skip


def logged(trainer: Any) -> dict[str, float]:
    trainer.train()
    return {key: value for line in trainer.state.log_history for key, value in line.items()}


def test_clipping_around_the_sampler_is_stock_trl(folder: Path, tmp_path: Path) -> None:
    lines, weights = [], []
    for cls, more in ((AsyncGRPOTrainer, {}), (AsyncCorralTrainer, {"objective": "ppo_clip"})):
        trainer = make(folder, tmp_path, rows(16), cls, max_steps=2, gradient_accumulation_steps=2, **more)
        lines.append(logged(trainer))
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    for key in ("loss", "grad_norm", "ratio", "kl", "entropy"):
        assert lines[1][key] == pytest.approx(lines[0][key], rel=1e-5), key
    assert_close(weights[1], weights[0], dtype=torch.float32)
    clipped = lines[0]["clip_ratio/region_mean"]
    assert clipped > 0.02, "nothing was clipped, so nothing was compared"
    assert lines[1]["tr/active_frac"] == pytest.approx(clipped, abs=1e-6)
    assert not any(key.startswith("clip_ratio") for key in lines[1]), "TRL's clip is not applied"


def reference(folder: Path, samples: list[RolloutSample], objective: str, settings: dict[str, Any], old: bool) -> Any:
    """Σ loss / tokens and its gradient: each row through the model by itself, then the objective on one padded batch."""
    model = AsyncCorralTrainerModel(folder)
    new = [model.log_probs(sample) for sample in samples]
    rollout = [torch.tensor(sample.old_log_probs[sample.completion_mask == 1]) for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    logp, sampler = pad(new, batch_first=True), pad(rollout, batch_first=True)
    mask = pad([torch.ones(len(x)) for x in new], batch_first=True).bool()
    credit = torch.tensor([sample.advantage for sample in samples])
    batch = TokenBatch(logp, logp.detach() if old else sampler, credit, mask, logp_rollout=sampler)
    torch.manual_seed(0)
    loss = make_objective(objective, **settings)(batch).loss.sum() / mask.sum()
    loss.backward()
    return float(loss.detach()), math.sqrt(sum(float(p.grad.square().sum()) for p in model.model.parameters()))


class AsyncCorralTrainerModel:
    """The saved model, read one row at a time with transformers' own attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def log_probs(self, sample: RolloutSample) -> torch.Tensor:
        ids = torch.tensor(sample.input_ids)
        logp = self.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        chosen = logp[:-1].gather(-1, ids[1:, None])[:, 0]
        return chosen[torch.tensor(sample.completion_mask[1:]) == 1]


DRAWS = {"clip_cov", "kl_cov"}
"""Objectives that choose tokens at random, so that two calls differ."""


@pytest.mark.parametrize("objective", sorted({*sampled_token_names(), "decoupled_ppo"} - DRAWS))
def test_every_objective_of_sampled_tokens_sees_whole_rows(objective: str, folder: Path, tmp_path: Path) -> None:
    # Rows share a prompt, and TRL packs them into one trie: sequence-level objectives need them apart again. cppo's
    # weight falls along the row, gspo's ratio is the row's.
    samples = rows(6)
    expected, norm = reference(folder, samples, objective, {}, old=objective == "decoupled_ppo")
    line = logged(make(folder, tmp_path, samples, per_device_train_batch_size=6, objective=objective))
    assert line["loss"] == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert line["grad_norm"] == pytest.approx(norm, rel=2e-3, abs=1e-6)


def test_a_correction_weighs_the_present_policy_against_the_sampler(folder: Path, tmp_path: Path) -> None:
    # By hand: the anchor is the present policy, so every ratio is 1; min(π/π_rollout, 1.1) weighs −Â.
    samples = rows(4)
    model = AsyncCorralTrainerModel(folder)
    total, moved, count = 0.0, 0.0, 0
    for sample in samples:
        new, sampler = model.log_probs(sample).detach(), torch.tensor(sample.old_log_probs[sample.completion_mask == 1])
        total += float(((new - sampler).exp().clamp(max=1.1) * -sample.advantage).sum())
        moved += float((new.exp() - sampler.exp()).abs().sum())
        count += len(new)
    settings = {"objective": "ppo_clip", "correction": "tis", "correction_config": {"cap": 1.1}}
    line = logged(make(folder, tmp_path, samples, **settings))
    assert line["loss"] == pytest.approx(total / count, rel=1e-4)
    assert line["tr/active_frac"] == 0
    assert line["tr/mismatch"] == pytest.approx(moved / count, rel=1e-3)  # the mean TV of "this token or another"


def test_staleness_is_logged_and_old_rows_are_dropped(folder: Path, tmp_path: Path) -> None:
    # The model has version 1 after TRL's first synchronisation: rows of version 0 are one update old, those of −9 too old.
    trainer = make(folder, tmp_path, rows(4, version=-9) + rows(4), objective="dppo", max_staleness=4)
    line = logged(trainer)
    assert line["tr/staleness"] == line["sample/staleness_mean"] == 1
    assert line["sample/dropped_stale_total"] >= 4  # the row read ahead is counted as well


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"peft_config": LoraConfig(r=2, target_modules="all-linear")}])
def test_bfloat16_and_an_adapter_give_the_loss_of_float32(settings: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    # A new adapter changes nothing, and bfloat16 keeps two to three digits of a log-prob.
    samples = rows(4)
    expected, _ = reference(folder, samples, "dppo", {"bound": 0.001}, old=False)
    trainer = make(folder, tmp_path, samples, objective="dppo", objective_config={"bound": 0.001}, **settings)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    assert logged(trainer)["loss"] == pytest.approx(expected, rel=2e-2)
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"objective": "troll"}, "whole distributions on a support"),
        ({"objective": "distill"}, "a teacher or a reference"),
        ({"objective": "dpo"}, "no objective"),
        ({"objective": "dppo", "objective_config": {"bund": 1}}, "bund"),
        ({"top_p": 0.9}, "`top_p` changes the probabilities"),
        ({"top_k": 5}, "`top_k` changes the probabilities"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty` changes the probabilities"),
        ({"correction": "tiss"}, "tis"),
        ({"correction_config": {"cap": 2.0}}, "no `correction` to set"),
        ({"objective": "decoupled_ppo", "correction": "tis"}, "would do it twice"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        AsyncCorralConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_a_stock_configuration_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users' arguments are not type-checked
    with pytest.raises(ValueError, match="must be an AsyncCorralConfig; got AsyncGRPOConfig"):
        AsyncCorralTrainer(str(folder), None, AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_a_changed_trainer_of_trls_is_named() -> None:
    place = "trl.experimental.async_grpo.AsyncGRPOTrainer.compute_loss"
    assert api.breaches({place: api.Clause("self model inputs *", "no_such_name")}) == [f"{place} does without no_such_name"]
