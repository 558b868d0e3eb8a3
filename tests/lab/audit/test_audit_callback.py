"""The audit of a trainer: training is the same bit for bit, and what is written is what the whole softmax says."""

import inspect
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_models import (
    RIGHT_REDUCTIONS,
    FakeVLLM,
    even_words,
    make_trainer,
    prompts,
    rollouts,
    settings,
    tiny_model,
    tiny_tokenizer,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from corral.deployed.state import preserve_state
from corral.lab.audit.callback import _send_alert, rules_of
from corral.lab.audit.folder import read_audit
from corral.lab.audit.scoring import choose, logp_at
from corral.lab.audit.tally import audit_table
from corral.lab.audit.tokens import kinds
from corral.lab.audit.words import sentences
from corral.llm import audit
from corral.validate import RunError
from device import drawing_on_the_cpu
from tolerance import assert_close
from two_processes import run_two


def stock(tmp: Path, **given: Any) -> GRPOTrainer:
    model, kwargs = given.pop("model", None), given.pop("trainer_kwargs", {})
    trainer = GRPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=even_words,
        args=GRPOConfig(**settings(tmp, **given)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        **kwargs,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(trainer: GRPOTrainer, resume: str | None = None) -> dict[str, Tensor]:
    """Weights after training, and the random state that it leaves."""
    set_seed(7)  # generation draws from the global state
    with drawing_on_the_cpu():
        trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {**weights, "random state": torch.get_rng_state()}


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)}


class TestTrainingIsTheSame:
    @pytest.mark.supports("run: audit of a stock GRPOTrainer", door="TRL")
    @pytest.mark.parametrize(
        "given",
        [
            {"max_steps": 6},
            {"max_steps": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
            {"max_steps": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            {"max_steps": 4, "trainer_kwargs": LORA, "disable_dropout": False},
            {"max_steps": 4, "gradient_checkpointing": True},
            {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "trainer_kwargs": {"eval_dataset": prompts(4)}},
        ],
        ids=["mini-batches", "accumulation", "two batches per update", "lora with dropout", "checkpointing", "evaluation"],
    )
    def test_bit_for_bit(self, tmp_path: Path, given: dict[str, Any]) -> None:
        without = trained(stock(tmp_path, **given))
        trainer = stock(tmp_path, **given)
        callback = audit(trainer, tmp_path / "audit")
        audited = trained(trainer)
        assert callback.failed is None
        assert without.keys() == audited.keys()
        for name, weight in without.items():
            assert torch.equal(weight, audited[name]), name
        _, table = read_audit(tmp_path / "audit")
        assert len(set(table["update"].tolist())) >= 2 or given["max_steps"] == 2
        assert max(table["kl"].tolist()) > 1e-4, "the policy must have moved, or nothing was compared"

    def test_a_corral_trainer_too(self, tmp_path: Path) -> None:
        without = trained(make_trainer(tmp_path, "troll", max_steps=4))
        trainer = make_trainer(tmp_path, "troll", max_steps=4)
        callback = audit(trainer, tmp_path / "audit")
        audited = trained(trainer)
        assert callback.failed is None
        assert all(torch.equal(weight, audited[name]) for name, weight in without.items())
        info = json.loads((tmp_path / "audit/audit.json").read_text())
        assert (info["loss"], info["model"]) == ("troll", "LlamaForCausalLM")

    def test_modes_and_random_state_are_put_back_even_after_an_error(self) -> None:
        model = tiny_model().train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()], torch.get_rng_state()

        def fail() -> None:
            with preserve_state(model):
                assert not any(module.training for module in model.modules())
                assert not torch.is_grad_enabled()
                torch.rand(3)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert [module.training for module in model.modules()] == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])


class Snapshots(TrainerCallback):
    """The model before and after every update, and what TRL sampled: everything a brute-force audit needs."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rollouts: list[tuple[int, dict[str, Any]]] = []
        generate = trainer._generate_and_score_completions

        def watched(inputs: Any) -> Any:
            output = generate(inputs)
            self.rollouts.append((len(self.weights) - 1, {key: value.clone().cpu() for key, value in output.items()}))
            return output

        trainer._generate_and_score_completions = watched

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.weights.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.weights.append({name: value.clone() for name, value in model.state_dict().items()})


def dense(weights: dict[str, Tensor], output: dict[str, Any], temperature: float) -> Tensor:
    """log π [B T V] in float64 of the model with these weights, padded and batched, unlike the audit's own pass."""
    model = tiny_model().double().eval()
    model.load_state_dict(weights)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits
    return (logits[:, :-1][:, -output["completion_ids"].shape[1] :] / temperature).log_softmax(-1)


