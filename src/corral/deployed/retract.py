"""Retraction: scale a step back towards the old weights until the network's measured KL is within a bound."""

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from corral.deployed.statistics import STATISTICS, BatchKL, TokenKL
from corral.validate import require

logger = logging.getLogger(__name__)

AIM = 0.97
"""Share of the KL bound that the next measurement aims at. It is below 1, since a KL just above the bound is of no use."""
CAREFUL = 0.7
"""Share of the KL bound that the last measurement aims at. If its KL is above the bound, the old weights are restored."""
ENOUGH = 0.8
"""Share of the KL bound above which a scaled-back step is accepted without another measurement."""
LOST = 0.1
"""Factor by which the step is shortened after a measurement of NaN or inf."""
LEAST = 1e-6
"""Smallest share of a step whose KL is measured. If an even smaller share is needed, the old weights are restored."""
FEW = 5000
"""Smallest number of tokens for a meaningful 99.9th percentile. With fewer, it is one of the five largest KLs."""
_INTERPOLATED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and buffers that are interpolated between their old and new values."""
_told: set[str] = set()
"""Names of statistics for which a warning has been logged already. Each warning is logged once."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Result of `retract`: the accepted share of the step, and the KL before and after the step was scaled back."""

    statistic: str
    bound: float
    share: float
    """Accepted share of the step: the weights are θ_old + share · (θ_new − θ_old)."""
    probes: int
    """Number of KL measurements. If no share of the step fits the bound, the last one is at the restored old weights."""
    value_before: float
    """Statistic of the KL after the updates, before the step was scaled back. NaN if a weight was NaN or inf."""
    value_after: float
    """Statistic of the KL at the final weights. It is at most the bound, unless the old weights were restored.
    For restored old weights it is at most max(bound, `rounding`)."""
    before: TokenKL
    after: TokenKL

    def metrics(self) -> dict[str, float]:
        """Return the metrics for a trainer's log. The 99.9th percentile is left out with fewer than 5,000 measured tokens."""
        after = self.after
        found = {
            "tr/deployed_kl_mean": after.mean,
            "tr/deployed_kl_p999": after.p999 if after.tokens >= FEW else None,
            "tr/deployed_kl_max": after.max,
            "tr/step_share": self.share,
            "tr/deployed_probes": float(self.probes),
            "tr/deployed_kl_se": after.se,
            "tr/deployed_seq_kl_mean": after.seq_mean,
            "tr/deployed_seq_kl_max": after.seq_max,
        }
        return {name: value for name, value in found.items() if value is not None}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Copy a module's trained parameters, and the buffers in its state dict, into a dictionary by name.

    A tied weight is copied once; of a sharded one this process's part. Other buffers are caches, such as the frequencies of
    a rotary embedding. Modules recompute them, and count in plain attributes what they hold: putting a copy back would leave
    the two at odds.
    """
    _forget_copies(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = {
        f"{path}.{name}".removeprefix("."): buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }
    return {name: x.detach().clone() for name, x in (trained | buffers).items()}


@torch.no_grad()
def retract(
    module: nn.Module,
    old: Mapping[str, Tensor],
    probe: Callable[[], Float[Tensor, " N"] | BatchKL],
    *,
    bound: float,
    statistic: str = "mean",
    max_probes: int = 4,
    rounding: float = 1e-6,
) -> Certificate:
    """Scale a step back to the largest share whose per-token KL is within a bound. A few measurements find this share.

        θ ← θ_old + s (θ_new − θ_old),   S(KL(π_θ ‖ π_old)) ≤ δ

    The whole step is measured first. Where it is too far, s = √(δ / D) is measured next (D grows as s² near the old weights),
    then corrections along the power law through the two nearest. Only a share that was measured is kept, with the weights as
    they are stored, rounding included. Where none fits, everything in `old` comes back bit for bit, and the network is measured
    once more: above the bound the error says so, and the old weights stay.

    Buffers in `old` follow the weights: floating-point ones are interpolated, such as a batch norm's running statistics. All
    others, such as counters, are those after the updates unless s = 0. What a probe writes into any of them is undone: the
    network that is kept is the one that was measured. Frozen parameters and buffers outside `old` are left alone. In
    distributed training `probe` returns the tokens of all processes: all decide alike.

    Args:
        module: the network after the updates; changed in place.
        old: `snapshot(module)` from before them: every parameter that is trained. Frozen ones in it are retracted too.
        probe: measures the module as it is now: KL(new‖old) of the batch's tokens [N], from `head_kl` or otherwise; or a
            `BatchKL`, whose sequences the certificate then has too.
        bound: δ > 0, inf to measure alone.
        statistic: "mean", "p999" (warns once below 5,000 tokens), "cvar" (mean of the worst 1 %) or "max".
        max_probes: measurements at most; with one, a step is kept whole or not at all. A step that fits takes one. The
            measurement of the old weights is not counted.
        rounding: a value of the statistic that is allowed at the old weights whatever the bound, for kernels that are not
            deterministic. In half precision use 1e-3.
    Returns:
        Certificate.
    Raises:
        ValueError: the old weights themselves do not fit the bound, so that something else has moved.
    Ref:
        Schulman et al. 2015, arXiv:1502.05477, app. C (the line search). Invariant: value_after ≤ max(bound, rounding) or an
        error, whatever `probe` says; a share above 0 has value_after ≤ bound.
    """
    _check(module, old, bound, statistic, max_probes, rounding)
    _forget_copies(module)
    live = _tensors(module)
    new = {name: live[name].detach().clone() for name in old}
    measures = bound == math.inf  # then nothing is undone, whatever is found
    first = _Probe.of(1.0, probe(), statistic)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    finite = measures or all(_is_finite(new[name]) for name in trained)
    if not finite:  # whatever was measured: a weight that no token of this batch reads is one that another batch may read
        first = _Probe(1.0, math.nan, TokenKL(mean=math.nan, p999=math.nan, max=math.nan, tokens=first.kl.tokens))
    tried = [first]
    share = _next_share(tried, bound, last=max_probes == 2) if finite and not measures else None
    while share is not None and len(tried) < max_probes:
        _place(module, old, new, share)
        tried.append(_Probe.of(share, probe(), statistic))
        share = _next_share(tried, bound, last=len(tried) == max_probes - 1)
    if statistic == "p999" and not measures and first.kl.tokens < FEW and statistic not in _told:
        _told.add(statistic)
        logger.warning(
            "retract: the 99.9th percentile of %d tokens is one of their five largest KLs, and noisy. Measure %d or more, or "
            "hold the mean.", first.kl.tokens, FEW,
        )  # fmt: skip
    kept = max((one for one in tried if measures or one.value <= bound), key=lambda one: one.share, default=None)
    if kept is None:
        _place(module, old, new, 0.0)
        kept = _Probe.of(0.0, probe(), statistic)
        tried.append(kept)
    _place(module, old, new, kept.share)  # a probe may have written into buffers
    if kept.share == 0 and not kept.value <= max(bound, rounding):
        raise ValueError(
            f"retract: no step fits the bound of {bound:.2g}, so the old weights are back. With them the {statistic} of the KL "
            f"is {kept.value:.2g} and should be 0. Something outside `old` has moved: a frozen parameter, a buffer that the "
            f"state dict leaves out, or an attribute of the module. Or `probe` is random, as with dropout, or scores otherwise "
            f"than the old policy was scored. Take `old` from `snapshot(module)` before the updates, and call module.eval() "
            f"before either policy is scored. Where rounding alone explains that KL, allow it with `rounding`."
        )
    return Certificate(
        statistic=statistic, bound=bound, share=kept.share, probes=len(tried),
        value_before=first.value, value_after=kept.value, before=first.kl, after=kept.kl,
    )  # fmt: skip


@dataclass(frozen=True)
class _Probe:
    """KL measurement at one share of the step, with the value that is compared with the bound and all KL statistics."""

    share: float
    value: float
    kl: TokenKL

    @classmethod
    def of(cls, share: float, measured: Tensor | BatchKL, statistic: str) -> "_Probe":
        """Build the record of a KL measurement. A single NaN makes every statistic NaN, which a quantile would hide."""
        found = TokenKL.of(measured)
        kl = measured.new_old if isinstance(measured, BatchKL) else measured
        lost = math.isnan(found.mean)
        return cls(share, math.nan if lost else float(STATISTICS[statistic](kl.detach().double())), found)


def _next_share(tried: list[_Probe], bound: float, *, last: bool) -> float | None:
    """Compute the next share of the step to measure, modelling the KL as a power of the share. Returns None to stop."""
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


def restore(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the weights and buffers of a `snapshot` back into the module, bit for bit."""
    _place(module, weights, {}, 0.0)


