"""The head in Triton: one streamed GEMM, sparse gradients where a row's own bound allows them."""
