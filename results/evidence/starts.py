"""Starts of the studies: a model as it comes, or supervised on demonstrations until a share of its samples is right.

    python -m results.evidence.starts smollm2 --log runs/evidence/pretrained-starts.jsonl
    python -m results.evidence.starts gemma --seeds 1 2 3 --log runs/evidence/pretrained-starts.jsonl
    python -m results.evidence.starts code --seeds 1 2 3          the embedded model on one-line functions, for a CPU

Where next to nothing is right there is nothing to reinforce: a model learns demonstrations, a few at a time, until enough of
its samples on problems to reinforce is right. Folders for the plans `b…`, `gate0-words` and `e`; a line each in --log, with
what a start can do on held-out problems, greedy and at four temperatures. Starts that are there already are left alone.
"""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from corral.lab.jobs.llm.problems import Problems, Sampling, generate
from corral.lab.models.load import load_model
from corral.lab.run.files import append_line
from corral.lab.tasks import Task, make_task, verify_all
from corral.lab.tasks.procedural import TwoNumbers
from results.evidence.code_problems import write_problems
from results.spec import BASES, CODE, WORDS

BATCH, WARM_UP = 32, 10
"""Demonstrations of an update, and updates in which the rate comes up."""
ASKED = 512
"""Problems that are answered at a time."""
TEMPERATURES = (1.0, 0.7, 0.4, 0.2)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Supervised warm-up that makes a start from a base model."""

    model: str
    """What `corral train --model` calls it."""
    out: str
    """Its folder, by `{start}`."""
    rounds: int = 0
    """Of demonstrations, after which a start is taken as it is."""
    enough: float = 0.1
    """Success at temperature 1 that ends the warm-up before that."""
    rate: float = 2e-5
    watched: int = 256
    """Training problems on which success is watched."""


WARM_UPS = {
    "smollm2": WarmUp(model="smollm2", out=BASES["smollm2"]["model"]),
    "gemma": WarmUp(model="gemma", out=BASES["gemma"]["model"], rounds=40),
    # Books have 1,823 problems to demonstrate: 42 rounds are three times through them.
    "books": WarmUp(model="smollm2", out=BASES["books"]["model"], rounds=42, enough=0.2),
    "code": WarmUp(model="tiny", out="runs/code-starts/{start}", rounds=40, enough=0.2, rate=1e-3, watched=128),
}


def about(base: str) -> dict[str, Any]:
    """Settings of a base's runs."""
    return CODE if base == "code" else WORDS | BASES[base]


def task_of(base: str, **changes: Any) -> Task:
    """The problems that a base is asked."""
    return make_task(about(base)["task"], **{**about(base).get("task_config", {}), **changes})


