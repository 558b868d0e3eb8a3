"""The head in Triton: one streamed GEMM forward, and sparse gradients wherever a row's error bound allows them."""
