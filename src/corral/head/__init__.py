"""Fused LM head: log-probs, top-k tokens, losses and gradients from hidden states, without storing all logits.

`lm_head` (forward.py) is the differentiable building block. `policy_loss_from_hidden` (policy_loss.py) computes an objective's
reduced loss and its gradient together, once. `head_kl` measures the exact KL of two networks, without a gradient. One call of
`policy_loss_from_hidden`, file by file:

dispatch.py         torch or triton: the only place that chooses
rows.py, packed.py  records of rows; unmasked tokens → packed rows, the terms of the loss, autograd for precomputed gradients
torch/              on any device
  stream.py           logits of some rows → normaliser, entropy, support and tail mass; gradients of log-probs → of logits
  fused.py            the objective on these rows, and its gradient from the same logits
  head_kl.py          two networks' logits, some rows at a time
triton/             on a GPU
  gemm_stats.py       one GEMM, which keeps five numbers of each tile of logits
  support.py          supports from these: plan which tiles to recompute, recompute them, finalize the rows; unions
  loss.py             the objective's own kernel on these rows (`row_losses`), and the metrics (`summarize`)
  backward.py         gradients of log-probs → of logits (`row_gradient`); planned dense rows (`dense_forward`); streamed rows,
                      sparse or recomputed (`head_gradients`)
  fused.py            validates a batch and plans its rows (`plan_rows`), then calls these in order
union.py            the old policy on a union of supports; triton/gathered.py on a GPU

`lm_head` (forward.py) goes through autograd instead, with a forward and a backward of torch/stream.py, or of triton/support.py
and triton/backward.py. from_logits.py does the same from logits that an engine has made. batch_loss.py computes an objective's
loss from its results.
"""

from corral.head.forward import HeadOutput, lm_head
from corral.head.policy_loss import PolicyLoss, policy_loss_from_hidden
from corral.head.torch.head_kl import head_kl
from corral.head.union import UnionSupport

__all__ = ["HeadOutput", "PolicyLoss", "UnionSupport", "head_kl", "lm_head", "policy_loss_from_hidden"]
