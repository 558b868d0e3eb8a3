"""Where Triton kernels are tested: compiled on a GPU if there is one, else by Triton's interpreter on the CPU.

`conftest.py` has told Triton to interpret; it has to be told before it is first imported.
"""

import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
import triton.runtime.interpreter as interpreter

from device import DEVICE

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""Half precision; the interpreter multiplies no bfloat16."""

BUILTINS = {
    place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}
"""What the interpreter replaces while a kernel runs, by where it is found."""

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: type, scope: object) -> None:
    """Triton 3.6 reads loop bounds from arrays of one element in a way that NumPy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_builtins_once(place: object, builder: object, scope: object) -> None:
    """Triton 3.6 looks through its whole language at every call of a function by a kernel: a third of these tests' time."""
    if not tl.core.is_builtin(getattr(place, BUILTINS[place][0])):
        return  # a kernel is running, and all of them are replaced
    for name in BUILTINS[place]:
        if tl.core.is_builtin(member := getattr(place, name)):
            interpreter._patch_attr(place, name, member, builder, scope)


# On a GPU the smaller of NaN and a number is the number.
interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter._patch_builtin = _patch_builtins_once


def small_tiles(monkeypatch: pytest.MonkeyPatch, columns: int = 16) -> None:
    """Without a GPU, tiles of 16 × `columns` × 16, so that a small problem crosses every border."""
    if DEVICE == "cpu":
        from corral.kernels import stream  # Triton is patched by now

        for dtype in stream.TILES:
            monkeypatch.setitem(stream.TILES, dtype, stream.Tile(16, columns, 16, warps=4, stages=1))
