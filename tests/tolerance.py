"""How closely two computations of one number must agree, by dtype: the only table of tolerances."""

import torch

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, **override: float) -> None:
    """`torch.testing.assert_close` at the tolerance of `dtype` (the actual value's unless given); NaN never passes."""
    tolerance = {**TOLERANCE[dtype or actual.dtype], **override}
    torch.testing.assert_close(actual, expected.to(actual.dtype), equal_nan=False, **tolerance)
