"""Retraction: after a batch's updates, back towards the old weights until the network that will be deployed is near enough."""

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from corral.deployed.statistics import STATISTICS, BatchKL, TokenKL
from corral.validate import number_in

logger = logging.getLogger(__name__)

AIM = 0.97
"""The share of the bound that a guess aims at: one that lands just above it would be a probe for nothing."""
CAREFUL = 0.7
"""The same for the last guess, after which nothing would be left but the old weights."""
ENOUGH = 0.8
"""A kept step that uses this share of the bound is not worth another probe."""
LOST = 0.1
"""The share to try next where the distance is no number."""
LEAST = 1e-6
"""A smaller share is not worth a probe: nothing is kept."""
FEW = 5000
"""With fewer tokens the 99.9th percentile is one of the five largest."""
_told: set[str] = set()
"""Warnings that were given: each is given once."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a retraction measured, kept and promises: on these tokens, the network is as near as `after` says."""

    statistic: str
    bound: float
    share: float
    """How much of the step was kept: θ_old + share · (θ_new − θ_old)."""
    probes: int
    """Measurements that this took."""
    value_before: float
    """The statistic after the updates, before anything was undone."""
    value_after: float
    """Of what was kept: at most the bound."""
    before: TokenKL
    after: TokenKL

    def metrics(self) -> dict[str, float]:
        """As a trainer logs it."""
        after = self.after
        found = {
            "tr/deployed_kl_mean": after.mean,
            "tr/deployed_kl_p999": after.p999,
            "tr/deployed_kl_max": after.max,
            "tr/step_share": self.share,
            "tr/deployed_probes": float(self.probes),
        }
        others = {
            "tr/deployed_kl_se": after.se,
            "tr/deployed_seq_kl_mean": after.seq_mean,
            "tr/deployed_seq_kl_max": after.seq_max,
        }
        return found | {name: value for name, value in others.items() if value is not None}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that are trained, by name; a tied weight once; of a sharded one this process's part."""
    _forget_copies(module)
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def retract(
    module: nn.Module,
    old: Mapping[str, Tensor],
    probe: Callable[[], Float[Tensor, " N"] | BatchKL],
    *,
    bound: float,
    statistic: str = "mean",
    max_probes: int = 4,
) -> Certificate:
    """Keep the largest share of a step that a few probes find, for which a statistic of the per-token KL fits a bound.

        θ ← θ_old + s (θ_new − θ_old),   S(KL(π_θ ‖ π_old)) ≤ δ

    The whole step is measured first. Where it is too far, s = √(δ / D) is measured next (D grows as s² near the old weights),
    then corrections along the power law through the two nearest. Only a share that was measured is kept, with the weights as
    they are stored, rounding included; where none fits, the old weights are, bit for bit. Parameters that are not in `old`,
    and buffers, are left alone. In distributed training `probe` returns the tokens of all processes: all decide alike.

    Args:
        module: the network after the updates; changed in place.
        old: `snapshot(module)` from before them.
        probe: measures the module as it is now: KL(new‖old) of the batch's tokens [N], from `head_kl` or otherwise; or a
            `BatchKL`, whose sequences the certificate then has too.
        bound: δ > 0, inf to measure alone.
        statistic: "mean", "p999" (warns once below 5,000 tokens), "cvar" (mean of the worst 1 %) or "max".
        max_probes: measurements at most; with one, a step is kept whole or not at all. A step that fits takes one.
    Returns:
        Certificate.
    Ref:
        Schulman et al. 2015, arXiv:1502.05477, app. C (the line search). Invariant: value_after ≤ bound, whatever `probe` says.
    """
    _check(module, old, bound, statistic, max_probes)
    _forget_copies(module)
    parameters = {name: p for name, p in module.named_parameters() if name in old}
    new = {name: p.detach().clone() for name, p in parameters.items()}
    measures = bound == math.inf  # then nothing is undone, whatever is found
    usable = measures or all(_is_finite(p) for p in new.values())
    tried: list[_Probe] = []
    share: float | None = 1.0 if usable else None
    while share is not None and len(tried) < max_probes:
        if tried:
            _place(parameters, old, new, share)
            _forget_copies(module)
        tried.append(_Probe.of(share, probe(), statistic))
        share = None if measures else _next_share(tried, bound, last=len(tried) == max_probes - 1)
    first = tried[0] if tried else _Probe(1.0, math.nan, TokenKL(mean=math.nan, p999=math.nan, max=math.nan, tokens=0))
    nothing = _Probe(0.0, 0.0, TokenKL.none(first.kl.tokens))
    if statistic == "p999" and not measures and tried:
        _warn_of_few(first.kl.tokens)
    fitting = [one for one in tried if measures or one.value <= bound]
    kept = max(fitting, key=lambda one: one.share, default=nothing)
    if not tried or tried[-1].share != kept.share:
        _place(parameters, old, new, kept.share)
    _forget_copies(module)
    return Certificate(
        statistic=statistic, bound=bound, share=kept.share, probes=len(tried),
        value_before=first.value, value_after=kept.value, before=first.kl, after=kept.kl,
    )  # fmt: skip


