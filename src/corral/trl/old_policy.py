"""Old policy of a batch of rollouts: log-probs on its top-k tokens, recomputed by the trainer or reported by the sampler."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from corral.head.packed import Packing
from corral.head.union import UnionSupport
from corral.numerics import logsumexp
from corral.support import extend_support, top_k_support
from corral.tensors import SparseDist
from corral.trl.processes import base_model, vocabulary_size
from corral.trl.scoring import HeadWeights, ScoringPass, SupportRequest

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

_KEYS = ("corral_ids", "corral_logp", "corral_rest", "corral_rest_max")
"""Keys in TRL's rollout buffer for the old policy's top-k tokens and log-probs.
TRL shuffles and slices every tensor there along its first axis."""
TEACHER_KEYS = ("corral_teacher_logp", "corral_teacher_rest")
"""Keys in TRL's rollout buffer for the teacher's log-probs on the old policy's token ids, and for the teacher's tail mass."""
_ROW = "corral_row"
"""Key in TRL's rollout buffer for each token's index into the stored hidden states [B T].
The index is −1 at tokens whose most likely tokens reached `support_mass`: they need no hidden state."""


@dataclass(eq=False)
class OldPolicy:
    """Old policy of the current rollouts: hidden states, LM head, and access to the top-k tokens (support) in TRL's buffer.

    A union needs the old log-probs of tokens that only the new policy thinks likely. They are exact: dot products of the old
    hidden states with the old head's rows. Both are kept for the tokens whose support was cut off at `support_size`: elsewhere
    the tail is below 1 − `support_mass` in all, and there is no union. `fill` is the published form: such tokens have
    probability 1e-12 under the old policy, and nothing is kept.
    """

    request: SupportRequest
    """Requested size of the old policy's support: tokens and probability mass. A union adds as many of the new one."""
    fill: float | None
    head: HeadWeights | None = None
    hidden: Float[Tensor, "M H"] | None = None

    def store(self, output: dict[str, Any], scoring: ScoringPass) -> None:
        """Write the old policy's top-k distribution into TRL's buffer `output`. For unions, also keep the hidden states."""
        dist = scoring.dist()
        assert dist is not None
        write_support(output, dist)
        self.head = self.hidden = None
        if (kept := scoring.hidden()) is None:
            return
        where = kept.places
        self.head = kept.head.freeze()
        mass = self.request.mass
        cut_off = dist.rest.flatten()[where] > math.log1p(-mass) if mass < 1 else where >= 0
        self.hidden = kept.states[cut_off]
        row = torch.full((dist.rest.numel(),), -1, device=where.device)
        row[where[cut_off]] = torch.arange(len(self.hidden), device=where.device)
        output[_ROW] = row.view(dist.rest.shape)

    def forget(self, output: dict[str, Any]) -> None:
        """Drop the stored hidden states and LM head, and the index of hidden states in TRL's buffer `output`."""
        self.head = self.hidden = None
        output.pop(_ROW, None)

    @staticmethod
    def support(inputs: dict[str, Any]) -> SparseDist | None:
        """Read the old policy's log-probs on its top-k tokens from TRL's buffer. Returns None if they were not stored."""
        if _KEYS[0] not in inputs:
            return None
        ids, logp, rest = (inputs[key] for key in _KEYS[:3])
        return SparseDist(ids, logp, rest, inputs.get(_KEYS[3]))  # a sampler does not report the last

    def union_support(self, inputs: dict[str, Any]) -> UnionSupport | None:
        """Return inputs for a loss on the union of both policies' top-k tokens, or None if the old LM head was not stored."""
        if self.head is None or self.hidden is None or _ROW not in inputs:
            return None
        head, (top_k, mass) = self.head, (self.request.top_k, self.request.mass)
        assert top_k is not None
        return UnionSupport(top_k=top_k, mass=mass, hidden=self.hidden, weight=head.weight, bias=head.bias, place=inputs[_ROW])

    def union(self, inputs: dict[str, Any], new: SparseDist, mask: Bool[Tensor, "B T"]) -> tuple[SparseDist, SparseDist]:
        """Return old and new policy on the union of their top-k tokens. In the union, the old policy's tokens come first.

        Where no hidden state was kept, members that only the new policy brings go back to its tail.
        """
        old = self.support(inputs)
        assert old is not None
        slots = max(1, int((torch.where(mask[..., None], new.ids, -1) >= 0).sum(-1).max()))
        slots = max(slots, old.ids.shape[-1])
        ids, logp, rest = new.ids[..., :slots].long(), new.logp[..., :slots], new.rest
        if self.fill is not None:
            filled = extend_support(old, ids, torch.full(ids.shape, math.log(self.fill), device=ids.device))
            return SparseDist(ids, logp, rest, new.rest_max), filled
        union = self.union_support(inputs)
        assert union is not None
        assert self.head is not None
        brought = torch.arange(slots, device=ids.device) >= (old.ids >= 0).sum(-1, keepdim=True)
        dropped = brought & (ids >= 0) & (union.place < 0)[..., None]
        rest = logsumexp(torch.cat([rest[..., None], torch.where(dropped, logp, -torch.inf)], -1))
        ids, logp = torch.where(dropped, -1, ids), torch.where(dropped, -torch.inf, logp)
        return SparseDist(ids, logp, rest, new.rest_max), union.extend(old, ids, self.head.spec)


