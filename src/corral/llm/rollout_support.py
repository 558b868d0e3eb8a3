"""The sampler's own likeliest tokens as the old policy's support: vLLM's `logprobs=K`, or those of a rollout function.

vLLM ranks what it reports by likelihood, and the sampled token may be one more than K; TRL takes the first for the sampled one.
Here it is found by its id, before TRL sees any of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.llm.old_policy import write_support
from corral.llm.processes import base_model
from corral.llm.sharding import vocabulary_size
from corral.types import SparseDist

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

_LEAST_TAIL = 1e-8
"""Mass that a tail of 1 − Σ p has at least: float32 log-probs do not know it any better."""
_MOST_MASS = 1 + 1e-3
"""What rounding leaves the log-probs of a token's likeliest to sum to at most."""

_Nested = list[list[list[Any]]]
"""By completion, by token, the entries of that token."""


@dataclass(frozen=True)
class _Report:
    """What a sampler said of its completions."""

    tokens: list[list[int]]
    ids: _Nested
    logprobs: _Nested
    """None where the sampler could not score a token."""

    def sampled(self) -> list[list[float]]:
        """Log-probs of the sampled tokens, for TRL; NaN where one could not be scored, or is not among those reported."""
        return [
            [_find(token, ids, logp) for token, ids, logp in zip(*rows, strict=True)]
            for rows in zip(self.tokens, self.ids, self.logprobs, strict=True)
        ]


def _find(token: int, ids: list[int], logp: list[float | None]) -> float:
    """The log-prob of a token among those reported; not every release of TRL can read None."""
    found = logp[ids.index(token)] if token in ids else None
    return math.nan if found is None else found


