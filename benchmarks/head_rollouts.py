"""What do real rollouts ask of the head: how many tokens hold the mass, how often may a backward be sparse, how fast is it?

SmolLM2-135M samples at temperature 1: answers to GSM8K questions (flat), and things that it knows by heart (peaked), before and
after some steps of reinforcement learning with TROLL on small sums. Kept are the hidden states of every set, of the policy that
drew it and of the one an update later. `collect` needs `make smollm2`. `measure` needs what it wrote, and for speed a GPU.

    python benchmarks/head_rollouts.py collect rollouts.pt --questions gsm8k/test.jsonl
    python benchmarks/head_rollouts.py measure rollouts.pt [--save]
"""

import argparse
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_contenders import OLD, PRODUCTS, TROLL, contenders
from head_problem import Problem
from head_vs_naive import errors, interleaved, peak_mebibytes, rounded
from results import save_results
from torch import Tensor

import corral
from corral.kernels.policy_loss import TOLERANCE

FILE = Path(__file__).with_name("results") / "head_rollouts.json"
K, MASS = 64, 1 - 1e-5
GROUP, SUMS, UPDATES = 8, 2, 2
"""Completions of a sum, sums of a step, updates of a batch."""
WANTED = {
    (PRODUCTS, "one product"), (PRODUCTS, "three products"), (OLD, "full logits"), (OLD, "corral, triton"),
    (TROLL, "full logits"), (TROLL, "corral, torch"), (TROLL, "corral, triton"), (TROLL, "corral, triton, exact"),
}  # fmt: skip