def test_numbers_are_those_of_the_whole_softmax(tmp_path: Path) -> None:
    """Two batches of two updates each. Old: before the batch; new: after its second update. Formulas are written out here."""
    trainer = stock(tmp_path, max_steps=4, learning_rate=3e-2)
    seen = Snapshots(trainer)
    audit(trainer, tmp_path / "audit", sequences=8, tokens=10_000)
    trainer.add_callback(seen)
    trained(trainer)
    _, columns = read_audit(tmp_path / "audit")
    assert set(columns["update"]) == {2, 4}
    checked = 0
    for before, output in seen.rollouts:
        old, new = (dense(seen.weights[at], output, trainer.temperature) for at in (before, before + 2))
        tokens, mask = output["completion_ids"], output["completion_mask"].bool()
        p, q = old.exp(), new.exp()
        sampled_old, sampled_new = (x.gather(-1, tokens[..., None])[..., 0] for x in (old, new))
        ratio = (sampled_new - sampled_old).exp()
        advantages = output["advantages"][:, None].expand_as(ratio)
        expected = {
            "logp_old": sampled_old,
            "logp_new": sampled_new,
            "entropy": -(p * old).sum(-1),
            "kl": (q * (new - old)).sum(-1),
            "tv": (p - q).abs().sum(-1) / 2,
            "tv_binary": (sampled_old.exp() - sampled_new.exp()).abs(),
            "clipped": ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0)),
            "advantage": advantages,
        }
        here = columns["update"] == before + 2
        # Sequences are drawn in an order of their own: a completion is found by its tokens.
        for sequence in np.unique(columns["sequence"][here]):
            rows = here & (columns["sequence"] == sequence)
            ids = columns["token"][rows].tolist()
            (match, *_) = [row for row in range(len(tokens)) if tokens[row][mask[row]].tolist() == ids and abs(float(
                sampled_old[row][0]) - columns["logp_old"][rows].iloc[0]) < 1e-4]  # fmt: skip
            for name, values in expected.items():
                got = torch.tensor(columns[name][rows].tolist(), dtype=torch.float64)
                torch.testing.assert_close(
                    got, values[match][mask[match]].double(), atol=2e-5, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
                )
            checked += len(ids)
    assert checked == len(columns)
    assert 0 < columns["clipped"].mean() < 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "qwen3_moe"])
