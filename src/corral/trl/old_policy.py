"""The old policy of a batch of rollouts: recomputed by the trainer, or as the sampler reported it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.head.packed import Packing
from corral.head.union import UnionSupport, gather_logp
from corral.numerics import logsumexp
from corral.support import extend_support
from corral.tensors import SparseDist
from corral.trl.processes import base_model, vocabulary_size
from corral.trl.scoring import HeadInputs, ScoringPass

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

_KEYS = ("corral_ids", "corral_logp", "corral_rest", "corral_rest_max")
"""How a support rides along in TRL's buffer of rollouts, which shuffles and slices any tensor by its first axis."""
_ROW = "corral_row"
"""With a union: where each token's hidden state is kept, [B T]; −1 where its support left less than 1 − `support_mass` out."""


@dataclass(eq=False)
class OldPolicy:
    """The old policy on its support in TRL's buffer and, for unions, the hidden states and the head behind it.

    A union needs the old log-probs of tokens that only the new policy thinks likely. They are exact: dot products of the old
    hidden states with the old head's rows. Both are kept for the tokens whose support was cut off at `support_size`: elsewhere
    the tail is below 1 − `support_mass` in all, and there is no union. `fill` is the published form: such tokens have
    probability 1e-12 under the old policy, and nothing is kept.
    """

    support_mass: float
    fill: float | None
    head: HeadInputs | None = None
    hidden: Float[Tensor, "M H"] | None = None

    def store(self, output: dict[str, Any], scoring: ScoringPass) -> None:
        """Write the support that a pass reported into TRL's buffer `output`, and keep what a union needs besides."""
        dist = scoring.dist()
        assert dist is not None
        write_support(output, dist)
        self.head = self.hidden = None
        if (kept := scoring.hidden()) is None:
            return
        where = kept.places
        self.head = kept.head.freeze()
        cut_off = dist.rest.flatten()[where] > math.log1p(-self.support_mass) if self.support_mass < 1 else where >= 0
        self.hidden = kept.states[cut_off]
        row = torch.full((dist.rest.numel(),), -1, device=where.device)
        row[where[cut_off]] = torch.arange(len(self.hidden), device=where.device)
        output[_ROW] = row.view(dist.rest.shape)

    def forget(self, output: dict[str, Any]) -> None:
        """Drop what a union needs, from TRL's buffer `output` too: no other follows."""
        self.head = self.hidden = None
        output.pop(_ROW, None)

    @staticmethod
    def support(inputs: dict[str, Any]) -> SparseDist | None:
        """The old policy on its own support, if it was stored."""
        if _KEYS[0] not in inputs:
            return None
        ids, logp, rest = (inputs[key] for key in _KEYS[:3])
        return SparseDist(ids, logp, rest, inputs.get(_KEYS[3]))  # a sampler does not report the last

    def union_support(self, inputs: dict[str, Any], top_k: int, mass: float) -> UnionSupport | None:
        """What a head needs to take the loss on the union itself; None where the old head was not kept."""
        if self.head is None or self.hidden is None or _ROW not in inputs:
            return None
        head, place = self.head, inputs[_ROW]
        return UnionSupport(top_k=top_k, mass=mass, hidden=self.hidden, weight=head.weight, bias=head.bias, place=place)

    def union(self, inputs: dict[str, Any], new: SparseDist, mask: Bool[Tensor, "B T"]) -> tuple[SparseDist, SparseDist]:
        """Both policies on the union of their supports, where `new` has it; the old one's members come first.

        Where no hidden state was kept, members that only the new policy brings go back to its tail.
        """
        old = self.support(inputs)
        assert old is not None
        slots = max(1, int((torch.where(mask[..., None], new.ids, -1) >= 0).sum(-1).max()))
        slots = max(slots, old.ids.shape[-1])
        members = (old.ids >= 0).sum(-1)
        place = torch.arange(slots, device=new.ids.device)
        ids, logp, rest = new.ids[..., :slots].long(), new.logp[..., :slots], new.rest
        brought = (place >= members[..., None]) & (ids >= 0)
        if self.fill is None:
            dropped = brought & (inputs[_ROW] < 0)[..., None]
            rest = logsumexp(torch.cat([rest[..., None], torch.where(dropped, logp, -torch.inf)], -1))
            ids, logp = torch.where(dropped, -1, ids), torch.where(dropped, -torch.inf, logp)
            brought = brought & ~dropped
        most = max(1, int(brought.sum(-1).max()))
        others = (members[..., None] + torch.arange(most, device=ids.device)).clamp(max=slots - 1)
        others = torch.where(torch.arange(most, device=ids.device) < brought.sum(-1, keepdim=True), ids.gather(-1, others), -1)
        return SparseDist(ids, logp, rest, new.rest_max), extend_support(old, ids, self._score(inputs, others))

    def _score(self, inputs: dict[str, Any], ids: Int[Tensor, "B T M"]) -> Float[Tensor, "B T M"]:
        """The old policy's log-probs of some tokens [B T M]; −inf where there are none, or where no hidden state was kept."""
        if self.fill is not None:
            return torch.full(ids.shape, math.log(self.fill), device=ids.device)
        assert self.head is not None
        assert self.hidden is not None
        row, out = inputs[_ROW], torch.full(ids.shape, -torch.inf, device=ids.device)
        wanted = (row >= 0) & (ids >= 0).any(-1)
        if bool(wanted.any()):
            tokens, logp = (inputs[key][..., 0][wanted] for key in _KEYS[:2])  # slot 0 is the sampled token
            head, hidden = self.head, self.hidden[row[wanted]]
            out[wanted] = gather_logp(hidden, head.weight, head.bias, head.spec, tokens, logp, ids[wanted]).float()
        return out


