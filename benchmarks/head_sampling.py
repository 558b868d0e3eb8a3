"""Real rollouts for the head's benchmark: SmolLM2-135M samples at temperature 1, before and after reinforcement learning.

Five kinds of context, from those in which so small a model is unsure to those in which it is all but certain. It learns small
sums, with TROLL and adapters on its attention; the head stays as it is. Kept are the hidden states of every set, under the
policy that drew it and under the one a step of learning later, and the head's weight in 8 bits with a scale for every 32, which
is how the model's file has it: nothing is lost.
"""

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import corral
from corral.run.files import write_whole

K, MASS = 64, 1 - 1e-5
GROUP, SUMS, UPDATES = 8, 2, 2
"""Completions of a sum, sums of a step, updates of a batch."""
CONTEXTS = 8
"""Of each kind."""
BLOCK = 32
"""Neighbours in a row of the weight that share a scale."""
PASSAGES = [
    "The tide went out before dawn, and the harbour lay still under a thin grey mist. Three boats leaned in the mud.",
    "Water boils at a lower temperature on a mountain, because the air above it is thinner and presses on it less.",
    "She counted the letters twice, tied them with a piece of string, and put them back where her father had left them.",
    "The bridge was built of oak, and for two hundred years nobody thought of asking what would happen when it burned.",
]


class Student:
    """SmolLM2 with adapters on its attention, and an optimizer for them."""

    def __init__(self, learning_rate: float) -> None:
        from peft import LoraConfig, get_peft_model

        from corral.llm.models import load_smollm2

        model, self.tokenizer = load_smollm2()
        self.tokenizer.padding_side = "left"
        adapter = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model = get_peft_model(model, adapter).eval()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=learning_rate)

    @property
    def weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach()

    def chat(self, question: str) -> str:
        """A question as the model was taught to be asked."""
        asked = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)

    def sample(self, contexts: list[str], tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, P + T], padded on the left; the mask of what was sampled, its end included; and the attention mask."""
        given = self.tokenizer(contexts, return_tensors="pt", padding=True, add_special_tokens=False)
        end, start = self.tokenizer.eos_token_id, given["input_ids"].shape[1]
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": tokens, "pad_token_id": end}
        with torch.no_grad():
            ids = self.model.generate(**given, **how)
        drawn = ids[:, start:]
        over = (drawn == end).cumsum(-1) - (drawn == end).long() > 0
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, start:] = ~over
        return ids, mask, torch.cat([given["attention_mask"], torch.ones_like(drawn)], -1)

    def hidden(self, ids: Tensor, mask: Tensor, attention: Tensor) -> Tensor:
        """Last hidden states of the positions that predict what was sampled [N, H]."""
        position = (attention.cumsum(-1) - 1).clamp(min=0)
        states = self.model.base_model.model.model(ids, attention_mask=attention, position_ids=position).last_hidden_state
        return states[:, :-1][mask[:, 1:]]

    def learn(self, draw: random.Random) -> float:
        """One batch of sums and two updates on it; returns the mean reward."""
        pairs = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(SUMS)]
        asked = [self.chat(sum_of(*pair)) for pair in pairs for _ in range(GROUP)]
        ids, mask, attention = self.sample(asked, 12)
        tokens = ids[:, 1:][mask[:, 1:]]
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
            anchor = corral.SparseDist(old.ids[None], old.logp[None], old.rest[None])
            logp = anchor.logp[..., 0]
            batch = corral.TokenBatch(logp, logp, advantages[of_row][None], torch.ones_like(logp) > 0, None, anchor)
            loss = corral.policy_loss_from_hidden(states[None], self.weight, tokens[None], batch, objective).loss.mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return rewards.mean().item()


def sum_of(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def closeness(text: str, answer: int) -> float:
    """1 for the right number, less for others, 0 for none; the last number counts."""
    numbers = re.findall(r"\d{1,6}", text)
    return 1 / (1 + abs(int(numbers[-1]) - answer)) if numbers else 0.0


def contexts(student: Student, questions: list[str], draw: random.Random) -> dict[str, list[str]]:
    """Kind → contexts, the surest last: what comes next is in the context already, or follows from it."""
    numbers = ["".join(draw.choices("0123456789", k=40)) for _ in range(CONTEXTS)]
    cue = [" ".join(text.split()[:4]) for text in PASSAGES]
    return {
        "GSM8K answers": [student.chat(question) for question in questions[:CONTEXTS]],
        "small sums": [student.chat(sum_of(draw.randint(2, 9), draw.randint(2, 9))) for _ in range(4 * CONTEXTS)],
        "passage, repeated": [f"{text}\n\n" * 5 + start for text, start in zip(PASSAGES * 2, cue * 2, strict=True)],
        "digits, repeated": [f"{number}\n" * 5 + number[:4] for number in numbers],
        "counting": [", ".join(str(i) for i in range(first, first + 40)) + "," for first in range(1, 80, 10)],
    }


def collect(path: Path, questions: list[str], steps: int, every: int, rows: int, learning_rate: float) -> None:
    """Sets before learning, and the latest of those after every so many steps; the file is written anew with each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    draw, student = random.Random(0), Student(learning_rate)
    asked = contexts(student, questions, draw)
    kept: dict[str, Any] = {**eight_bits(student.weight), "sets": {}, "rewards": []}
    for step in range(steps + 1):
        drawn = {}
        if step % every == 0:
            drawn = {kind: student.sample(texts, -(-rows // len(texts))) for kind, texts in asked.items()}
            with torch.no_grad():
                before = {kind: student.hidden(*given) for kind, given in drawn.items()}
        kept["rewards"].append(student.learn(draw))
        print(f"step {step}: mean reward {kept['rewards'][-1]:.2f}", flush=True)
        if drawn:
            kept["sets"] = {name: given for name, given in kept["sets"].items() if given["step"] == 0}
        for kind, (ids, mask, attention) in drawn.items():
            with torch.no_grad():
                after = student.hidden(ids, mask, attention)
            old, new = (x[:rows].bfloat16() for x in (before[kind], after))
            tokens = ids[:, 1:][mask[:, 1:]][:rows].int()
            name = f"{kind}, after {step} steps" if step else f"{kind}, before"
            kept["sets"][name] = {"old": old, "new": new, "tokens": tokens, "step": step}
        if drawn:
            write_whole(path, partial(torch.save, kept))


def eight_bits(weight: Tensor) -> dict[str, Tensor]:
    """The weight as its file has it: a whole number for each entry and a scale for every 32."""
    blocks = weight.unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) / 127).half()
    whole = (blocks / scale.float()[..., None].clamp(min=1e-12)).round().to(torch.int8)
    found = {"whole": whole, "scale": scale}
    if not torch.equal(weight_of(found), weight):
        raise ValueError("this model's head is not stored in 8 bits with a scale for every 32; its weight would be changed.")
    return found


def weight_of(stored: dict[str, Any]) -> Tensor:
    return (stored["whole"].float() * stored["scale"].float()[..., None]).flatten(-2)
