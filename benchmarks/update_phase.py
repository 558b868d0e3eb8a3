"""How fast is the trainer's update phase, and how long a micro-batch fits, with TROLL on, against stock TRL?

An update is forward, backward and optimizer step of one micro-batch, metrics included; nothing is sampled meanwhile. All
contenders of a model run in one process and in turns; the median counts. Rollouts are drawn once from the model, whose
weights then move a little, so that the old policy is an old one. "peaked" models have a final norm large enough for a few
tokens to hold all mass; "flat" ones are as random weights are; "real" is SmolLM2 with its own.

The longest micro-batch is what fits into a given memory beyond the weights and the optimizer's state: gradients, activations
and the head's own. What is known is saved at once, so nothing is lost where time runs out.

    python benchmarks/update_phase.py [--models "8B, 4 of 36 layers"] [--smollm2 FOLDER] [--save]
"""

import argparse
import copy
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
    AutoModelForCausalLM,
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
from corral.llm.trainer import SUPPORT_KEYS

FILE = Path(__file__).with_name("results") / "update_phase.json"
PROMPT, COMPLETION = 16, 48
"""Tokens of a sequence."""
GIBIBYTES = 8
"""Beyond weights and optimizer, that the longest micro-batch may take."""

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
MOVED = {"flat": 0.01, "peaked": 0.01, "real": 0.002}
"""How far weights move between rollout and update, in standard deviations of a weight: KLs are then about what updates do."""
REAL = "smollm2"


def make_model(name: str, policy: str, device: str, folder: Path | None = None) -> PreTrainedModel:
    """Random weights, a peaked policy by the scale of the last norm; or those of a folder."""
    torch.manual_seed(0)
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = MODELS[name]()
    if policy == "peaked":
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
        dist = trainer._scored.support()
        slots = max(1, int((dist.ids >= 0).sum(-1).max()))
        kept = dist.ids[..., :slots].int(), dist.logp[..., :slots].contiguous(), dist.rest
        inputs |= dict(zip(SUPPORT_KEYS, kept, strict=True))
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

    def __init__(
        self, contender: str, model: PreTrainedModel, ids: Tensor, prompt: int, device: str, moved: float = MOVED["flat"]
    ) -> None:
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


