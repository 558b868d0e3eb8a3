"""Updates of stock TRL's trainer and of corral's on the same rollouts: forward, backward, metrics, optimizer step.

TRL's defaults, gradient checkpointing among them. Rollouts are drawn once, then the weights move a little, so that the old
policy is an old one; nothing is sampled afterwards. Weights are random: "peaked" models have a final norm large enough for a
few tokens to hold all mass, "flat" ones are as random weights are. Of the largest there are a few layers. Timed by head.py.
"""

import copy
import random
import tempfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

CONTENDERS = ("TRL, GRPO", "corral, ppo_clip", "corral, troll")
PROMPT = 16
LOGIT_SPREAD = 25.0
"""Standard deviation of a peaked model's logits."""
MOVED = 0.01
"""How far weights move between rollout and update, in standard deviations of a weight: KLs are then about what updates do."""
REPORTED = ("head/dense_share", "head/dropped_max", "tr/active_frac", "tr/rest_mass", "entropy")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B, 4 of 36 layers": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    }),
    "Qwen2.5-0.5B": ("Qwen2", {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "Qwen2.5-1.5B": ("Qwen2", {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "SmolLM2-135M": ("Llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    }),
    "smoke": ("Llama", {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    }),
}  # fmt: skip
"""Architecture and sizes as published; the larger, the more the head has to do."""
CASES = [
    {"model": model, "policy": policy, "sequences": 128, "tokens": 48}
    for model in MODELS if model != "smoke" for policy in ("peaked", "flat")
]  # fmt: skip
SMOKE = {"model": "smoke", "policy": "peaked", "sequences": 4, "tokens": 4}


class Update:
    """Callable that takes one micro-batch through a trainer and the optimizer."""

    def __init__(self, trainer: "GRPOTrainer", device: str) -> None:
        self.trainer = trainer
        self.batch = next(iter(trainer.get_train_dataloader()))
        self.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-9, fused=device == "cuda")
        torch.manual_seed(3)
        self()  # draws the rollouts and scores them; the trainer keeps them
        nudge(trainer.model)
        self.metrics()

    def __call__(self) -> None:
        self.trainer.training_step(self.trainer.model, self.batch, None)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return what the trainer has logged since the last call."""
        self.trainer.log({})
        logged = self.trainer.state.log_history[-1]
        return {name: float(logged[name]) for name in REPORTED if name in logged}


def make_updates(about: dict[str, Any], device: str) -> dict[str, Update]:
    """Every contender with a copy of the same model."""
    model = _make_model(about["model"], about["policy"], device)
    return {name: Update(_make_trainer(name, copy.deepcopy(model), about, device), device) for name in CONTENDERS}


def _make_model(name: str, policy: str, device: str) -> "PreTrainedModel":
    import transformers

    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    if policy == "peaked":
        width = model.lm_head.weight.shape[1] ** 0.5 * model.lm_head.weight.float().std().item()
        with torch.no_grad():
            model.model.norm.weight.fill_(LOGIT_SPREAD / width)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def _make_trainer(contender: str, model: "PreTrainedModel", about: dict[str, Any], device: str) -> "GRPOTrainer":
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from corral.llm import CorralConfig, CorralTrainer

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(64))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    draw, groups = random.Random(0), min(8, about["sequences"])
    prompts = [" ".join(draw.choices(words[2:], k=PROMPT)) for _ in range(about["sequences"])]
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "report_to": "none", "use_cpu": device == "cpu", "bf16": device == "cuda",
        "per_device_train_batch_size": about["sequences"], "num_generations": groups, "num_iterations": 10_000,
        "max_completion_length": about["tokens"],
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    ours = contender.startswith("corral, ")
    args = CorralConfig(objective=contender.removeprefix("corral, "), **settings) if ours else GRPOConfig(**settings)
    trainer = (CorralTrainer if ours else GRPOTrainer)(
        model=model, args=args, train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=lambda completions, **_: [float(i % groups) for i in range(len(completions))],
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # as `train` would
    trainer.model.train()
    return trainer


def nudge(model: "PreTrainedModel", size: float = MOVED) -> None:
    """A small step in a random direction, the same for all."""
    draw = torch.Generator(model.device).manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=torch.float32)
            weight.add_((size * weight.float().std() * noise).to(weight.dtype) if weight.ndim > 1 else 0.0)
