"""LM head in Triton: one GEMM forward, and sparse logit gradients for tokens where little is dropped."""