def write_support(output: dict[str, Any], dist: SparseDist, *, whole: bool = False) -> None:
    """Write the old policy's top-k distribution [B T K] into TRL's buffer `output`. Without `whole`, unused slots are cut."""
    slots = dist.ids.shape[-1] if whole else max(1, int((dist.ids >= 0).sum(-1).max()))
    values = dist.ids[..., :slots].int(), dist.logp[..., :slots].contiguous(), dist.rest, dist.rest_max
    output.update((key, value) for key, value in zip(_KEYS, values, strict=True) if value is not None)


def read_teacher(inputs: dict[str, Any], old: SparseDist | None) -> SparseDist | None:
    """Read the teacher's log-probs on the old policy's top-k tokens from TRL's buffer. Returns None if they were not stored."""
    if old is None or TEACHER_KEYS[0] not in inputs:
        return None
    return SparseDist(old.ids, *(inputs[key] for key in TEACHER_KEYS))


class Behaviour(LogitsProcessor):
    """Logits processor that records the log-probs of the sampled tokens during generation, and changes no logits.

    It reads what the next token is drawn from, as vLLM reports it: float32 logits divided by the temperature, without the
    tokens that top-p, top-k or min-p cut off, and renormalised. A step's log-probs [B V] are held until the next call shows
    which tokens were drawn, so that one step's are in memory and no more.
    """

    def __init__(self, support: SupportRequest | None = None, *, replays: bool = False) -> None:
        """Record log-probs of the sampled tokens. With `support`, also record the most likely tokens and the tail mass.

        With `replays`, record all tokens that top-p, top-k or min-p kept.
        """
        self.support, self.replays = SupportRequest() if support is None else support, replays
        self._tokens: list[list[int]] = []
        self._logps: list[Float[Tensor, " B"]] = []
        self._dists: list[SparseDist] = []
        self._last: Float[Tensor, "B V"] | None = None

    @contextmanager
    def record(self, model: Any) -> Iterator[None]:
        """Context that records one generation. Its log-probs replace the log-probs of the previous generation.

        transformers puts processors that it is given before temperature and truncation, so this one joins the finished list.
        """
        self._tokens, self._logps, self._dists, self._last = [], [], [], None
        build = model._get_logits_processor

        def build_with_record(*args: Any, **kwargs: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*build(*args, **kwargs), self])

        model._get_logits_processor = build_with_record
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Record the log-probs of the tokens sampled last. Keep this position's log-probs until its tokens are sampled."""
        if self._last is not None:
            self._store(input_ids[:, -1])
        self._last = scores.float().log_softmax(-1)
        return scores

    def _store(self, tokens: Int[Tensor, " B"]) -> None:
        """Store the sampled tokens' log-probs at the previous position."""
        assert self._last is not None
        self._logps.append(self._last.gather(1, tokens[:, None])[:, 0])
        if self.replays:
            kept = top_k_support(self._last, tokens, int((self._last > -torch.inf).sum(-1).max()), check=False)
            self._dists.append(replace(kept, ids=torch.where(kept.logp > -torch.inf, kept.ids, -1)))
        elif self.support.top_k is not None:
            k = min(self.support.top_k, self._last.shape[1])
            self._dists.append(top_k_support(self._last, tokens, k, self.support.mass, check=False))

    def logps(self, tokens: list[list[int]]) -> list[list[float]]:
        """Return the recorded log-probs of the completions' tokens, up to the first end-of-sequence token."""
        last, longest = len(self._logps), max(map(len, tokens))
        if self._last is not None and last < longest:  # a finished row holds padding there
            self._store(torch.tensor([row[last] if last < len(row) else 0 for row in tokens], device=self._last.device))
        if len(self._logps) < longest:
            raise RuntimeError(
                "CorralTrainer: transformers' generation drew tokens without the logits processor that records them. Has it "
                "changed? Please report it."
            )
        self._tokens, self._last = tokens, None
        found = torch.stack(self._logps, 1).tolist()
        return [row[: len(own)] for row, own in zip(found, tokens, strict=True)]

    def store(self, output: dict[str, Any]) -> None:
        """Write the sampler's recorded top-k distribution into TRL's buffer `output`."""
        write_support(output, self.dist(output["completion_ids"].shape[1]), whole=self.replays)

    def dist(self, length: int) -> SparseDist:
        """Return the recorded distributions on top-k or kept tokens [B T K], for completions padded to `length` tokens."""
        slots = max(dist.ids.shape[-1] for dist in self._dists)
        wide = [
            SparseDist(
                nn.functional.pad(dist.ids, (0, slots - dist.ids.shape[-1]), value=-1),
                nn.functional.pad(dist.logp, (0, slots - dist.ids.shape[-1]), value=-torch.inf), dist.rest, dist.rest_max,
            )
            for dist in self._dists
        ]  # fmt: skip
        found = SparseDist.cat([dist.map(lambda x: x[:, None]) for dist in wide], dim=1)
        lengths = torch.tensor([[len(row)] for row in self._tokens], device=found.ids.device)
        # Completions' own tokens: those that `mask_truncated_completions` takes out are still recorded.
        drawn, kept = (Packing(torch.arange(n, device=found.ids.device) < lengths) for n in (found.ids.shape[1], length))
        return kept.unpack_dist(found.map(drawn.pack))