def test_logp_at_some_positions_is_the_models_own(family: str) -> None:
    model = tiny_model(family).eval()
    ids = torch.tensor([3, 9, 14, 5, 22, 8])
    expected = (model(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)
    positions = torch.tensor([1, 4, 5])
    with torch.no_grad():
        found = logp_at(model, ids, positions, temperature=0.7)
    assert_close(found, expected[positions - 1])


class TestWhatIsAudited:
    def test_every_nth_update(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path, max_steps=8)
        audit(trainer, tmp_path / "audit", every=3)
        trained(trainer)
        # Batches begin after updates 0, 2, 4, 6; due are 0, then the first at or after 3, then at or after 7: none.
        assert set(read_audit(tmp_path / "audit")[1]["update"].tolist()) == {2, 6}

    def test_few_tokens_of_few_completions(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path)
        audit(trainer, tmp_path / "audit", sequences=3, tokens=5)
        trained(trainer)
        _, table = read_audit(tmp_path / "audit")
        assert len(table) == 5
        assert len(set(table["sequence"].tolist())) <= 3

    def test_trackio_is_alerted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sent: list[dict[str, str]] = []
        fake = SimpleNamespace(alert=lambda **given: sent.append(given), AlertLevel=SimpleNamespace(WARN="warn"))
        monkeypatch.setitem(sys.modules, "trackio", fake)
        trainer = stock(tmp_path, learning_rate=0.05)
        with pytest.raises(ValueError, match="of a run with report_to='trackio'"):
            audit(trainer, tmp_path / "audit", alert_above=1.0)
        trainer.args.report_to = ["trackio"]  # a trainer that begins with it asks for the package itself
        with pytest.raises(ValueError, match="from 0 to 100"):
            audit(trainer, tmp_path / "audit", alert_above=101.0)
        audit(trainer, tmp_path / "audit", alert_above=0.0, kl_bound=100.0)  # every block is inside it
        trainer.args.report_to = []
        trained(trainer)
        info, table = read_audit(tmp_path / "audit")
        found = kinds(audit_table(info, table).rows, "kl", info["rules"]["kl_bound"])
        updates = {int(update) for update in table["update"][np.isin(found, ("false", "missed"))]}
        assert updates, "a learning rate that clips"
        assert len(sent) == len(updates)
        assert sent[0]["title"].startswith("clipping would be wrong about ")
        assert f"corral audit {tmp_path / 'audit'}" in sent[0]["text"]
        monkeypatch.setitem(sys.modules, "trackio", None)
        with caplog.at_level(logging.WARNING):
            _send_alert("x", "y")
        assert "trackio could not be alerted that x" in caplog.text

    def test_what_the_sampler_reported_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
        trainer = stock(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False)
        callback = audit(trainer, tmp_path / "audit", tokens=10_000)
        trained(trainer)
        assert callback.failed is None
        columns = read_audit(tmp_path / "audit")[1]
        reported = sorted(value for row in trainer.vllm_generation.sampled for value in row)
        assert sorted(columns["logp_rollout"].tolist()) == pytest.approx(reported, abs=1e-6)
        gap = np.abs(np.exp(columns["logp_rollout"]) - np.exp(columns["logp_old"]))
        assert gap.max() > 0.02, "the sampler must be off"
        # DPPO on the sampled token is anchored on the sampler.
        expected = np.abs(np.exp(columns["logp_rollout"]) - np.exp(columns["logp_new"]))
        np.testing.assert_allclose(columns["tv_binary"], expected, atol=1e-6)

    def test_without_reported_log_probs_they_are_null(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path)
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        assert read_audit(tmp_path / "audit")[1]["logp_rollout"].isna().all()

    def test_only_tokens_that_are_trained_on(self, tmp_path: Path) -> None:
        """Not a tool's output, not what is masked out; credit may be one per token."""
        trainer = stock(tmp_path)
        callback = audit(trainer, tmp_path / "audit", sequences=8, tokens=10_000)
        inputs = {key: value.clone() for key, value in rollouts(trainer)[0].items()}
        inputs["completion_mask"][1] = 0
        inputs["tool_mask"] = inputs["completion_mask"].clone()
        inputs["tool_mask"][:, 1] = 0
        numbered = torch.arange(inputs["completion_ids"].numel()).reshape(inputs["completion_ids"].shape)
        inputs["advantages"] = numbered.to(inputs["advantages"])
        kept = callback._choose(inputs)
        live = inputs["tool_mask"].bool() & inputs["completion_mask"].bool()
        assert sum(len(one.positions) for one in kept) == int(live.sum())
        for one in kept:
            places = one.positions - one.start
            assert 1 not in places.tolist()
            row = int(one.advantages[0]) // live.shape[1]
            assert row != 1
            assert torch.equal(one.advantages, inputs["advantages"][row][live[row]].cpu())
            assert torch.equal(one.ids[one.positions], inputs["completion_ids"][row][live[row]].cpu())
        assert callback._choose({**inputs, "completion_mask": torch.zeros_like(inputs["completion_mask"])}) == []
        with pytest.raises(RunError, match="images"):
            callback._choose({**inputs, "pixel_values": torch.zeros(1)})

    def test_choose_is_fair_and_bounded(self) -> None:
        lengths, counts = torch.tensor([2, 0, 6, 4]), torch.zeros(4, 6)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2000):
            chosen = choose(lengths, 2, 3, generator, whole=False)
            assert sum(len(ranks) for _, ranks in chosen) <= 3
            for row, ranks in chosen:
                assert ranks.tolist() == sorted(set(ranks.tolist()))
                counts[row, ranks] += 1
        assert counts[1].sum() == 0
        assert all(counts[row, length:].sum() == 0 for row, length in enumerate(lengths.tolist()))
        for row, length in enumerate(lengths.tolist()):  # within a completion every token is equally likely
            assert (counts[row, :length] - counts[row, :length].mean()).abs().max() < 120 if length else True

    def test_whole_completions_where_clipping_looks_at_them_whole(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            chosen = choose(torch.tensor([5, 3, 9, 2]), 4, 8, generator, whole=True)
            assert 1 <= sum(len(ranks) for _, ranks in chosen) <= 8
            assert all(len(ranks) == [5, 3, 9, 2][row] for row, ranks in chosen)
        with pytest.raises(RunError, match="shortest here has 9 tokens"):
            choose(torch.tensor([9, 0, 12]), 4, 8, generator, whole=True)


def trl_means(trainer: GRPOTrainer, name: str = "clip_ratio/region_mean") -> float:
    """The mean of what TRL logged, a line for each update."""
    return float(np.mean([row[name] for row in trainer.state.log_history if name in row]))


class TestWhatClippingDid:
    """The clip in the updates that were made, on all of their tokens, beside TRL's own number and one more update."""

    @pytest.mark.parametrize("loss_type", RIGHT_REDUCTIONS)
    @pytest.mark.parametrize(
        "given", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}], ids=["mini-batches", "passes, accumulation"]
    )
    def test_it_is_trls_mean_clip_ratio(self, tmp_path: Path, loss_type: str, given: dict[str, Any]) -> None:
        trainer = stock(
            tmp_path, loss_type=loss_type, steps_per_generation=4, max_steps=8, learning_rate=0.03, **given
        )  # fmt: skip
        callback = audit(trainer, tmp_path / "audit", every=4, sequences=2, tokens=5)
        trained(trainer)
        assert callback.failed is None
        info, _ = read_audit(tmp_path / "audit")
        made = info["updates_made"]
        assert (made["updates"], made["micro_batches"]) == (8, 8 * trainer.args.gradient_accumulation_steps)
        assert made["blocked"] == pytest.approx(trl_means(trainer), abs=1e-6)
        assert made["trl"] == pytest.approx(trl_means(trainer), abs=1e-6)
        assert made["blocked"] > 0.02, "a learning rate that clips"
        assert not info["one_update_per_batch"]

    def test_with_one_update_per_batch_no_clip_ever_acts(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path, steps_per_generation=1, max_steps=4, learning_rate=0.05, loss_type="dapo")
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        info, table = read_audit(tmp_path / "audit")
        assert (info["one_update_per_batch"], info["updates_made"]["blocked"], trl_means(trainer)) == (True, 0.0, 0.0)
        summary = audit_table(info, table)
        said = sentences(summary)
        assert sum("no clip ever acts in this run" in text for text in said) == 1
        assert summary.verdicts["clipped"]["kl"].share > 0, "one more update would have been clipped"
        assert any(text.startswith("On one more update on these completions, clipping") for text in said)

    def test_of_a_corral_trainer_it_is_what_the_trainer_logs(self, tmp_path: Path) -> None:
        without = trained(make_trainer(tmp_path, "ppo_clip", max_steps=4, learning_rate=0.03))
        trainer = make_trainer(tmp_path, "ppo_clip", max_steps=4, learning_rate=0.03)
        seen: list[int] = []
        trainer.token_observer = lambda inputs, batch, objective: seen.append(batch.mask.sum().item())
        audit(trainer, tmp_path / "audit")
        audited = trained(trainer)
        assert all(torch.equal(weight, audited[name]) for name, weight in without.items())
        made = read_audit(tmp_path / "audit")[0]["updates_made"]
        assert made["blocked"] == pytest.approx(trl_means(trainer, "tr/active_frac"), abs=1e-6)
        assert made["blocked"] > 0
        assert made["trl"] is None
        assert len(seen) == 4, "whoever observed before still does"

    def test_only_training_is_counted(self, tmp_path: Path) -> None:
        """Not evaluation in between; a resumed run counts what was saved, and what it repeats once."""
        given: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps"}
        given |= {"eval_steps": 1, "trainer_kwargs": {"eval_dataset": prompts(4)}}
        for resumed in (None, str(tmp_path / "checkpoint-4")):
            trainer = stock(tmp_path, **given)
            audit(trainer, tmp_path / "audit", every=4)
            trained(trainer, resume=resumed)
            info, table = read_audit(tmp_path / "audit")
            assert set(table["update"].tolist()) == {2, 6}
            made = info["updates_made"]
            assert (made["updates"], made["micro_batches"]) == (8, 8), "those between audited batches, and after the last"

    def test_a_loss_that_does_not_clip_says_so(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path, loss_type="cispo", epsilon_high=5.0)
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        info, table = read_audit(tmp_path / "audit")
        assert info["updates_made"] is None
        assert "The run's own loss, cispo, does not clip." in sentences(audit_table(info, table))


