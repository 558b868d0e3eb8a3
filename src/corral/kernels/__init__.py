"""The same maths, fast: from hidden states to log-probs and sparse distributions without ever holding the logits.

Hidden states → loss → gradient, file by file. `head` (log-probs, support) and `policy_loss` (the loss too) are the doors,
`dispatch` chooses the path, `batch_loss` takes an objective's loss of a head's rows; `live` picks rows out of a batch.

torch, any device   `logits`          one block of products, in either direction
                    `head_rows`       logits of some rows → normaliser, entropy, support and rest
                    `head_backward`   blocks again, turned into their gradient
                    `foreseen`        or the gradient formed on the way, of a loss that is known beforehand
                    `head_kl`         the exact KL of two networks, a few rows of both at a time
                    `parallel`        a vocabulary split over processes
Triton, forward     `inspect_batch`   is the batch fit, and which rows will be dense?
                    `stream`          one product, each tile of which leaves five numbers; `reduce_tile`, `walk`
                    `select`          supports from these: `doubt` finds tiles to make again, `extract` does, `settle` sums up
                    `rule`            an objective's own kernel: `token_loss`, `troll_loss`, on `project_row` and `loss_rows`
Triton, backward    `row_gradient`    gradients of log-probs → of logits: single entries, and one factor for the rest
                    `route`           sparse rows (`sparse_backward`), a few dense ones (`few_rows`), many (`dense_backward`)
                    `formed`          gradients formed on the way: `dense_forward`, `row_factor`; `difference` to what is asked
Triton, autograd    `triton_head`     the head alone; `fused_loss`: head and objective in one
                    `later`           answers for the host; `ids_later`: are the ids what they should be?
"""

from corral.kernels.head import HeadOutput, lm_head
from corral.kernels.head_kl import head_kl
from corral.kernels.policy_loss import policy_loss_from_hidden

__all__ = ["HeadOutput", "head_kl", "lm_head", "policy_loss_from_hidden"]
