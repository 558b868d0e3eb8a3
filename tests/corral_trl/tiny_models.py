"""Tiny random models, their tokenizer, rewards and trainers: what the tests of the TRL door share.

- `tiny_model(family)`: two layers, hidden 16, vocabulary 40, fresh random weights large enough to be far from uniform.
- `RIGHT_REDUCTIONS`: those that this release of TRL averages rightly.
- `make_trainer(tmp, objective, **settings)`: a CorralTrainer on `DEVICE`; nothing is logged or saved.
- `rollouts(trainer)`: one batch of rollouts, as TRL buffers it for training, split into micro-batches.
- `loss_and_gradient(trainer, inputs)`: through the door.
- `without_fused_loss(trainer)`: its loss from the building blocks.
- `measured(trainer)`: the metrics of its updates so far.
- `dense_logp(model, inputs, temperature)`: every log-probability of the completion, from the model's own forward.
- `Spy.on(trainer)`: records what the objective is given.
- `FakeVLLM`: stands in for TRL's vLLM, with log-probs of its own that are a little off, ranked as vLLM ranks them.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

# Nothing here is to look for a network; the variables are read when transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions are experimental, and say so

import torch
import trl
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    logging,
    set_seed,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from trl import GRPOTrainer

from corral.llm import CorralConfig, CorralTrainer
from corral.objective import ObjectiveFunction
from corral.objective.config import ObjectiveConfig
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.trl.api import REDUCTIONS, WRONG_BEFORE
from corral.trl.scoring import ScoringPass
from device import DEVICE, drawing_on_the_cpu

logging.set_verbosity_error()

RIGHT_REDUCTIONS = [how for how in REDUCTIONS if Version(trl.__version__) >= Version(WRONG_BEFORE.get(how, "0"))]

PAD, EOS, VOCABULARY = 0, 1, 40
ENDS = [EOS, 12, 19, 33]  # several words end a completion, so that lengths differ
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    "cohere": (CohereConfig, {"logit_scale": 0.5}),
    "granite": (GraniteConfig, {"logits_scaling": 2.0}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.1},
    ),
}  # fmt: skip
"""Heads that differ: plain, soft-capped (and tied), scaled up and down, with experts and their auxiliary loss."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: <pad>, <eos>, <unk>, w0, w1, …"""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_model(family: str = "llama", seed: int = 0, **sizes: int) -> PreTrainedModel:
    """Fresh random weights, scaled so that next tokens are neither certain nor uniform."""
    config_cls, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_cls(**{**SIZES, **settings, **sizes})
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_cls](config)
    model.generation_config.eos_token_id = ENDS
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)
    return model


def prompts(count: int = 16) -> Dataset:
    """Prompts of different lengths, so that batches have padding on the left."""
    return Dataset.from_dict({"prompt": [" ".join(f"w{(i * 5 + j) % 30}" for j in range(1 + i % 4)) for i in range(count)]})


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Reward: the share of words with an even number, and a little for brevity."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) / 6 - 0.01 * len(text.split())
        for text in completions
    ]


def settings(tmp: Path | str, **given: Any) -> dict[str, Any]:
    """Defaults of the tests: in float32, quiet, two updates per batch of rollouts (so the old policy is kept)."""
    return {
        "output_dir": str(tmp), "use_cpu": DEVICE == "cpu", "bf16": False, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False, "per_device_train_batch_size": 4, "num_generations": 4,
        "temperature": 0.9, "max_completion_length": 6, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
        "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": 3,
        "loss_type": "dapo" if "dapo" in RIGHT_REDUCTIONS else "dr_grpo",
        "adam_epsilon": 1e-3,  # else the sign of a gradient that is all rounding moves a weight by the whole learning rate
        **given,
    }  # fmt: skip


def make_trainer(
    tmp: Path | str,
    objective: str = "troll",
    *,
    model: Any = None,
    rewards: Any = even_words,
    trainer_kwargs: dict[str, Any] | None = None,
    **given: Any,
) -> CorralTrainer:
    """A CorralTrainer on the tiny Llama, or on the model given, with a support that leaves something out."""
    given = {"support_size": 8, "support_mass": 0.95, **given}
    return CorralTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=rewards,
        args=CorralConfig(objective=objective, **settings(tmp, **given)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        **(trainer_kwargs or {}),
    )


