"""Rows of tokens.parquet: the KL and the log-ratio of single tokens, and what the objective did to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from corral.objective import Objective
from corral.objective.metrics import token_kl
from corral.objective.ratio import log_ratio
from corral.types import SparseDist, TokenBatch

_COMPLETIONS = 4
"""Completions kept of a step."""

_LONGEST = 1024
"""Tokens kept of a completion."""

_BUDGET = 200_000
"""Tokens kept of a run; beyond it every other step goes."""


@dataclass(frozen=True)
class CompletionSample:
    """The first completions of a batch, copied, so that no memory of the others is held."""

    batch: TokenBatch
    ids: Int[Tensor, "B T"]
    rewards: Float[Tensor, " B"] | None

    @classmethod
    def of(cls, batch: TokenBatch, ids: Tensor, rewards: Tensor | None, count: int = _COMPLETIONS) -> "CompletionSample":
        """Copies, without gradients."""

        def first(x: Any) -> Any:
            if isinstance(x, SparseDist):
                return x.map(first)
            return x if x is None else x[:count].detach().clone()

        fields = {name: first(value) for name, value in vars(batch).items()}
        return cls(TokenBatch(**fields), first(ids), first(rewards))


@torch.no_grad()
def token_rows(
    sample: CompletionSample, objective: Objective, tokenizer: PreTrainedTokenizerBase, **about: Any
) -> list[dict[str, Any]]:
    """Rows for tokens.parquet, one per completion that has unmasked tokens. `about` is the same in all of them.

    The objective is evaluated again on the batch that it had in training; one that returns no `acted` gives no rows.
    """
    batch = sample.batch
    out = objective(batch)
    if out.acted is None:
        return []
    columns = {"kl_before": token_kl(batch), "kl_after": out.kl_after, "log_ratio": log_ratio(batch)}
    advantages = batch.advantages if batch.advantages.ndim == 1 else _first_unmasked(batch.advantages, batch.mask)
    rows = []
    for index, mask in enumerate(batch.mask):
        if not bool(mask.any()):
            continue
        advantage = float(advantages[index])
        bounds = objective.config.bounds
        row = {
            **about,
            "reward": None if sample.rewards is None else float(sample.rewards[index]),
            "advantage": advantage,
            "bound": None if bounds is None else bounds[advantage > 0],
            "token": token_texts(tokenizer, sample.ids[index][mask][:_LONGEST].tolist()),
            "action": [objective.config.action if acted else "" for acted in out.acted[index][mask][:_LONGEST].tolist()],
        }
        row |= {name: None if x is None else x[index][mask][:_LONGEST].float().tolist() for name, x in columns.items()}
        rows.append(row)
    return rows


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Each token decoded by itself, with the leading blank that SentencePiece drops put back."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = tokenizer.batch_decode([[token] for token in ids])
    return [
        f" {text}" if str(name).startswith("▁") and not text.startswith(" ") else text
        for name, text in zip(names, texts, strict=True)
    ]


def thin_rows(rows: list[dict[str, Any]], more: list[dict[str, Any]], budget: int = _BUDGET) -> list[dict[str, Any]]:
    """`rows` and `more`, thinned to every 2nd, 4th, … step until they have at most `budget` tokens.

    How far `rows` were thinned shows in their steps, so a resumed run keeps what it would have kept without the break.
    """
    every = 1
    steps = {row["step"] for row in rows}
    while len(steps) > 1 and all(step % (2 * every) == 0 for step in steps):
        every *= 2
    kept = [*rows, *more]
    while True:
        kept = [row for row in kept if row["step"] % every == 0]
        if sum(len(row["token"]) for row in kept) <= budget or len({row["step"] for row in kept}) < 2:
            return kept
        every *= 2


def _first_unmasked(x: Tensor, mask: Tensor) -> Tensor:
    """The value at the first unmasked token of each row."""
    return x.gather(1, mask.int().argmax(1, keepdim=True)).squeeze(1)
