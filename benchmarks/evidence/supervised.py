"""Warm starts: a model learns demonstrations of a task, worded as `corral train` words its problems."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from corral.lab.jobs.llm.problems import Problems, Sampling, generate
from corral.lab.models.load import load_model
from corral.lab.tasks import Task, verify_all

BATCH, WARM_UP = 32, 10
"""Demonstrations of an update, and updates in which the rate comes up."""
ASKED = 512
"""Problems that are answered at a time."""
TEMPERATURES = (1.0, 0.7, 0.4, 0.2)


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
            sampling = Sampling(max_tokens=self.longest, greedy=greedy, temperature=temperature)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
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