class RolloutSupport:
    """Asks the sampler for its likeliest tokens, hands TRL the sampled one of them, and stores the support in TRL's buffer."""

    def __init__(self, trainer: "CorralTrainer") -> None:
        """Replaces `generate` of the trainer's vLLM, or the trainer's rollout function, of this trainer alone."""
        if trainer.tools:
            raise ValueError(
                "CorralTrainer: anchor='rollout' on a support is not supported with tools, whose answers stand between the "
                "sampler's tokens. Use anchor='old', or an objective on sampled tokens."
            )
        self.vocabulary = vocabulary_size(base_model(trainer.model))
        self._report: _Report | None = None
        if trainer.use_vllm:
            trainer.vllm_generation.logprobs = trainer.args.support_size
        if trainer.rollout_func is not None:
            trainer.rollout_func = self._of_function(trainer.rollout_func)
        else:
            sampler: Any = trainer.vllm_generation
            sampler.generate = self._of_vllm(sampler.generate)

    def _of_vllm(self, generate: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """TRL's `generate`, with the sampled token's log-prob as the only entry of each token."""

        def generate_and_keep(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            prompts, tokens, logprobs, ids = generate(*args, **kwargs)
            self._report = _Report(tokens, ids, logprobs)
            return prompts, tokens, [[[logp] for logp in row] for row in self._report.sampled()], None

        return generate_and_keep

    def _of_function(self, rollout: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """A rollout function that reports `logprobs` and `logprob_token_ids` with several entries for each token."""

        def roll_out_and_keep(*args: Any, **kwargs: Any) -> dict[str, Any]:
            output = dict(rollout(*args, **kwargs))
            ids = output.pop("logprob_token_ids", None)
            if ids is None or output.get("logprobs") is None:
                raise ValueError(
                    "CorralTrainer: anchor='rollout' on a support needs the sampler's likeliest tokens, and the rollout "
                    "function returned no `logprobs` or no `logprob_token_ids`, both [completion][token][entry]. Have it "
                    "return them, or use anchor='old'."
                )
            self._report = _Report(output["completion_ids"], ids, output["logprobs"])
            return output | {"logprobs": self._report.sampled()}

        return roll_out_and_keep

    def store(self, output: dict[str, Any]) -> None:
        """Write the support of the newest rollouts into TRL's buffer `output`."""
        report, self._report = self._report, None
        tokens, mask = output["completion_ids"], output["completion_mask"].bool()
        live = mask & output["tool_mask"].bool() if "tool_mask" in output else mask  # a function's `env_mask`
        lengths = [] if report is None else [len(row) for row in report.tokens]
        if report is None or len(lengths) != len(tokens) or max(lengths) > tokens.shape[1]:
            raise RuntimeError("CorralTrainer: TRL trains on other completions than the sampler's. Please report it.")
        # Of each completion's own tokens: those that `mask_truncated_completions` takes out are still in the report.
        place = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
        rows = [list(chain.from_iterable(x)) for x in (report.ids, report.logprobs)]
        slots = max(map(len, rows[0]))
        ids = torch.tensor([[*row, *[-1] * (slots - len(row))] for row in rows[0]])
        logp = [[torch.nan if x is None else x for x in row] + [-torch.inf] * (slots - len(row)) for row in rows[1]]
        found = sampler_support(
            tokens.cpu()[place], ids, torch.tensor(logp, dtype=torch.float64), live.cpu()[place], self.vocabulary
        )
        dist = SparseDist(
            torch.full((*tokens.shape, slots), -1).masked_scatter(place[..., None], found.ids),
            torch.full((*tokens.shape, slots), -torch.inf).masked_scatter(place[..., None], found.logp.float()),
            torch.zeros(tokens.shape).masked_scatter(place, found.rest.float()),
        )
        write_support(output, dist.map(lambda x: x.to(tokens.device)))


def sampler_support(
    tokens: Int[Tensor, " N"],
    ids: Int[Tensor, "N M"],
    logp: Float[Tensor, "N M"],
    live: Bool[Tensor, " N"],
    vocabulary: int,
) -> SparseDist:
    """The support that a sampler reported, in any order, with the mass of all other tokens.

        rest = log(1 − Σ p)         of the full softmax's log-probs, at least 1e-8; −inf where every token was reported

    Args:
        tokens: the sampled tokens [N].
        ids: reported tokens [N, M], −1 at padding, the sampled one somewhere among them.
        logp: their log-probs; NaN where the sampler could not score one.
        live: tokens that are trained on; others may hold anything.
        vocabulary: V.
    Returns:
        SparseDist [N, M] with the sampled token in slot 0. A row with a NaN keeps that token alone, with NaN for its log-prob
        and tail: :func:`fill_unscored`.
    """
    by_id = ids.argsort(stable=True, dim=-1)
    ids, logp = ids.gather(-1, by_id), logp.gather(-1, by_id)
    sampled, unscored = ids == tokens[:, None], (logp.isnan() & (ids >= 0)).any(-1)
    if bool((missing := live & ~sampled.any(-1)).any()):
        raise ValueError(
            f"CorralTrainer: the sampler reported log-probs of other tokens than the one it drew, at {int(missing.sum())} of "
            f"{len(tokens)} tokens, the first of which is token {int(tokens[missing][0])}. `logprob_token_ids` must hold every "
            f"sampled token."
        )
    ids = torch.where(unscored[:, None] & ~sampled, -1, ids)
    logp = torch.where(unscored[:, None], torch.nan, logp).masked_fill(ids < 0, -torch.inf)
    # The sampled token first, then by likelihood, ties by lower id, padding last.
    order = torch.where(sampled, torch.inf, logp).argsort(stable=True, dim=-1, descending=True)
    ids, logp = ids.gather(-1, order), logp.gather(-1, order)
    mass = logp.exp().sum(-1)
    if bool((above := live & (mass > _MOST_MASS)).any()):
        raise ValueError(
            f"CorralTrainer: the sampler's log-probs are none of a policy: at {int(above.sum())} of {len(tokens)} tokens they "
            f"sum to up to {mass[above].max():.4g}. vLLM must run with --logprobs-mode processed_logprobs."
        )
    whole = (ids >= 0).sum(-1) >= vocabulary
    return SparseDist(ids, logp, torch.where(whole, -torch.inf, (1 - mass).clamp(min=_LEAST_TAIL).log()))


def fill_unscored(dist: SparseDist, logp: Float[Tensor, "*b"]) -> SparseDist:
    """The support with `logp`, the trainer's own, where the sampler could not score a token: no mismatch there, as in TRL."""
    unscored = dist.logp[..., 0].isnan()
    tail = torch.log(-torch.expm1(logp.float().clamp(max=-_LEAST_TAIL)))
    own = torch.where(unscored[..., None] & (dist.ids >= 0), logp[..., None].float(), dist.logp)
    return SparseDist(dist.ids, own, torch.where(unscored, tail, dist.rest), dist.rest_max)


def check_server(trainer: "CorralTrainer") -> None:
    """Refuse a vLLM server whose log-probs are of another policy than the one it draws from, such as before temperature."""
    client: Any = getattr(trainer.vllm_generation, "vllm_client", None)  # the main process has one, with a server
    if not hasattr(client, "get_server_info"):  # a server of TRL's before 1.16 has the right mode
        return
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and trainer.temperature == 1):
        raise ValueError(
            f"CorralTrainer: anchor='rollout' needs the log-probs that vLLM draws from, and this server reports {mode!r} at "
            f"temperature {trainer.temperature}. Restart it with --logprobs-mode processed_logprobs, or use anchor='old'."
        )
