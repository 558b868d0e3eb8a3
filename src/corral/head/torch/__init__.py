"""The head in torch, for any device and dtype, with a vocabulary that may be sharded over processes."""
