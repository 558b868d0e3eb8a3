"""How fast is the trainer's update phase, and how long a micro-batch fits, with TROLL on, against stock TRL?

An update is forward, backward and optimizer step of one micro-batch; nothing is sampled meanwhile. All contenders of a model
run in one process and in turns; the median counts. Rollouts are drawn once from the model, whose weights then move a little, so
that the old policy is an old one. "peaked" models have a final norm large enough for a few tokens to hold all mass.

The longest micro-batch is what fits into a card of a given size: the process may take no more.

    python benchmarks/update_phase.py [--models "8B, 4 of 36 layers"] [--save]
"""

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from results import save_results
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

from corral.llm import CorralConfig, CorralTrainer

FILE = Path(__file__).with_name("results") / "update_phase.json"
PROMPT, COMPLETION = 64, 448
"""Tokens of a sequence."""
GIBIBYTES = 24
"""Of the card that the longest micro-batch is found for."""

# Width, vocabulary and layers as published; of the two large ones a few layers.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "smoke": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    ),
    "smollm2, its shape": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
        )
    ),
    "0.5B, 6 of 24 layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=6, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    ),
    "8B, 4 of 36 layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
        )
    ),
}  # fmt: skip
CONTENDERS = ("TRL, GRPO", "corral, ppo_clip", "corral, troll")
LOGIT_SPREAD = 25.0
"""Standard deviation of a peaked model's logits."""


def make_model(name: str, peaked: bool, device: str) -> PreTrainedModel:
    """Random weights; a peaked policy by the scale of the last norm."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name]()
    if peaked:
        width = model.lm_head.weight.shape[1] ** 0.5 * model.lm_head.weight.float().std().item()
        with torch.no_grad():
            model.model.norm.weight.fill_(LOGIT_SPREAD / width)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


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


def draw_rollouts(model: PreTrainedModel, sequences: int, length: int, prompt: int) -> Tensor:
    """Token ids [B, prompt + length], the completion sampled from the model."""
    ids = torch.randint(2, model.config.vocab_size, (sequences, prompt), device=model.device)
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
        trainer._ask(trainer._own_support() if support else None)
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
        dist = trainer._scored.dist
        slots = max(1, int((dist.ids >= 0).sum(-1).max()))
        inputs |= {"corral_ids": dist.ids[..., :slots].int(), "corral_logp": dist.logp[..., :slots], "corral_rest": dist.rest}
    return inputs


def nudge(model: PreTrainedModel, size: float = 0.01) -> None:
    """A small step in a random direction, the same for all."""
    draw = torch.Generator(model.device).manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=torch.float32)
            weight.add_((size * weight.float().std() * noise).to(weight.dtype) if weight.ndim > 1 else 0.0)


class Update:
    """One micro-batch through a trainer, and the optimizer's step, as often as it is called."""

    def __init__(self, contender: str, model: PreTrainedModel, ids: Tensor, prompt: int, device: str) -> None:
        self.trainer = make_trainer(contender, model, device)
        self.inputs = as_buffered(self.trainer, ids, prompt)
        nudge(self.trainer.model)
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-9, fused=device == "cuda")

    def __call__(self, inputs: dict[str, Tensor] | None = None) -> None:
        loss = self.trainer.compute_loss(self.trainer.model, self.inputs if inputs is None else inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def repeated(self, sequences: int) -> dict[str, Tensor]:
        """The same rollouts over and over, as many as asked for."""
        times = -(-sequences // len(self.inputs["completion_ids"]))
        return {key: x if x.ndim == 0 else x.repeat(times, *[1] * (x.ndim - 1))[:sequences] for key, x in self.inputs.items()}


def seconds(run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fits(update: Update, sequences: int) -> bool:
    gc.collect()
    torch.cuda.empty_cache()
    try:
        update(update.repeated(sequences))
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        update.optimizer.zero_grad(set_to_none=True)
        return False
    return True


def longest(update: Update, start: int, until: float) -> int:
    """Most sequences of a micro-batch that fit into the card's memory; to an eighth, or as far as time allows."""
    good, step = 0, start
    while step > max(good // 8, 0) and time.perf_counter() < until:
        if fits(update, good + step):
            good, step = good + step, step * 2 if good in (0, step) else step
        else:
            step //= 2
    return good


def measure(
    name: str, peaked: bool, device: str, *, sequences: int, rounds: int, memory: bool, tokens: int
) -> list[dict[str, Any]]:
    prompt = min(PROMPT, tokens)
    model = make_model(name, peaked, device)
    ids = draw_rollouts(model, sequences, tokens, prompt)
    about = {"model": name, "policy": "peaked" if peaked else "flat", "sequences": sequences, "tokens": tokens}
    rows = {contender: {**about, "contender": contender} for contender in CONTENDERS}
    updates = {}
    for contender in CONTENDERS:
        updates[contender] = Update(contender, copy.deepcopy(model), ids, prompt, device)
    del model
    taken: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for contender, update in updates.items():
        update()  # compiles, and fills the optimizer's state
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update()
            rows[contender]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(rounds):
        for contender, update in updates.items():
            taken[contender].append(seconds(update, device))
    for contender, times in taken.items():
        rows[contender] |= {"ms": 1e3 * statistics.median(times), "tokens_per_s": ids.numel() / statistics.median(times)}
        metrics = updates[contender].trainer._metrics["train"]
        for metric in ("head/dense_share", "head/dropped_max", "tr/active_frac", "tr/rest_mass", "entropy"):
            if metrics.get(metric):
                rows[contender][metric] = statistics.mean(metrics[metric])
    if memory and device == "cuda":
        find_longest(updates, rows, sequences)
    for row in rows.values():
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return list(rows.values())


def find_longest(updates: dict[str, Update], rows: dict[str, dict[str, Any]], start: int) -> None:
    """One contender at a time, with the others out of the way."""
    total = torch.cuda.get_device_properties(0).total_memory
    for contender in list(updates):
        update = updates.pop(contender)
        for other in updates.values():
            other.trainer.model.to("cpu")
            other.optimizer.state.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(GIBIBYTES * 2**30 / total)
        rows[contender]["longest"] = longest(update, start, time.perf_counter() + 8)
        torch.cuda.set_per_process_memory_fraction(1.0)
        del update
        for other in updates.values():
            other.trainer.model.to("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "smoke"])
    parser.add_argument("--policies", nargs="+", choices=["peaked", "flat"], default=["peaked", "flat"])
    parser.add_argument("--sequences", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=COMPLETION, help="of a completion")
    parser.add_argument("--rounds", type=int, default=9, help="updates of each contender; the median counts")
    parser.add_argument("--no-memory", action="store_true", help="do not look for the longest micro-batch")
    parser.add_argument("--save", action="store_true", help=f"keep the rows in benchmarks/results/{FILE.name}")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in args.models:
        rows = []
        for policy in args.policies:
            given = {"sequences": args.sequences, "rounds": args.rounds, "tokens": args.tokens}
            # A flat policy needs the most memory.
            rows += measure(name, policy == "peaked", device, memory=policy == "flat" and not args.no_memory, **given)
            gc.collect()
            if args.save:
                FILE.parent.mkdir(exist_ok=True)
                save_results(f"{name}, on {device}", rows, FILE)


if __name__ == "__main__":
    main()
