"""How closely two computations of one number must agree, by dtype and by device: the only table of tolerances."""

import torch

from device import DEVICE

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}

ROUNDING = {"cpu": 1e-5, "cuda": 1e-4}[DEVICE]
"""Of losses and gradients of one small model in float32, through one head and another. A GPU's GEMM adds in an order that
depends on the shape, and its exponentials are good to two units in the last place."""

TWENTY_UPDATES = 1e-4
"""Of all that is logged in a run of twenty updates, on any device: stock TRL is 2e-5 from itself there, in its gradient norm,
if its first weights are moved by one part in 10⁷."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, **override: float) -> None:
    """`torch.testing.assert_close` at the tolerance of `dtype` (the actual value's unless given); NaN never passes.

    The expected value may be of another dtype, and on another device.
    """
    tolerance = {**TOLERANCE[dtype or actual.dtype], **override}
    torch.testing.assert_close(actual, expected.to(actual), equal_nan=False, **tolerance)
