"""Triton's interpreter as `interpreted` leaves it: faster, and as strict."""

import pytest
import torch
import triton
import triton.language as tl

from interpreted import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are compiled here")


@triton.jit
def _times_four(x):
    return x * 4


@triton.jit
def _quadruple(x, out):
    tl.store(out, _times_four(tl.load(x)))


def test_a_function_called_by_a_kernel_and_an_overflow():
    out = torch.zeros(1, dtype=torch.int32)
    _quadruple[(1,)](torch.tensor([2**29 - 1], dtype=torch.int32), out)
    assert out.item() == 2**31 - 4
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        _quadruple[(1,)](torch.tensor([2**29], dtype=torch.int32), out)
    _quadruple[(1,)](torch.tensor([-(2**29)], dtype=torch.int32), out)
    assert out.item() == -(2**31), "the language is patched as before"
