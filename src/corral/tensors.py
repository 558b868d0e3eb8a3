"""Records of tensors: a distribution on a sparse support, a batch of tokens, and an objective's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.numerics import at_least_float32

_Record = TypeVar("_Record", bound="Tensors")


@dataclass(frozen=True, eq=False)
class Tensors:
    """Base class for records of tensors. Indexing, moving and joining act on all tensor fields and skip other fields."""

    SHARED: ClassVar[tuple[str, ...]] = ()
    """Names of fields that all rows share, such as a weight. Shared fields are moved to a device, but not indexed."""

    def map(self: _Record, change: Callable[[Tensor], Tensor], *, shared: bool = False) -> _Record:
        """Apply a function to every tensor field, also in nested records. With `shared`, include the fields in `SHARED`."""

        def changed(x: Any) -> Any:
            return change(x) if isinstance(x, Tensor) else x.map(change, shared=shared) if isinstance(x, Tensors) else x

        return replace(self, **{name: changed(x) for name, x in vars(self).items() if shared or name not in self.SHARED})

    def __getitem__(self: _Record, index: Any) -> _Record:
        """Select rows of the record: `index` applies to every tensor field."""
        return self.map(lambda x: x[index])

    def detach(self: _Record) -> _Record:
        """Return the record with its tensors as constants for autograd."""
        return self.map(Tensor.detach, shared=True)

    def to(self: _Record, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> _Record:
        """Move the record to another device or dtype. `dtype` converts floating-point fields only."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None), shared=True)

    @classmethod
    def cat(cls: type[_Record], parts: Sequence[_Record], dim: int = 0) -> _Record:
        """Join records along an axis. Fields without tensors are taken from the first record."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str, x: Any) -> Any:
            found = [vars(part)[name] for part in parts]
            return torch.cat(found, dim) if isinstance(x, Tensor) else type(x).cat(found, dim) if isinstance(x, Tensors) else x

        return replace(parts[0], **{name: joined(name, x) for name, x in vars(parts[0]).items() if name not in cls.SHARED})


@dataclass(frozen=True, eq=False)
class SparseDist(Tensors):
    """Next-token distribution on a few tokens (support: the sampled and the top-k tokens), with the exact mass of the tail.

    Slot 0 is the sampled token; the other slots hold the rest of the support, most likely first, ties by lower id, padding
    last. Built by :func:`corral.top_k_support`; the same support under another policy by :func:`corral.gather_support`.
    """

    ids: Int[Tensor, "*b K"]
    """Token ids of the support, int64 or int32. Padding is −1 and always comes last."""
    logp: Float[Tensor, "*b K"]
    """Log-probabilities of the support's tokens under the full softmax, −inf at padding."""
    rest: Float[Tensor, "*b"]
    """Log-probability of the tail, which is all tokens outside the support. It is −inf only if the tail is empty."""
    rest_max: Float[Tensor, "*b"] | None = None
    """Largest log-probability of a token outside the support, a constant for autograd. None if unknown."""

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
        """Return log-probabilities with the tail as one more category [*, K + 1], so that they form a complete distribution."""
        return at_least_float32(torch.cat([self.logp, self.rest.unsqueeze(-1)], dim=-1))

    def pack(self, device: torch.device | str = "cpu") -> "PackedSparseDist":
        """Pack the distribution without padding into int32 and float32 tensors, detached, on the CPU by default."""
        # Most rows of a peaked policy need a few of their K slots: only those are kept, and their number per position.
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
class PackedSparseDist(Tensors):
    """Packed form of a SparseDist for rollout buffers, with 8 bytes per support token and 12 bytes per position."""

    ids: Int[Tensor, " n"]
    logp: Float[Tensor, " n"]
    rest: Float[Tensor, "*b"]
    counts: Int[Tensor, "*b"]
    """Number of support tokens at each position of the batch.
    `ids` and `logp` list the tokens of one position after another."""
    slots: int
    """Number K of support slots per position in the unpacked distribution, including padding."""
    rest_max: Float[Tensor, "*b"] | None = None

    @property
    def bytes_per_token(self) -> float:
        """Memory of the packed distribution per position of the batch, in bytes."""
        stored = sum(x.numel() * x.element_size() for x in vars(self).values() if isinstance(x, Tensor))
        return stored / max(self.counts.numel(), 1)

    def unpack(self, device: torch.device | str | None = None) -> SparseDist:
        """Restore the packed distribution, exact up to float32."""
        here = self.map(lambda x: x.to(device or x.device, copy=True))
        kept = torch.arange(self.slots, device=here.counts.device) < here.counts.unsqueeze(-1)
        ids = torch.full(kept.shape, -1, dtype=torch.int64, device=kept.device)
        logp = torch.full(kept.shape, -torch.inf, device=kept.device)
        ids[kept], logp[kept] = here.ids.long(), here.logp
        return SparseDist(ids, logp, here.rest, here.rest_max)


