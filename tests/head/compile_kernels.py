"""Compiles every kernel for a GPU that need not be there: the interpreter accepts more than the compiler does.

Run in a process of its own, in which Triton does not interpret: python compile_kernels.py CAPABILITY
"""

import importlib
import pkgutil
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import corral.head.triton
from corral.head.triton import backward, fused, gathered, gemm_stats, loss, support

# The types of arguments by name; all others are pointers to float32.
TYPES = {
    "i32": "count rows tiles slots slots_in top_k vocabulary width start total length stride stride_b stride_t stride_ids "
    "stride_kept stride_logp joined",
    "fp32": "mass bound regression cap before after slope curve tolerance small low high highest slack",
    "*i32": "counter marks queue key keys route counts starts out_ids filled floors overflow need out_route likely",
    "*i64": "listed order picked tokens ranked out_joined wide row_of", "*u8": "place mask state left_out joins",
    "*bf16": "dz d_weight stored",
}  # fmt: skip
BLOCKS = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "TILES": 1024, "SLOTS": 128, "BLOCK": 4096, "SOME": 8, "PIECE": 64}
SWITCHES = dict.fromkeys(
    ["COMPILED", "ENTROPY", "GIVEN", "THRESHOLD", "ANCHOR", "DENSE", "SYMMETRIC", "DECOUPLED", "OUTWARD"], True
)
TILE = {"hidden": "*bf16", "weight": "tensordesc<bf16[256, 64]>", "length": "*i32"}
STATS = {"hidden": "tensordesc<bf16[128, 64]>", "weight": "tensordesc<bf16[256, 64]>", "store": "tensordesc<bf16[128, 256]>"}
HEAD = {"hidden": "*bf16", "weight": "*bf16"}
ORDER = {"flat": "fp32", "fewest": "i32", "share": "fp32", "rest": "fp32"}
PROGRAMS = {"PROGRAMS": 132, "GROUP": 16}
RULES = ("clip", "mask", "weight", "gate", "penalty", "flip")
SHARED = {80: 163, 90: 227}
"""KiB of shared memory that a block of theirs may take."""
STORED = {"counter": None}
STREAMED = {"store": None, "reference": None, "PLAIN": True}
CASES: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    *((gemm_stats._stats_kernel, STATS, PROGRAMS | STORED | {"PLAIN": plain}, 8) for plain in (False, True)),
    (gemm_stats._stats_kernel, STATS, PROGRAMS | STREAMED | {"counter": None}, 8),
    (gemm_stats._stats_kernel, STATS, PROGRAMS | STREAMED, 8),
    (support._given_kernel, {"length": "*i32"}, {}, 4),
    (support._own_kernel, {"length": "*i32"}, {"ROOM": 256}, 4),
    (support._tile_kernel, TILE, {"OWN": True, "ROWS": 64, "PROGRAMS": 132, "LISTED": 256}, 8),
    (support._tile_kernel, TILE, {"OWN": False, "ROWS": 64, "PROGRAMS": 132, "LISTED": 128}, 8),
    (support._finalize_given_kernel, {}, {}, 4),
    (support._finalize_own_kernel, {"ids": "*i64"}, {"BEST": 64, "ROOM": 256}, 4),
    (support._finalize_own_kernel, {"ids": "*i64"}, {"BEST": 64, "ROOM": 2048}, 4),
    (support._join_kernel, {"ids": "*i64"}, {"GIVEN": 128, "RANKED": 128, "SLOTS": 256, "SOME": 16}, 1),
    (gathered._extend_kernel, HEAD | {"ids": "*i64"}, {"BLOCK": 512, "JOINED": 256}, 4),
    *((fused._inspect_kernel, {"ids": "*i64"}, {"ROWS": 8, "EVERY": every}, 4) for every in (True, False)),
    (fused._order_kernel, ORDER, {}, 8),
    (backward._row_kernel, {"ids": "*i64"}, {}, 1),
    *((backward._route_kernel, {"ids": "*i32"}, {"ROWS": 16, "BLOCK": 2048} | mean, 8) for mean in ({}, {"given_mean": None})),
    (backward._tally_kernel, {"dense_rows": "*i64"}, {"PADDED": 16, "BLOCK": 8192}, 8),
    (backward._hidden_kernel, HEAD | {"out": "*bf16"}, {"BLOCK": 1024, "SOME": 4}, 4),
    (backward._piece_kernel, HEAD, {}, 16),
    *((backward._weight_kernel, HEAD, {"ADD": add}, 4) for add in (True, False)),
    (backward._dense_kernel, {"ids": "*i32"}, {}, 8),
    (backward._scale_kernel, {"x": "*bf16"}, {"BLOCK": 8192}, 8),
    (loss._metrics_kernel, {}, {"BLOCK": 2048}, 8),
    (loss._troll_kernel, {}, {"GRADIENT": "exact"}, 1),
    *((loss._token_kernel, {}, {"RULE": rule, "MEASURE": "support_kl", "ROWS": 2}, 1) for rule in RULES),
    (loss._token_kernel, {}, {"RULE": "clip", "MEASURE": "chi_square", "ROWS": 2}, 1),
    (backward._sampled_kernel, HEAD, {"BLOCK": 1024}, 2),
    (backward._entries_kernel, {"ids": "*i32"}, {"LIKELY": 4}, 1),
    (backward._rows_kernel, {"out": "*bf16", "weight": "*bf16"}, {"BLOCK": 1024, "LIKELY": 4}, 2),
    (backward._rows_kernel, {"x": "*bf16", "out": "*bf16"}, {"BLOCK": 1024, "LIKELY": 0}, 2),
]  # fmt: skip


def every_kernel() -> set[Any]:
    """What is launched: functions whose name says so, in every module."""
    found = set()
    for module in pkgutil.walk_packages(corral.head.triton.__path__, "corral.head.triton."):
        members = vars(importlib.import_module(module.name))
        found |= {x for name, x in members.items() if isinstance(x, triton.JITFunction) and name.endswith("_kernel")}
    return found


def compile_all(capability: int) -> None:
    missing = every_kernel() - {kernel for kernel, *_ in CASES}
    assert not missing, f"not compiled here: {missing}"
    types = {name: kind for kind, names in TYPES.items() for name in names.split()}
    for kernel, own_types, own_constants, warps in CASES:
        constants = {k: v for k, v in (BLOCKS | SWITCHES | own_constants).items() if k in kernel.arg_names}
        signature = {
            name: "constexpr" if name in constants else (types | own_types).get(name, "*fp32") for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})
        assert made.metadata.shared <= 1024 * SHARED[capability], f"{kernel.__name__}: {made.metadata.shared} bytes"


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