def demonstrations(base: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Problems with their answers; of books those of the half that is not reinforced."""
    if isinstance(task := task_of(base), TwoNumbers):
        return task.demonstrations(count, seed)
    told = task_of(base, part="sft")
    return [(prompt, told.answer(prompt)) for prompt in told.train_prompts(count, seed)]  # type: ignore[attr-defined]  # tasks with data have it


def rounds_of(base: str, rounds: int, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Demonstrations of each round: four batches of new ones, or a fourth of the functions at a time."""
    if base == "code":
        pairs = write_problems(Path(CODE["task_config"]["path"]))
        yield from (pairs[place % 4 :: 4] for place in range(rounds))
    else:
        size = 4 * BATCH
        pairs = [(prompt, f" {answer}") for prompt, answer in demonstrations(base, rounds * size, seed)]
        yield from (pairs[at : at + size] for at in range(0, len(pairs), size))


class Start:
    """A model with the problems of a task; `rate` is that of its AdamW."""

    def __init__(self, model: str, task: Task, *, instruction: str, longest: int, rate: float, device: str) -> None:
        self.model: PreTrainedModel
        self.model, self.tokenizer = load_model(model)
        self.model.to(device)  # type: ignore[arg-type]  # transformers' own annotation takes no string
        self.task, self.longest, self.rate = task, longest, rate
        self.problems = Problems(task=task, tokenizer=self.tokenizer, instruction=instruction)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate / WARM_UP, weight_decay=0.0)

    def success(self, prompts: list[str], *, temperature: float = 1.0, greedy: bool = False) -> float:
        """Share of the prompts that are answered rightly, a batch at a time."""
        self.model.eval()
        torch.manual_seed(0)
        right, device = 0.0, self.model.device.type
        for start in range(0, len(prompts), ASKED):
            batch = prompts[start : start + ASKED]
            ids = self.problems.tokens(batch)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                sampling = Sampling(max_tokens=self.longest, greedy=greedy, temperature=temperature)
                tokens = generate(self.model, self.tokenizer, ids, sampling)
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            right += sum(verify_all(self.task, batch, texts))
        return right / len(prompts)

    def measure(self, prompts: list[str]) -> dict[str, float]:
        """Greedy success, and by temperature."""
        return {"greedy": self.success(prompts, greedy=True)} | {
            f"{temperature:g}": self.success(prompts, temperature=temperature) for temperature in TEMPERATURES
        }

    def learn(self, pairs: list[tuple[str, str]], generator: torch.Generator) -> float:
        """Once through the demonstrations in a random order, on the tokens after the prompt; the mean loss."""
        self.model.train()
        prompts = self.problems.tokens([prompt for prompt, _ in pairs])
        texts = self.tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
        answers = [[*ids, self.tokenizer.eos_token_id] for ids in texts]
        losses = []
        for rows in torch.randperm(len(pairs), generator=generator).split(BATCH):
            loss = self.answer_loss([(prompts[i], answers[i]) for i in rows.tolist()])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
            for group in self.optimizer.param_groups:
                group["lr"] = min(self.rate, group["lr"] + self.rate / WARM_UP)
        return float(torch.stack(losses).mean())

    def answer_loss(self, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Mean cross-entropy of the answers' tokens; a row is the tokens of a prompt and those of its answer.

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

    def until(
        self, enough: float, watched: list[str], parts: Iterable[list[tuple[str, str]]], generator: torch.Generator
    ) -> list[dict[str, float]]:
        """A round for each part of the demonstrations, until this share of the watched problems is right; loss and success."""
        found: list[dict[str, float]] = []
        for pairs in parts:
            found.append({"loss": self.learn(pairs, generator), "success": self.success(watched)})
            print(found[-1], flush=True)
            if found[-1]["success"] >= enough:
                break
        return found

    def save(self, out: Path) -> None:
        """Write model and tokenizer into a folder, whole."""
        beside = out.with_name(f".{out.name}")
        self.model.save_pretrained(beside)
        self.tokenizer.save_pretrained(beside)
        beside.replace(out)


def load(base: str, device: str, model: str | None = None) -> Start:
    """A base's model, or another in its place, asked as the base is."""
    how: dict[str, Any] = {"instruction": about(base)["instruction"], "longest": about(base)["max_completion_length"]}
    return Start(model or WARM_UPS[base].model, task_of(base), rate=WARM_UPS[base].rate, device=device, **how)


def make(start: Start, base: str, seed: int, out: Path, *, rounds: int, problems: int) -> dict[str, Any]:
    """Write one start's folder whole, after a warm-up where it has rounds for one; what it can do."""
    began, how = time.monotonic(), WARM_UPS[base]
    held_out = start.task.held_out_prompts(problems, seed=0)
    card = {"model": base, "seed": seed, "held_out": len(held_out), "before": start.measure(held_out[: how.watched])}
    watched = start.task.train_prompts(how.watched, seed=20_000 + seed)
    parts = rounds_of(base, rounds, seed=10_000 + seed)
    card["rounds"] = start.until(how.enough, watched, parts, torch.Generator().manual_seed(seed))
    start.save(out)
    return card | {"after": start.measure(held_out), "seconds": time.monotonic() - began}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", choices=WARM_UPS)
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of the warm-ups")
    parser.add_argument("--problems", type=int, default=1024, help="held-out ones, to measure on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if given.base == "code":
        write_problems(Path(CODE["task_config"]["path"]))
    for seed in given.seeds:
        out = Path(WARM_UPS[given.base].out.format(start=seed))
        if out.exists():
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        start, rounds = load(given.base, given.device), WARM_UPS[given.base].rounds
        card = make(start, given.base, seed, out, rounds=rounds, problems=given.problems)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


if __name__ == "__main__":
    main()
