"""Scoring passes: one call of TRL's LM head returns log-probs, and on request top-k distributions and hidden states."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from corral.support import condition_on_support, gather_support, top_k_support
from corral.tensors import SparseDist, Tensors
from corral.trl.api import FUSED
from corral.trl.packing import PackedRow, packed_mask


@dataclass(frozen=True)
class SupportRequest:
    """Request for a policy's support: its most likely tokens, until they reach `mass`, at most `top_k`. Empty by default."""

    top_k: int | None = None
    mass: float = 1.0


@dataclass(frozen=True, eq=False)
class HeadWeights(Tensors):
    """Weight, bias and scaling of the LM head in one scoring pass: the map from hidden states to logits."""

    weight: Tensor
    bias: Tensor | None
    spec: LogitSpec

    def freeze(self, *, shares: bool = True) -> "HeadWeights":
        """Copy the LM head's parameters, because later updates change them. With `shares`, untrained ones are shared."""
        return self.map(lambda x: x if shares and not x.requires_grad else x.detach().clone())


@dataclass(frozen=True, eq=False)
class HiddenStates(Tensors):
    """Last hidden states of some tokens of a scoring pass, and the LM head that maps them to logits."""

    SHARED: ClassVar[tuple[str, ...]] = ("head",)

    states: Float[Tensor, "M H"]
    places: Int[Tensor, " M"]
    """Index of each hidden state's token in the flattened batch of completions [B T], ascending."""
    head: HeadWeights


