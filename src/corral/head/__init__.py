"""Hidden states → log-probs, supports, losses and gradients, without ever holding the logits.

Two verbs. `lm_head` (head.py) is the differentiable building block; `policy_loss_from_hidden` (policy_loss.py) takes an
objective's reduced loss and its gradient together, once. One call of it, file by file:

dispatch.py         torch or triton: the only place that chooses
packed.py           unmasked tokens → packed rows; the terms of the loss (`rows.py` has the nouns of both implementations)
torch/              on any device
  online.py           logits of some rows → normaliser, entropy, support and tail mass
  head_kl.py          the exact KL of two networks, a few rows of both at a time
  fused.py            the objective on these rows, and its gradient off the same logits; `backward.py` has dz
triton/             on a GPU
  plan_batch.py       is the batch valid, and which rows are planned to be dense?
  gemm_stats.py       one GEMM, each tile of which leaves five numbers (`reduce_tile.py`)
  support/            supports from these: `select` plans which tiles to recompute, recomputes them, finalizes the rows; `union`
  loss/               the objective's own kernel (`rule`: `token`, `troll`), and the metrics (`rows`)
  backward/           gradients of log-probs → of logits (`row_gradient`); dense rows three GEMMs on the way (`dense_forward`,
                      `row_factor`); streamed ones sparse or recomputed (`route`, `sparse`, `dense`)
  fused.py            these in order
precomputed.py      autograd: the gradients times the one number that arrives
union.py            what the union of two supports takes: the old head, whose log-probs of new members are `gathered`

`lm_head` passes torch/autograd.py or triton/autograd.py instead, and batch_loss.py takes an objective's loss of its rows.
`head_kl` measures: the exact KL of two networks, without a gradient.
"""

from corral.head.forward import HeadOutput, lm_head
from corral.head.policy_loss import PolicyLoss, policy_loss_from_hidden
from corral.head.torch.head_kl import head_kl
from corral.head.union import UnionSupport

__all__ = ["HeadOutput", "PolicyLoss", "UnionSupport", "head_kl", "lm_head", "policy_loss_from_hidden"]
