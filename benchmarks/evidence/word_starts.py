"""Warm starts of a pretrained model on word problems: supervised on ASDiv's equations, until reinforcement has something to do.

    python benchmarks/evidence/word_starts.py --data runs/words --seeds 1 2 3 4 5 --workers 5 --log starts.jsonl
    python benchmarks/evidence/word_starts.py --model gemma --seeds 1 2 3 --workers 3 --log starts.jsonl

Each start learns from half of the training problems
(`part="sft"`; the other half is for reinforcement, SVAMP for measuring), an epoch at a time, until a quarter of its samples on
256 problems of that other half is right: a rule that never looks at SVAMP. Folders SEED for the plan `b`; a line each in --log,
with what the start can do before (on 256 problems) and after, greedy and at four temperatures. Five share a GPU. Starts that
are there already are left alone.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from evidence_spec import WORD_STARTS, WORDS
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from corral.llm.models import load_model
from corral.llm.problems import Problems, generate
from corral.run.files import append_line
from corral.task import verify_all
from corral.task.dataset import FiniteTask
from corral.task.words import WordProblems

EQUATION = re.compile(r"[0-9.+\-*/()]+=([0-9.]+)")
"""What ASDiv's formulas are where they are one line of arithmetic; the number is the answer."""
RATE, BATCH, WARM_UP = 1e-4, 32, 10
ENOUGH, EPOCHS = 0.25, 8
"""Success at temperature 1 at which a start is good enough, and epochs after which it is taken as it is."""
TEMPERATURES = (1.0, 0.7, 0.4, 0.2)
ASKED, WATCHED = 500, 256
"""Problems that are answered at a time; and those on which the model is measured as it comes and after every epoch."""


def demonstrations(task: WordProblems) -> list[tuple[str, str]]:
    """Problems of the task's part with their equations; those without one are left out, MAWPS's among them."""
    found = []
    for prompt in task.train_prompts(task.sizes[0], seed=0):
        formula = str(task.row(prompt).get("formula") or "").replace(" ", "")
        equation = EQUATION.fullmatch(formula)
        if equation is not None and task.verify(prompt, formula) == 1.0:
            found.append((prompt, formula))
    return found


class Start:
    """A model with its problems, as `corral train` words them."""

    longest = int(WORDS["max_completion_length"])
    rate = RATE

    def __init__(self, name: str, data: str, device: str) -> None:
        self.model: PreTrainedModel
        self.model, self.tokenizer = load_model(name)
        self.model.to(device)  # type: ignore[arg-type]  # transformers' own annotation takes no string
        self.reinforce: FiniteTask = WordProblems(path=data, part="rl")
        self.problems = Problems(task=self.reinforce, tokenizer=self.tokenizer, instruction=str(WORDS["instruction"]))

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
            right += sum(verify_all(self.reinforce, batch, texts))
        return right / len(prompts)

    def measure(self, prompts: list[str]) -> dict[str, float]:
        """Greedy success, and by temperature."""
        return {"greedy": self.success(prompts, greedy=True)} | {
            f"{temperature:g}": self.success(prompts, temperature=temperature) for temperature in TEMPERATURES
        }

    def epoch(self, pairs: list[tuple[str, str]], optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
        """Once through the demonstrations in a random order, on the tokens after the prompt; the mean loss."""
        self.model.train()
        prompts = self.problems.tokens([prompt for prompt, _ in pairs])
        texts = self.tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
        answers = [[*ids, self.tokenizer.eos_token_id] for ids in texts]
        losses = []
        for rows in torch.randperm(len(pairs), generator=generator).split(BATCH):
            loss = self._loss([(prompts[i], answers[i]) for i in rows.tolist()])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            for group in optimizer.param_groups:
                group["lr"] = min(self.rate, group["lr"] + self.rate / WARM_UP)
        return float(torch.stack(losses).mean())

    def _loss(self, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
        """Mean cross-entropy of the answers' tokens.

        Rows end together, so that logits are computed where answers are and nowhere else: those of a batch's prompts over
        262,144 tokens would be 4 GB.
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


def make(name: str, data: str, seed: int, out: Path, *, problems: int, epochs: int, device: str) -> dict[str, Any]:
    """Train one start and write its folder whole; what it can do."""
    began = time.monotonic()
    start = Start(name, data, device)
    svamp = start.reinforce.held_out_prompts(problems, seed=0)
    watched = start.reinforce.train_prompts(min(WATCHED, problems), seed=10_000 + seed)
    before = start.measure(svamp[:WATCHED])
    card: dict[str, Any] = {"model": name, "seed": seed, "held_out": len(svamp), "before": before, "epochs": []}
    pairs, generator = demonstrations(WordProblems(path=data, part="sft")), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(start.model.parameters(), lr=RATE / WARM_UP, weight_decay=0.0)
    while len(card["epochs"]) < epochs:
        loss = start.epoch(pairs, optimizer, generator)
        reached = start.success(watched)
        card["epochs"].append({"loss": loss, "success": reached})
        if reached >= ENOUGH:
            break
    card |= {"demonstrations": len(pairs), "after": start.measure(svamp), "seconds": time.monotonic() - began}
    start.save(out)
    return card


def main() -> None:
    """Command line: several starts side by side, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(WORDS["task_config"]["path"]), help="folder with asdiv, mawps and svamp")
    parser.add_argument("--out", type=Path, help="folder of the starts: that of the plans unless named")
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--problems", type=int, default=1000, help="of SVAMP, to measure on")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    given.out = given.out or Path(WORD_STARTS.get(given.model, f"runs/word-starts-{given.model}"))
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [seed for seed in given.seeds if not (given.out / str(seed)).exists()]
    if len(wanted) > 1 and given.workers > 1:
        sys.exit(side_by_side(wanted, given))
    transformers_logging.disable_progress_bar()
    for seed in wanted:
        more = {"problems": given.problems, "epochs": given.epochs, "device": given.device}
        card = make(given.model, given.data, seed, given.out / str(seed), **more)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


def side_by_side(seeds: list[int], given: argparse.Namespace) -> str | None:
    """A process for every seed, as many at once as there are workers; a sentence where one failed."""
    same = [f"--{key}={value}" for key, value in vars(given).items() if key not in ("seeds", "workers") and value is not None]
    running: list[subprocess.Popen[bytes]] = []
    ends: list[int] = []
    for seed in seeds:
        if len(running) == given.workers:
            ends.append(running.pop(0).wait())
        running.append(subprocess.Popen([sys.executable, __file__, *same, "--seeds", str(seed)]))
    ends += [process.wait() for process in running]
    return "a start was not made; run the same command again for those that are missing." if any(ends) else None


if __name__ == "__main__":
    main()
