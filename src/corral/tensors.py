"""The nouns: a distribution on a sparse support, a batch of tokens, what an objective returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.numerics import at_least_float32


@dataclass(frozen=True, eq=False)
class SparseDist:
    """A next-token distribution on a sparse support, with the exact mass of its tail.

    Slot 0 is the sampled token; the other slots hold the others of the support, most likely first, ties by lower id, padding
    last. Built by :func:`corral.top_k_support`; the same support under another policy by :func:`corral.gather_support`.
    """

    ids: Int[Tensor, "*b K"]
    """Token ids, int64 (int32 accepted); −1 is padding, compacted to the end."""
    logp: Float[Tensor, "*b K"]
    """Log-probabilities of the full softmax; −inf at padding."""
    rest: Float[Tensor, "*b"]
    """Log mass of every token outside the support, a logsumexp over them; −inf only where nothing is left."""
    rest_max: Float[Tensor, "*b"] | None = None
    """Largest log-probability outside the support, a constant for autograd; None where nobody knows it."""

    def __post_init__(self) -> None:
        if self.ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"SparseDist: `ids` holds token ids, int64 or int32; got {self.ids.dtype}.")
        for name, x in (("logp", self.logp), ("rest", self.rest)):
            if not x.is_floating_point():
                raise ValueError(f"SparseDist: `{name}` holds log-probabilities and must be floating point; got {x.dtype}.")
        if self.rest_max is not None and self.rest_max.shape != self.rest.shape:
            raise ValueError(
                f"SparseDist: rest and rest_max are both [*]; got {list(self.rest.shape)} and {list(self.rest_max.shape)}."
            )
        if self.ids.shape != self.logp.shape or self.rest.shape != self.ids.shape[:-1]:
            raise ValueError(
                f"SparseDist: ids and logp are [*, K] and rest is [*]; got ids {list(self.ids.shape)}, "
                f"logp {list(self.logp.shape)}, rest {list(self.rest.shape)}."
            )

    def with_rest(self) -> Float[Tensor, "*b K_plus_rest"]:
        """Log-probabilities with the tail as one more category: a whole distribution, [*, K + 1]."""
        return at_least_float32(torch.cat([self.logp, self.rest.unsqueeze(-1)], dim=-1))

    def map(self, change: Callable[[Tensor], Tensor]) -> "SparseDist":
        """The same change made to every field: rows picked, moved or reshaped along the leading axes."""
        rest_max = None if self.rest_max is None else change(self.rest_max)
        return SparseDist(change(self.ids), change(self.logp), change(self.rest), rest_max)

    def detach(self) -> "SparseDist":
        """The same distribution as a constant for autograd."""
        return self.map(Tensor.detach)

    def pack(self, device: torch.device | str = "cpu") -> "PackedSparseDist":
        """Jagged int32 + float32 storage without the padding, on the CPU by default; detached."""
        kept = self.ids >= 0
        return PackedSparseDist(
            ids=self.ids[kept].to(device, torch.int32),
            logp=self.logp.detach()[kept].to(device, torch.float32),
            rest=self.rest.detach().to(device, torch.float32, copy=True),
            counts=kept.sum(-1).to(device, torch.int32),
            slots=self.ids.shape[-1],
            rest_max=None if self.rest_max is None else self.rest_max.to(device, torch.float32, copy=True),
        )


@dataclass(frozen=True, eq=False)
class PackedSparseDist:
    """A :class:`SparseDist` as a rollout buffer stores it: 8 bytes per token of the support and 12 per position."""

    ids: Int[Tensor, " n"]
    logp: Float[Tensor, " n"]
    rest: Float[Tensor, "*b"]
    counts: Int[Tensor, "*b"]
    """Tokens of the support at each position; the rows of `ids` and `logp` follow one another in this order."""
    slots: int
    """K of the distribution that was packed, padding included."""
    rest_max: Float[Tensor, "*b"] | None = None

    @property
    def bytes_per_token(self) -> float:
        """Storage per position of the batch."""
        fields = (self.ids, self.logp, self.rest, self.counts, self.rest_max)
        stored = sum(x.numel() * x.element_size() for x in fields if x is not None)
        return stored / max(self.counts.numel(), 1)

    def unpack(self, device: torch.device | str | None = None) -> SparseDist:
        """The distribution that was packed, exactly as it was up to float32."""
        counts = self.counts.to(device or self.counts.device)
        kept = torch.arange(self.slots, device=counts.device) < counts.unsqueeze(-1)
        ids = torch.full(kept.shape, -1, dtype=torch.int64, device=counts.device)
        logp = torch.full(kept.shape, -torch.inf, device=counts.device)
        ids[kept] = self.ids.to(counts.device, torch.int64)
        logp[kept] = self.logp.to(counts.device)
        rest_max = None if self.rest_max is None else self.rest_max.to(counts.device, copy=True)
        return SparseDist(ids, logp, self.rest.to(counts.device, copy=True), rest_max)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Everything an objective may read: B completions of T tokens. Padding may hold anything, NaN included.

    What each objective checks of it is in :mod:`corral.objective.check`.
    """

    logp_new: Float[Tensor, "B T"]
    """log π of the sampled tokens under the policy being trained; the gradient flows here."""
    logp_old: Float[Tensor, "B T"]
    """log π_old of the same tokens: the anchor, centre of the region and denominator of the ratio."""
    advantages: Float[Tensor, "B T"] | Float[Tensor, " B"]
    mask: Bool[Tensor, "B T"]
    """True where a token is trained on."""
    dist_new: SparseDist | None = None
    dist_old: SparseDist | None = None
    """Both policies on ONE shared support, [B T K]."""
    logp_rollout: Float[Tensor, "B T"] | None = None
    """What the sampler reported: sampler corrections and `tr/mismatch` read it."""
    dist_teacher: SparseDist | None = None
    """A third policy, a constant, on the same support [B T K]: whom `distill` learns from, or the reference that `troll` with
    centre="reference" stays near."""


