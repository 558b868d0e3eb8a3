"""Where Triton kernels are tested: compiled on a GPU if there is one, else by Triton's interpreter on the CPU.

`conftest.py` has told Triton to interpret; it has to be told before it is first imported.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton.runtime.interpreter as interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""Half precision; the interpreter multiplies no bfloat16."""

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: type, scope: object) -> None:
    """Triton 3.6 reads loop bounds from arrays of one element in a way that NumPy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
