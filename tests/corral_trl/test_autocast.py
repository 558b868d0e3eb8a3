"""Rollouts under mixed precision: from the policy that is trained, with each weight rounded once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import fixed_rollout, make_trainer, rollouts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin

from corral.trl.processes import one_autocast
from corral.trl.trainer import CorralTrainer


class Casts(TorchDispatchMode):
    """Counts how often each parameter is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self.of[id(args[0])] = self.of.get(id(args[0]), 0) + 1
        return op(*args, **(kwargs or {}))


def prepared(tmp_path: Path, **settings: Any) -> CorralTrainer:
    """A trainer whose model has accelerate's autocast around its forward pass, as in training."""
    trainer = make_trainer(tmp_path, "troll", **settings)
    trainer.model_wrapped = trainer.model = trainer.accelerator.prepare_model(trainer.model)
    return trainer


def ids(trainer: CorralTrainer) -> Tensor:
    """Two prompts of eight tokens, where the model is."""
    return torch.arange(5, 21, device=trainer.accelerator.device).view(2, 8)


def generated(trainer: CorralTrainer) -> tuple[Tensor, dict[int, int]]:
    """Logits of six tokens drawn [6 B V], and how often weights were cast for them."""
    model: Any = trainer.model
    prompts = ids(trainer)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    torch.manual_seed(0)
    with torch.no_grad(), Casts() as casts:
        out = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), output_logits=True, **how)
    return torch.stack(out.logits), casts.of


def test_each_weight_is_rounded_once_and_nothing_else_changes(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, bf16=True)
    before = [weight.clone() for weight in trainer.model.parameters()]
    with one_autocast(trainer):
        logits, casts = generated(trainer)
    plain_logits, plain_casts = generated(trainer)
    assert torch.equal(logits, plain_logits)
    assert (set(casts.values()), set(plain_casts.values())) == ({1}, {6})
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_an_adapter_samples_in_the_precision_it_is_trained_in(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = prepared(tmp_path, bf16=True, trainer_kwargs={"peft_config": lora})
    with one_autocast(trainer):
        drawn = generated(trainer)[0][0]
    with torch.no_grad():
        trained = trainer.model(input_ids=ids(trainer), logits_to_keep=1).logits[:, -1].float()
    assert torch.equal(drawn, trained)
    assert not torch.equal(generated(trainer)[0][0], trained), "peft generates past accelerate's autocast, in float32"


def test_a_step_too_small_for_half_precision_reaches_the_sampler(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, bf16=True)
    model: Any = trainer.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    with one_autocast(trainer):
        before = generated(trainer)[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1 + 2.0**-10)
        assert torch.equal(model.model.embed_tokens.weight.bfloat16().float() * (1 + 2.0**-10), model.model.embed_tokens.weight)
    with one_autocast(trainer):
        assert not torch.equal(generated(trainer)[0], before)


@pytest.mark.parametrize("bf16", [True, False])
def test_rollouts_are_under_one_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    trainer, seen, generate = prepared(tmp_path, bf16=bf16), [], GenerationMixin.generate

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.is_autocast_enabled(trainer.accelerator.device.type))
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    rollouts(trainer)
    assert seen == [bf16]


def test_a_sampler_of_the_users_own_sees_no_autocast(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "troll", bf16=True, trainer_kwargs={"rollout_func": fixed_rollout()})
    with one_autocast(trainer):
        assert not torch.is_autocast_enabled(trainer.accelerator.device.type)