@dataclass(eq=False, kw_only=True)
class ScoringPass:
    """One scoring pass of TRL over completions [B T]: the request, corral's function for the LM head, and the results.

    TRL hands log-probs and entropy from the model to its loss, and nothing else. Everything more travels in this object:

        CorralTrainer              makes a pass, and calls TRL's method inside `policy_head.expect(scoring)`
          TRL                      calls `_get_per_token_logps_and_entropies`, which CorralTrainer overrides:
            PolicyHead.run         puts the pass in the place of TRL's head function, and calls TRL's own method
              TRL                  calls the model, once for every slice of the batch
                enter_model        packs the slice into one row, if the model takes one
                ScoringPass.apply  runs `lm_head` or `policy_loss_from_hidden`, and appends to `results`
                leave_model        puts log-probs back into the slice
        CorralTrainer              reads the results: for `OldPolicy.store` after rollouts, for the loss in an update
    """

    support: SupportRequest = field(default_factory=SupportRequest)
    ids: Int[Tensor, "B T K"] | None = None
    """Token ids whose log-probs the LM head computes. If `support` is requested too, the head uses the union of both."""
    replay: bool = False
    """True if `ids` are the tokens that truncated sampling kept (top-p, top-k, min-p). The policy is conditioned on them."""
    loss: LossTerms | None = None
    """Inputs of the loss [B T], if the LM head computes the loss with its gradient. None if it computes log-probs instead."""
    tolerance: float = 0.0
    """Share of a token's logit gradient that a sparse backward pass may drop."""
    keep_hidden: bool = False
    """True if the scoring pass stores hidden states and the LM head."""
    choose: Callable[[Bool[Tensor, "B T"]], Bool[Tensor, " B"]] | None = None
    """Function from the completion mask to the sequences whose hidden states are stored. None stores all sequences."""

    policy_head: "PolicyHead" = field(init=False, repr=False)
    tokens: int = field(init=False)
    """Number of tokens at the end of each sequence that are scored, including padding."""
    order: Int[Tensor, " B"] | None = field(default=None, init=False)
    """Order in which the model is called on the sequences of the batch. None means ascending order."""
    scored: Bool[Tensor, "b L"] = field(init=False)
    """True at positions, in the current slice of the batch, for which TRL computes log-probs."""
    handed: Bool[Tensor, "_ _"] = field(init=False)
    """True at positions of the model's actual input for which TRL computes log-probs. The input may be one packed row."""
    row: PackedRow | None = field(default=None, init=False)
    """Layout of the packed row of the current slice of the batch. None if the slice is padded."""
    chosen: Bool[Tensor, " B"] | None = field(default=None, init=False)
    """True for the sequences whose hidden states are stored: the result of `choose`."""
    drew_random: bool = field(default=False, init=False)
    """True if the scoring pass used random numbers, for example for dropout. Set only if hidden states are stored."""
    kept: list[HiddenStates] = field(default_factory=list, init=False)
    """Stored hidden states of each slice of the batch."""
    results: list[tuple[HeadOutput | PolicyLoss, Packing]] = field(default_factory=list, init=False)
    """Results of the LM head for each slice of the batch, with their indices in [B T].
    The results are log-probs and top-k distributions [N …], or a loss [1 N]. Empty if TRL computed all logits and no support
    was requested."""
    logp: Float[Tensor, "B T"] | None = field(default=None, init=False)
    entropy: Float[Tensor, "B T"] | None = field(default=None, init=False)
    """Log-probs and entropy [B T] as TRL returned them."""

    def dist(self) -> SparseDist | None:
        """Return the policy on the requested tokens [B T K], empty at masked tokens, or None if no tokens were requested."""
        dists = [packing.unpack_dist(output.dist) for output, packing in self.results if output.dist is not None]
        if not dists:
            return None
        dist = SparseDist.cat(dists)
        return dist if self.order is None else dist[self.order.argsort()]

    def hidden(self) -> HiddenStates | None:
        """Return the stored hidden states of all slices of the batch, joined. Returns None if none are stored."""
        if not self.kept:
            return None
        hidden = HiddenStates.cat(self.kept)
        return hidden if self.order is None else hidden[hidden.places.argsort()]

    def enter_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Forward pre-hook that finds the positions [b L−1] that TRL is about to score, and packs the sequences into a row."""
        self.handed = self.scored = kwargs["labels"][:, 1:] != -100
        if module not in self.policy_head.packed or kwargs.get("pixel_values") is not None:
            self.row = None
            return None
        self.row = PackedRow.of(kwargs["attention_mask"].bool())
        kwargs = self.row.pack(kwargs)
        self.handed = kwargs["labels"][:, 1:] != -100
        packed_mask.active = True
        return args, kwargs

    def leave_model(self, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook that puts the results of a packed row back into the padded shape, as TRL reads them."""
        packed_mask.active = False
        if self.row is not None:
            for name in ("log_probs", "entropy"):
                if name in output:
                    output[name] = self.row.unpack(output[name], self.scored.shape)

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *how: Any
    ) -> tuple[Tensor | None, ...]:
        """Compute log-probs and entropy of the scored tokens in one slice of the batch, in place of TRL's LM-head function."""
        _, softcap, scale, outputs = how
        rows = None
        if len(tokens) == self.handed.numel():
            rows = self.handed.to(hidden.device).flatten().nonzero().squeeze(-1)
            hidden, tokens = hidden.index_select(0, rows), tokens[rows]
        completion = self.scored[:, -self.tokens :].to(hidden.device)
        places = completion.flatten().byte().argsort(descending=True, stable=True)  # without a host sync for the count
        count = len(tokens)
        packing = Packing(completion, places[:count])
        ids, top_k = self.ids, self.support.top_k
        if ids is not None:  # of the whole batch
            ids = ids.flatten(0, 1)[self._places(packing, ids.device)]
        if not count:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids = None if ids is None else ids.new_full((1, ids.shape[-1]), -1)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings: dict[str, Any] = {
            "bias": bias, "scale": scale, "softcap": softcap, "temperature": temperature, "entropy": "entropy" in outputs,
            **self.policy_head.one_implementation(hidden, weight),
        }  # fmt: skip
        output: HeadOutput | PolicyLoss
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            if self.loss is not None and count and completion.shape == self.loss.batch.mask.shape:
                terms = self.loss.pack(packing)
                output = policy_loss_from_hidden(
                    hidden[None], weight, tokens[None], terms.batch, terms.objective, weights=terms.weights,
                    policy_weights=terms.policy_weights, on_policy=terms.on_policy, union=terms.union, **settings,
                )  # fmt: skip
                logp, entropy = output.logp[0], None if output.entropy is None else output.entropy[0]
                # Hooks of distributed training sit on what the model returns: log-probs depend on the loss, with gradient 0.
                logp = logp + torch.where(torch.zeros_like(output.loss, dtype=torch.bool), output.loss, 0.0)
            else:
                output = lm_head(
                    hidden, weight, tokens, ids=ids, top_k=None if top_k is None else min(top_k, len(weight)),
                    mass=self.support.mass, tolerance=self.tolerance, **settings,
                )  # fmt: skip
                if self.replay:
                    assert output.dist is not None  # there are ids
                    dist = condition_on_support(output.dist)
                    p = dist.logp.detach().exp()
                    output = HeadOutput(dist.logp[:, 0], -torch.where(p > 0, p * dist.logp.detach(), 0.0).sum(-1), dist)
                logp, entropy = output.logp, output.entropy
                if not count:
                    logp, entropy = logp[:0], None if entropy is None else entropy[:0]
                    output = HeadOutput(logp, entropy, None if output.dist is None else output.dist[:0])
                if self.keep_hidden:
                    self._keep(hidden[:count], packing, HeadWeights(weight, bias, LogitSpec(scale, softcap, temperature)))
        self.results.append((output, packing))
        found = [logp, entropy]
        if rows is not None:
            found = [None if x is None else x.new_zeros(self.handed.numel()).index_copy(0, rows, x) for x in found]
        return (*found, None, None, None)

    def _places(self, packing: Packing, device: torch.device) -> Int[Tensor, " N"]:
        """Return the index in the flattened batch [B T] of each scored token in the current slice of the batch."""
        done, length = sum(packing.shape[0] for _, packing in self.results), packing.shape[1]
        places = torch.arange(packing.count, device=device) if packing.rows is None else packing.rows
        if self.order is None:
            return places + done * length
        return self.order.to(device)[done + places // length] * length + places % length

    def _keep(self, states: Float[Tensor, "N H"], packing: Packing, head: HeadWeights) -> None:
        """Store the hidden states of the chosen sequences in one slice of the batch."""
        if self.kept:
            head = self.kept[0].head
        elif torch.distributed.is_initialized():  # a sharded head is whole in this pass alone
            head = head.freeze(shares=False)
        places = self._places(packing, states.device)
        if self.chosen is not None:
            wanted = self.chosen[places // packing.shape[1]]
            states, places = states[wanted], places[wanted]
        self.kept.append(HiddenStates(states.detach(), places, head))

    def read_logits(self, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook that computes the top-k distribution from all logits, for TRL before 1.15."""
        logp = (output.logits[:, :-1][:, -self.tokens :].float() / self.policy_head.temperature).log_softmax(-1)
        if self.support.top_k is None:
            assert self.ids is not None
            dist = gather_support(logp, self.ids)
        else:
            k, sampled = min(self.support.top_k, logp.shape[-1]), kwargs["input_ids"][:, -self.tokens :]
            dist = top_k_support(logp, sampled, k, self.support.mass, ids=self.ids)
        rows = Packing(torch.ones(logp.shape[:2], dtype=torch.bool, device=logp.device))
        found = HeadOutput(dist.logp[..., 0].flatten(), None, dist.map(lambda x: x.flatten(0, 1)))
        self.results.append((found, rows))


_trl_utils: Any = trl.trainer.utils  # one of its names is replaced while a pass is scored


@dataclass(eq=False)
class PolicyHead:
    """Replaces TRL's LM-head function in all scoring passes of the policy, a reference and a teacher.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded weights) and hands them to one function. In scoring passes, that function is corral's: old, new and reference
    log-probs then come from one head in one precision, and a support with them. TRL before 1.15 computes all logits, in every
    pass alike, and the support is taken from those.
    """

    models: list[nn.Module]
    temperature: float
    own: SupportRequest
    """Request for the policy's most likely tokens in old-policy passes."""
    union: bool
    """True if later scoring passes add the new policy's most likely tokens to the old policy's support `own`."""
    packed: list[nn.Module] = field(default_factory=list)
    """Models whose batches are packed into rows without padding."""
    _expected: ScoringPass | None = None

    @contextmanager
    def expect(self, scoring: ScoringPass) -> Iterator[None]:
        """Context in which TRL's first scoring pass fills `scoring`. Later passes, such as a reference's, request nothing."""
        before, self._expected = self._expected, scoring
        try:
            yield
        finally:
            self._expected = before

    @contextmanager
    def run(self, mask: Bool[Tensor, "B T"]) -> Iterator[ScoringPass]:
        """Context in which corral's LM-head function replaces TRL's, for the unmasked tokens of the completions.

        The hooks are of this pass alone. So is the name in TRL's module: TRL has no argument for its head function, and
        looks it up there, behind whatever accelerate, PEFT or FSDP have wrapped around the model's forward.
        """
        scoring, self._expected = self._expected or ScoringPass(), None
        scoring.policy_head, scoring.tokens = self, mask.shape[1]
        if scoring.keep_hidden and scoring.choose is not None:
            scoring.chosen = scoring.choose(mask)
        with ExitStack() as stack:
            if FUSED:
                for model in self.models:
                    stack.callback(model.register_forward_pre_hook(scoring.enter_model, with_kwargs=True).remove)
                    stack.callback(model.register_forward_hook(scoring.leave_model, with_kwargs=True).remove)
                stack.callback(setattr, packed_mask, "active", False)  # after an error in a model
                stack.callback(setattr, _trl_utils, "_ChunkedLogProbFunction", _trl_utils._ChunkedLogProbFunction)
                _trl_utils._ChunkedLogProbFunction = scoring
            elif scoring.support.top_k is not None or scoring.ids is not None:
                for model in self.models:
                    stack.callback(model.register_forward_hook(scoring.read_logits, with_kwargs=True).remove)
            before = _random_state() if scoring.keep_hidden else []
            yield scoring
            if before:
                scoring.drew_random = any(not torch.equal(x, y) for x, y in zip(before, _random_state(), strict=True))

    def one_implementation(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """Choose the torch implementation on a GPU if any scoring pass has no kernel, because mixed heads round differently."""
        if not hidden.is_cuda:
            return {}
        top_k = None if self.own.top_k is None else min(self.own.top_k, len(weight))
        chosen = choose("CorralTrainer", "auto", hidden, weight, top_k, given=top_k + 1 if self.union and top_k else 0)
        return {"impl": "torch"} if chosen == "torch" else {}


def _random_state() -> list[Tensor]:
    """Random state of the CPU, and of this process's GPU if it has one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
