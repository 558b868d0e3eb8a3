"""Numerical helpers: floating-point precision, and logarithms that are exact both near 0 and for large arguments."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import reduce, wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

NEAR = 0.5
"""Largest |x| for which eˣ − 1 − x is computed as a series. Above it, the plain formula loses at most three bits."""


LOG_RATIO_MAX = 20.0
"""Largest log-ratio that is passed to exp. Without a limit, a masked token's ratio may overflow, and 0 · inf is NaN."""

CERTAIN = -1e-8
"""Log-probs of sampled tokens are clamped to this value in a KL. One that float32 rounds to 0 would make it infinite."""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a half-precision tensor to float32. corral uses half precision for storage only."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the highest precision among the tensors, at least float32."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert all tensors to one dtype: the highest precision among them, at least float32."""
    dtype = common_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def require_tensors(where: str, **given: object) -> None:
    """Raise a ValueError that names the first argument that is not a tensor. Arrays and lists are not converted."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{where}: `{name}` is a tensor; got {type(value).__module__}.{type(value).__qualname__}. Convert it with "
                f"torch.as_tensor(…)."
            )


def without_autocast(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Decorator that disables autocast, which would round the factors of float32 GEMMs to half precision."""

    @wraps(function)
    def exact(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        with ExitStack() as stack:
            for device in devices:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return exact


def log1mexp(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Compute log(1 − eˣ) for x ≤ 0, exact also near 0: the log-probability of all other tokens if x is that of one token.

    Near 0 it is log(−expm1(x)), far below 0 it is log1p(−eˣ). Gives −inf with gradient 0 at x = 0 (and above, where only
    rounding can put a log-probability).

    Ref:
        Mächler 2012, "Accurately computing log(1 − exp(−|a|))". Invariant: log1mexp(log1mexp(x)) = x.
    """
    certain = x >= 0
    x = torch.where(certain, -1.0, x)  # any harmless value: 0 · inf would be NaN in the gradient
    near = x > -math.log(2)
    far_form = torch.log1p(-torch.where(near, -1.0, x).exp())
    near_form = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    return torch.where(certain, -torch.inf, torch.where(near, near_form, far_form))


def logsumexp(x: Float[Tensor, "*b K"]) -> Float[Tensor, "*b"]:
    """Compute log Σ eˣ over the last axis. Rows in which all entries are −inf give −inf with gradient 0 instead of NaN."""
    peak = x.detach().amax(-1, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    total = (x - peak).exp().sum(-1)
    empty = total == 0
    return torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + peak.squeeze(-1))


def expm1_minus(x: Tensor) -> Tensor:
    """Compute eˣ − 1 − x ≥ 0 to full relative precision for any small x."""
    near = x.abs() < NEAR
    far = torch.where(near, 1.0, x)
    return torch.where(near, expm1_minus_series(torch.where(near, x, 0.0)), torch.expm1(far) - far)


def expm1_minus_series(x: Tensor) -> Tensor:
    """Compute eˣ − 1 − x for |x| < ½ as the series x² Σ xⁿ/(n+2)!, which avoids cancellation."""
    terms = 15 if x.dtype == torch.float64 else 8
    # One tensor for all coefficients: making fourteen takes longer than the sum.
    first, *others = x.new_tensor([1 / math.factorial(n) for n in range(terms + 1, 1, -1)]).unbind()
    series = first.expand_as(x)
    for coefficient in others:
        series = torch.addcmul(coefficient, series, x)
    return x * x * series


def gradient_state(parameters: Iterable[Tensor]) -> tuple[bool, bool]:
    """Return two flags about gradients: all are finite, and all are 0. Without any gradient, return (True, False).

    For a sharded gradient it reads this process's part. Both flags leave the device in one transfer.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return True, False
    # A DTensor has `to_local`; importing its class takes a second.
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    finite = torch.stack([gradient.isfinite().all().to(local[0].device) for gradient in local]).all()
    moving = torch.stack([gradient.any().to(local[0].device) for gradient in local]).any()
    is_finite, is_moving = torch.stack([finite, moving]).tolist()
    return is_finite, not is_moving


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients to None, so that optimizers skip the parameters and keep weights, moments and step counts."""
    for parameter in parameters:
        parameter.grad = None
