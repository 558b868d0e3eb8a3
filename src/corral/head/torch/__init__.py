"""LM head in PyTorch, for any device and dtype. The vocabulary may be sharded over processes."""
