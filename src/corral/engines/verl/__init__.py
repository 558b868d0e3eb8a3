"""Integration with verl: policy losses, an FSDP engine that keeps top-k tokens, and trainers."""