class TestRules:
    @pytest.mark.parametrize(
        ("given", "name", "clip"),
        [
            ({"epsilon": 0.1, "epsilon_high": 0.28}, "ppo_clip", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}),
            ({"delta": 4.0}, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 4.0}),
            (
                {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
                "gspo",
                {"clip_low": 3e-4, "clip_high": 4e-4},
            ),
        ],
    )
    def test_the_runs_own_clipping(self, tmp_path: Path, given: dict[str, Any], name: str, clip: dict[str, Any]) -> None:
        rules = rules_of(stock(tmp_path, **given), 0.05, 0.2)
        assert rules.own
        assert rules.as_dict()["clip"] == {"name": name, **clip}

    def test_a_loss_that_does_not_clip(self, tmp_path: Path) -> None:
        rules = rules_of(stock(tmp_path, loss_type="cispo", epsilon_high=5.0), 0.05, 0.2)
        assert not rules.own
        assert rules.clip.name == "ppo_clip"

    def test_corrals_own(self, tmp_path: Path) -> None:
        assert rules_of(make_trainer(tmp_path, "clip_higher"), 0.05, 0.2).clip.name == "clip_higher"
        assert not rules_of(make_trainer(tmp_path, "dppo"), 0.05, 0.2).own

    def test_a_sequence_level_run(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path, importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
        callback = audit(trainer, tmp_path / "audit")
        trained(trainer)
        assert callback.failed is None
        columns = read_audit(tmp_path / "audit")[1]
        for sequence in np.unique(columns["sequence"]):  # all tokens of a completion share one verdict
            assert len(set(columns["clipped"][columns["sequence"] == sequence])) == 1


class TestTroubles:
    def test_a_failing_audit_does_not_stop_training(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without = trained(stock(tmp_path, max_steps=4))
        trainer = stock(tmp_path, max_steps=4)
        callback = audit(trainer, tmp_path / "audit")
        monkeypatch.setattr(callback.folder, "add", lambda *_: (_ for _ in ()).throw(RunError("the disk is full")))
        with caplog.at_level(logging.WARNING):
            audited = trained(trainer)
        assert all(torch.equal(weight, audited[name]) for name, weight in without.items())
        assert callback.failed == "RunError: the disk is full"
        assert "training goes on" in caplog.text

    def test_a_folder_that_holds_an_audit_is_refused_at_once(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path)
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        trainer = stock(tmp_path)
        with pytest.raises(RunError, match="holds an audit already"):
            audit(trainer, tmp_path / "audit")
        with pytest.raises(RunError, match="by other rules"):
            audit(trainer, tmp_path / "audit", kl_bound=0.01, resume=True)
        with pytest.raises(RunError, match="holds no audit"):
            audit(trainer, tmp_path)

    def test_what_could_be_resumed_and_is_not_is_refused_before_anything_is_sampled(self, tmp_path: Path) -> None:
        trainer = stock(tmp_path)
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        trainer = stock(tmp_path)
        audit(trainer, tmp_path / "audit", resume=True)
        with pytest.raises(RunError, match="holds an audit already"):
            trained(trainer)
        assert trainer._step == 0

    def test_a_resumed_run_goes_on(self, tmp_path: Path) -> None:
        given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}
        trainer = stock(tmp_path, **given)
        audit(trainer, tmp_path / "audit")
        trained(trainer)
        first = read_audit(tmp_path / "audit")[1]
        assert set(first["update"].tolist()) == {2, 4, 6}
        trainer = stock(tmp_path, **given)
        audit(trainer, tmp_path / "audit")
        trained(trainer, resume=str(tmp_path / "checkpoint-4"))
        again = read_audit(tmp_path / "audit")[1]
        assert set(again["update"].tolist()) == {2, 4, 6}
        assert again[again["update"] <= 4].equals(first[first["update"] <= 4])

    @pytest.mark.parametrize("given", [{"every": 0}, {"sequences": 0}, {"tokens": 2.5}, {"kl_bound": 0.0}, {"tv_bound": -1.0}])
    @pytest.mark.usefixtures("unchecked_shapes")
    def test_bad_settings(self, tmp_path: Path, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(given))):
            audit(stock(tmp_path), tmp_path / "audit", **given)

    @pytest.mark.usefixtures("unchecked_shapes")
    def test_not_a_trainer(self) -> None:
        with pytest.raises(ValueError, match="takes a GRPOTrainer; got str"):
            audit("trainer")

    @pytest.mark.refuses("run: audit of a model sharded by FSDP 1 or ZeRO-3", door="TRL")
    def test_sharded_in_ways_that_were_never_tested(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = stock(tmp_path)
        trainer.is_fsdp_enabled = True
        monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False)
        with pytest.raises(ValueError, match="sharded by FSDP 1 is not audited"):
            audit(trainer, tmp_path / "audit")
        trainer.is_fsdp_enabled = False
        monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", SimpleNamespace(zero_stage=3))
        with pytest.raises(ValueError, match="sharded by ZeRO-3 is not audited"):
            audit(trainer, tmp_path / "audit")


