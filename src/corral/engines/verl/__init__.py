"""verl adapter: policy losses, FSDP and Megatron engines that keep top-k tokens, and trainers."""
