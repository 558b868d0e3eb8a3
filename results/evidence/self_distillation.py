"""Does a model learn from itself, shown the solution? Countdown with the embedded model, word problems with another.

    python -m results.evidence.self_distillation --out runs/self-distillation      # five minutes, then two for each run
    python -m results.evidence.self_distillation --model smollm2 --data WORDS.jsonl --rate 1e-5 --out runs/smollm2   # on a GPU

The embedded model has never seen anything before a problem, and is no teacher as it is: shown a solution, it is right at none.
So it is first taught to read one, supervised: three quarters of the examples are a solution, a line end and its problem, with
a clean answer; one quarter are problems alone, answered with mistakes, so that it goes on making them there. Then it learns
from a frozen copy of itself, by `corral train --objective distill`, and is measured on held-out problems alone. A model that
reads instructions needs no such lesson: any other `--model` (`make smollm2` fetches that one) is trained as it is, on rows with
a problem in `input` and a number in `target`, as in MAWPS; a tenth of them is held out.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.jobs.llm.settings import resolve
from corral.lab.jobs.llm.train import train
from corral.lab.models.tiny import load_tiny
from corral.lab.tasks.procedural import Countdown

LESSONS, BATCH, RATE = 600, 96, 1e-3
MISTAKES, SHARE = 0.1, 4
"""Probability that a character of an answer to a problem alone is replaced, and one example in so many is one."""
CHAT = "{problem}\nThink briefly, then end with #### and the number."
SHOWN = CHAT + " (The right number is {target}.)"


def teach_to_read(folder: Path) -> None:
    """The embedded model, taught to answer a problem whose solution stands before it."""
    task, (model, tokenizer) = Countdown(), load_tiny()
    demonstrations, draw = task.demonstrations(20_000, 11), random.Random(0)
    characters = tokenizer("0123456789+-*=", add_special_tokens=False)["input_ids"]

    def example(problem: str, solution: str, shown: bool) -> tuple[list[int], list[int]]:
        prompt = tokenizer(f"{solution}\n{problem}" if shown else problem)["input_ids"]
        tokens = tokenizer(solution, add_special_tokens=False)["input_ids"]
        if not shown:
            tokens = [draw.choice(characters) if draw.random() < MISTAKES else token for token in tokens]
        return [*prompt, *tokens, tokenizer.eos_token_id], [-100] * len(prompt) + [*tokens, tokenizer.eos_token_id]

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()
    for step in range(LESSONS):
        rows = [example(*demonstrations[draw.randrange(len(demonstrations))], i % SHARE != 0) for i in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids, labels = (
            torch.tensor([[*row[part], *[padding] * (width - len(row[part]))] for row in rows])
            for part, padding in ((0, tokenizer.pad_token_id), (1, -100))
        )
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * (1 - step / LESSONS)
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"with the right solution before it {shown_success(model, tokenizer, right=True):.2f}, with another problem's "
          f"{shown_success(model, tokenizer, right=False):.2f}")  # fmt: skip


def shown_success(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, right: bool) -> float:
    """Share of 256 problems that the model answers at temperature 1, shown their solutions, or one another's."""
    task = Countdown()
    rows = task.demonstrations(256, 5)
    solutions = [solution for _, solution in (rows if right else rows[1:] + rows[:1])]
    ids = [tokenizer(f"{solution}\n{problem}")["input_ids"] for (problem, _), solution in zip(rows, solutions, strict=True)]
    torch.manual_seed(0)
    tokens = generate(model.eval(), tokenizer, ids, Sampling(max_tokens=task.max_completion_length + 1))
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(task.verify(problem, text) for (problem, _), text in zip(rows, texts, strict=True)) / len(rows)


def run(model: str, bound: float, seed: int, steps: int, rate: float, data: Path | None, out: Path) -> dict[str, Any]:
    """One run of self-distillation; its summary."""
    settings: dict[str, Any] = {
        "model": model, "task": "countdown", "objective": "distill", "objective_config": {"bound": bound}, "seed": seed,
        "steps": steps, "eval_every": 10, "eval_size": 512, "checkpoint_every": steps, "num_generations": 4,
        "per_device_train_batch_size": 64, "steps_per_generation": 2, "learning_rate": rate, "gradient_checkpointing": False,
    }  # fmt: skip
    if data is not None:
        columns = {"prompt_column": "input", "answer_column": "target", "verifier": "number"}
        settings |= {"task": "jsonl", "task_config": {"path": str(data), **columns}, "max_completion_length": 96}
        settings |= {"instruction": CHAT, "teacher_instruction": SHOWN, "eval_size": 200}
    return train(resolve([settings]), out=out, quiet=True).summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.05, float("inf")])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate; 1e-5 is one for SmolLM2")
    parser.add_argument("--data", type=Path, help="word problems with `input` and `target`, for a model other than tiny")
    args = parser.parse_args()
    if (args.model == "tiny") == (args.data is not None):
        parser.error("`--data` goes with a model that reads instructions: the embedded one learns countdown.")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model = args.model
    if model == "tiny":
        model = str(args.out / "reader")
        if not Path(model, "config.json").is_file():
            teach_to_read(Path(model))
    for seed in args.seeds:
        for bound in args.bounds:
            began = time.process_time()
            found = run(model, bound, seed, args.steps, args.rate, args.data, args.out / f"bound-{bound:g}-seed-{seed}")
            shown = {name: found[name] for name in ("success_start", "success_final", "stopped")}
            print(
                json.dumps({"bound": bound, "seed": seed, **shown, "cpu_seconds": round(time.process_time() - began)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