@dataclass(frozen=True, eq=False)
class TokenBatch(Tensors):
    """Inputs of an objective: B completions of T tokens. Padding may hold any value, also NaN.

    :mod:`corral.objective.check` has what objectives refuse.
    """

    logp_new: Float[Tensor, "B T"]
    """Log-probs log π of the sampled tokens under the policy in training. Gradients flow through this field."""
    logp_old: Float[Tensor, "B T"]
    """Log-probs log π_old of the sampled tokens under the old policy, which is the centre of the trust region.
    The ratio is π / π_old."""
    advantages: Float[Tensor, "B T"] | Float[Tensor, " B"]
    mask: Bool[Tensor, "B T"]
    """True at tokens that are used for training."""
    dist_new: SparseDist | None = None
    dist_old: SparseDist | None = None
    """Old policy's distributions [B T K], on the same support (sampled and top-k tokens) as `dist_new`."""
    logp_rollout: Float[Tensor, "B T"] | None = None
    """Log-probs of the sampled tokens as the sampler reported them, for sampler corrections and the metric `tr/mismatch`."""
    dist_teacher: SparseDist | None = None
    """Distributions [B T K] of a third policy on the same support, constant for autograd.
    It is the teacher of `distill`, or the reference of `troll` with centre="reference"."""

    @classmethod
    def on_support(
        cls,
        new: SparseDist,
        old: SparseDist,
        advantages: Float[Tensor, "B T"] | Float[Tensor, " B"],
        mask: Bool[Tensor, "B T"],
        logp_rollout: Float[Tensor, "B T"] | None = None,
    ) -> "TokenBatch":
        """Build a batch from two policies on the same support, whose first token is the sampled token."""
        return cls(new.logp[..., 0], old.logp[..., 0], advantages, mask, new, old, logp_rollout)


@dataclass(frozen=True, eq=False)
class ObjectiveOutput(Tensors):
    """Output of an objective: a loss for each token, 0 at masked tokens and not reduced, and metrics to log."""

    loss: Float[Tensor, "B T"]
    """Loss of each token: the policy-gradient term plus the regression term."""
    metrics: dict[str, Tensor]
    acted: Bool[Tensor, "B T"] | None = None
    """True at tokens on which the trust region acted. None if this is not recorded, as in a fused kernel.
    The metric `tr/active_frac` is its mean."""
    kl_after: Float[Tensor, "B T"] | None = None
    """KL(projected‖old) of each token, for objectives that project. None for other objectives."""
    regression: Float[Tensor, "B T"] | None = None
    """Part of the loss that pulls the new policy back to the trust region. None if there is no such part.
    Sampler corrections weigh the policy gradient and leave this part alone. It is also None if a fused kernel includes it
    in the loss only."""

    def weigh(self, weights: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the loss with the policy-gradient term multiplied by `weights`, such as a sampler correction."""
        if self.regression is None:
            return torch.where(weights == 0, 0.0, self.loss * weights)
        return torch.where(weights == 0, 0.0, (self.loss - self.regression) * weights) + self.regression

    def total(self, weights: Float[Tensor, "B T"], policy_weights: Float[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """Compute Σ w (c · policy term + regression), with `weights` w and `policy_weights` c. Tokens with w = 0 may be NaN."""
        loss = self.loss if policy_weights is None else self.weigh(policy_weights)
        return torch.where(weights == 0, 0.0, loss * weights).sum()


def metric_kind(name: str) -> Literal["max", "sum", "mean"]:
    """Return how a metric is combined over several batches, by its name: maximum, sum, or mean over tokens."""
    return "max" if "_max" in name else "sum" if name == "tr/unconverged" else "mean"


def join_outputs(parts: Sequence[ObjectiveOutput]) -> ObjectiveOutput:
    """Join outputs of an objective for parts of the unmasked tokens, each [1 n], into one output [1 N]."""
    if len(parts) == 1:
        return parts[0]
    counts = parts[0].loss.new_tensor([float(part.loss.numel()) for part in parts])
    metrics = {}
    for name in parts[0].metrics:
        values, kind = torch.stack([part.metrics[name].to(counts.dtype) for part in parts]), metric_kind(name)
        counted = counts
        if name == "tr/dual":  # the mean over projected tokens; where the projection failed it is infinite and left out
            active, lost = (torch.stack([part.metrics[key] for part in parts]) for key in ("tr/active_frac", "tr/unconverged"))
            counted = (counts * active - lost).clamp(min=0)
        mean = (values * counted).sum() / counted.sum().clamp(min=1)
        metrics[name] = values.amax() if kind == "max" else values.sum() if kind == "sum" else mean
    return replace(ObjectiveOutput.cat(parts, 1), metrics=metrics)