def peak(update: Update, sequences: int) -> float:
    """MiB that an update takes beyond what is held before it; infinite where they cannot be had."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        update(update.repeated(sequences))
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        update.optimizer.zero_grad(set_to_none=True)
        return math.inf
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def longest(update: Update, known: int) -> tuple[int, int]:
    """Most sequences of a micro-batch that fit, and the fewest that do not, an eighth apart; `known` are known to fit."""
    good, bad = known, 0
    while not bad or bad - good > good // 8:
        tried = (good + bad) // 2 if bad else 2 * good
        if peak(update, tried) < math.inf:
            good = tried
        else:
            bad = tried
    return good, bad


Save = Callable[[], None]


def measure(
    about: dict[str, Any], model: PreTrainedModel, prompts: Tensor, rows: list[dict[str, Any]], save: Save, rounds: int
) -> dict[str, Update]:
    """Times and memory of every contender, in turns; a row for each, saved as they come in."""
    device, start = model.device.type, time.perf_counter()
    ids = draw_rollouts(model, about["tokens"], prompts, about["policy"])
    say("rollouts", start)
    mine: dict[str, dict[str, Any]] = {contender: {**about, "contender": contender} for contender in CONTENDERS}
    rows += mine.values()
    updates: dict[str, Update] = {}
    for contender in CONTENDERS:
        start = time.perf_counter()
        updates[contender] = update = Update(
            contender, copy.deepcopy(model), ids, prompts.shape[1], device, MOVED[about["policy"]]
        )
        update()  # compiles, and fills the optimizer's state
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update()
            mine[contender]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        say(f"{contender}: first updates", start)
        save()
    taken: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for i in range(rounds):
        for contender, update in updates.items():
            taken[contender].append(seconds(update, device))
            middle = statistics.median(taken[contender])
            mine[contender] |= {"ms": 1e3 * middle, "tokens_per_s": ids.numel() / middle, "rounds": i + 1}
        save()
    for contender, update in updates.items():
        metrics = update.trainer._metrics["train"]
        for metric in ("head/dense_share", "head/dropped_max", "tr/active_frac", "tr/rest_mass", "entropy"):
            if metrics.get(metric):
                mine[contender][metric] = statistics.mean(metrics[metric])
        print(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in mine[contender].items()}, flush=True
        )
    save()
    return updates


def find_longest(updates: dict[str, Update], rows: list[dict[str, Any]], save: Save) -> None:
    """One contender at a time: the process may take so much more than what it holds already."""
    total = torch.cuda.get_device_properties(0).total_memory
    for row in rows:
        update, start = updates.pop(row["contender"]), time.perf_counter()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + GIBIBYTES * 2**30) / total)
        row["longest"], row["too_long"] = longest(update, row["sequences"])
        row["within_gib"] = GIBIBYTES
        torch.cuda.set_per_process_memory_fraction(1.0)
        say(f"{row['contender']}: {row['longest']} sequences within {GIBIBYTES} GiB", start)
        save()


def say(what: str, start: float) -> None:
    print(f"  {what}, {time.perf_counter() - start:.1f} s", flush=True)


def prompts_of(folder: Path | None, sequences: int, length: int, vocabulary: int) -> Tensor:
    """Token ids [B, length]: those beside a model's own weights, or random ones."""
    if folder is not None and (folder / "prompts.pt").exists():
        given = torch.load(folder / "prompts.pt")
        return given.repeat(-(-sequences // len(given)), 1)[:sequences, :length]
    return torch.randint(2, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(0))


def table(path: Path) -> str:
    """Markdown of all results: a line for every model and policy."""
    lines = [
        "| model | policy | sequences × tokens | TRL, GRPO | corral, ppo_clip | corral, troll | tokens/s: troll × TRL "
        "| MiB: TRL, ppo_clip, troll | longest: TRL, ppo_clip, troll |",
        "|" + " --- |" * 9,
    ]
    for found in json.loads(path.read_text()).values():
        rows = found["rows"]
        for policy in dict.fromkeys(row["policy"] for row in rows):
            three = [row for name in CONTENDERS for row in rows if (row["policy"], row["contender"]) == (policy, name)]
            if len(three) < len(CONTENDERS) or "ms" not in three[-1]:
                continue
            times = " | ".join(f"{row['ms']:.3g} ms" for row in three)
            ratio = three[-1]["tokens_per_s"] / three[0]["tokens_per_s"]
            memory = ", ".join(f"{row['mib']:.0f}" for row in three)
            most = ", ".join(f"{row['longest']}–{row['too_long']}" if "longest" in row else "" for row in three).strip(", ")
            shape = f"{three[0]['sequences']} × {three[0]['tokens']}"
            lines.append(f"| {three[0]['model']} | {policy} | {shape} | {times} | {ratio:.2f} | {memory} | {most} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[name for name in MODELS if name != "smoke"])
    parser.add_argument("--policies", nargs="+", choices=["peaked", "flat"], default=["peaked", "flat"])
    parser.add_argument("--smollm2", type=Path, help="SmolLM2 with its own weights: a folder that transformers can load")
    parser.add_argument("--weights", help="what to say of those weights in the rows")
    parser.add_argument("--sequences", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=COMPLETION, help="of a completion")
    parser.add_argument("--rounds", type=int, default=9, help="updates of each contender; the median counts")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many")
    parser.add_argument("--no-memory", action="store_true", help="do not look for the longest micro-batch")
    parser.add_argument("--save", nargs="?", type=Path, const=FILE, help=f"keep the rows, in {FILE.name} unless said where")
    parser.add_argument(
        "--table", nargs="?", type=Path, const=FILE, help="print the results that were kept, and measure nothing"
    )
    args = parser.parse_args()
    if args.table is not None:
        print(table(args.table))
        return
    device, begun = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    jobs: list[tuple[str, str, Path | None]] = [(name, policy, None) for name in args.models for policy in args.policies]
    if args.smollm2 is not None:
        jobs.append((REAL, "real", args.smollm2))
    kept: dict[str, list[dict[str, Any]]] = {}
    for name, policy, folder in jobs:
        if time.perf_counter() - begun > args.seconds:
            print(f"no time left for {name}, {policy}", flush=True)
            continue
        print(f"{name}, {policy}, after {time.perf_counter() - begun:.0f} s", flush=True)
        rows = kept.setdefault(name, [])
        save: Save = partial(save_results, f"{name}, on {device}", rows, args.save) if args.save else lambda: None
        model = make_model(name, policy, device, folder)
        prompts = prompts_of(folder, args.sequences, min(PROMPT, args.tokens), model.config.vocab_size)
        about = {"model": name, "policy": policy, "sequences": args.sequences, "tokens": args.tokens}
        about |= {"weights": args.weights} if folder is not None and args.weights else {}
        updates = measure(about, model, prompts, rows, save, args.rounds)
        del model
        if device == "cuda" and not args.no_memory and policy != "peaked":  # a flat policy needs the most
            find_longest(updates, rows[-len(CONTENDERS) :], save)
        del updates
        gc.collect()


if __name__ == "__main__":
    main()
