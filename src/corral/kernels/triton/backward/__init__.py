"""From gradients of log-probs to gradients of hidden states and weights."""
