"""What the update phase is measured on: models, trainers, rollouts, and one update of a micro-batch.

Rollouts are drawn once from a model, whose weights then move a little, so that the old policy is an old one. "peaked" models
have a final norm large enough for a few tokens to hold all mass; "flat" ones are as random weights are; "real" is SmolLM2 with
its own.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from head_sampling import PASSAGES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from update_tables import LARGE, MIDDLE, OWN, SMALL

from corral.llm import CorralConfig, CorralTrainer
from corral.llm.models import load_model
from corral.llm.policy_head import SupportRequest

PROMPT, COMPLETION = 16, 48
"""Tokens of a sequence."""
LOGIT_SPREAD = 25.0
"""Standard deviation of a peaked model's logits."""
MOVED = {"flat": 0.01, "peaked": 0.01, "real": 0.002}
"""How far weights move between rollout and update, in standard deviations of a weight: KLs are then about what updates do."""

# Width, vocabulary and layers as published; of the two large ones a few layers.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "smoke": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    ),
    SMALL: lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
        )
    ),
    MIDDLE: lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=6, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    ),
    LARGE: lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
        )
    ),
}  # fmt: skip


def make_model(name: str, policy: str, device: str, sequences: int, length: int) -> tuple[PreTrainedModel, Tensor]:
    """A model, and prompts [B, length]. Both random, a peaked policy by the scale of the last norm; or SmolLM2 and passages."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name == OWN:
        model, tokenizer = load_model("smollm2")
        given = torch.tensor([tokenizer(text)["input_ids"][:length] for text in PASSAGES])
        return model.to(device, dtype), given.repeat(-(-sequences // len(given)), 1)[:sequences]
    with torch.device(device):
        model = MODELS[name]()
    if policy == "peaked":
        width = model.lm_head.weight.shape[1] ** 0.5 * model.lm_head.weight.float().std().item()
        with torch.no_grad():
            model.model.norm.weight.fill_(LOGIT_SPREAD / width)
    drawn = torch.randint(2, model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(0))
    return model.to(dtype), drawn


def make_trainer(contender: str, model: PreTrainedModel, device: str) -> GRPOTrainer:
    """TRL's defaults, gradient checkpointing among them, but for two updates of every batch of rollouts."""
    words = {"<pad>": 0, "<eos>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "report_to": "none", "use_cpu": device == "cpu", "bf16": device == "cuda",
        "per_device_train_batch_size": 2, "num_generations": 2, "num_iterations": 2, "max_completion_length": COMPLETION,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["<eos>"] * 8})
    given = {"reward_funcs": lambda completions, **_: [0.0] * len(completions), "train_dataset": dataset}
    if contender.startswith("TRL"):
        trainer = GRPOTrainer(model=model, args=GRPOConfig(**settings), processing_class=tokenizer, **given)
    else:
        objective = contender.removeprefix("corral, ")
        args = CorralConfig(objective=objective, **settings)
        trainer = CorralTrainer(model=model, args=args, processing_class=tokenizer, **given)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # as `train` would
    trainer.model.train()
    return trainer


def draw_rollouts(model: PreTrainedModel, length: int, prompts: Tensor, policy: str) -> Tensor:
    """Token ids [B, prompt + length], the completion sampled from the model; a flat policy's are as good as uniform."""
    ids = prompts.to(model.device)
    if policy == "flat":
        drawn = torch.randint(2, model.config.vocab_size, (len(ids), length), generator=torch.Generator().manual_seed(3))
        return torch.cat([ids, drawn.to(ids.device)], 1)
    model.eval()
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length,
        min_new_tokens=length, pad_token_id=0, use_cache=True,
    )  # fmt: skip


def as_buffered(trainer: GRPOTrainer, ids: Tensor, prompt: int) -> dict[str, Tensor]:
    """What TRL buffers of rollouts, with the policy before the update; a support where the objective reads one."""
    tokens = ids.shape[1] - prompt
    support = isinstance(trainer, CorralTrainer) and trainer.needs_support
    if isinstance(trainer, CorralTrainer):
        trainer._ask(trainer.own_support() if support else SupportRequest())
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), tokens, 8)[0]
    draw = torch.Generator(ids.device).manual_seed(1)
    inputs = {
        "prompt_ids": ids[:, :prompt], "prompt_mask": torch.ones_like(ids[:, :prompt]), "completion_ids": ids[:, prompt:],
        "completion_mask": torch.ones_like(ids[:, prompt:]), "old_per_token_logps": logps,
        "advantages": torch.randn(len(ids), generator=draw, device=ids.device),
        "num_items_in_batch": torch.tensor(ids[:, prompt:].numel(), device=ids.device),
    }  # fmt: skip
    if support:
        trainer.old_policy.store(inputs, trainer._scored)
    return inputs


def nudge(model: PreTrainedModel, size: float) -> None:
    """A small step in a random direction, the same for all."""
    draw = torch.Generator(model.device).manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=torch.float32)
            weight.add_((size * weight.float().std() * noise).to(weight.dtype) if weight.ndim > 1 else 0.0)


class Update:
    """One micro-batch through a trainer, and the optimizer's step, as often as it is called."""

    def __init__(self, contender: str, model: PreTrainedModel, ids: Tensor, prompt: int, device: str, moved: float) -> None:
        self.trainer = make_trainer(contender, model, device)
        self.inputs = as_buffered(self.trainer, ids, prompt)
        nudge(self.trainer.model, moved)
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-9, fused=device == "cuda")

    def __call__(self, inputs: dict[str, Tensor] | None = None) -> None:
        loss = self.trainer.compute_loss(self.trainer.model, self.inputs if inputs is None else inputs)
        loss.backward()
        if isinstance(self.trainer, CorralTrainer):
            self.trainer.settle_metrics()  # as `training_step` does; TRL has written its own down by now
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def log(self) -> None:
        """As training does after a step: the trainer goes by the entropy that was logged last."""
        self.trainer.log({"entropy": statistics.mean(self.trainer._metrics["train"]["entropy"])})

    def repeated(self, sequences: int) -> dict[str, Tensor]:
        """The same rollouts over and over, as many as asked for."""
        times = -(-sequences // len(self.inputs["completion_ids"]))
        return {key: x if x.ndim == 0 else x.repeat(times, *[1] * (x.ndim - 1))[:sequences] for key, x in self.inputs.items()}
