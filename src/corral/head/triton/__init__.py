"""LM head in Triton: one GEMM in the forward pass, and sparse logit gradients if the part they drop is small."""
