"""More warm starts of the embedded model, and other families of its size, all supervised on countdown by one command.

    python -m results.evidence.warm_starts --out runs/starts                          seeds 1, 2, 3 of the embedded model
    python -m results.evidence.warm_starts --out runs/starts --families qwen3 gemma moe --seeds 1 --workers 3

Each is a folder FAMILY-SEED for `--model` and the plans `a-starts` and `f-moe`, with what it can do in warm_start.json. With
one start, seeds vary the noise of reinforcement learning alone. A GPU takes five minutes or less for each; several share it.
Starts that are there already are left alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Gemma2Config, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

from corral.llm.tiny import build_tiny, build_tokenizer
from corral.task.countdown import Countdown

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import warm_start  # the embedded model's own

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 416, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **ids: Qwen3Config(**_SIZES, **ids),
    # Logits are capped at ±30 as Gemma 2 does it; capped attention would need the slow implementation.
    "gemma": lambda **ids: Gemma2Config(**_SIZES, **ids, attn_logit_softcapping=None, query_pre_attn_scalar=32),
    "moe": lambda **ids: Qwen3MoeConfig(
        **_SIZES, **ids, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=208, norm_topk_prob=True
    ),
}
FAMILIES = ("llama", *_FAMILIES)
"""Llama is the embedded model's own."""


def build(family: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of about a million fresh random weights, and the embedded model's tokenizer."""
    if family == "llama":
        return build_tiny(seed)
    tokenizer = build_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = _FAMILIES[family](vocab_size=len(tokenizer), **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model.eval(), tokenizer


def make(family: str, seed: int, out: Path, steps: int | None, evaluate: int | None) -> None:
    """Train one start as the embedded model was, and write its folder whole."""
    given = ["--out", str(out), "--seed", str(seed), "--report-every", "1000"]
    given += [] if steps is None else ["--steps", str(steps), "--batch", "64", "--demonstrations", "512"]
    given += [] if evaluate is None else ["--evaluate", str(evaluate)]
    args = warm_start.parse_arguments(given)
    task, (model, tokenizer) = Countdown(), build(family, seed)
    model.to(args.device)
    data = warm_start.demonstrate(task, tokenizer, args.demonstrations, seed, model.device)
    warm_start.train(model, tokenizer, task, data, args)
    prompts = task.held_out_prompts(args.evaluate, seed)
    found = {"prompts": args.evaluate, "parameters": sum(p.numel() for p in model.parameters())}
    found |= {"temperature_1": warm_start.success(model, tokenizer, task, prompts, seed)}
    found |= {"greedy": warm_start.success(model, tokenizer, task, prompts, None)}
    card = {"family": family, "settings": {key: value for key, value in vars(args).items() if key != "out"}}
    warm_start.save_whole(out, model.cpu(), card | {"held_out_success": found})
    print(f"{out}: {found}", flush=True)


def main() -> None:
    """Command line: several starts side by side, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["llama"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, help="fewer, of small batches, to try it out")
    parser.add_argument("--evaluate", type=int, help="held-out problems other than 4,096")
    given = parser.parse_args()
    wanted = [(family, seed) for family in given.families for seed in given.seeds]
    wanted = [(family, seed) for family, seed in wanted if not (given.out / f"{family}-{seed}").exists()]
    if len(wanted) == 1 or given.workers == 1:
        for family, seed in wanted:
            make(family, seed, given.out / f"{family}-{seed}", given.steps, given.evaluate)
        return
    more = [f"--{key}={vars(given)[key]}" for key in ("steps", "evaluate") if vars(given)[key] is not None]
    command = [sys.executable, __file__, "--out", str(given.out), "--workers", "1", *more]
    running: list[subprocess.Popen[bytes]] = []
    ends: list[int] = []
    for family, seed in wanted:
        if len(running) == given.workers:
            ends.append(running.pop(0).wait())
        running.append(subprocess.Popen([*command, "--families", family, "--seeds", str(seed)]))
    ends += [process.wait() for process in running]
    if any(ends):
        sys.exit("a start was not made; run the same command again for those that are missing.")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")  # TF32, where there is any
    main()