_LEAST_TAIL = 1e-8
"""Smallest tail mass (probability outside the top-k tokens) computed as 1 − Σ p. Float32 log-probs are not more exact."""
_MOST_MASS = 1 + 1e-3
"""Largest sum of a position's top-k probabilities that rounding can explain. Larger sums are refused."""

_Nested = list[list[list[Any]]]
"""Nested lists with the axes [completion][token][one of the top-k tokens]."""
_Report = tuple[list[list[int]], _Nested, _Nested]
"""Report of a sampler: sampled tokens, most likely tokens at each position, and their log-probs (None where unknown)."""


def _sampled(report: _Report) -> list[list[float]]:
    """Return the log-probs of the sampled tokens in TRL's format, with NaN where the sampler reported no log-prob."""

    def find(token: int, ids: list[int], logp: list[float | None]) -> float:
        found = logp[ids.index(token)] if token in ids else None
        return math.nan if found is None else found

    return [[find(*token) for token in zip(*rows, strict=True)] for rows in zip(*report, strict=True)]


class RolloutSupport:
    """Builds the old policy's top-k distribution from the log-probs that the sampler reports, for TRL's rollout buffer."""

    def __init__(self, trainer: "CorralTrainer") -> None:
        """Replace vLLM's method `generate`, or the trainer's rollout function, to store the log-probs that it reports."""
        if trainer.tools:
            raise ValueError(
                "CorralTrainer: anchor='rollout' on a support is not supported with tools, whose answers stand between the "
                "sampler's tokens. Use anchor='old', or an objective on sampled tokens."
            )
        self.vocabulary = vocabulary_size(base_model(trainer.model))
        self._report: _Report | None = None
        if trainer.use_vllm:
            trainer.vllm_generation.logprobs = trainer.args.support_size
        self._sample: Callable[..., Any]
        if trainer.rollout_func is not None:
            self._sample, trainer.rollout_func = trainer.rollout_func, self._roll_out
        else:
            sampler: Any = trainer.vllm_generation
            self._sample, sampler.generate = sampler.generate, self._generate

    def _generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Override of vLLM's sampling: store all reported log-probs, and return to TRL only those of the sampled tokens."""
        prompts, tokens, logprobs, ids = self._sample(*args, **kwargs)
        self._report = tokens, ids, logprobs
        return prompts, tokens, [[[logp] for logp in row] for row in _sampled(self._report)], None

    def _roll_out(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Override of a rollout function: store all reported log-probs, and return to TRL only those of the sampled tokens."""
        output = dict(self._sample(*args, **kwargs))
        ids = output.pop("logprob_token_ids", None)
        if ids is None or output.get("logprobs") is None:
            raise ValueError(
                "CorralTrainer: anchor='rollout' on a support needs the sampler's likeliest tokens, and the rollout function "
                "returned no `logprobs` or no `logprob_token_ids`, both [completion][token][entry]. Have it return them, or "
                "use anchor='old'."
            )
        self._report = output["completion_ids"], ids, output["logprobs"]
        return output | {"logprobs": _sampled(self._report)}

    def store(self, output: dict[str, Any]) -> None:
        """Write the sampler's top-k distribution for the newest rollouts into TRL's buffer `output`."""
        report, self._report = self._report, None
        tokens, mask = output["completion_ids"], output["completion_mask"].bool()
        live = mask & output["tool_mask"].bool() if "tool_mask" in output else mask  # a function's `env_mask`
        lengths = [] if report is None else [len(row) for row in report[0]]
        if report is None or len(lengths) != len(tokens) or max(lengths) > tokens.shape[1]:
            raise RuntimeError("CorralTrainer: TRL trains on other completions than the sampler's. Please report it.")
        # Of each completion's own tokens: those that `mask_truncated_completions` takes out are still in the report.
        packing = Packing(torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None])
        rows = [list(chain.from_iterable(x)) for x in report[1:]]
        slots = max(map(len, rows[0]))
        ids = torch.tensor([[*row, *[-1] * (slots - len(row))] for row in rows[0]])
        logp = [[torch.nan if x is None else x for x in row] + [-torch.inf] * (slots - len(row)) for row in rows[1]]
        scored = torch.tensor(logp, dtype=torch.float64)
        found = sampler_support(packing.pack(tokens.cpu()), ids, scored, packing.pack(live.cpu()), self.vocabulary)
        dist = packing.unpack_dist(SparseDist(found.ids, found.logp.float(), found.rest.float()))
        write_support(output, dist.map(lambda x: x.to(tokens.device)))


def sampler_support(
    tokens: Int[Tensor, " N"], ids: Int[Tensor, "N M"], logp: Float[Tensor, "N M"], live: Bool[Tensor, " N"], vocabulary: int
) -> SparseDist:
    """Build the sampler's top-k distribution from the sampler's report, with the probability mass of all other tokens.

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
    """Insert the trainer's log-probs `logp` at tokens for which the sampler reported no log-prob, as TRL does.

    These tokens then show no mismatch.
    """
    unscored = dist.logp[..., 0].isnan()
    tail = torch.log(-torch.expm1(logp.float().clamp(max=-_LEAST_TAIL)))
    own = torch.where(unscored[..., None] & (dist.ids >= 0), logp[..., None].float(), dist.logp)
    return SparseDist(dist.ids, own, torch.where(unscored, tail, dist.rest), dist.rest_max)


def check_server(trainer: "CorralTrainer") -> None:
    """Refuse a vLLM server whose reported log-probs belong to another distribution than the one it samples from."""
    client: Any = getattr(trainer.vllm_generation, "vllm_client", None)  # the main process has one, with a server
    if not hasattr(client, "get_server_info"):  # a server of TRL's before 1.16 has the right mode
        return
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and trainer.temperature == 1):
        raise ValueError(
            f"CorralTrainer: anchor='rollout' needs the log-probs that vLLM draws from, and this server reports {mode!r} at "
            f"temperature {trainer.temperature}. Restart it with --logprobs-mode processed_logprobs, or use anchor='old'."
        )