def _is_finite(weight: Tensor) -> bool:
    """True if all values of a weight are finite. For a sharded weight, all processes are checked."""
    finite = weight.isfinite().all()
    return bool(finite.full_tensor() if hasattr(finite, "full_tensor") else finite)  # a DTensor, whose import takes a second


def _forget_copies(module: nn.Module) -> None:
    """Drop cached copies of weights: autocast's half-precision copies and FSDP2's gathered weights.

    This is done before reading weights and after writing them.
    """
    torch.clear_autocast_cache()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, so not used
    for part in module.modules():
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            part.reshard()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name. A shared buffer appears under each of its names."""
    return dict(module.named_parameters()) | dict(module.named_buffers(remove_duplicate=False))


@torch.no_grad()
def _place(module: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, Tensor], share: float) -> None:
    """Write θ_old + share · (θ_new − θ_old) into parameters and buffers, rounded once. Share 0 copies the old values exactly.

    Half precision is interpolated in float32. Tensors of other types take the new value.
    """
    _forget_copies(module)  # a gathered weight is another tensor than its part
    live = _tensors(module)  # looked up every time: a forward pass may register a buffer anew
    for name, x in old.items():
        y = new[name] if share else x
        if 0 < share < 1 and y.dtype in _INTERPOLATED:
            y = torch.where(x == y, y, torch.lerp(x, y, share))  # the difference of equal infinities is no number
        live[name].copy_(y)
    _forget_copies(module)


def _check(
    module: nn.Module, old: Mapping[str, Tensor], bound: float, statistic: str, max_probes: int, rounding: float
) -> None:
    live = _tensors(module)
    wrong = next((name for name, x in old.items() if name not in live or live[name].shape != x.shape), None)
    if not old or wrong is not None:
        raise ValueError(
            f"retract: `old` holds parameters and buffers of this module, from `snapshot(module)`; "
            f"{'it is empty' if wrong is None else f'{wrong!r} is none of them, or has another shape'}."
        )
    missing = [name for name, p in module.named_parameters() if p.requires_grad and name not in old]
    if missing:
        raise ValueError(
            f"retract: {missing[0]!r} is trained and not in `old`, so that it cannot be put back ({len(missing)} such "
            f"parameters in all). Take `old` from `snapshot(module)` before the updates. Freeze what is no part of the policy "
            f"(requires_grad_(False)), or leave it out of `module`."
        )
    given = SimpleNamespace(bound=bound, statistic=statistic, max_probes=max_probes, rounding=rounding)
    check = partial(require, given, name="retract")
    check("bound", above=0, what="a divergence", note="inf measures alone")
    check("statistic", one_of=STATISTICS)
    check("max_probes", at_least=1, integer=True)
    check("rounding", at_least=0, finite=True, what="a divergence")
