"""Which tokens do clipping and DPPO block on identical batches, and how far had their distributions really moved?

    OMP_NUM_THREADS=1 python -m results.evidence.blocked_tokens --out runs/evidence/blocked.jsonl

The embedded model on countdown, a plain loop: rollouts, eight updates by clipping, then every rule looks at the same old and
new policies, token by token, with the total variation over the whole vocabulary beside it. A line for each rate, by bucket of
the old probability of the sampled token. A minute of one core.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corral import TokenBatch, group_advantages, make_objective, reduce_loss
from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.models.tiny import load_tiny
from corral.lab.run.files import append_line
from corral.lab.tasks.procedural import Countdown
from corral.objective import Objective

PROMPTS, GROUP, UPDATES = 64, 8, 8
EDGES = (0.01, 0.1, 0.5, 0.9)
NAMES = ("below .01", ".01 – .1", ".1 – .5", ".5 – .9", "above .9")
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip .2": ("ppo_clip", {}),
    **{f"TV {bound:g}": ("dppo", {"bound": bound}) for bound in (0.1, 0.15, 0.2)},
}
"""What blocks tokens, by name; DPPO's divergence is of the sampled token against all others."""
FAR = 0.2
"""Total variation over the vocabulary beyond which DPPO's paper would have a token blocked."""


def log_probs(model: Any, ids: Tensor, start: int) -> Tensor:
    """Log-probabilities of the whole vocabulary at the completions' places [B T V]; padding is on the left of prompts."""
    logits: Tensor = model(input_ids=ids, attention_mask=(ids != model.config.pad_token_id).long()).logits
    return logits[:, start - 1 : -1].float().log_softmax(-1)


def roll_out(model: Any, tokenizer: Any, task: Countdown, seed: int) -> tuple[Tensor, int, Tensor, Tensor]:
    """Prompts with completions [B P+T], the length P, the mask of completions [B T], and advantages [B]."""
    prompts = [prompt for prompt in task.train_prompts(PROMPTS, seed) for _ in range(GROUP)]
    asked = tokenizer(prompts)["input_ids"]
    torch.manual_seed(seed)
    written = generate(model.eval(), tokenizer, asked, Sampling(max_tokens=task.max_completion_length + 1))
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    rewards = torch.tensor([task.verify(prompt, text) for prompt, text in zip(prompts, texts, strict=True)])
    advantages = group_advantages(rewards, torch.arange(PROMPTS).repeat_interleave(GROUP), "grpo")
    before, behind = (max(map(len, rows)) for rows in (asked, written))
    ids = torch.full((len(asked), before + behind), tokenizer.pad_token_id)
    for row, (prompt, completion) in enumerate(zip(asked, written, strict=True)):
        ids[row, before - len(prompt) : before] = torch.tensor(prompt)
        ids[row, before : before + len(completion)] = torch.tensor(completion)
    mask = torch.arange(behind) < torch.tensor([[len(completion)] for completion in written])
    return ids, before, mask, advantages


def update(model: Any, optimizer: Any, ids: Tensor, start: int, mask: Tensor, old: Tensor, advantages: Tensor) -> None:
    """Eight updates by clipping, sums over a fixed length as the demo has them."""
    objective, model = make_objective("ppo_clip"), model.train()
    for rows in torch.randperm(len(ids)).chunk(UPDATES):
        new = log_probs(model, ids[rows], start).gather(-1, ids[rows, start:, None])[..., 0]
        out = objective(TokenBatch(new, old[rows], advantages[rows], mask[rows]))
        reduce_loss(out.loss, mask[rows], "seq-mean-token-sum-norm", length=mask.shape[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def look(batch: TokenBatch, old: Tensor, new: Tensor, rules: dict[str, Objective]) -> dict[str, Tensor]:
    """Per unmasked token: old probability, total variation over the vocabulary, and whether each rule blocks it."""
    columns = {"p_old": batch.logp_old.exp(), "tv": (old.exp() - new.exp()).abs().sum(-1) / 2}
    for name, rule in rules.items():
        acted = rule(batch).acted
        assert acted is not None
        columns[name] = acted.float()
    return {name: column[batch.mask] for name, column in columns.items()}


def by_bucket(columns: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A row for each bucket of the old probability: its tokens, how far they moved, shares blocked, and blocked though near."""
    place = torch.bucketize(columns["p_old"], torch.tensor(EDGES))
    rows = []
    for index, name in enumerate(NAMES):
        here = {key: column[place == index] for key, column in columns.items()}
        if not (count := len(here["tv"])):
            continue
        far = here["tv"] > FAR
        row: dict[str, Any] = {"bucket": name, "tokens": count, "tv": share(here["tv"]), "far": share(far.float())}
        row["blocked"] = {rule: share(here[rule]) for rule in RULES}
        row["near"] = {rule: share(here[rule] * ~far) for rule in RULES}
        rows.append(row)
    return rows


def share(column: Tensor) -> float:
    """The mean, to four digits."""
    return float(f"{column.mean():.4g}")


def measure(rate: float, batches: int, seed: int) -> list[dict[str, Any]]:
    """Batches in a row at one rate, looked at after each one's updates."""
    (model, tokenizer), task = load_tiny(), Countdown()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rules = {name: make_objective(objective, **settings) for name, (objective, settings) in RULES.items()}
    found: list[dict[str, Tensor]] = []
    for index in range(batches):
        ids, start, mask, advantages = roll_out(model, tokenizer, task, 1000 * seed + index)
        with torch.no_grad():
            old = log_probs(model, ids, start)
        tokens = ids[:, start:, None]
        logp_old = old.gather(-1, tokens)[..., 0]
        before = look(TokenBatch(logp_old, logp_old, advantages, mask), old, old, rules)
        assert not any(before[name].any() for name in RULES), "nothing has moved, and something is blocked"
        update(model, optimizer, ids, start, mask, logp_old, advantages)
        with torch.no_grad():
            new = log_probs(model.eval(), ids, start)
        found.append(look(TokenBatch(new.gather(-1, tokens)[..., 0], logp_old, advantages, mask), old, new, rules))
    return by_bucket({name: torch.cat([columns[name] for columns in found]) for name in found[0]})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-4, 1e-3])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--seed", type=int, default=401)
    parser.add_argument("--out", type=Path, help="file to append a line per rate to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for rate in given.rates:
        line = {"rate": rate, "batches": given.batches, "seed": given.seed, "buckets": measure(rate, given.batches, given.seed)}
        print(line, flush=True)
        if given.out is not None:
            append_line(given.out, line)


if __name__ == "__main__":
    main()