@dataclass(frozen=True)
class _Probe:
    """One measurement."""

    share: float
    value: float
    kl: TokenKL

    @classmethod
    def of(cls, share: float, measured: Tensor | BatchKL, statistic: str) -> "_Probe":
        """A KL that is no number anywhere leaves no statistic one: a quantile would pass it by."""
        found = TokenKL.of(measured)
        kl = measured.new_old if isinstance(measured, BatchKL) else measured
        lost = math.isnan(found.mean)
        return cls(share, math.nan if lost else float(STATISTICS[statistic](kl.detach().double())), found)


def _next_share(tried: list[_Probe], bound: float, *, last: bool) -> float | None:
    """Where to measure next, as if the statistic were a power of the share; None where nothing is worth another probe."""
    fits = max((one for one in tried if one.value <= bound), key=lambda one: one.share, default=None)
    if fits is not None and (fits.share == 1.0 or fits.value >= ENOUGH * bound):
        return None
    # The whole step did not fit, so that there is one; all of them went further than what fits.
    far = sorted((one for one in tried if not one.value <= bound), key=lambda one: one.share)
    nearest = far[0]
    if not math.isfinite(nearest.value):
        guess = nearest.share * LOST if fits is None else math.sqrt(fits.share * nearest.share)
    elif fits is not None:
        if fits.value <= 0:
            return math.sqrt(fits.share * nearest.share)
        power = math.log(nearest.value / fits.value) / math.log(nearest.share / fits.share)
        guess = fits.share * (AIM * bound / fits.value) ** (1 / power)
    else:
        power = 2.0
        if len(far) > 1 and math.isfinite(far[1].value):
            power = math.log(max(far[1].value / nearest.value, 1.0)) / math.log(far[1].share / nearest.share)
            # Far away a KL saturates: it grew more slowly there than it will between here and the bound. The last probe
            # relies on none of that, for where it does not fit nothing is kept.
            power = min(2.0, max(0.5, power if last else (power + 2.0) / 2))
        guess = nearest.share * ((CAREFUL if last else AIM) * bound / nearest.value) ** (1 / power)
    return guess if guess > LEAST else None


def _warn_of_few(tokens: int) -> None:
    if tokens < FEW and "p999" not in _told:
        _told.add("p999")
        logger.warning(
            "retract: the 99.9th percentile of %d tokens is one of their five largest KLs, and noisy. Measure %d or more, or "
            "hold the mean.", tokens, FEW,
        )  # fmt: skip


def restore(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of a `snapshot` back into the module, bit for bit."""
    _forget_copies(module)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    _forget_copies(module)


def _is_finite(weight: Tensor) -> bool:
    """Of a sharded weight, on all processes alike."""
    finite = weight.isfinite().all()
    return bool(finite.full_tensor() if hasattr(finite, "full_tensor") else finite)  # a DTensor, whose import takes a second


def _forget_copies(module: nn.Module) -> None:
    """Before weights are read or after they were written: drop half-precision copies of autocast, and FSDP2's gathered ones."""
    torch.clear_autocast_cache()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, so not used
    for part in module.modules():
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _place(parameters: Mapping[str, Tensor], old: Mapping[str, Tensor], new: Mapping[str, Tensor], share: float) -> None:
    """Write θ_old + share · (θ_new − θ_old) into the parameters, rounded once; at 0 the old weights, even from NaN."""
    for name, p in parameters.items():
        p.copy_(torch.lerp(old[name], new[name], share) if share else old[name])  # half precision is computed wide


def _check(module: nn.Module, old: Mapping[str, Tensor], bound: float, statistic: str, max_probes: int) -> None:
    shapes = {name: p.shape for name, p in module.named_parameters()}
    if not old or any(name not in shapes or shapes[name] != x.shape for name, x in old.items()):
        wrong = next((name for name, x in old.items() if name not in shapes or shapes[name] != x.shape), None)
        raise ValueError(
            f"retract: `old` holds parameters of this module, from `snapshot(module)`; "
            f"{'it is empty' if wrong is None else f'{wrong!r} is none of them, or has another shape'}."
        )
    if not number_in(bound, 0) or bound == 0:
        raise ValueError(f"retract: `bound` is a divergence > 0, inf to measure alone; got {bound!r}.")
    if statistic not in STATISTICS:
        raise ValueError(f"retract: `statistic` is one of {', '.join(STATISTICS)}; got {statistic!r}.")
    if type(max_probes) is not int or max_probes < 1:
        raise ValueError(f"retract: `max_probes` is a whole number ≥ 1; got {max_probes!r}.")
