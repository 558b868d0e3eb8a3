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


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """The head of one pass: what turns a hidden state into logits."""

    weight: Tensor
    bias: Tensor | None
    spec: LogitSpec

    def freeze(self, *, shares: bool = True) -> "HeadInputs":
        """A copy that later updates leave as it is; with `shares`, parameters that are not trained are not copied."""

        def copy(x: Tensor) -> Tensor:
            return x if shares and not x.requires_grad else x.detach().clone()

        return HeadInputs(copy(self.weight), None if self.bias is None else copy(self.bias), self.spec)


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Last hidden states of some tokens of a pass, and the head that they went through."""

    states: Float[Tensor, "M H"]
    places: Int[Tensor, " M"]
    """Index of each token in the flattened [B T]; ascending."""
    head: HeadInputs


@dataclass(frozen=True, eq=False)
class HeadResult:
    """The head's results for some completions of a pass, packed: log-probs and a support [N …], or a loss of them [1 N]."""

    output: HeadOutput | PolicyLoss
    packing: Packing
    """Places of the packed rows in [B T]."""
    hidden: HiddenStates | None = None
    """Hidden states, if the pass keeps them."""


@dataclass(eq=False, kw_only=True)
class ScoringPass:
    """One pass of TRL's over completions [B T]: a request to the head, filled with the head's results, read by the loss.

    TRL hands log-probs and entropy from the model to its loss, and nothing else. Everything more travels in this object:

        CorralTrainer              makes a pass, and calls TRL's method inside `policy_head.expect(scoring)`
          TRL                      calls `_get_per_token_logps_and_entropies`, which CorralTrainer overrides:
            PolicyHead.run         puts corral's head in the place of TRL's, and calls TRL's own method
              TRL                  calls the model, once for every slice of the batch
                FusedHead          reads `support` and `loss`, runs `lm_head` or `policy_loss_from_hidden`, appends to `results`
            CorralTrainer          writes `logp` and `entropy`, which TRL's method returned
        CorralTrainer              hands the pass on: to `OldPolicy.store` after rollouts, to `PolicyTerm.loss` in an update
    """

    support: SupportRequest = field(default_factory=SupportRequest)
    loss: LossTerms | None = None
    """The loss of the completions [B T], for the head to compute with its gradient; None if the head cannot."""
    tolerance: float = 0.0
    """Share of a token's gradient that a sparse backward pass may leave out."""
    keep_hidden: bool = False
    """Whether results hold the hidden states and the head."""
    choose: Callable[[Bool[Tensor, "B T"]], Bool[Tensor, " B"]] | None = None
    """Picks the sequences whose hidden states are kept, given the mask of the completions; None keeps all."""
    chosen: Bool[Tensor, " B"] | None = None
    """The choice, made before the model is called."""
    drew_random: bool = False
    """Whether the pass drew random numbers, as dropout does; known if hidden states are kept."""
    tokens: int = 0
    """Number of tokens that are scored, the last ones of each sequence."""
    head: HeadInputs | None = None
    """The head of the kept hidden states."""
    results: list[HeadResult] = field(default_factory=list)
    """One for every slice of the batch; none if TRL computed all logits and no support was wanted."""
    logp: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None

    def dist(self) -> SparseDist | None:
        """The policy on the support of every token [B T K], empty at masked tokens, if a support was wanted."""
        dists = [x.packing.unpack_dist(x.output.dist) for x in self.results if x.output.dist is not None]
        if len(dists) < 2:
            return dists[0] if dists else None
        rest_max = [dist.rest_max for dist in dists if dist.rest_max is not None]
        ids, logp, rest = (torch.cat(parts) for parts in zip(*((d.ids, d.logp, d.rest) for d in dists), strict=True))
        return SparseDist(ids, logp, rest, torch.cat(rest_max) if rest_max else None)

    def keep(self, states: Float[Tensor, "N H"], packing: Packing, head: HeadInputs) -> HiddenStates | None:
        """The hidden states that the next result holds, given those of a slice's packed rows; None if the pass keeps none."""
        if not self.keep_hidden:
            return None
        if self.head is None:  # among several processes a sharded head is whole in this pass alone
            self.head = head.freeze(shares=False) if torch.distributed.is_initialized() else head
        places = torch.arange(packing.count, device=states.device) if packing.rows is None else packing.rows
        places = places + sum(result.packing.shape.numel() for result in self.results)
        if self.chosen is not None:
            wanted = self.chosen[places // packing.shape[1]]
            states, places = states[wanted], places[wanted]
        return HiddenStates(states.detach(), places, self.head)

    def hidden(self) -> HiddenStates | None:
        """The hidden states of all slices, if the pass keeps them."""
        kept = [result.hidden for result in self.results if result.hidden is not None]
        if not kept:
            return None
        return HiddenStates(torch.cat([x.states for x in kept]), torch.cat([x.places for x in kept]), kept[0].head)

    def backward_reports(self) -> list[Tensor]:
        """[2] for each slice: its backward pass will write the share of dense rows and the most that it left out there."""
        reports = [result.output.report for result in self.results]
        return [x for x in reports if x is not None and torch.is_grad_enabled()]


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
    def run(self, mask: Bool[Tensor, "B T"]) -> Iterator[ScoringPass]:
        """Inside, models are scored by corral's head, on the completions, whose mask is given.

        The hooks are of this pass alone. So is the name in TRL's module: TRL has no argument for its head function, and
        looks it up there, behind whatever accelerate, PEFT or FSDP have wrapped around the model's forward.
        """
        scoring, self._expected = self._expected or ScoringPass(), None
        scoring.tokens = mask.shape[1]
        if scoring.keep_hidden and scoring.choose is not None:
            scoring.chosen = scoring.choose(mask)
        with ExitStack() as stack:
            if FUSED:
                head = FusedHead(scoring, self)
                for model in self.models:
                    stack.callback(model.register_forward_pre_hook(head.read_labels, with_kwargs=True).remove)
                stack.callback(setattr, _trl_utils, "_ChunkedLogProbFunction", _trl_utils._ChunkedLogProbFunction)
                _trl_utils._ChunkedLogProbFunction = head
            elif scoring.support.top_k is not None or scoring.support.ids is not None:
                for model in self.models:
                    hook = functools.partial(_read_logits, scoring, self.temperature)
                    stack.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
            before = _random_state() if scoring.keep_hidden else []
            yield scoring
            if before:
                scoring.drew_random = any(not torch.equal(x, y) for x, y in zip(before, _random_state(), strict=True))


class FusedHead:
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
        count = len(tokens)
        packing = Packing(completion, places[:count])
        ids = None if scoring.support.ids is None else packing.pack(scoring.support.ids)
        if not count:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids = None if ids is None else ids.new_full((1, ids.shape[-1]), -1)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings: dict[str, Any] = {
            "bias": bias, "scale": scale, "softcap": softcap, "temperature": temperature, "entropy": "entropy" in outputs,
            **self.one_implementation(hidden, weight),
        }  # fmt: skip
        output: HeadOutput | PolicyLoss
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            if scoring.loss is not None and count and completion.shape == scoring.loss.batch.mask.shape:
                terms = scoring.loss.pack(packing)
                output = policy_loss_from_hidden(
                    hidden[None], weight, tokens[None], terms.batch, terms.objective, weights=terms.weights,
                    policy_weights=terms.policy_weights, on_policy=terms.on_policy, union=terms.union, **settings,
                )  # fmt: skip
                logp, entropy = output.logp[0], None if output.entropy is None else output.entropy[0]
                # Hooks of distributed training sit on what the model returns: log-probs depend on the loss, with gradient 0.
                logp = logp + torch.where(torch.zeros_like(output.loss, dtype=torch.bool), output.loss, 0.0)
                kept = None
            else:
                output = lm_head(
                    hidden, weight, tokens, ids=ids,
                    top_k=None if scoring.support.top_k is None else min(scoring.support.top_k, len(weight)),
                    mass=scoring.support.mass, tolerance=scoring.tolerance, **settings,
                )  # fmt: skip
                logp, entropy = output.logp, output.entropy
                if not count:
                    logp, entropy = logp[:0], None if entropy is None else entropy[:0]
                    output = HeadOutput(logp, entropy, None if output.dist is None else output.dist.map(lambda x: x[:0]))
                kept = scoring.keep(hidden[:count], packing, HeadInputs(weight, bias, LogitSpec(scale, softcap, temperature)))
        scoring.results.append(HeadResult(output, packing, kept))
        found = [logp, entropy]
        if rows is not None:
            found = [None if x is None else x.new_zeros(scored.numel()).index_copy(0, rows, x) for x in found]
        return (*found, None, None, None)

    def one_implementation(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """On a GPU the torch path for every pass if one of them has no kernel: two heads would round differently."""
        if not hidden.is_cuda:
            return {}
        own = self.policy.own.top_k
        top_k = None if own is None else min(own, len(weight))
        chosen = choose("CorralTrainer", "auto", hidden, weight, top_k, given=top_k + 1 if self.policy.union and top_k else 0)
        return {"impl": "torch"} if chosen == "torch" else {}


def _random_state() -> list[Tensor]:
    """The random state of the CPU, and of this process's GPU if it has one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


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
    rows = Packing(torch.ones(logp.shape[:2], dtype=torch.bool, device=logp.device))
    scoring.results.append(HeadResult(HeadOutput(dist.logp[..., 0].flatten(), None, dist.map(lambda x: x.flatten(0, 1))), rows))
