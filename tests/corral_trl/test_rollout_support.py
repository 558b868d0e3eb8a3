"""The sampler's own top-K as the anchor: what vLLM reports → a support with the sampled token first and the mass left over."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import (
    FakeVLLM,
    Spy,
    fixed_rollout,
    loss_and_gradient,
    make_trainer,
    measured,
    nudge,
    rollouts,
    without_fused_loss,
)
from torch import Tensor
from torch.testing import assert_close

from corral import TokenBatch, categorical_tv, make_objective, top_k_support
from corral.llm import CorralTrainer
from corral.tensors import SparseDist
from corral.trl.api import FUSED
from corral.trl.old_policy import fill_unscored, sampler_support

TOP_K = {"objective_config": {"estimator": "topk", "bound": 0.15}, "anchor": "rollout"}
V = 6


def support(token: int, ids: list[int], p: list[float], *, live: bool = True, vocabulary: int = V) -> SparseDist:
    logp = torch.tensor([p], dtype=torch.float64).log()
    return sampler_support(torch.tensor([token]), torch.tensor([ids]), logp, torch.tensor([live]), vocabulary)


class TestSupport:
    def test_golden_the_sampled_token_is_found_by_its_id(self) -> None:
        # Ranked .5 .25 .125; token 4 was drawn. What is left: 1 − 7/8 = 1/8.
        found = support(4, [2, 4, 0], [0.5, 0.25, 0.125])
        assert found.ids.tolist() == [[4, 2, 0]]
        assert_close(found.logp.exp(), torch.tensor([[0.25, 0.5, 0.125]], dtype=torch.float64))
        assert_close(found.rest, torch.tensor([math.log(1 / 8)], dtype=torch.float64))

    def test_golden_a_sampled_token_beyond_the_top_k_and_padding(self) -> None:
        # The two likeliest and, drawn, the unlikely 5; 1 − .5 − .25 − .0625 = .1875. Equal ones stand by their ids.
        found = support(5, [3, 1, 5, -1], [0.375, 0.375, 0.0625, 0.0])
        assert found.ids.tolist() == [[5, 1, 3, -1]]
        assert found.logp[0, -1] == -torch.inf
        assert_close(found.rest.exp(), torch.tensor([0.1875], dtype=torch.float64))

    def test_nothing_is_left_where_every_token_was_reported(self) -> None:
        assert support(1, [0, 1], [0.5, 0.5], vocabulary=2).rest.tolist() == [-torch.inf]
        assert_close(support(1, [0, 1], [0.5, 0.5]).rest, torch.tensor([math.log(1e-8)], dtype=torch.float64))

    @given(seed=st.integers(0, 2**16), k=st.integers(1, 12))
    def test_it_is_the_policys_own_support(self, seed: int, k: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logp = (3 * torch.randn(5, 13, generator=generator, dtype=torch.float64)).log_softmax(-1)
        tokens = torch.randint(13, (5,), generator=generator)
        expected = top_k_support(logp, tokens, k)
        shuffle = torch.randperm(k + 1, generator=generator)  # whatever the order
        ids, reported = expected.ids[:, shuffle], expected.logp[:, shuffle]
        found = sampler_support(tokens, ids, reported, torch.ones(5, dtype=torch.bool), 13)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.logp, expected.logp)
        least = torch.where((expected.ids >= 0).all(-1) & (k == 12), 0.0, 1e-8)  # 13 tokens are all there are
        assert_close(found.rest.exp(), expected.rest.exp().clamp(min=least), atol=1e-12, rtol=1e-9)

    def test_a_token_that_could_not_be_scored_takes_the_trainers_own(self) -> None:
        found = support(4, [2, 4, 0], [0.5, math.nan, 0.125])
        assert found.ids.tolist() == [[4, -1, -1]]
        assert found.logp[0, 0].isnan()
        filled = fill_unscored(found, torch.tensor([math.log(0.25)]))
        assert_close(filled.with_rest().exp()[0], torch.tensor([0.25, 0.0, 0.0, 0.75], dtype=torch.float64))
        kept = support(4, [2, 4, 0], [0.5, 0.25, 0.125])
        assert torch.equal(fill_unscored(kept, torch.tensor([-9.0])).with_rest(), kept.with_rest())

    def test_other_tokens_than_the_sampled_one_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"other tokens than the one it drew, at 1 of 1 tokens.* is token 5"):
            support(5, [2, 4], [0.5, 0.25])
        assert support(5, [2, 4], [0.5, 0.25], live=False).ids.shape == (1, 2), "padding may hold anything"

    def test_logits_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"sum to up to 1.25. vLLM must run with --logprobs-mode processed_logprobs"):
            support(4, [2, 4], [0.75, 0.5])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM faked, reporting its eight likeliest; settings that switch it on."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
    return {"use_vllm": True, "vllm_importance_sampling_correction": False}


def drawn_with(trainer: CorralTrainer, inputs: dict[str, Any]) -> Tensor:
    """What the faked sampler drew each token with [B T V]: found again by the sampled log-probs, which TRL has shuffled."""
    sampler: Any = trainer.vllm_generation
    rows = [torch.stack(row) for row in sampler.policies]
    whole = torch.zeros(*inputs["completion_ids"].shape, rows[0].shape[-1]).log_softmax(-1)
    for b, reported in enumerate(inputs["sampling_per_token_logps"].cpu()):
        length = int(inputs["completion_mask"][b].sum())
        (i,) = (i for i, p in enumerate(sampler.sampled) if len(p) == length and abs(p[0] - float(reported[0])) < 1e-6)
        whole[b, :length] = rows[i]
    return whole.to(inputs["completion_ids"].device)


class TestTrainer:
    @pytest.mark.supports("anchor: `rollout` for an objective on a support, with vLLM's `logprobs`, faked", door="TRL")
    @pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
    def test_dppo_is_anchored_at_the_samplers_top_k(self, tmp_path: Path, vllm: dict[str, Any], accumulation: int) -> None:
        trainer = make_trainer(tmp_path, "dppo", gradient_accumulation_steps=accumulation, **TOP_K, **vllm)
        assert trainer.vllm_generation.logprobs == 8
        spy = Spy.on(trainer)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        loss = trainer.compute_loss(trainer.model, inputs)
        (batch,) = spy.batches
        mask, whole = batch.mask, drawn_with(trainer, inputs)
        expected = top_k_support(whole, inputs["completion_ids"], 8)
        assert batch.dist_old is not None
        assert torch.equal(batch.dist_old.ids[mask].long(), expected.ids[mask])
        assert_close(batch.dist_old.logp[mask], expected.logp[mask])
        assert_close(batch.dist_old.rest[mask].exp(), expected.rest[mask].exp(), atol=1e-6, rtol=1e-4)
        assert_close(batch.logp_old[mask], inputs["sampling_per_token_logps"][mask])
        # And the divergence is the one that dense policies have on that support: some tokens are outside, others not.
        new = batch.dist_new
        assert new is not None
        moved = categorical_tv(expected.with_rest(), new.with_rest())[mask]
        assert 0 < float((moved > 0.15).float().mean()) < 1
        outside = (moved > 0.15) & ((new.logp[..., 0] - expected.logp[..., 0]) * batch.advantages[:, None] > 0)[mask]
        assert torch.equal(spy.outputs[0].acted[mask], outside)
        assert loss.isfinite()

    @pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
    def test_the_fused_loss_is_the_same(self, tmp_path: Path, vllm: dict[str, Any], accumulation: int) -> None:
        trainer = make_trainer(tmp_path, "dppo", gradient_accumulation_steps=accumulation, **TOP_K, **vllm)
        inputs = rollouts(trainer)[0]
        nudge(trainer.model)
        loss, gradient = loss_and_gradient(trainer, inputs)
        assert measured(trainer)["tr/active_frac"][-1] > 0
        without_fused_loss(trainer)
        expected, slow = loss_and_gradient(trainer, inputs)
        assert_close(loss, expected, atol=1e-6, rtol=1e-5)
        for name, value in gradient.items():
            assert_close(value, slow[name], atol=1e-5, rtol=1e-4)

    def test_it_trains(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, "dppo", max_steps=2, steps_per_generation=1, num_iterations=2, **TOP_K, **vllm)
        trainer.train()
        logged = [row for row in trainer.state.log_history if "loss" in row]
        assert len(logged) == 2
        assert all(math.isfinite(row["loss"]) and row["tr/rest_mass"] > 0 for row in logged)

    @pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
    @pytest.mark.parametrize("estimator", ["binary", "topk"])
    def test_a_token_that_vllm_could_not_score_has_no_mismatch(
        self, tmp_path: Path, vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, accumulation: int, estimator: str
    ) -> None:
        if estimator == "binary" and not FUSED:
            pytest.skip("older releases of TRL cannot read a log-prob of None")
        inner = FakeVLLM.generate

        def generate(self: FakeVLLM, **kwargs: Any) -> tuple[Any, ...]:
            prompts, tokens, logprobs, ids = inner(self, **kwargs)
            return prompts, tokens, [[[None] * len(row[0]), *row[1:]] for row in logprobs], ids

        monkeypatch.setattr(FakeVLLM, "generate", generate)
        given = {**TOP_K, "objective_config": {"estimator": estimator}}
        trainer = make_trainer(tmp_path, "dppo", gradient_accumulation_steps=accumulation, **given, **vllm)
        inputs = rollouts(trainer)[0]
        loss = trainer.compute_loss(trainer.model, inputs)
        spy = Spy.on(trainer)
        assert_close(trainer.compute_loss(trainer.model, inputs), loss, atol=1e-6, rtol=1e-5)
        batch = spy.batches[0]
        assert_close(batch.logp_old[:, 0], batch.logp_new.detach()[:, 0], atol=1e-5, rtol=0)
        assert (batch.logp_old - batch.logp_new)[batch.mask].abs().max() > 0.05, "others are the sampler's"

    @pytest.mark.supports("anchor: `rollout` for an objective on a support, with a rollout function's log-probs", door="TRL")
    def test_a_rollout_function_reports_its_own(self, tmp_path: Path) -> None:
        p = [[0.5, 0.25], [0.5, 0.25], [0.5, 0.125]]  # of pairs of tokens; 3, 4, 5 were drawn
        rollout = fixed_rollout([[math.log(x) for x in row] for row in p], [[9, 3], [4, 7], [8, 5]])
        trainer = make_trainer(tmp_path, "dppo", trainer_kwargs={"rollout_func": rollout}, **TOP_K)
        spy = Spy.on(trainer)
        inputs = rollouts(trainer)[0]
        trainer.compute_loss(trainer.model, inputs)
        old = spy.batches[0].dist_old
        assert old is not None
        assert old.ids[0].tolist() == [[3, 9], [4, 7], [5, 8]]
        assert_close(old.with_rest().exp()[0].cpu(), torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]))
        assert_close(inputs["sampling_per_token_logps"][0].exp().cpu(), torch.tensor([0.25, 0.5, 0.125]))

    def test_a_rollout_function_without_ids_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "dppo", trainer_kwargs={"rollout_func": fixed_rollout([-1.0, -1.0, -1.0])}, **TOP_K)
        with pytest.raises(ValueError, match="returned no `logprobs` or no `logprob_token_ids`"):
            rollouts(trainer)

    def test_troll_may_be_anchored_there_too(self, tmp_path: Path, vllm: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, "troll", anchor="rollout", objective_config={"bound": 0.005}, **vllm)
        spy = Spy.on(trainer)
        trainer.compute_loss(trainer.model, rollouts(trainer)[0])
        batch, out = spy.batches[0], spy.outputs[0]
        assert out.acted[batch.mask].any(), "the sampler is off by more than the bound"
        dense = make_objective("troll", bound=0.005)(
            TokenBatch(batch.logp_new, batch.logp_old, batch.advantages, batch.mask, batch.dist_new, batch.dist_old)
        )
        assert_close(out.loss, dense.loss)

    @pytest.mark.parametrize(("mode", "temperature"), [("raw_logprobs", 0.9), ("raw_logits", 1.0), ("processed_logits", 1.0)])
    @pytest.mark.refuses("anchor: `rollout` with a vLLM server that reports anything but what it draws from", door="TRL")
    def test_a_server_before_the_temperature_is_refused(
        self, tmp_path: Path, vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str, temperature: float
    ) -> None:
        def client(mode: str) -> SimpleNamespace:
            return SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})

        monkeypatch.setattr(FakeVLLM, "vllm_client", client("processed_logprobs"), raising=False)
        make_trainer(tmp_path, "dppo", **TOP_K, **vllm)
        monkeypatch.setattr(FakeVLLM, "vllm_client", client("raw_logprobs"))
        make_trainer(tmp_path, "dppo", temperature=1.0, **TOP_K, **vllm)
        monkeypatch.setattr(FakeVLLM, "vllm_client", client(mode))
        with pytest.raises(ValueError, match=f"this server reports '{mode}' at temperature {temperature}"):
            make_trainer(tmp_path, "dppo", temperature=temperature, **TOP_K, **vllm)
        make_trainer(tmp_path, "dppo", temperature=temperature, **{**TOP_K, "anchor": "old"}, **vllm)
