"""Compiles every kernel for a GPU that need not be there: the interpreter accepts more than the compiler does.

Run in a process of its own, in which Triton does not interpret: python compile_kernels.py CAPABILITY
"""

import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from corral.kernels import dense_backward, doubt, row_gradient, select, settle, sparse_backward, stream, troll_loss

# The types of arguments by name; all others are pointers to float32.
TYPES = {
    "i32": "count rows tiles slots slots_in top_k room vocabulary width start",
    "fp32": "mass bound regression cap before after slope curve tolerance",
    "*i32": "marks state first of_tile of_row queue length key route counts starts out_ids out_route out_key",
    "*i64": "candidates order picked tokens", "*u8": "place", "*i1": "out_active out_converged out_flawed",
    "*bf16": "dz d_weight",
}  # fmt: skip
BLOCKS = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "TILES": 1024, "SLOTS": 128}
SWITCHES = {"BIAS": True, "CAP": True, "ENTROPY": True, "GIVEN": True}
CASES: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    (
        stream._stream_kernel, {"hidden": "tensordesc<bf16[128, 64]>", "weight": "tensordesc<bf16[256, 64]>"},
        {"PLAIN": False, "PROGRAMS": 132, "GROUP": 16}, 8,
    ),
    (
        select._tile_kernel, {"hidden": "*bf16", "weight": "tensordesc<bf16[256, 64]>", "of_row": "*i32"},
        {"ROWS": 64, "SPLIT": 4}, 4,
    ),
    (doubt._doubt_kernel, {"count": "*i32"}, {"TOP_K": True, "BEST": 64}, 4),
    (doubt._doubt_kernel, {"count": "*i32"}, {"TOP_K": False, "BEST": 1}, 4),
    (settle._given_kernel, {"count": "*i32"}, {"SOME": 16}, 4),
    (settle._top_k_kernel, {"count": "*i32", "ids": "*i64"}, {"THRESHOLD": True, "BEST": 64, "WIDE": 256}, 4),
    (row_gradient._row_kernel, {"ids": "*i64"}, {}, 1),
    (row_gradient._route_kernel, {"ids": "*i32"}, {}, 1),
    (
        sparse_backward._hidden_kernel, {"weight": "*bf16", "out": "*bf16", "ids": "*i32"},
        {"CODE": 1, "BLOCK": 1024, "SOME": 8}, 4,
    ),
    (sparse_backward._weight_kernel, {"hidden": "*bf16"}, {"WEIGHT": True, "BLOCK": 4096, "SOME": 8}, 4),
    (dense_backward._dense_kernel, {"ids": "*i32"}, {"BLOCK": 4096}, 8),
    (troll_loss._troll_kernel, {}, {"CAPPED": False, "GRADIENT": 0, "TOLERANCE": 1e-3}, 1),
]  # fmt: skip


def compile_all(capability: int) -> None:
    types = {name: kind for kind, names in TYPES.items() for name in names.split()}
    for kernel, own_types, own_constants, warps in CASES:
        constants = {k: v for k, v in (BLOCKS | SWITCHES | own_constants).items() if k in kernel.arg_names}
        signature = {
            name: "constexpr" if name in constants else (types | own_types).get(name, "*fp32") for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
