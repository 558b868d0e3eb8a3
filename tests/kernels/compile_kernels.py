"""Compiles every kernel for a GPU that need not be there: the interpreter accepts more than the compiler does.

Run in a process of its own, in which Triton does not interpret: python compile_kernels.py CAPABILITY
"""

import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from corral.kernels import (
    dense_backward,
    dense_forward,
    difference,
    doubt,
    extract,
    few_rows,
    ids_later,
    inspect_batch,
    loss_rows,
    route,
    row_factor,
    row_gradient,
    select,
    settle,
    sparse_backward,
    stream,
    token_loss,
    troll_loss,
)

# The types of arguments by name; all others are pointers to float32.
TYPES = {
    "i32": "count rows tiles slots slots_in top_k vocabulary width start total length stride stride_b stride_t stride_ids "
    "stride_kept stride_logp stride_scale",
    "fp32": "mass bound regression cap before after slope curve tolerance small low high highest slack",
    "*i32": "counter marks queue key keys route counts starts out_ids out_key filled floors overflow few need out_need",
    "*i64": "listed order picked tokens", "*u8": "place mask state", "*bf16": "dz d_weight stored",
}  # fmt: skip
BLOCKS = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "TILES": 1024, "SLOTS": 128, "BLOCK": 4096, "SOME": 8}
ON = "COMPILED BIAS CAP ENTROPY GIVEN SUPPORT ROLLOUT WEIGHTS KEPT REST LOGP NATS SCALE WEIGHT THRESHOLD CAPPED"
SWITCHES = dict.fromkeys(ON.split(), True)
TILE = {"hidden": "*bf16", "weight": "tensordesc<bf16[256, 64]>", "length": "*i32"}
STREAM = {"hidden": "tensordesc<bf16[128, 64]>", "weight": "tensordesc<bf16[256, 64]>", "store": "tensordesc<bf16[128, 256]>"}
HEAD = {"hidden": "*bf16", "weight": "*bf16"}
INSPECT = [dict.fromkeys(("EVERY", "MASKED_TOO"), x) for x in (True, False)]
ORDER = {"position": "*i32", "fewest": "i32", "share": "fp32", "rest": "fp32"}
FORMED = {"index": "*i64", "ids": "*i64", "left_out": "*u8", "formed": "i32", "out_met": "*i32", "rounding": "fp32"}
COMPARISONS = (difference._ratio_kernel, difference._difference_kernel)
WRITTEN = {"FEW": 16, "PIECE": 64}
WALK = {"PROGRAMS": 132, "GROUP": 16}
SHARED = {80: 163, 90: 227}
"""KiB of shared memory that a block of theirs may take."""
FULL = {"STORE": True, "REFERENCE": True, "COUNTER": True}
BLANK = {"store": None, "reference": None, "counter": None, "STORE": False, "REFERENCE": False, "COUNTER": False}
CASES: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    *((stream._stream_kernel, STREAM, WALK | FULL | {"PLAIN": plain}, 8) for plain in (False, True)),
    (stream._stream_kernel, STREAM, WALK | BLANK | {"PLAIN": True}, 8),
    (doubt._given_kernel, {"length": "*i32"}, {"COUNTER": True}, 4),
    (doubt._own_kernel, {"length": "*i32"}, {"ROOM": 256}, 4),
    (extract._tile_kernel, TILE, {"OWN": True, "ROWS": 64, "PROGRAMS": 132, "LISTED": 256}, 8),
    (extract._tile_kernel, TILE, {"OWN": False, "ROWS": 64, "PROGRAMS": 132, "LISTED": 128}, 8),
    (settle._given_kernel, {}, {"COUNTER": True}, 4),
    (settle._own_kernel, {"ids": "*i64"}, {"BEST": 64, "ROOM": 256}, 4),
    (settle._own_kernel, {"ids": "*i64"}, {"BEST": 64, "ROOM": 2048}, 4),
    (select._marks_kernel, {"ids": "*i64", "index": "*i64"}, {"BLOCK": 1024, "INDEX": True, "COUNTER": True}, 4),
    (row_gradient._row_kernel, {"ids": "*i64"}, {}, 1),
    (route._route_kernel, {"ids": "*i32"}, {"ROWS": 16, "BLOCK": 2048}, 4),
    (ids_later._repeat_kernel, {"ids": "*i64", "found": "*i64"}, {"SOME": 16}, 4),
    (route._tally_kernel, {}, {"FEW": 16, "BLOCK": 8192}, 16),
    (few_rows._logit_kernel, {"ids": "*i32"} | HEAD, {"FEW": 16, "COLUMNS": 128}, 4),
    (few_rows._hidden_kernel, HEAD, {"FEW": 16, "PARTS": 64, "COLUMNS": 128}, 4),
    (few_rows._sum_kernel, {"out": "*bf16"}, {"FEW": 16, "PARTS": 64, "BLOCK": 128}, 4),
    (sparse_backward._hidden_kernel, HEAD | {"out": "*bf16"}, {"BLOCK": 1024, "SOME": 4}, 4),
    *((sparse_backward._piece_kernel, HEAD, WRITTEN | {"ADD": add}, 16) for add in (True, False)),
    *((sparse_backward._weight_kernel, HEAD, WRITTEN | {"ADD": add}, 4) for add in (True, False)),
    (dense_backward._dense_kernel, {"ids": "*i32"}, {}, 8),
    (dense_forward._gradient_kernel, {"ids": "*i32"}, {"SOME": 16}, 8),
    (dense_forward._scale_kernel, {"x": "*bf16"}, {"BLOCK": 8192}, 8),
    (inspect_batch._compact_kernel, {"hidden": "*bf16", "picked": "*bf16", "position": "*i32", "index": "*i64"}, {}, 4),
    *((inspect_batch._inspect_kernel, {"ids": "*i64"}, {"ROWS": 16, "FORM": True} | x, 4) for x in INSPECT),
    *((inspect_batch._order_kernel, ORDER, {"FORMED_FIRST": x}, 8) for x in (True, False)),
    *((kernel, FORMED, {"INDEX": True, "LOSS_OWN": True, "LOSS_KEPT": True, "WEIGHED": True}, 1) for kernel in COMPARISONS),
    (difference._median_kernel, FORMED, {"BLOCK": 1024}, 4),
    (loss_rows._metrics_kernel, {}, {"BLOCK": 2048, "TAIL": True}, 8),
    (troll_loss._troll_kernel, {}, {"GRADIENT": 0}, 1),
    *((token_loss._token_kernel, {}, {"RULE": rule, "MEASURE": 4, "ROWS": 2}, 1) for rule in range(5)),
    (row_factor._sampled_kernel, HEAD | {"index": "*i64"}, {"INDEX": True, "COUNTER": True, "BLOCK": 1024}, 2),
    (row_factor._singles_kernel, {"ids": "*i32", "likely": "*i32", "left_out": "*u8", "stored": "*bf16"}, {"LIKELY": 4}, 1),
    (row_factor._rows_kernel, {"out": "*bf16", "likely": "*i32", "weight": "*bf16"}, {"BLOCK": 1024, "LIKELY": 4}, 2),
    (row_factor._rows_kernel, {"x": "*bf16", "out": "*bf16"}, {"BLOCK": 1024, "LIKELY": 0}, 2),
]  # fmt: skip


def compile_all(capability: int) -> None:
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