@dataclass(frozen=True, eq=False)
class ObjectiveOutput:
    """What an objective returns: a loss per token, unreduced and 0 where masked out, and what to log."""

    loss: Float[Tensor, "B T"]
    """Policy term and regression together."""
    metrics: dict[str, Tensor]
    acted: Bool[Tensor, "B T"] | None = None
    """Where the region acted: on these tokens `tr/active_frac` counts. None where nobody says, as in a fused kernel."""
    kl_after: Float[Tensor, "B T"] | None = None
    """KL(projected‖old), for objectives that project."""
    regression: Float[Tensor, "B T"] | None = None
    """The part of the loss that pulls the network back to the region. Weights for the sampler, which are of the policy
    gradient, leave it alone. None where there is none, or where a fused kernel has it in the loss only."""

    def weigh(self, weights: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The loss with its policy term multiplied by `weights`: a sampler correction, importance weights, an entropy mask."""
        if self.regression is None:
            return torch.where(weights == 0, 0.0, self.loss * weights)
        return torch.where(weights == 0, 0.0, (self.loss - self.regression) * weights) + self.regression

    def total(self, weights: Float[Tensor, "B T"], policy_weights: Float[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """Σ w (c · policy + regression), w = `weights` and c = `policy_weights`; what is weighted with 0 does not count."""
        loss = self.loss if policy_weights is None else self.weigh(policy_weights)
        return torch.where(weights == 0, 0.0, loss * weights).sum()

    def detach(self) -> "ObjectiveOutput":
        """The same as constants for autograd."""
        regression = None if self.regression is None else self.regression.detach()
        return ObjectiveOutput(self.loss.detach(), self.metrics, self.acted, self.kl_after, regression)


def metric_kind(name: str) -> Literal["max", "sum", "mean"]:
    """How a metric of several batches is made of theirs; means are over tokens."""
    return "max" if "_max" in name else "sum" if name == "tr/unconverged" else "mean"


def join_outputs(parts: Sequence[ObjectiveOutput]) -> ObjectiveOutput:
    """Outputs for some tokens each [1 n], all of them unmasked, as one [1 N]."""
    if len(parts) == 1:
        return parts[0]
    counts = parts[0].loss.new_tensor([float(part.loss.numel()) for part in parts])
    metrics = {}
    for name in parts[0].metrics:
        values, kind = torch.stack([part.metrics[name].to(counts.dtype) for part in parts]), metric_kind(name)
        counted = counts
        if name == "tr/dual":  # of the tokens that were projected; of those that could not be, it is infinite and left out
            active, lost = (torch.stack([part.metrics[key] for part in parts]) for key in ("tr/active_frac", "tr/unconverged"))
            counted = (counts * active - lost).clamp(min=0)
        mean = (values * counted).sum() / counted.sum().clamp(min=1)
        metrics[name] = values.amax() if kind == "max" else values.sum() if kind == "sum" else mean

    def cat(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]  # one of the fields below
        return None if found[0] is None else torch.cat(found, 1)

    loss = cat("loss")
    assert loss is not None
    return ObjectiveOutput(loss, metrics, cat("acted"), cat("kl_after"), cat("regression"))
