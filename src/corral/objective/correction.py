"""Sampler corrections: weights of the policy gradient that correct for the mismatch between sampler and trainer.

    loss = objective(batch).weigh(correction(batch))

That is c · policy + regression, token by token. A regression, such as `troll`'s, is no expectation over the sampler: it is not
weighted, and pulls dropped tokens back too. With ρ_t = π_old(a_t) / π_rollout(a_t), of `logp_old` and `logp_rollout`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence import kl_k2
from corral.objective.check import check_batch
from corral.objective.ratio import clamp_log_ratio, zero_padding
from corral.tensors import TokenBatch
from corral.validate import Checked, build_config, limited, nearest, number_in


@dataclass(frozen=True, kw_only=True)
class TISConfig(Checked):
    cap: float = limited(2.0, above=0, what="the largest weight")
    """Largest importance weight C of a token or sequence."""


@dataclass(frozen=True, kw_only=True)
class IcePopConfig:
    low: float = 0.5
    """Smallest probability ratio α of trainer to sampler. Tokens with a smaller ratio get weight 0."""
    high: float = 5.0
    """Largest probability ratio β of trainer to sampler. Tokens with a larger ratio get weight 0."""

    def __post_init__(self) -> None:
        if not (number_in(self.low, 0) and number_in(self.high, self.low)):
            raise ValueError(f"icepop: keeps ratios in [`low`, `high`] with 0 ≤ low ≤ high; got [{self.low!r}, {self.high!r}].")


@dataclass(frozen=True, kw_only=True)
class TRMConfig(Checked):
    bound: float = limited(0.05, at_least=0, what="a divergence", note="inf switches it off")
    """Bound δ on the KL estimate k2 = ½ (log ρ)² of every token. A sequence with a token above δ gets weight 0."""


def tis(batch: TokenBatch, config: TISConfig) -> Float[Tensor, "B T"]:
    """Truncated importance sampling (TIS) with one weight per token: the ratio ρ_t of trainer to sampler, capped at C.

    Ref:
        Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return clamp_log_ratio(_log_mismatch(batch)).exp().clamp(max=config.cap)


def seq_tis(batch: TokenBatch, config: TISConfig) -> Float[Tensor, "B T"]:
    """Truncated importance sampling with one weight per sequence: the product of its token ratios ρ_t, capped at C.

    Ref:
        Liu, Li et al. 2025, "When speed kills stability". Invariant: on one-token sequences it is tis.
    """
    product = _log_mismatch(batch).sum(-1, keepdim=True)
    return clamp_log_ratio(product).exp().clamp(max=config.cap).expand_as(batch.mask)


def icepop(batch: TokenBatch, config: IcePopConfig) -> Float[Tensor, "B T"]:
    """IcePop: each token's weight is its ratio ρ_t if the ratio lies in [α, β], and 0 otherwise.

    Ref:
        Ling team 2025, Ring-1T, arXiv:2510.18855.
    """
    ratio = clamp_log_ratio(_log_mismatch(batch)).exp()
    return torch.where((ratio >= config.low) & (ratio <= config.high), ratio, 0.0)


def trm(batch: TokenBatch, config: TRMConfig) -> Float[Tensor, "B T"]:
    """Trust-region masking (TRM): weight 1 on sequences whose tokens all have ½ (log ρ_t)² ≤ δ, and 0 on all other sequences.

    Ref:
        Li et al. 2025, arXiv:2512.23075, with the k2 estimate, and of the old policy where the paper
        measures the current one; the default δ is ours.
    """
    furthest = kl_k2(_log_mismatch(batch), torch.zeros_like(batch.logp_old)).amax(-1, keepdim=True)
    return (furthest <= config.bound).expand_as(batch.mask).to(furthest.dtype)


CORRECTIONS: dict[str, tuple[Callable[[TokenBatch, Any], Tensor], type]] = {
    "icepop": (icepop, IcePopConfig),
    "seq_tis": (seq_tis, TISConfig),
    "tis": (tis, TISConfig),
    "trm": (trm, TRMConfig),
}


@dataclass(frozen=True)
class Correction:
    """Sampler correction with a name and settings: maps a TokenBatch to weights [B T], detached, ≥ 0, and 0 at padding."""

    name: str
    config: Any
    check: bool = True
    """If True, a batch with values that cannot be log-probabilities, such as logits, is refused."""

    def __call__(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        check_batch(self.name, batch, {"logp_rollout"}, check=self.check)
        function, _ = CORRECTIONS[self.name]
        with torch.no_grad():
            return torch.where(batch.mask, function(batch, self.config), 0.0)


def make_correction(name: str, /, *, check: bool = True, **config: Any) -> Correction:
    """Build the sampler correction `name`: "tis", "seq_tis", "icepop" or "trm". `check` is as in `make_objective`."""
    if not isinstance(name, str) or name not in CORRECTIONS:
        raise ValueError(f"make_correction: there is no correction {name!r}.{nearest(name, CORRECTIONS)}")
    return Correction(name, build_config(name, CORRECTIONS[name][1], config), check)


def _log_mismatch(batch: TokenBatch) -> Float[Tensor, "B T"]:
    assert batch.logp_rollout is not None
    return zero_padding(batch.logp_old, batch.mask) - zero_padding(batch.logp_rollout, batch.mask)