def rollouts(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """One batch of rollouts in TRL's buffer: the micro-batches that training would read."""
    set_seed(7)  # generation draws from the global state
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # `train` sets it
    trainer._step = 0
    with drawing_on_the_cpu():
        trainer._prepare_inputs(batch)
    return trainer._buffered_inputs


def nudge(model: nn.Module, size: float = 0.15, seed: int = 1) -> None:
    """A small random update, the same for the same seed: the new policy is no longer the old one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.add_(size * parameter.std() * noise)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient; they are then cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def loss_and_gradient(trainer: GRPOTrainer, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch through the door, and its gradient."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), gradients(trainer.model)


def without_fused_loss(trainer: CorralTrainer) -> None:
    """From here on the head computes no loss: it comes from `lm_head`, the objective of the whole batch and autograd."""
    expect = trainer.policy_head.expect

    def without_loss(scoring: ScoringPass) -> Any:
        scoring.loss = None
        return expect(scoring)

    trainer.policy_head.expect = without_loss


def measured(trainer: CorralTrainer) -> dict[str, list[float]]:
    """Metrics of the updates since the last line of the log."""
    trainer.flush_metrics()
    return trainer._metrics["train"]


def dense_logp(model: PreTrainedModel, inputs: dict[str, Any], temperature: float) -> Tensor:
    """log π [B T V] at the completion tokens, from the class's own forward, which nobody has patched."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = type(model).forward(model, input_ids=ids, attention_mask=attention).logits
    return (logits[:, :-1][:, -inputs["completion_ids"].shape[1] :] / temperature).log_softmax(-1)


class Spy:
    """An objective's function that records the batches it is given and what comes out."""

    def __init__(self, function: ObjectiveFunction) -> None:
        self.function = function
        self.batches: list[TokenBatch] = []
        self.outputs: list[ObjectiveOutput] = []

    @classmethod
    def on(cls, trainer: CorralTrainer) -> "Spy":
        spy = cls(trainer.objective.function)
        # By another name no kernel takes its place; and it is asked of the whole batch, as where other terms are.
        trainer.objective = replace(trainer.objective, name="spied", function=spy)
        without_fused_loss(trainer)
        return spy

    def __call__(self, batch: TokenBatch, config: ObjectiveConfig) -> ObjectiveOutput:
        self.batches.append(batch)
        self.outputs.append(self.function(batch, config))
        return self.outputs[-1]


class FakeVLLM:
    """Samples from the policy with other rounding: its logits are a little off, and it reports what it drew with.

    `generate` returns what vLLM's wrapper in TRL does: per token a list of log-probs, most likely first, of the sampled token
    alone where `logprobs` is 0, and of the `logprobs` likeliest besides otherwise.
    """

    def __init__(self, *, model: Any, temperature: float, max_completion_length: int, logprobs: int, **_: Any) -> None:
        self.model, self.temperature, self.length, self.logprobs = model, temperature, max_completion_length, logprobs
        self.generator = torch.Generator().manual_seed(5)
        self.sampled: list[list[float]] = []
        self.policies: list[list[Tensor]] = []
        """All of what each token was drawn with [V]."""

    def sync_weights(self) -> None:
        """The model is the trainer's own."""

    @torch.no_grad()
    def generate(self, *, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        completions, reported, ids_of, self.sampled, self.policies = [], [], [], [], []
        for prompt in prompts:
            tokens, ranked, ids_ranked, drawn, whole = list(prompt), [], [], [], []
            while len(drawn) < self.length and (not drawn or tokens[-1] not in ENDS):
                ids = torch.tensor([tokens], device=self.model.device)
                logits = self.model(input_ids=ids).logits[0, -1].cpu() / self.temperature
                logp = (logits + 0.2 * torch.randn(len(logits), generator=self.generator)).log_softmax(-1)
                token = int(torch.multinomial(logp.exp(), 1, generator=self.generator))
                shown = {token, *logp.topk(self.logprobs).indices.tolist()}
                ids_ranked.append(sorted(shown, key=lambda i: -logp[i]))
                ranked.append([float(logp[i]) for i in ids_ranked[-1]])
                drawn.append(float(logp[token]))
                whole.append(logp)
                tokens.append(token)
            completions.append(tokens[len(prompt) :])
            reported.append(ranked)
            ids_of.append(ids_ranked)
            self.sampled.append(drawn)
            self.policies.append(whole)
        return prompts, completions, reported, ids_of


def fixed_rollout(logprobs: list[Any] | None = None, token_ids: list[list[int]] | None = None) -> Any:
    """A rollout function whose every completion is w0 w1 w2, cut off before its end, with these log-probs (of `token_ids`)."""

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
        output = {
            "prompt_ids": ids,
            "completion_ids": [[3, 4, 5] for _ in ids],
            "logprobs": None if logprobs is None else [logprobs for _ in ids],
        }
        return output if token_ids is None else output | {"logprob_token_ids": [token_ids for _ in ids]}

    return rollout
