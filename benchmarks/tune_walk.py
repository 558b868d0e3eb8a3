"""Which way through its tiles is the fastest for the streamed product on this GPU? Measures, and remembers the answer.

python benchmarks/tune_walk.py [--widths 896 4096] [--vocabulary 151936] [--rows 8192]          corral bench walk […]
"""

import argparse

import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from corral.kernels.logits import LogitSpec
from corral.kernels.triton.gemm_stats import stream, tile_of
from corral.kernels.walk import CANDIDATES, Walk, remember, usual_walk

CLEARLY = 0.99
"""Times the usual walk's time: what is not faster than that is noise."""


def measure(hidden: torch.Tensor, weight: torch.Tensor, *, stored: bool) -> dict[Walk, float]:
    """Milliseconds of each walk that the GPU has memory for; the usual one comes first."""
    tile = tile_of(hidden)
    columns = -(-len(weight) // tile.columns) * tile.columns
    store = hidden.new_empty(len(hidden), columns) if stored else None
    reference = hidden.new_zeros(len(hidden), dtype=torch.float32) if stored else None
    usual = usual_walk(hidden.shape[1], tile.stages, stored=stored)
    taken = {}
    for walk in dict.fromkeys([usual, *CANDIDATES]):
        try:
            taken[walk] = do_bench(
                lambda walk=walk: stream(
                    hidden, weight, None, LogitSpec(), entropy=False, store=store, reference=reference, walk=walk
                ),
                return_mode="median",
            )
        except OutOfResources:
            continue
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[896, 4096], help="of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the streamed product runs on a GPU, and there is none here.")
    for width in args.widths:
        draw = torch.Generator("cuda").manual_seed(0)
        hidden, weight = (
            torch.randn(rows, width, generator=draw, device="cuda").to(getattr(torch, args.dtype))
            for rows in (args.rows, args.vocabulary)
        )
        for stored in (False, True):
            rows = hidden[: args.rows // 2] if stored else hidden
            taken = measure(rows, weight, stored=stored)
            usual, best = next(iter(taken)), min(taken, key=lambda walk: taken[walk])
            gain = taken[best] / taken[usual]
            print(f"width {width}{', stored' if stored else ''}: {best}, {gain:.3f} × the usual {usual}, {taken[usual]:.3f} ms")
            path = remember(rows, best if gain < CLEARLY else usual, stored=stored)
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
