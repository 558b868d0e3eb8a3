"""Where Triton kernels are tested: compiled on a GPU if there is one, else by Triton's interpreter on the CPU.

`conftest.py` has told Triton to interpret; it has to be told before it is first imported.
"""

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

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
    """Triton reads loop bounds from arrays of one element in a way that NumPy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_builtins_once(place: object, builder: object, scope: object) -> None:
    """Triton looks through its whole language at every call of a function by a kernel: a third of these tests' time."""
    if not tl.core.is_builtin(getattr(place, BUILTINS[place][0])):
        return  # a kernel is running, and all of them are replaced
    for name in BUILTINS[place]:
        if tl.core.is_builtin(member := getattr(place, name)):
            interpreter._patch_attr(place, name, member, builder, scope)


_patch_language, _UNCHANGED = interpreter._patch_lang, interpreter._LangPatchScope()
_LANGUAGES: dict[int, frozenset[object]] = {}
_PATCHED: set[object] = set()


def _patch_language_once(function: Any) -> Any:
    """Triton patches its language anew whenever a kernel calls a function: while a kernel runs, it is patched already."""
    names = function.__globals__
    if id(names) not in _LANGUAGES:
        _LANGUAGES[id(names)] = frozenset(value for value in names.values() if value is tl or value is tl.core)
    missing = _LANGUAGES[id(names)] - _PATCHED
    if not missing and _LANGUAGES[id(names)]:
        return _UNCHANGED
    scope = _patch_language(function)
    _PATCHED.update(missing)
    restore = scope.restore

    def restore_all() -> None:
        restore()
        _PATCHED.difference_update(missing)

    scope.restore = restore_all
    return scope


def _remember_by_name(function: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """One answer per type; types of pointers and blocks cannot be hashed, and a name tells each of them apart."""
    answers: dict[str, Any] = {}

    def look_up(kind: tl.dtype) -> Any:
        if kind.name not in answers:
            answers[kind.name] = function(kind)
        return answers[kind.name]

    return look_up


def _set_tuple(self: tl.tuple, args: Any, type: Any = None) -> None:
    """As in Triton, but for the type, which is made when somebody asks for it: hardly ever."""
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _set_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """As in Triton, but for the shape, which is made when somebody asks for it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar


_set_block, BLOCKS = tl.block_type.__init__, {}


def _set_block_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """As in Triton, but the shape is checked and the name written once per type."""
    key = (element_ty.name, *[x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if key not in BLOCKS:
        _set_block(self, element_ty, shape)
        BLOCKS[key] = vars(self)
    vars(self).update(BLOCKS[key])


def _make_lazy(place: type, name: str, value: Callable[[Any], Any]) -> None:
    """An attribute computed when it is first read; one that is assigned takes its place."""
    setattr(place, name, lazy := cached_property(value))
    lazy.__set_name__(place, name)


# Each operation of the interpreter makes several types and shapes, and reads few of them: half of these tests' time.
if DEVICE == "cpu":  # a compiler is left alone
    interpreter._get_np_dtype = _remember_by_name(interpreter._get_np_dtype)
    tl.tuple.__init__, tl.tensor.__init__, tl.block_type.__init__ = _set_tuple, _set_tensor, _set_block_once
    _make_lazy(tl.tuple, "type", lambda self: tl.core._type_for_tuple_values(self.values))
    _make_lazy(tl.tensor, "shape", lambda self: tl.tuple([tl.constexpr(x) for x in getattr(self.type, "shape", ())]))
    _make_lazy(tl.tensor, "numel", lambda self: tl.constexpr(getattr(self.type, "numel", 1)))
# On a GPU the smaller of NaN and a number is the number.
interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter._patch_builtin = _patch_builtins_once
interpreter._patch_lang = _patch_language_once
# Whether integers overflow is computed with ten tensors and, unless the interpreter debugs, thrown away.
TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, left, right, operation: None


def small_tiles(monkeypatch: pytest.MonkeyPatch, columns: int = 16) -> None:
    """Without a GPU, tiles of 16 × `columns` × 16, so that a small problem crosses every border."""
    if DEVICE == "cpu":
        from corral.head.dispatch import TILES, Tile

        for dtype in TILES:
            monkeypatch.setitem(TILES, dtype, Tile(16, columns, 16, warps=4, stages=1))
