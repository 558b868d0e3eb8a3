"""Scoring for audits: choose tokens at random, and compute full next-token distributions at these tokens."""

import inspect
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from corral.lab.audit.measure import measure
from corral.lab.audit.rules import Rules
from corral.trl.processes import base_model
from corral.validate import RunError


def logp_at(
    model: nn.Module, ids: Int[Tensor, " L"], positions: Int[Tensor, " N"], temperature: float = 1.0
) -> Float[Tensor, "N V"]:
    """Compute log-probs of all V tokens of the vocabulary at N positions of one unpadded sequence, in float32.

    N is 1 or more, and logits are divided by the temperature. The LM head is computed at these positions only, so memory is
    that of N × V numbers however long the sequence is.
    """
    base = base_model(model)
    before = positions - 1  # a position's logits predict the token after it
    few = "logits_to_keep" in inspect.signature(base.forward).parameters
    output = model(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids)[None],
        use_cache=False,
        **({"logits_to_keep": before} if few else {}),
    )
    logits = output.logits[0] if few else output.logits[0, before]
    if len(logits) != len(positions):
        raise ValueError(f"{type(base).__name__} gave logits at {len(logits)} positions where {len(positions)} were asked for.")
    return (logits.float() / temperature).log_softmax(-1)


def choose(
    lengths: Tensor, sequences: int, tokens: int, generator: torch.Generator, *, whole: bool
) -> list[tuple[int, Tensor]]:
    """Draw up to `tokens` tokens of up to `sequences` completions at random, as a list of (row, sorted token indices).

    Every token of the chosen completions is equally likely, so shares of tokens are unbiased. With `whole`, completions that
    do not fit as a whole are passed over.
    """
    order = [row for row in torch.randperm(len(lengths), generator=generator).tolist() if lengths[row] > 0]
    if whole:
        fitting: list[int] = []
        left = tokens
        for row in order:
            if lengths[row] <= left and len(fitting) < sequences:
                fitting.append(row)
                left -= int(lengths[row])
        if order and not fitting:
            raise RunError(
                f"this run clips whole completions, the shortest here has {int(lengths[order].min())} tokens, and "
                f"tokens={tokens} are audited. Raise it."
            )
        return [(row, torch.arange(int(lengths[row]))) for row in fitting]
    if not (order := order[:sequences]):
        return []
    owners = torch.tensor(order).repeat_interleave(lengths[order])
    ranks = torch.cat([torch.arange(int(lengths[row])) for row in order])
    drawn = torch.randperm(len(ranks), generator=generator)[:tokens].sort().values
    owners, ranks = owners[drawn], ranks[drawn]
    return [(row, ranks[owners == row]) for row in order if bool((owners == row).any())]


@dataclass(frozen=True, eq=False)
class AuditedCompletion:
    """Completion of an audit: its token ids, and the audited tokens with their advantages."""

    ids: Tensor
    """Token ids of prompt and completion, without padding."""
    start: int
    """Index in `ids` at which the completion begins."""
    positions: Tensor
    """Indices of the audited tokens in `ids`."""
    advantages: Tensor
    logp_rollout: Tensor | None = None
    end: int = 0
    """Micro-step of the trainer after the last update on the completion's batch, when the policies are compared."""

    def measure(self, old: Tensor, new: Tensor, rules: Rules, tokenizer: Any) -> pd.DataFrame:
        """Compare old and new policy at the audited tokens, from full log-probs. Returns a table with a row per token."""
        tokens = self.ids[self.positions].cpu()
        columns = measure(tokens.to(new.device), old, new, self.advantages, rules, self.logp_rollout)
        rows = {**columns, "token": tokens, "position": self.positions.cpu() - self.start, "advantage": self.advantages.float()}
        texts = [tokenizer.decode([token]) for token in tokens.tolist()]
        return pd.DataFrame({name: column.numpy() for name, column in rows.items()}).assign(text=texts)


def choose_completions(
    output: dict[str, Any], sequences: int, tokens: int, generator: torch.Generator, end: int, *, whole: bool
) -> list[AuditedCompletion]:
    """Draw completions and tokens for an audit from TRL's sampled batch, among the tokens that are trained on."""
    output = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in output.items()}
    prompt, completion = output["prompt_mask"].bool(), output["completion_mask"].bool()
    live = completion & output["tool_mask"].bool() if "tool_mask" in output else completion
    rollout = output.get("sampling_per_token_logps")
    chosen = []
    for row, ranks in choose(live.sum(-1), sequences, tokens, generator, whole=whole):
        places, start, advantages = live[row].nonzero()[:, 0][ranks], int(prompt[row].sum()), output["advantages"][row]
        chosen.append(
            AuditedCompletion(
                ids=torch.cat([output["prompt_ids"][row][prompt[row]], output["completion_ids"][row][completion[row]]]),
                start=start,
                positions=places + start,  # completions are padded on the right, so places are those in the sequence
                advantages=(advantages.expand(len(live[row])) if advantages.ndim == 0 else advantages)[places],
                logp_rollout=None if rollout is None else rollout[row][places],
                end=end,
            )
        )
    return chosen
