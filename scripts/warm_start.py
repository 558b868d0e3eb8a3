"""Make the embedded models: supervised training on answers by demonstrators who make mistakes.

    python scripts/warm_start.py --out src/corral/lab/models/tiny        (PYTHONPATH=src where corral is not installed)
    python scripts/warm_start.py --out src/corral/lab/models/tiny-sums --task sums --start tiny --carried .2 \
        --noise 0 --steps 600 --batch 96 --lr 1.5e-3 --demonstrations 60000 --evaluate 2048 --device cpu

The first command makes `tiny`, for countdown. Each character of a demonstrated answer is replaced by a random one with
probability --noise, and the model learns to imitate that, mistakes included. So it knows how to solve most problems (greedy
decoding is right), and seldom does when sampled, since a dozen characters must all come out clean: reinforcement learning has
something to sharpen. The defaults are what was shipped: held-out success .19 at temperature 1, .85 greedy, in 270 s on one
H200. A CPU takes hours.

The second command makes `tiny-sums` from `tiny`. Its demonstrators add two numbers of up to two digits and write a carry down
with probability --carried: 47+80=27+5=22. So the model can carry, and greedily it nearly never does: reinforcement learning has
something to teach. What was shipped has held-out success .37 at temperature 1, .25 greedy, after two minutes of one CPU core.

Only training problems are shown.
The studies in results/ also start from models of other seeds, tasks and families: `--family qwen3 --out runs/starts/qwen3-1`.
"""
# ruff: noqa: T201 (a script prints what it finds)

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Gemma2Config, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.models import EMBEDDED
from corral.lab.models.tiny import build_tiny, load_tiny, tiny_tokenizer
from corral.lab.tasks import verify_all
from corral.lab.tasks.procedural import OPERATORS, Arithmetic, Countdown, ProceduralTask, places, uniform

TASKS: dict[str, ProceduralTask] = {
    "countdown": Countdown(),
    "sums": Arithmetic(operations="+"),
    "arithmetic": Arithmetic(operations="+-", digits=3),
}
"""Tasks that a model may be trained for: `tiny` is for countdown, `tiny-sums` for sums, and the third is for the studies."""
MISTAKES = f"0123456789{OPERATORS}="
"""What a character may be replaced by: never the end of the sequence, nor is that ever replaced, so that every answer ends."""
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 416, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
OTHERS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **ids: Qwen3Config(**SIZES, **ids),
    # Logits are capped at ±30 as Gemma 2 does it; capped attention would need the slow implementation.
    "gemma": lambda **ids: Gemma2Config(**SIZES, **ids, attn_logit_softcapping=None, query_pre_attn_scalar=32),
    "moe": lambda **ids: Qwen3MoeConfig(
        **SIZES, **ids, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=208, norm_topk_prob=True
    ),
}
FAMILIES = ("llama", *OTHERS)
"""Llama is the embedded model's own."""


