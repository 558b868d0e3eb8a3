"""Log-probs that transformers' generation reports of itself: the numbers, where they are read, and what stays as it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import Spy, dense_logp, loss_and_gradient, make_trainer, measured, nudge, rollouts, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import GenerationMixin

from corral.support import gather_support
from corral.trl.old_policy import Behaviour, OldPolicy
from corral.trl.scoring import SupportRequest
from device import DEVICE
from tolerance import assert_close

LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
CORRECTED = {"correction": "tis", "vllm_importance_sampling_correction": False}


def gap(inputs: dict[str, Any]) -> Tensor:
    """What the sampler reported less what the trainer scored, of the unmasked tokens."""
    return (inputs["sampling_per_token_logps"] - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()]


class Coin:
    """A model of three tokens, as far as `record` reads one."""

    def _get_logits_processor(self) -> LogitsProcessorList:
        return LogitsProcessorList([lambda ids, scores: scores / 0.5])


def test_golden_log_probs_and_support() -> None:
    # Logits [0, ln 2, ln 3] at temperature ½ are weights 1 : 4 : 9. Drawn: 1, then 2; the second row ends at once.
    logits = torch.tensor([0.0, math.log(2), math.log(3)]).expand(2, 3)
    model, behaviour = Coin(), Behaviour(SupportRequest(top_k=1))
    with behaviour.record(model):
        processors = model._get_logits_processor()
        prompt = torch.zeros(2, 1, dtype=torch.long)
        first = processors(prompt, logits)
        processors(torch.cat([prompt, torch.tensor([[1], [2]])], 1), logits)
    assert_close(first, logits / 0.5)
    logps = behaviour.logps([[1, 2], [2]])
    assert [len(row) for row in logps] == [2, 1]
    assert_close(torch.tensor([*logps[0], *logps[1]]).exp(), torch.tensor([4 / 14, 9 / 14, 9 / 14]))
    output = {"completion_ids": torch.tensor([[1, 2, 0], [2, 0, 0]])}  # TRL may pad further
    behaviour.store(output)
    dist = OldPolicy.support(output)
    assert dist is not None
    assert dist.ids.tolist() == [[[1, 2], [2, -1], [-1, -1]], [[2, -1], [-1, -1], [-1, -1]]]
    assert_close(dist.logp[0, 0].exp(), torch.tensor([4 / 14, 9 / 14]))
    assert_close(dist.rest[0, :2].exp(), torch.tensor([1 / 14, 5 / 14]))
    assert "_get_logits_processor" not in vars(model)


@pytest.mark.supports("correction: any, with transformers' generation", door="TRL")
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("kwargs", [{}, LORA], ids=["whole", "LoRA"])
def test_a_scoring_pass_agrees(tmp_path: Path, family: str, kwargs: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, "troll", model=tiny_model(family), trainer_kwargs=kwargs, **CORRECTED)
    for inputs in rollouts(trainer):
        mask = inputs["completion_mask"].bool()
        assert not inputs["sampling_per_token_logps"][~mask].any(), "padding, as with any other sampler"
        assert inputs["sampling_per_token_logps"][mask].max() < 0
        assert 0 < gap(inputs).abs().max() < 3e-5
    assert family != "llama" or not all(inputs["completion_mask"].all() for inputs in rollouts(trainer)), "lengths must differ"


def test_half_precision_has_a_mismatch_and_no_other_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True, **CORRECTED)
    found = torch.cat([gap(inputs) for inputs in rollouts(trainer)])
    assert 1e-4 < found.abs().max() < 0.3
    assert found.mean().abs() < 0.05


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_truncation_is_reported_renormalised(tmp_path: Path, how: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, "troll", **CORRECTED, **how)
    (inputs, _) = rollouts(trainer)
    mask, tokens = inputs["completion_mask"].bool(), inputs["completion_ids"]
    with torch.no_grad():
        logp = dense_logp(trainer.model, inputs, 0.9)
    p = logp.exp()
    ranked = p.sort(-1, descending=True)
    if "top_k" in how:
        kept = p >= ranked.values[..., 4:5]
    elif "min_p" in how:
        kept = p >= 0.1 * ranked.values[..., :1]
    else:  # the fewest that reach it
        kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ranked.indices, ranked.values.cumsum(-1) - ranked.values < 0.7)
    expected = (logp - torch.where(kept, p, 0.0).sum(-1, keepdim=True).log()).gather(-1, tokens[..., None])[..., 0]
    assert_close(inputs["sampling_per_token_logps"][mask], expected[mask], atol=1e-4)


@pytest.mark.parametrize("objective", ["ppo_clip", "dppo", "gspo"])
def test_the_sampler_is_the_anchor_if_asked_for(tmp_path: Path, objective: str) -> None:
    trainer = make_trainer(tmp_path, objective, anchor="rollout")
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[0]
    trainer.compute_loss(trainer.model, inputs)
    (batch,) = spy.batches
    assert torch.equal(batch.logp_old, inputs["sampling_per_token_logps"])
    assert not torch.equal(batch.logp_old[batch.mask], inputs["old_per_token_logps"][batch.mask])


@pytest.mark.parametrize(
    ("objective", "config"), [("troll", {}), ("troll", {"level": "sequence"}), ("dppo", {"estimator": "topk"})]
)
def test_the_samplers_support_is_the_anchor_if_asked_for(tmp_path: Path, objective: str, config: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, objective, anchor="rollout", objective_config=config)
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[0]
    nudge(trainer.model)
    loss, gradient = loss_and_gradient(trainer, inputs)
    (batch,) = spy.batches
    assert batch.dist_old is not None
    nudge(trainer.model, -0.15)  # back, to within rounding
    own = make_trainer(tmp_path, objective, objective_config=config)
    theirs = rollouts(own)[0]
    assert torch.equal(theirs["completion_ids"], inputs["completion_ids"]), "recording draws nothing"
    with torch.no_grad():
        expected = gather_support(dense_logp(own.model, inputs, 0.9), batch.dist_old.ids)
    for name in ("logp", "rest", "rest_max"):
        found, right = (vars(dist)[name][batch.mask] for dist in (batch.dist_old, expected))
        assert_close(found, right, atol=1e-4)
    nudge(own.model)
    recomputed, its_gradient = loss_and_gradient(own, theirs)
    assert_close(loss, recomputed, atol=1e-3)
    for name, g in its_gradient.items():
        assert_close(gradient[name], g, atol=1e-3)


@pytest.mark.supports("objective: decoupled_ppo, with transformers' generation", door="TRL")
@pytest.mark.parametrize(
    ("objective", "given"),
    [("decoupled_ppo", {}), *(("ppo_clip", {"correction": name}) for name in ("tis", "seq_tis", "icepop", "trm"))],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
def test_what_reads_the_samplers_log_probs_learns(
    tmp_path: Path, objective: str, given: dict[str, Any], accumulation: int
) -> None:
    trainer = make_trainer(tmp_path, objective, gradient_accumulation_steps=accumulation, max_steps=3, **given)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    lines = [line for line in trainer.state.log_history if "tr/mismatch" in line]
    assert len(lines) == 3
    assert all(0 < line["tr/mismatch"] < 1e-5 for line in lines)


def test_an_evaluation_reads_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", anchor="rollout", per_device_eval_batch_size=4)
    rollouts(trainer)
    assert math.isfinite(trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_loss"])


def test_generation_that_goes_past_the_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", anchor="rollout")
    generate = GenerationMixin.generate

    def elsewhere(model: Any, *args: Any, **kwargs: Any) -> Any:
        del model._get_logits_processor
        try:
            return generate(model, *args, **kwargs)
        finally:
            model._get_logits_processor = None

    monkeypatch.setattr(GenerationMixin, "generate", elsewhere)
    with pytest.raises(RuntimeError, match="without the logits processor that records them"):
        rollouts(trainer)


def test_nothing_is_recorded_where_nothing_reads_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "dppo")  # whose own anchor is the rollout: the recomputed policy, as ever
    assert trainer.behaviour is None
    trainer.compute_loss(trainer.model, rollouts(trainer)[0])
    assert "tr/mismatch" not in measured(trainer)
    assert trainer.accelerator.device.type == DEVICE
