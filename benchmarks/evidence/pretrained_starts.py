"""Starts of pretrained models for word problems with two numbers: SmolLM2 as it comes, Gemma after a supervised warm-up.

    python benchmarks/evidence/pretrained_starts.py smollm2 --log starts.jsonl
    python benchmarks/evidence/pretrained_starts.py gemma --seeds 1 2 3 --log starts.jsonl

A base model neither ends its answers nor knows what is asked of it: it learns demonstrations, a few at a time, until a tenth of
its samples on other training problems is right. Folders of BASES for the plans `b…` and `gate0-words`; a line each in --log, with
what a start can do on held-out problems, greedy and at four temperatures. Starts that are there already are left alone.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from evidence_spec import BASES, PRETRAINED
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from corral.llm.models import load_model
from corral.llm.problems import Problems, generate
from corral.run.files import append_line
from corral.task import make_task, verify_all
from corral.task.two_numbers import TwoNumbers

RATE, BATCH = 2e-5, 32
ROUND, ROUNDS = 4, 40
"""Updates between two looks at the success, and rounds after which a start is taken as it is."""
ENOUGH = 0.1
"""Success at temperature 1 at which a warm-up ends."""
TEMPERATURES = (1.0, 0.7, 0.4, 0.2)
ASKED, WATCHED = 512, 256
"""Problems that are answered at a time; and those on which a warm-up is watched."""


class Start:
    """A model with its problems, as `corral train` words them."""

    longest = int(PRETRAINED["max_completion_length"])

    def __init__(self, base: str, device: str, name: str | None = None) -> None:
        self.model: PreTrainedModel
        self.model, self.tokenizer = load_model(name or base)
        self.model.to(device)  # type: ignore[arg-type]  # transformers' own annotation takes no string
        task = make_task("two_numbers")
        assert isinstance(task, TwoNumbers)
        self.task = task
        instruction = str({**PRETRAINED, **BASES[base]}["instruction"])
        self.problems = Problems(task=task, tokenizer=self.tokenizer, instruction=instruction)

    def success(self, prompts: list[str], *, temperature: float = 1.0, greedy: bool = False) -> float:
        """Share of the prompts that are answered rightly, a batch at a time."""
        self.model.eval()
        torch.manual_seed(0)
        right, device = 0.0, self.model.device.type
        for start in range(0, len(prompts), ASKED):
            batch = prompts[start : start + ASKED]
            ids = self.problems.tokens(batch)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                tokens = generate(self.model, self.tokenizer, ids, self.longest, greedy=greedy, temperature=temperature)
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            right += sum(verify_all(self.task, batch, texts))
        return right / len(prompts)

    def measure(self, prompts: list[str]) -> dict[str, float]:
        """Greedy success, and by temperature."""
        return {"greedy": self.success(prompts, greedy=True)} | {
            f"{temperature:g}": self.success(prompts, temperature=temperature) for temperature in TEMPERATURES
        }

    def warm_up(self, seed: int, rounds: int) -> list[dict[str, float]]:
        """Supervised on demonstrations, each seen once; loss and success of every round."""
        watched = self.task.train_prompts(WATCHED, seed=20_000 + seed)
        pairs = self.task.demonstrations(rounds * ROUND * BATCH, seed=10_000 + seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)
        found: list[dict[str, float]] = []
        while len(found) < rounds and (not found or found[-1]["success"] < ENOUGH):
            losses = []
            self.model.train()
            for _ in range(ROUND):
                loss = self._loss([pairs.pop() for _ in range(BATCH)])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found.append({"loss": float(torch.stack(losses).mean()), "success": self.success(watched)})
        return found

    def _loss(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
        """Mean cross-entropy of the answers' tokens."""
        prompts = self.problems.tokens([prompt for prompt, _ in pairs])
        answers = self.tokenizer([f" {answer}" for _, answer in pairs], add_special_tokens=False)["input_ids"]
        ended = [[*answer, self.tokenizer.eos_token_id] for answer in answers]
        return self.answer_loss(list(zip(prompts, ended, strict=True)))

    def answer_loss(self, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Mean cross-entropy of the second tokens of each pair after its first.

        Rows end together, so that logits are computed where answers are and nowhere else: those of a batch's prompts over
        262,144 tokens would be a gigabyte.
        """
        device, longest = self.model.device, max(len(answer) for _, answer in rows)
        batch = self.tokenizer.pad(
            {"input_ids": [[*row[0], *row[1]] for row in rows]}, padding_side="left", return_tensors="pt"
        )
        labels = torch.full((len(rows), longest), -100)
        for place, (_, answer) in enumerate(rows):
            labels[place, -len(answer) :] = torch.tensor(answer)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = self.model(**batch.to(device), logits_to_keep=longest + 1, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten().to(device))

    def save(self, out: Path) -> None:
        """Write model and tokenizer into a folder, whole."""
        beside = out.with_name(f".{out.name}")
        self.model.save_pretrained(beside)
        self.tokenizer.save_pretrained(beside)
        beside.replace(out)


def make(start: Start, base: str, seed: int, out: Path, *, rounds: int, problems: int) -> dict[str, Any]:
    """Write one start's folder whole, after a warm-up where it has rounds for one; what it can do."""
    began = time.monotonic()
    held_out = start.task.held_out_prompts(problems, seed=0)
    card: dict[str, Any] = {"model": base, "seed": seed, "held_out": problems, "before": start.measure(held_out[:WATCHED])}
    card["rounds"] = start.warm_up(seed, rounds)
    start.save(out)
    return card | {"after": start.measure(held_out), "seconds": time.monotonic() - began}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", choices=("smollm2", "gemma"))
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of Gemma's warm-ups")
    parser.add_argument("--problems", type=int, default=1024, help="held-out ones, to measure on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    for seed in given.seeds:
        out = Path(str(BASES[given.base]["model"]).format(start=seed))
        if out.exists():
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        start, rounds = Start(given.base, given.device), ROUNDS if given.base == "gemma" else 0
        card = make(start, given.base, seed, out, rounds=rounds, problems=given.problems)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


if __name__ == "__main__":
    main()
