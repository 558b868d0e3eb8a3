"""Distillation in the trainer: the teacher's policy on the union of both supports, and a student that comes nearer to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import (
    FakeVLLM,
    Spy,
    dense_logp,
    even_words,
    loss_and_gradient,
    make_trainer,
    measured,
    nudge,
    prompts,
    rollouts,
    settings,
    tiny_model,
    tiny_tokenizer,
    without_fused_loss,
)  # fmt: skip
from torch import Tensor
from torch.testing import assert_close

import corral
from corral import categorical_kl, project_categorical_kl
from corral.llm import CorralConfig, CorralTrainer
from corral.trl.api import FUSED
from device import DEVICE

pytestmark = pytest.mark.skipif(not FUSED, reason="this TRL hands no hidden states over")

HINT = "w7 w8"


def make(tmp: Path, teacher: Any = None, *, hint: bool = True, **given: Any) -> CorralTrainer:
    """A trainer that distils from `teacher`, or from its own model shown a hint before the prompt."""
    dataset = prompts()
    if hint:
        dataset = dataset.add_column("teacher_prompt", [f"{HINT} {text}" for text in dataset["prompt"]])
    given = {"support_size": 8, "support_mass": 0.95, "objective_config": {"bound": 0.1}, **given}
    return CorralTrainer(
        tiny_model(), even_words, CorralConfig(objective="distill", **settings(tmp, **given)), dataset,
        processing_class=tiny_tokenizer(), teacher=teacher,
    )  # fmt: skip


def teacher_logp(model: Any, inputs: dict[str, Any], *, hint: bool) -> Tensor:
    """log π_teacher [B T V] at the completion tokens, one sequence after another, with and without the hint."""
    before = tiny_tokenizer()(HINT)["input_ids"] if hint else []
    out = torch.zeros(*inputs["completion_ids"].shape, 40).log_softmax(-1)
    for b, (prompt, there) in enumerate(zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)):
        length = int(inputs["completion_mask"][b].sum())
        start = len(before) + int(there.sum())
        ids = torch.tensor([[*before, *prompt[there].tolist(), *inputs["completion_ids"][b, :length].tolist()]], device=DEVICE)
        logits = type(model).forward(model, input_ids=ids).logits[0, start - 1 : -1].detach().cpu()
        out[b, :length] = (logits / 0.9).log_softmax(-1)
    return out.to(DEVICE)


@pytest.mark.supports("objective: distill", door="TRL")
@pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
@pytest.mark.parametrize("own", [True, False], ids=["the model shown a hint", "another model"])
def test_both_policies_stand_on_the_union(tmp_path: Path, own: bool, accumulation: int) -> None:
    other, mass = tiny_model(seed=1), 0.95 if own else 0.3  # a support that holds its mass has a union too
    trainer = make(tmp_path, None if own else other, hint=own, support_mass=mass, gradient_accumulation_steps=accumulation)
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[0]
    with torch.no_grad():
        old = dense_logp(trainer.model, inputs, 0.9)
        teacher = teacher_logp(trainer.model if own else other, inputs, hint=own)
    nudge(trainer.model)
    trainer.compute_loss(trainer.model, inputs)
    (batch,) = spy.batches
    mask, tokens = batch.mask, inputs["completion_ids"]
    assert batch.dist_old is not None
    assert batch.dist_teacher is not None
    for found, dense in ((batch.dist_old, old), (batch.dist_teacher, teacher)):
        expected = corral.gather_support(dense, found.ids.long())
        assert_close(found.with_rest()[mask].exp(), expected.with_rest()[mask].exp(), atol=1e-5, rtol=1e-4)
    likely = [corral.top_k_support(dense, tokens, 8, mass).ids for dense in (old, teacher)]
    for row, *both in zip(batch.dist_old.ids[mask], *(x[mask] for x in likely), strict=True):
        assert set(row.tolist()) - {-1} == set(torch.cat(both).tolist()) - {-1}
    assert_close(batch.logp_old[mask], old.gather(-1, tokens[..., None])[..., 0][mask], atol=1e-5, rtol=1e-5)
    assert "corral_row" not in inputs
    assert trainer.old_policy.hidden is None, "nothing is held once both are known"


@pytest.mark.parametrize("accumulation", [1, 2], ids=["off-policy", "one update per batch"])
def test_the_gradient_is_that_of_dense_policies(tmp_path: Path, accumulation: int) -> None:
    given = {"support_size": 40, "support_mass": 1.0, "gradient_accumulation_steps": accumulation}
    trainer = make(tmp_path, **given)
    trainer.loss_type = "bnpo"  # a mean over the tokens of the micro-batch
    inputs = rollouts(trainer)[0]
    with torch.no_grad():
        old = dense_logp(trainer.model, inputs, 0.9)
        teacher = teacher_logp(trainer.model, inputs, hint=True)
    nudge(trainer.model)
    loss, gradient = loss_and_gradient(trainer, inputs)
    metrics = measured(trainer)
    without_fused_loss(trainer)
    apart, slow = loss_and_gradient(trainer, inputs)
    target = project_categorical_kl(teacher, old, 0.1).logp
    mask = inputs["completion_mask"].bool()
    expected = categorical_kl(dense_logp(trainer.model, inputs, 0.9), target)[mask].mean() / accumulation
    expected.backward()
    assert expected > 0.05
    for value in (loss, apart):
        assert_close(value, expected.detach(), atol=1e-5, rtol=1e-4)
    for name, parameter in trainer.model.named_parameters():
        for found in (gradient, slow):
            assert_close(found[name], parameter.grad, atol=2e-5, rtol=1e-3)
    assert metrics["tr/teacher_kl"][-1] == pytest.approx(float(categorical_kl(teacher, old)[mask].mean()), rel=1e-3)
    assert metrics["tr/kl_after"][-1] <= 0.1 + 1e-5
    assert 0 < metrics["tr/active_frac"][-1] <= 1


def test_a_model_that_teaches_itself_stays_as_it_was(tmp_path: Path) -> None:
    trainer, before = make(tmp_path), tiny_model()
    spy = Spy.on(trainer)
    nudge(trainer.model)
    inputs = rollouts(trainer)[0]
    trainer.compute_loss(trainer.model, inputs)
    (batch,) = spy.batches
    teacher, old = batch.dist_teacher, batch.dist_old
    assert teacher is not None
    assert old is not None
    ids, mask = teacher.ids.long(), batch.mask
    expected = corral.gather_support(teacher_logp(before.to(DEVICE), inputs, hint=True), ids)
    assert_close(teacher.logp[mask].exp(), expected.logp[mask].exp(), atol=1e-5, rtol=1e-4)
    now = corral.gather_support(dense_logp(trainer.model, inputs, 0.9).detach(), ids)
    assert_close(old.logp[mask].exp(), now.logp[mask].exp(), atol=1e-5, rtol=1e-4)


def test_a_ball_around_a_reference_in_the_trainer(tmp_path: Path) -> None:
    config = {"objective_config": {"bound": 0.02, "centre": "reference"}, "support_size": 40, "support_mass": 1.0}
    config |= {"gradient_accumulation_steps": 2}  # one update per batch: around the old policy no region would act
    trainer = CorralTrainer(
        tiny_model(), even_words, CorralConfig(objective="troll", **settings(tmp_path, **config)), prompts(),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.loss_type = "bnpo"
    nudge(trainer.model)  # away from the reference, which is the model as it was
    inputs = rollouts(trainer)[0]
    loss, _ = loss_and_gradient(trainer, inputs)
    metrics, mask = measured(trainer), inputs["completion_mask"].bool()
    reference = teacher_logp(tiny_model().to(DEVICE), inputs, hint=False)
    new = dense_logp(trainer.model, inputs, 0.9).detach()
    projection = project_categorical_kl(new, reference, 0.02)
    sampled = inputs["completion_ids"].cpu()[..., None]
    ratio = (projection.logp - new).gather(-1, sampled)[..., 0].exp()
    expected = -ratio * inputs["advantages"].cpu()[:, None] + categorical_kl(new, projection.logp)
    assert_close(loss.cpu(), expected[mask.cpu()].mean() / 2, atol=1e-5, rtol=1e-4)
    assert 0 < metrics["tr/active_frac"][-1] <= 1
    assert metrics["tr/kl_after"][-1] <= 0.02 + 1e-6


@pytest.mark.supports("model: distillation of a LoRA adapter", door="TRL")
def test_an_adapter_learns_from_the_model_without_it(tmp_path: Path) -> None:
    dataset = prompts().add_column("teacher_prompt", [f"{HINT} {text}" for text in prompts()["prompt"]])
    config = CorralConfig(objective="distill", **settings(tmp_path, support_size=8, max_steps=2))
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = CorralTrainer(tiny_model(), even_words, config, dataset, processing_class=tiny_tokenizer(), peft_config=adapter)
    trainer.train()
    assert all(row["tr/teacher_kl"] > 0 for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("bound", [0.05, float("inf")])
def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path, bound: float, caplog: pytest.LogCaptureFixture) -> None:
    given = {"max_steps": 12, "learning_rate": 1e-2, "adam_epsilon": 1e-8, "objective_config": {"bound": bound}}
    trainer = make(tmp_path, tiny_model(seed=1), hint=False, gradient_accumulation_steps=2, **given)
    trainer.train()
    distance = [row["tr/teacher_kl"] for row in trainer.state.log_history if "tr/teacher_kl" in row]
    assert sum(distance[-3:]) < 0.8 * sum(distance[:3])
    assert "no trust region acts" not in caplog.text
    assert "before any update" not in caplog.text


def test_a_teacher_in_bfloat16_and_an_evaluation(tmp_path: Path) -> None:
    trainer = make(tmp_path, tiny_model(seed=1).bfloat16(), hint=False, num_generations_eval=2, per_device_eval_batch_size=4)
    assert trainer.evaluate(prompts(4))["eval_loss"] > 0
    trainer.compute_loss(trainer.model, rollouts(trainer)[0])
    assert measured(trainer)["tr/teacher_kl"][-1] > 0.1


def test_another_model_may_read_the_column_too(tmp_path: Path) -> None:
    other = tiny_model(seed=1)
    trainer = make(tmp_path, other, hint=True)
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[0]
    trainer.compute_loss(trainer.model, inputs)
    (batch,) = spy.batches
    assert batch.dist_teacher is not None
    expected = corral.gather_support(teacher_logp(other, inputs, hint=True), batch.dist_teacher.ids.long())
    assert_close(batch.dist_teacher.logp[batch.mask].exp(), expected.logp[batch.mask].exp(), atol=1e-5, rtol=1e-4)


class TestRefusals:
    def test_a_model_that_would_teach_itself_what_it_knows(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"its own teacher, and 8 of 8 rows of the dataset have no `teacher_prompt`"):
            rollouts(make(tmp_path, hint=False))

    def test_another_vocabulary(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has a vocabulary of 32 tokens and the student one of 40"):
            make(tmp_path, tiny_model(vocab_size=32))

    def test_a_teacher_that_nobody_listens_to(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"objective='troll' reads no teacher. Use objective='distill'"):
            make_trainer(tmp_path, "troll", trainer_kwargs={"teacher": tiny_model()})

    @pytest.mark.refuses('objective: distill, with `support="union"` or the sampler as anchor', door="TRL")
    def test_other_supports(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="has the union of student and teacher, or reference"):
            make(tmp_path, support="union")
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVLLM)
        with pytest.raises(ValueError, match=r"needs the old policy on another model's tokens too. Use anchor='old'"):
            make(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False, anchor="rollout")
