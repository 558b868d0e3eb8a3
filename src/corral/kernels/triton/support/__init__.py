"""Exact supports from the tile statistics of a streamed GEMM."""
