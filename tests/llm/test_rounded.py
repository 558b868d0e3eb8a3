"""Rollouts in half precision: rounded while they are drawn, the very same weights afterwards, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import make_trainer, rollouts
from transformers import GenerationMixin

from corral.llm.rounded import rounded_weights


def dtypes_while_generating(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """Every precision that weights have when transformers generates; filled as it does."""
    seen: list[set[torch.dtype]] = []
    generate = GenerationMixin.generate

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({weight.dtype for weight in model.parameters()})
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    return seen


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_rollouts_are_drawn_in_the_precision_of_the_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, expected: torch.dtype
) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=bf16)
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in trainer.model.named_parameters()}
    seen = dtypes_while_generating(monkeypatch)
    rollouts(trainer)
    assert seen == [{expected}]
    for name, weight in trainer.model.named_parameters():
        place, value = before[name]
        assert weight.data_ptr() == place
        assert torch.equal(weight, value)


def test_weights_come_back_after_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True)
    before = [weight.clone() for weight in trainer.model.parameters()]

    def interrupted() -> None:
        with rounded_weights(trainer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True)
    model: Any = trainer.model
    model.lm_head.weight = model.model.embed_tokens.weight
    with rounded_weights(trainer):
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adapters_and_their_base_are_rounded_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = make_trainer(tmp_path, "troll", bf16=True, trainer_kwargs=lora)
    before = [weight.clone() for weight in trainer.model.parameters()]
    seen = dtypes_while_generating(monkeypatch)
    rollouts(trainer)
    assert seen[-1] == {torch.bfloat16}
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_a_sampler_of_the_users_own_reads_exact_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True)
    trainer.reports_logps = True
    with rounded_weights(trainer):
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