def write_support(output: dict[str, Any], dist: SparseDist) -> None:
    """Write the old policy's support [B T K] into TRL's buffer `output`."""
    slots = max(1, int((dist.ids >= 0).sum(-1).max()))  # the others are padding
    values = dist.ids[..., :slots].int(), dist.logp[..., :slots].contiguous(), dist.rest, dist.rest_max
    output.update((key, value) for key, value in zip(_KEYS, values, strict=True) if value is not None)


_LEAST_TAIL = 1e-8
"""Mass that a tail of 1 − Σ p has at least: float32 log-probs do not know it any better."""
_MOST_MASS = 1 + 1e-3
"""What rounding leaves the log-probs of a token's likeliest to sum to at most."""

_Nested = list[list[list[Any]]]
"""By completion, by token, the entries of that token."""


class _Report(NamedTuple):
    """The tokens that a sampler drew, and the likeliest ones that it reported at each of them."""

    tokens: list[list[int]]
    ids: _Nested
    logprobs: _Nested
    """None where the sampler could not score a token."""

    def sampled(self) -> list[list[float]]:
        """Log-probs of the sampled tokens, for TRL; NaN where one could not be scored, or is not among those reported."""
        return [[_find(*token) for token in zip(*rows, strict=True)] for rows in zip(*self, strict=True)]


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
        self._sample: Callable[..., Any]
        if trainer.rollout_func is not None:
            self._sample, trainer.rollout_func = trainer.rollout_func, self._roll_out
        else:
            sampler: Any = trainer.vllm_generation
            self._sample, sampler.generate = sampler.generate, self._generate

    def _generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's vLLM draws completions; of each token's log-probs the sampled one's is left, the others are kept here."""
        prompts, tokens, logprobs, ids = self._sample(*args, **kwargs)
        self._report = _Report(tokens, ids, logprobs)
        return prompts, tokens, [[[logp] for logp in row] for row in self._report.sampled()], None

    def _roll_out(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The user's function draws completions; `logprobs` and `logprob_token_ids` have several entries for each token."""
        output = dict(self._sample(*args, **kwargs))
        ids = output.pop("logprob_token_ids", None)
        if ids is None or output.get("logprobs") is None:
            raise ValueError(
                "CorralTrainer: anchor='rollout' on a support needs the sampler's likeliest tokens, and the rollout function "
                "returned no `logprobs` or no `logprob_token_ids`, both [completion][token][entry]. Have it return them, or "
                "use anchor='old'."
            )
        self._report = _Report(output["completion_ids"], ids, output["logprobs"])
        return output | {"logprobs": self._report.sampled()}

    def store(self, output: dict[str, Any]) -> None:
        """Write the support of the newest rollouts into TRL's buffer `output`."""
        report, self._report = self._report, None
        tokens, mask = output["completion_ids"], output["completion_mask"].bool()
        live = mask & output["tool_mask"].bool() if "tool_mask" in output else mask  # a function's `env_mask`
        lengths = [] if report is None else [len(row) for row in report.tokens]
        if report is None or len(lengths) != len(tokens) or max(lengths) > tokens.shape[1]:
            raise RuntimeError("CorralTrainer: TRL trains on other completions than the sampler's. Please report it.")
        # Of each completion's own tokens: those that `mask_truncated_completions` takes out are still in the report.
        packing = Packing(torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None])
        rows = [list(chain.from_iterable(x)) for x in (report.ids, report.logprobs)]
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
