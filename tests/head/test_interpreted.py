"""Triton's interpreter as `interpreted` leaves it: faster, and the same."""

import pytest
import torch
import triton
import triton.language as tl

from interpreted import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are compiled here")


@triton.jit
def _times_four(x):
    return tl.maximum(x, 0) * 4


@triton.jit
def _quadruple(x, out):
    tl.store(out, _times_four(tl.load(x)))


def test_a_kernel_calls_a_function_again_and_again_and_integers_wrap_as_on_a_gpu():
    out = torch.zeros(1, dtype=torch.int32)
    for value, expected in ((7, 28), (-7, 0), (2**29, -(2**31)), (2**29 - 1, 2**31 - 4)):
        _quadruple[(1,)](torch.tensor([value], dtype=torch.int32), out)
        assert out.item() == expected
    assert not callable(tl.tensor.__dict__.get("__bool__")), "outside a kernel the language is Triton's own"
