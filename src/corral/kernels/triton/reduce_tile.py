"""One tile of logits → its largest logit and where it is, the second largest, and sums over all but the largest.

Both forms return (top, place, second, Σ e^(z − second), Σ (z − second) e^(z − second)), sums of all but the largest; and for
a gradient (e, base, is_top): 2^(z log2 e − base) of all but the largest, and 1 where the largest is, 0 elsewhere.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
FAR: tl.constexpr = tl.constexpr(1e30)
"""Below every logit."""
ROOM: tl.constexpr = tl.constexpr(96.0)
"""Powers of two above the largest logit, so that sums reach as far below it: those 150 below it are 0."""


@triton.jit
@no_type_check
def reduce_any(z, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr):
    """Of logits some or all of which may be −inf."""
    local = tl.arange(0, COLUMNS)
    # The place by comparison: faster than a maximum that carries its index along. NaN has none, and takes any.
    top = tl.max(z, 1)
    place = tl.min(tl.where(z == top[:, None], local[None, :], COLUMNS - 1), 1)
    is_top = local[None, :] == place[:, None]
    z = tl.where(is_top, -float("inf"), z)
    second = tl.max(z, 1)
    # Where nothing but the largest is finite, the sum is 0 whatever it is relative to.
    base = tl.where(second == -float("inf"), 0.0, second)
    e = tl.exp2((z - base[:, None]) * LOG2_E)
    gaps = base
    if ENTROPY:
        gaps = tl.sum(tl.where(z > -float("inf"), z - base[:, None], 0.0) * e, 1)
    return top, place, second, tl.sum(e, 1), gaps, e, base * LOG2_E, is_top.to(tl.float32)


@triton.jit
@no_type_check
def reduce_plain(z, factor, ENTROPY: tl.constexpr, COMPILED: tl.constexpr, COLUMNS: tl.constexpr):
    """Of finite h Wᵀ, whose logits are larger by a positive factor.

    Comparing and selecting are what costs beside a GEMM; multiplying costs next to nothing. So the largest is marked with
    1 and everything else with 0, and its place, how many equals it has, and what is left without it are sums of these. Sums of
    exponentials are relative to the largest, so that they need not wait for the second. Equals leave together, and are put
    back into the sums: they are the second largest.
    """
    local = tl.arange(0, COLUMNS)
    top = tl.max(z, 1)
    if COMPILED:  # one instruction, where comparing and selecting are two
        is_top = tl.inline_asm_elementwise(
            "set.eq.f32.f32 $0, $1, $2;", "=f,f,f", [z, tl.broadcast_to(top[:, None], z.shape)], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        is_top = (z == top[:, None]).to(tl.float32)
    marks = tl.sum(is_top * (local.to(tl.float32) + 65536.0)[None, :], 1)
    z = z - is_top * FAR
    second = tl.max(z, 1)
    exponent = factor * LOG2_E
    base = top * exponent - ROOM
    arguments = z * exponent - base[:, None]
    e = tl.exp2(arguments)

    equals = (marks * (1 / 65536)).to(tl.int32)
    place = tl.where(equals == 1, marks.to(tl.int32) - 65536, 0)
    second = tl.where(equals > 1, top, second)
    up = (top - second) * exponent
    back = tl.exp2(tl.minimum(up - ROOM, 126.0))
    others = (equals - 1).to(tl.float32) + tl.sum(e, 1) * back
    gaps = others
    if ENTROPY:
        gaps = (tl.sum((arguments - ROOM) * e, 1) * back + up * others) * (1 / LOG2_E)
    others = tl.where(others < 1.0, 1.0, others)  # the second alone is 1, also where it was too far below
    return top * factor, place, second * factor, others, gaps, e, base, is_top
