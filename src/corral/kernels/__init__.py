"""The same maths, fast: from hidden states to log-probs and sparse distributions without ever holding the logits."""

from corral.kernels.head import HeadOutput, lm_head

__all__ = ["HeadOutput", "lm_head"]
