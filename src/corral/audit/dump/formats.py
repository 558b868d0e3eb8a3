"""What engines log about every token, read into completions: corral's own JSON lines, prime-rl, open-instruct."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from corral.audit.dump.completion import LoggedCompletion, read_support, take_completion
from corral.audit.dump.record import DumpRecord


@dataclass(frozen=True)
class Format:
    """A format of JSON lines: which fields it is known by, and how a line is read."""

    name: str
    fields: frozenset[str]
    """A first line that has all of these is in this format."""
    read: Callable[[DumpRecord], list[LoggedCompletion]]
    compared: str
    """What is old and what is new, for the first sentence of an audit."""
    remark: str | None = None
    """What a reader of the audit has to know about these numbers."""


def _read_own(record: DumpRecord) -> list[LoggedCompletion]:
    """A line of corral's own schema; docs/audit.md#the-format has every field."""
    tokens = record.ids("tokens")
    length = len(tokens)
    mask = record.flags("mask", length) if record.has("mask") else np.ones(length, dtype=np.bool_)
    logp_old, logp_new = (record.log_probs(name, length) for name in ("logp_old", "logp_new"))
    step = record.whole("step", 0) or 0
    sampled_at = record.whole("sampled_at")
    return [
        take_completion(
            step=step,
            tokens=tokens,
            mask=mask,
            advantages=_advantages(record, length),
            logp_old=logp_old,
            logp_new=logp_new,
            logp_rollout=record.log_probs("logp_rollout", length) if record.has("logp_rollout") else None,
            support=read_support(record, tokens, mask, logp_old, logp_new) if record.has("top_ids") and length else None,
            entropy=record.numbers("entropy", length) if record.has("entropy") else None,
            reward=record.number("reward"),
            age=None if sampled_at is None else step - sampled_at,
        )
    ]


def _advantages(record: DumpRecord, length: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One per token, or one for all of them."""
    if isinstance(record.content.get("advantages"), list):
        return record.numbers("advantages", length)
    value = record.number("advantages")
    if value is None:
        raise record.error("`advantages` should be a number, or a list with one per token.")
    return np.full(length, value)


def _read_prime_rl(record: DumpRecord) -> list[LoggedCompletion]:
    """A line of `token_exports/step_*/rank_*.jsonl`: old is the sampler, new the trainer before its update."""
    tokens = record.ids("token_ids")
    length = len(tokens)
    mask = record.flags("loss_mask", length)
    if record.has("losses"):  # other losses than RL's share the mask: of this one alone there are advantages
        channels = [entry.content.get("rl") for entry in record.rows("losses", length)]
        mask &= np.array([isinstance(channel, dict) and channel.get("mask") is True for channel in channels], dtype=np.bool_)
    rewards = record.numbers("rewards", length)[mask] if record.has("rewards") else np.empty(0)
    rewards = rewards[~np.isnan(rewards)]
    step = record.whole("export_step", record.whole("step", 0))
    return [
        take_completion(
            step=step or 0,
            tokens=tokens,
            mask=mask,
            advantages=record.numbers("advantages", length),
            logp_old=record.log_probs("inference_logprobs", length),
            logp_new=record.log_probs("trainer_logprobs", length),
            entropy=record.numbers("entropy", length) if record.has("entropy") else None,
            reward=float(rewards[0]) if len(rewards) else None,
        )
    ]


def _read_open_instruct(record: DumpRecord) -> list[LoggedCompletion]:
    """A line of `*_trainer_logprobs_step*.jsonl`: packed completions, flat; old is the sampler (vLLM), new the trainer.

    Where it has no advantages, each token's is taken to push it further out, the most that a rule can block.
    """
    logp_new = record.log_probs("trainer_logprobs")
    length = len(logp_new)
    logp_old = record.log_probs("vllm_logprobs", length)
    step = record.whole("step", 0) or 0
    trained_at, sampled_at = record.whole("trainer_model_step"), record.whole("model_step")
    return [
        take_completion(
            step=step,
            tokens=record.ids("token_ids", length) if record.has("token_ids") else np.zeros(length, dtype=np.int64),
            mask=record.flags("response_mask", length),
            advantages=record.numbers("advantages", length) if record.has("advantages") else np.sign(logp_new - logp_old),
            logp_old=logp_old,
            logp_new=logp_new,
            age=None if trained_at is None or sampled_at is None else trained_at - sampled_at,
        )
    ]


SAMPLER_IS_OLD = (
    "The old policy here is the sampler, as the engine logs no other: a distance is staleness and the mismatch between sampler "
    "and trainer together, before the update."
)

FORMATS = (
    Format(
        "corral",
        frozenset({"tokens", "logp_old", "logp_new"}),
        _read_own,
        "compared under the old and the new policy as logged",
    ),
    Format(
        "prime-rl",
        frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
        _read_prime_rl,
        "as sampled, compared with the trainer before its update",
        SAMPLER_IS_OLD,
    ),
    Format(
        "open-instruct",
        frozenset({"trainer_logprobs", "vllm_logprobs", "response_mask"}),
        _read_open_instruct,
        "as sampled, compared with the trainer before its update",
        f"{SAMPLER_IS_OLD} Where there are no advantages, every token counts as pushed further out, so that shares of blocked "
        "and missed tokens are upper bounds.",
    ),
)
"""In this order a first line is looked at."""
