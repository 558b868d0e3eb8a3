"""Scoring passes: TRL calls its head once, and corral keeps the log-probs, supports and hidden states it needs."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import trl.trainer.utils
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from corral.head import lm_head
from corral.head.dispatch import choose
from corral.head.forward import HeadOutput
from corral.head.logits import LogitSpec
from corral.head.packed import LossTerms, Packing
from corral.head.policy_loss import PolicyLoss, policy_loss_from_hidden
from corral.support import gather_support, top_k_support
from corral.tensors import SparseDist
from corral.trl.api import FUSED


@dataclass(frozen=True, eq=False, kw_only=True)
class SupportRequest:
    """Which support a pass reports: the policy's own top-k, given ids [B T K], the union of both, or none."""

    top_k: int | None = None
    mass: float = 1.0
    ids: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no support is wanted, but log-probs and entropy alone."""
        return self.top_k is None and self.ids is None


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """The head of one pass: what turns a hidden state into logits."""

    weight: Tensor
    bias: Tensor | None
    spec: LogitSpec

    def freeze(self) -> "HeadInputs":
        """A copy that later updates leave as it is; parameters that are not trained are shared."""
        weight, bias = (x.detach().clone() if x is not None and x.requires_grad else x for x in (self.weight, self.bias))
        assert weight is not None
        return HeadInputs(weight, bias, self.spec)

    def copy(self) -> "HeadInputs":
        """A copy of everything, with no gradient."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return HeadInputs(self.weight.detach().clone(), bias, self.spec)


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Last hidden states of some tokens of a pass, and the head that they went through."""

    states: Float[Tensor, "M H"]
    places: Int[Tensor, " M"]
    """Of each token, in the flattened [B T]; ascending."""
    head: HeadInputs


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadResult:
    """What the head found for some of the completions: packed rows, a loss of them, or a support [B T K] from all logits."""

    packing: Packing | None = None
    """Places of the packed rows in [B T]."""
    rows: HeadOutput | None = None
    loss: PolicyLoss | None = None
    """Loss and gradient of the rows [1 N], where the pass asked for them."""
    dist: SparseDist | None = None
    hidden: HiddenStates | None = None
    """Where the pass keeps them."""

    def support(self) -> SparseDist | None:
        """The support of every token [B T K], empty at masked tokens."""
        if self.rows is None or self.rows.dist is None or self.packing is None:
            return self.dist
        return self.packing.unpack_dist(self.rows.dist)


@dataclass(eq=False, kw_only=True)
class ScoringPass:
    """One pass of TRL's over completions [B T]: a request to the head, filled with the head's results, read by the loss.

    TRL hands log-probs and entropy from the model to its loss, and nothing else. Everything more travels in this object:

        CorralTrainer              makes a pass, and calls TRL's method inside `policy_head.expect(scoring)`
          TRL                      calls `_get_per_token_logps_and_entropies`, which CorralTrainer overrides:
            PolicyHead.run         puts corral's head in the place of TRL's, and calls TRL's own method
              TRL                  calls the model, once for every slice of the batch
                PolicyHead         reads `support` and `loss`, runs `lm_head` or `policy_loss_from_hidden`, appends to `results`
            CorralTrainer          writes `logp` and `entropy`, which TRL's method returned
        CorralTrainer              hands the pass on: to `OldPolicy.store` after rollouts, to `PolicyTerm.loss` in an update
    """

    support: SupportRequest = field(default_factory=SupportRequest)
    loss: Callable[[Packing], LossTerms | None] | None = None
    """The loss of the scored tokens [1 N], for the head to compute with its gradient; None where the head cannot."""
    tolerance: float = 0.0
    """Share of a token's gradient that a sparse backward pass may leave out."""
    keep_hidden: bool = False
    """Whether results hold the hidden states and the head."""
    choose: Callable[[Bool[Tensor, "B T"]], Bool[Tensor, " B"]] | None = None
    """Of which sequences they are kept, given the mask of the completions; of all where None."""
    chosen: Bool[Tensor, " B"] | None = None
    drew_random: bool = False
    """Whether the pass drew random numbers, as dropout does; known where hidden states are kept."""
    tokens: int = 0
    """Of each sequence, the last so many are scored."""
    results: list[HeadResult] = field(default_factory=list)
    """One for every slice of the batch; none where TRL computed all logits and no support was wanted."""
    logp: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None

    def dist(self) -> SparseDist | None:
        """The policy on the support of every token [B T K], if one was wanted."""
        dists = [dist for result in self.results if (dist := result.support()) is not None]
        if len(dists) < 2:
            return dists[0] if dists else None
        rest_max = [dist.rest_max for dist in dists if dist.rest_max is not None]
        ids, logp, rest = (torch.cat(parts) for parts in zip(*((d.ids, d.logp, d.rest) for d in dists), strict=True))
        return SparseDist(ids, logp, rest, torch.cat(rest_max) if rest_max else None)

    def begin(self, mask: Bool[Tensor, "B T"]) -> None:
        """Before the model is called: choose the sequences whose hidden states are kept."""
        if self.keep_hidden and self.choose is not None:
            self.chosen = self.choose(mask)

    def keep(self, states: Float[Tensor, "N H"], packing: Packing, head: HeadInputs) -> HiddenStates | None:
        """What the next result holds of a slice's hidden states, given those of its packed rows."""
        if not self.keep_hidden:
            return None
        places = packing.rows
        if places is None:
            places = torch.arange(packing.count, device=states.device)
        if self.chosen is not None:
            first = sum(result.packing.shape[0] for result in self.results if result.packing is not None)
            wanted = self.chosen[first + places // packing.shape[1]]
            states, places = states[wanted], places[wanted]
        earlier = next((result.hidden.head for result in self.results if result.hidden is not None), None)
        if earlier is None and torch.distributed.is_initialized():  # a sharded head is whole in this pass alone
            earlier = head.copy()
        return HiddenStates(states.detach(), places, earlier or head)

    def hidden(self) -> HiddenStates | None:
        """The hidden states of all slices, where the pass keeps them."""
        kept, start = [], 0
        for result in self.results:
            if result.hidden is None or result.packing is None:
                return None
            kept.append((result.hidden.states, start + result.hidden.places, result.hidden.head))
            start += result.packing.shape.numel()
        if not kept:
            return None
        states, places, heads = zip(*kept, strict=True)
        return HiddenStates(torch.cat(states), torch.cat(places), heads[0])

    def fused(self) -> tuple[PolicyLoss, Packing] | None:
        """The loss that the head computed, and the places of its tokens; None where it computed none."""
        result = self.results[0] if self.results else None
        if result is None or result.loss is None or result.packing is None:
            return None
        return result.loss, result.packing

    def backward_reports(self) -> list[Tensor]:
        """[2] for each slice: its backward pass will write the share of dense rows and the most that it left out there."""
        found = [result.rows or result.loss for result in self.results]
        return [x.report for x in found if x is not None and x.report is not None and torch.is_grad_enabled()]


_trl_utils: Any = trl.trainer.utils  # one of its names is replaced while a pass is scored


class PolicyHead:
    """The head that scores every pass of the policy and of its reference.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded weights) and hands them to one function. In scoring passes, that function is corral's: old, new and reference
    log-probs then come from one head in one precision, and a support with them. TRL before 1.15 computes all logits, in every
    pass alike, and the support is taken from those.
    """

    def __init__(self, models: Iterable[nn.Module], temperature: float, own: SupportRequest, *, union: bool) -> None:
        """`own` is the support of old passes; with `union`, updates ask for it beside the old policy's."""
        self.models, self.temperature, self.own, self.union = list(models), temperature, own, union
        self._expected: ScoringPass | None = None

    @contextmanager
    def expect(self, scoring: ScoringPass) -> Iterator[None]:
        """Inside, the first pass that TRL makes is `scoring`; others, such as a reference's after it, want no support."""
        self._expected = scoring
        try:
            yield
        finally:
            self._expected = None

    @contextmanager
    def run(self, tokens: int) -> Iterator[ScoringPass]:
        """Inside, models are scored by corral's head, on the last `tokens` tokens of each sequence.

        The hooks are of this pass alone. So is the name in TRL's module: TRL has no argument for its head function, and
        looks it up there, behind whatever accelerate, PEFT or FSDP have wrapped around the model's forward.
        """
        scoring, self._expected = self._expected or ScoringPass(), None
        scoring.tokens = tokens
        with ExitStack() as stack:
            if FUSED:
                head = _FusedHead(scoring, self)
                for model in self.models:
                    stack.callback(model.register_forward_pre_hook(head.read_labels, with_kwargs=True).remove)
                stack.callback(setattr, _trl_utils, "_ChunkedLogProbFunction", _trl_utils._ChunkedLogProbFunction)
                _trl_utils._ChunkedLogProbFunction = head
            elif not scoring.support.is_empty:
                for model in self.models:
                    hook = functools.partial(_read_logits, scoring, self.temperature)
                    stack.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
            before = _random_state() if scoring.keep_hidden else []
            yield scoring
            if before:
                scoring.drew_random = any(not torch.equal(x, y) for x, y in zip(before, _random_state(), strict=True))


class _FusedHead:
    """Stands in for TRL's chunked log-prob function in one pass: same call, corral's head inside."""

    def __init__(self, scoring: ScoringPass, policy: PolicyHead) -> None:
        self.scoring, self.policy = scoring, policy
        self.scored: Tensor | None = None

    def read_labels(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: which positions [B L−1] TRL is about to have scored."""
        self.scored = kwargs["labels"][:, 1:] != -100

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *how: Any
    ) -> tuple[Tensor | None, ...]:
        """Log-probs and entropy of the rows that TRL passes: all of them on a CPU, the scored ones alone on a GPU."""
        _, softcap, scale, outputs = how
        scoring, scored, rows = self.scoring, self.scored, None
        assert scored is not None, "TRL scored a model that is neither the policy nor its reference"
        if len(tokens) == scored.numel():
            rows = scored.to(hidden.device).flatten().nonzero().squeeze(-1)
            hidden, tokens = hidden.index_select(0, rows), tokens[rows]
        completion = scored[:, -scoring.tokens :].to(hidden.device)
        places = completion.flatten().byte().argsort(descending=True, stable=True)  # without a host sync for the count
        packing = Packing(completion, places[: len(tokens)])
        ids = None if scoring.support.ids is None else packing.pack(scoring.support.ids)
        terms = scoring.loss(packing) if scoring.loss is not None and len(tokens) else None
        empty = not len(tokens)
        if empty:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids = None if ids is None else ids.new_full((1, ids.shape[-1]), -1)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings: dict[str, Any] = {
            "bias": bias, "scale": scale, "softcap": softcap, "temperature": temperature, "entropy": "entropy" in outputs,
            **self._one_implementation(hidden, weight),
        }  # fmt: skip
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            if terms is not None:
                loss = policy_loss_from_hidden(
                    hidden[None], weight, tokens[None], terms.batch, terms.objective, weights=terms.weights,
                    policy_weights=terms.policy_weights, on_policy=terms.on_policy, union=terms.union, **settings,
                )  # fmt: skip
                return _outputs(*self._report_loss(loss, packing), rows, scored.numel())
            head = lm_head(
                hidden, weight, tokens, ids=ids,
                top_k=None if scoring.support.top_k is None else min(scoring.support.top_k, len(weight)),
                mass=scoring.support.mass, tolerance=scoring.tolerance, **settings,
            )  # fmt: skip
        head = _without_rows(head) if empty else head
        inputs = HeadInputs(weight, bias, LogitSpec(scale, softcap, temperature))
        kept = scoring.keep(hidden[: len(head.logp)], packing, inputs)
        scoring.results.append(HeadResult(packing=packing, rows=head, hidden=kept))
        return _outputs(head.logp, head.entropy, rows, scored.numel())

    def _report_loss(self, loss: PolicyLoss, packing: Packing) -> tuple[Tensor, Tensor | None]:
        """Append a loss to the results. The hooks of distributed training sit on what the model returns: log-probs, then,
        depend on the loss, with a gradient of zero."""
        self.scoring.results.append(HeadResult(packing=packing, loss=loss))
        nothing = torch.where(torch.zeros_like(loss.loss, dtype=torch.bool), loss.loss, 0.0)
        return loss.logp[0] + nothing, None if loss.entropy is None else loss.entropy[0]

    def _one_implementation(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """On a GPU the torch path for every pass where one of them has no kernel: two heads would round differently."""
        if not hidden.is_cuda:
            return {}
        own = self.policy.own.top_k
        top_k = None if own is None else min(own, len(weight))
        chosen = choose("CorralTrainer", "auto", hidden, weight, top_k, given=top_k + 1 if self.policy.union and top_k else 0)
        return {"impl": "torch"} if chosen == "torch" else {}


def _random_state() -> list[Tensor]:
    """Of the CPU, and of this process's GPU where it has one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _outputs(logp: Tensor, entropy: Tensor | None, rows: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """What TRL's function returns, for the rows that it passed: `count` of them, where `rows` were scored."""
    found = [logp, entropy]
    if rows is not None:
        found = [None if x is None else x.new_zeros(count).index_copy(0, rows, x) for x in found]
    return (*found, None, None, None)


def _read_logits(
    scoring: ScoringPass, temperature: float, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook that takes a support from all logits, for TRL before 1.15."""
    tokens, support = scoring.tokens, scoring.support
    logp = (output.logits[:, :-1][:, -tokens:].float() / temperature).log_softmax(-1)
    if support.top_k is None:
        assert support.ids is not None
        dist = gather_support(logp, support.ids)
    else:
        k = min(support.top_k, logp.shape[-1])
        dist = top_k_support(logp, kwargs["input_ids"][:, -tokens:], k, support.mass, ids=support.ids)
    scoring.results.append(HeadResult(dist=dist))


def _without_rows(head: HeadOutput) -> HeadOutput:
    """Nothing, still connected to where it came from."""
    dist = None if head.dist is None else head.dist.map(lambda x: x[:0])
    return HeadOutput(head.logp[:0], None if head.entropy is None else head.entropy[:0], dist)