def build(family: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of about a million fresh random weights, and the embedded model's tokenizer."""
    if family == "llama":
        return build_tiny(seed)
    tokenizer = tiny_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = OTHERS[family](vocab_size=len(tokenizer), **ids)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Demonstrations:
    """Clean demonstrations, on the device: prompt, answer and <eos> in a row, padded on the right."""

    tokens: Tensor  # [N T]
    prompt: Tensor  # [N 1] length of the prompt
    length: Tensor  # [N 1] length of all of it
    mistakes: Tensor  # [C] the tokens of MISTAKES

    def batch(self, size: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B T−1] of `size` demonstrations with mistakes made anew; a target of −100 counts for nothing."""
        device = self.tokens.device
        rows = torch.randint(len(self.tokens), (size,), generator=generator, device=device)
        tokens, prompt, length = self.tokens[rows], self.prompt[rows], self.length[rows]
        at = torch.arange(tokens.shape[1], device=device)
        answered = (at >= prompt) & (at < length)
        wrong = torch.rand(tokens.shape, generator=generator, device=device) < noise
        other = self.mistakes[torch.randint(len(self.mistakes), tokens.shape, generator=generator, device=device)]
        tokens = torch.where(wrong & answered & (at < length - 1), other, tokens)
        return tokens[:, :-1], torch.where(answered, tokens, -100)[:, 1:]


def add_up(prompt: str, carried: float, draw: Callable[[], float]) -> str:
    """Answer "47+85:" with every step, each carry written down with probability `carried`: 47+80=27+5=22 without any."""
    left, right = map(int, prompt[:-1].split("+"))
    text, value = str(left), left
    for place in places(right):
        ten = 10 ** len(str(place))  # what the next digit to the left is worth
        total = value + place
        if total // ten > value // ten and draw() >= carried:
            total -= ten
        text, value = f"{text}+{place}={total}", total
    return text


def demonstrate(
    task: ProceduralTask,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int,
    device: torch.device,
    carried: float = 1.0,
) -> Demonstrations:
    """Draw the demonstrations. Of countdown there are 165 thousand of them to draw from, prompts in every order."""
    pairs = task.demonstrations(count, seed)
    if carried < 1:
        draw = uniform("carries", seed, held_out=False)
        pairs = [(prompt, add_up(prompt, carried, draw)) for prompt, _ in pairs]
    texts = [prompt + answer + str(tokenizer.eos_token) for prompt, answer in pairs]
    rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return Demonstrations(
        tokens=rows["input_ids"].to(device),
        prompt=torch.tensor([[1 + len(prompt)] for prompt, _ in pairs], device=device),  # 1 is <bos>
        length=rows["attention_mask"].sum(1, keepdim=True).to(device),
        mistakes=torch.tensor(tokenizer.convert_tokens_to_ids(list(MISTAKES)), device=device),
    )


def success(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: ProceduralTask, prompts: list[str], seed: int | None
) -> float:
    """Fraction of prompts answered rightly, sampled at temperature 1; greedily if `seed` is None."""
    # A completion that has not ended by then is longer than any right answer.
    sampling = Sampling(max_tokens=task.max_completion_length + 1, greedy=seed is None)
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        rows = generate(model, tokenizer, tokenizer(prompts)["input_ids"], sampling)
    answers = [text.removesuffix(str(tokenizer.eos_token)) for text in tokenizer.batch_decode(rows)]
    return sum(verify_all(task, prompts, answers)) / len(prompts)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: ProceduralTask,
    data: Demonstrations,
    args: argparse.Namespace,
) -> None:
    """Train by AdamW with a linear warm-up and a cosine down to 0, on the tokens after the prompt."""
    # Vectors are norms' scales, which have no reason to shrink.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=model.device.type == "cuda")
    warmup = max(1, args.steps // 20)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator(model.device).manual_seed(args.seed)
    few = min(512, args.evaluate)
    seen, held_out = task.train_prompts(few, args.seed), task.held_out_prompts(few, args.seed + 1)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs, targets = data.batch(args.batch, args.noise, generator)
        # No attention mask: padding is on the right, where causal attention does not look, and the plain causal kernel is fast.
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.report_every == 0 and step < args.steps:
            greedy = [success(model, tokenizer, task, prompts, None) for prompts in (held_out, seen)]
            print(
                f"step {step:5d}  {time.perf_counter() - start:5.1f} s  loss {loss.item():.4f}  held out: "
                f"T=1 {success(model, tokenizer, task, held_out, args.seed):.3f}, greedy {greedy[0]:.3f}  "
                f"seen in training: greedy {greedy[1]:.3f}",
                flush=True,
            )


def save_whole(out: Path, model: PreTrainedModel, card: dict[str, object]) -> None:
    """Write the folder under another name, then move it into place: it is there whole or not at all."""
    beside = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        model.save_pretrained(beside)
        tiny_tokenizer().save_pretrained(beside)  # one that was used would write down its last padding, too
        (beside / "warm_start.json").write_text(json.dumps(card, indent=2) + "\n")
        for path in beside.iterdir():
            path.chmod(0o644)  # safetensors' files are private otherwise
        os.replace(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already, unless something failed


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Every default is what was shipped."""
    parser = argparse.ArgumentParser(
        description="Make the embedded models.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--task", choices=TASKS, default="countdown")
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--start", choices=EMBEDDED, help="train this model on, instead of random weights")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=2048, help="demonstrations per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.12, help="probability that a character is replaced")
    parser.add_argument("--carried", type=float, default=1.0, help="of sums: probability that a carry is written down")
    parser.add_argument("--demonstrations", type=int, default=400_000, help="drawn once; mistakes are made anew every time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=int, default=4096, help="held-out prompts for the numbers at the end")
    parser.add_argument("--report-every", type=int, default=500, help="steps between lines of progress")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} is there already; remove it first, or choose another --out")
    if args.carried < 1 and args.task != "sums":
        parser.error(f"--carried is for --task sums; got --task {args.task}")
    return args


def main(argv: list[str]) -> None:
    """Draw, train, measure, write."""
    args = parse_arguments(argv)
    task = TASKS[args.task]
    model, tokenizer = load_tiny(args.start) if args.start else build(args.family, args.seed)
    model.to(args.device)
    start = time.perf_counter()
    data = demonstrate(task, tokenizer, args.demonstrations, args.seed, model.device, args.carried)
    print(f"{args.demonstrations} demonstrations in {time.perf_counter() - start:.1f} s; training on {args.device}", flush=True)
    train(model, tokenizer, task, data, args)
    prompts = task.held_out_prompts(args.evaluate, args.seed)
    sampled, greedy = success(model, tokenizer, task, prompts, args.seed), success(model, tokenizer, task, prompts, None)
    seconds = time.perf_counter() - start
    print(f"held out, {args.evaluate} prompts: T=1 {sampled:.3f}, greedy {greedy:.3f}  ({seconds:.1f} s in all)")
    card = {
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "report_every")},
        "held_out_success": {"prompts": args.evaluate, "temperature_1": sampled, "greedy": greedy},
        "seconds": round(seconds, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    save_whole(args.out, model.cpu(), card)
    print(f"written: {args.out}")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")  # TF32, where there is any, and for this program alone
    main(sys.argv[1:])
