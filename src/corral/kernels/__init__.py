"""The same maths, fast: from hidden states to log-probs and sparse distributions without ever holding the logits."""

from corral.kernels.head import HeadOutput, lm_head
from corral.kernels.policy_loss import policy_loss_from_hidden

__all__ = ["HeadOutput", "lm_head", "policy_loss_from_hidden"]
