"""One scoring pass of TRL's over completions: the support asked of the head, what the head found, and how the loss reads it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.kernels.head import HeadOutput
from corral.kernels.logits import LogitSpec
from corral.kernels.packed import LossTerms, Packing
from corral.kernels.policy_loss import PolicyLoss
from corral.types import SparseDist


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