def test_what_is_read_of_trl_is_there(tmp_path: Path) -> None:
    """The private names that the audit leans on, in whichever release of TRL is installed."""
    trainer = stock(tmp_path)
    assert list(inspect.signature(trainer._generate_and_score_completions).parameters) == ["inputs"]
    for name in (
        "_step",
        "epsilon_low",
        "epsilon_high",
        "num_iterations",
        "temperature",
        "loss_type",
        "importance_sampling_level",
    ):
        assert hasattr(trainer, name), name
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0" in source
    assert "self.args.steps_per_generation * self.num_iterations" in source


def shard(trainer: GRPOTrainer) -> GRPOTrainer:
    """FSDP2 over two processes on the CPU, where accelerate itself has none: modules and settings as it leaves them."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in trainer.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    trainer.is_fsdp_enabled = trainer.model._is_fsdp_managed_module = True
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2)
    trainer.accelerator.prepare_model = lambda model, **_: model
    return trainer


def half_of_a_run(rank: int, folder: Path) -> None:
    """One of two processes: the same run without and with an audit, whole and sharded; then one whose disk is full."""
    given = {"per_device_train_batch_size": 2, "max_steps": 4}
    for kind, wrap in {"whole": lambda trainer: trainer, "sharded": shard}.items():
        without = trained(wrap(stock(folder, **given)))
        trainer = wrap(stock(folder, **given))
        callback = audit(trainer, folder / kind)
        audited = trained(trainer)
        assert callback.failed is None
        assert callback.pending == []
        for name, weight in without.items():
            assert torch.equal(*(x.full_tensor() if isinstance(x, DTensor) else x for x in (weight, audited[name]))), name
    trainer = shard(stock(folder, **given))
    callback = audit(trainer, folder / "full", every=1)
    callback.folder.add = lambda *_: (_ for _ in ()).throw(RunError("the disk is full"))  # only the main process writes
    trained(trainer)
    assert callback.failed == ("RunError: the disk is full" if rank == 0 else "the main process has stopped it")
    (folder / f"rank {rank}").touch()


@pytest.mark.supports("run: audit of a model sharded by FSDP2", door="TRL")
def test_of_two_processes_the_main_one_audits(tmp_path: Path) -> None:
    run_two(half_of_a_run, tmp_path)
    assert all((tmp_path / f"rank {rank}").is_file() for rank in range(2))
    _, whole = read_audit(tmp_path / "whole")
    assert set(whole["update"].tolist()) == {2, 4}
    assert len(set(whole["sequence"].tolist())) == 4  # its own half of eight completions
    sharded = read_audit(tmp_path / "sharded")[1]
    for name, column in whole.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(sharded[name], column, atol=1e-4, err_msg=name)
        else:
            assert sharded[name].tolist() == column.tolist(), name