class Student:
    """SmolLM2 with adapters on its attention, and an optimizer for them; the head stays as it is."""

    def __init__(self, learning_rate: float) -> None:
        from peft import LoraConfig, get_peft_model

        from corral.llm.models import load_smollm2

        model, self.tokenizer = load_smollm2()
        adapter = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model = get_peft_model(model, adapter).eval()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=learning_rate)

    @property
    def weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach()

    def sample(self, questions: list[str], tokens: int) -> tuple[Tensor, Tensor]:
        """Ids [B, P + T], padded on the left, and the mask of what was sampled, its end included."""
        chats = [[{"role": "user", "content": question}] for question in questions]
        texts = [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        self.tokenizer.padding_side = "left"
        given = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        with torch.no_grad():
            ids = self.model.generate(
                **given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=end
            )
        drawn = ids[:, given["input_ids"].shape[1] :]
        over = (drawn == end).cumsum(-1) - (drawn == end).long() > 0
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, given["input_ids"].shape[1] :] = ~over
        self.attention = torch.cat([given["attention_mask"], torch.ones_like(drawn)], -1)
        return ids, mask

    def hidden(self, ids: Tensor, mask: Tensor, attention: Tensor) -> Tensor:
        """Last hidden states of the positions that predict what was sampled [N, H]."""
        position = (attention.cumsum(-1) - 1).clamp(min=0)
        states = self.model.base_model.model.model(ids, attention_mask=attention, position_ids=position).last_hidden_state
        return states[:, :-1][mask[:, 1:]]

    def learn(self, draw: random.Random) -> float:
        """One batch of sums and two updates on it; returns the mean reward."""
        pairs = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(SUMS)]
        questions = [f"What is {a} + {b}?" for a, b in pairs for _ in range(GROUP)]
        ids, mask = self.sample(questions, 12)
        attention, tokens = self.attention, ids[:, 1:][mask[:, 1:]]
        texts = [self.tokenizer.decode(row[keep]) for row, keep in zip(ids, mask, strict=True)]
        answers = [a + b for a, b in pairs for _ in range(GROUP)]
        rewards = torch.tensor([closeness(x, y) for x, y in zip(texts, answers, strict=True)])
        advantages = corral.group_advantages(rewards, torch.arange(len(rewards)) // GROUP, "dr_grpo")
        of_row = mask[:, 1:].nonzero()[:, 0]
        objective, old = corral.make_objective("troll"), None
        for _ in range(UPDATES):
            states = self.hidden(ids, mask, attention)
            if old is None:
                with torch.no_grad():
                    old = corral.lm_head(states, self.weight, tokens, top_k=K, mass=MASS).dist
            everything = torch.ones(1, len(tokens), dtype=torch.bool)
            anchor = corral.SparseDist(old.ids[None], old.logp[None], old.rest[None])
            logp = anchor.logp[..., 0]
            batch = corral.TokenBatch(logp, logp, advantages[of_row][None], everything, None, anchor)
            loss = corral.policy_loss_from_hidden(states[None], self.weight, tokens[None], batch, objective).loss.mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return rewards.mean().item()


def closeness(text: str, answer: int) -> float:
    """1 for the right number, less for others, 0 for none; the last number counts."""
    numbers = re.findall(r"\d{1,6}", text)
    return 1 / (1 + abs(int(numbers[-1]) - answer)) if numbers else 0.0


def by_heart(count: int, draw: random.Random) -> list[str]:
    """Requests whose answers are all but certain, token by token."""
    words = ["apple", "river", "stone", "cloud", "green", "table", "seven", "window", "paper", "music"]
    lists = (" ".join(draw.choices(words, k=6)) for _ in range(count))
    return [
        f"Repeat these words four times, exactly: {words}." if i % 2 else f"Count from {i} to {i + 30}, separated by commas."
        for i, words in enumerate(lists)
    ]


def collect(path: Path, questions: Path, steps: int, rows: int, learning_rate: float) -> None:
    """Sets before and after learning, and the head: its weight in 8 bits, as the file has it, so that little has to travel."""
    torch.manual_seed(0)
    draw, student = random.Random(0), Student(learning_rate)
    asked = {
        "gsm8k": [json.loads(line)["question"] for line in questions.read_text().splitlines()[: rows // 40]],
        "by heart": by_heart(rows // 40, draw),
    }
    sets: dict[str, dict[str, Tensor]] = {}
    rates: list[float] = []

    def keep(when: str) -> None:
        drawn = {}
        for name, texts in asked.items():
            ids, mask = student.sample(texts, 64)
            drawn[name] = ids, mask, student.attention
        before = {name: student.hidden(*given).detach() for name, given in drawn.items()}
        rates.append(student.learn(draw))
        for name, given in drawn.items():
            old, new = (x[:rows].bfloat16() for x in (before[name], student.hidden(*given).detach()))
            tokens = given[0][:, 1:][given[1][:, 1:]][:rows]
            sets[f"{name}, {when}"] = {"old": old, "new": new, "tokens": tokens.int()}
            print(name, when, len(tokens), flush=True)

    with torch.no_grad():
        weight = student.weight.clone()
    keep("before")
    for step in range(1, steps):
        rates.append(student.learn(draw))
        print(step, rates[-1], flush=True)
    keep(f"after {steps} steps")
    scale = weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    whole = (weight.unflatten(-1, (-1, 32)) / scale[..., None].clamp(min=1e-12)).round().to(torch.int8)
    torch.save({"sets": sets, "scale": scale.half(), "whole": whole, "rewards": rates}, path)


def load(path: Path, device: str) -> tuple[dict[str, dict[str, Tensor]], Tensor, list[float]]:
    stored = torch.load(path)
    weight = (stored["whole"].float() * stored["scale"].float()[..., None]).flatten(-2).bfloat16()
    sets = {name: {key: x.to(device) for key, x in given.items()} for name, given in stored["sets"].items()}
    return sets, weight.to(device), stored["rewards"]


def statistics_of(p: Problem) -> dict[str, float]:
    """How flat the policy is, and how many rows the sparse backward's own bound sends the dense way."""
    logp = (p.hidden_old.double() @ p.weight.double().T).log_softmax(-1)
    mass = logp.exp().sort(-1, descending=True).values.cumsum(-1)
    needed = (mass < MASS).sum(-1) + 1
    outside = 1 - mass[:, K - 1]
    found = {
        "entropy": -(logp.exp() * logp).sum(-1).mean().item(), "support_median": needed.double().median().item(),
        "support_fits": (needed <= K).double().mean().item(), "outside_mean": outside.mean().item(),
        "outside_90": outside.quantile(0.9).item(),
    }  # fmt: skip
    assert p.old is not None
    head = corral.lm_head(p.hidden_new.float(), p.weight.float(), p.tokens, ids=p.old.ids)
    leaves = [x.detach().requires_grad_() for x in (head.dist.logp, head.dist.rest)]
    dist = corral.SparseDist(p.old.ids[None], leaves[0][None], leaves[1][None])
    old = corral.SparseDist(p.old.ids[None], p.old.logp[None], p.old.rest[None])
    logp_old = old.logp[..., 0]
    batch = corral.TokenBatch(dist.logp[..., 0], logp_old, p.advantages[None], logp_old < 1, dist, old)
    out = corral.make_objective("troll")(batch)
    g_kept, g_rest = torch.autograd.grad(out.loss.sum(), leaves)
    total = g_kept.sum(-1) + g_rest
    inside = (g_kept - leaves[0].exp() * total[:, None]).abs().sum(-1)
    off = (g_rest - leaves[1].exp() * total).abs()
    size = inside + off
    dense = off > TOLERANCE * torch.maximum(size, size[size > 0].mean())
    return found | {
        "dense_share": dense[size > 0].double().mean().item(), "active": out.metrics["tr/active_frac"].item(),
        "kl": out.metrics["tr/kl_before"].item(),
    }  # fmt: skip


def problem_of(given: dict[str, Tensor], weight: Tensor, tokens: int | None = None) -> Problem:
    """A set as the head's benchmark has its problems; `tokens` repeats its rows to so many."""
    times = 1 if tokens is None else -(-tokens // len(given["tokens"]))
    old, new, sampled = (x.repeat(times, *[1] * (x.ndim - 1))[:tokens] for x in (given["old"], given["new"], given["tokens"]))
    draw = torch.Generator(old.device).manual_seed(0)
    advantages = torch.randn(len(old), generator=draw, device=old.device)
    return Problem(
        hidden_old=old, hidden_new=new, weight=weight, tokens=sampled.long(), advantages=advantages, k=K
    ).with_support()


def measure(path: Path, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row of statistics and errors per set; on a GPU a row per contender besides."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sets, weight, _ = load(path, device)
    rows: list[dict[str, Any]] = []
    for name, given in sets.items():
        p = problem_of(given, weight)
        rows.append({"set": name, "rows": len(p.tokens), **statistics_of(p.first(512))})
        runs = {key: run for key, run in contenders(device, torch.bfloat16).items() if key in WANTED or device == "cpu"}
        wide = problem_of(given, weight, tokens) if device == "cuda" else p.first(64)
        for key, run in runs.items():
            row = {"set": name, "task": key[0], "name": key[1], **errors(key[0], run, p)}
            if device == "cuda":
                row["mib"] = peak_mebibytes(partial(run, wide), device)
            rows.append(row)
        if device == "cuda":
            times = interleaved({key: partial(run, wide) for key, run in runs.items()}, device, rounds, 0.15)
            for row in rows[-len(runs) :]:
                row |= {"N": len(wide.tokens), "ms": times[row["task"], row["name"]]}
        for row in rows[-len(runs) - 1 :]:
            print({key: rounded(value) for key, value in row.items()}, flush=True)
    return [{key: rounded(value) for key, value in row.items()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["collect", "measure"])
    parser.add_argument("file", type=Path, help="what `collect` writes and `measure` reads")
    parser.add_argument("--questions", type=Path, help="GSM8K, one question per line of JSON")
    parser.add_argument("--steps", type=int, default=12, help="of learning")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--rows", type=int, default=768, help="tokens of each set")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a timed run: those of the set, repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help=f"keep the rows in benchmarks/results/{FILE.name}")
    args = parser.parse_args()
    if args.command == "collect":
        if args.questions is None:
            parser.error("collect: --questions names a file of GSM8K")
        collect(args.file, args.questions, args.steps, args.rows, args.learning_rate)
        return
    rows = measure(args.file, args.tokens, args.rounds)
    if args.save:
        FILE.parent.mkdir(exist_ok=True)
        save_results(f"rollouts on {'cuda' if torch.cuda.is_available() else 'cpu'}", rows, FILE)


if __name__ == "__main__":
    main()
