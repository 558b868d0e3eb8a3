"""Fused LM head and loss in PyTorch, with gradients, in three GEMMs: no logits are recomputed in a backward pass.

Some rows at a time: their logits are made, the objective computes its loss from them, and its gradient is computed from the
same logits before they are dropped. Every token passes the objective once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corral.head.logits import Scratch, accumulate, block_size, operand, slices
from corral.head.packed import FusedLoss, LossTerms, Packing
from corral.head.rows import Gradients, HeadInput, HeadRows, Upstream, blank_gradients
from corral.head.torch.stream import HeadGradients, LogitGradient, Outside, Shard, check_tokens, scan_rows
from corral.numerics import common_dtype
from corral.tensors import SparseDist, join_outputs


def fused_loss(source: HeadInput, terms: LossTerms, needed: Sequence[bool]) -> FusedLoss | None:
    """Compute the policy loss and its gradients for a batch, one block of tokens at a time; None if that is not possible.

    None if the logits of the forward pass do not suffice for the gradients (a soft cap, or an objective of whole sequences), if
    the batch is empty, or if the objective refuses a row: it then gets the whole batch, so that its message covers all.
    """
    packing = Packing(terms.batch.mask)
    config = getattr(terms.objective, "config", None)  # an objective may be any function of a batch
    if source.spec.softcap is not None or not getattr(config, "tokenwise", False) or not packing.count:
        return None
    source, terms = source.map(packing.pack), terms.pack(packing)
    check_sampled(source.ids, source.tokens)
    source = check_tokens("policy_loss_from_hidden", source, len(source.weight))
    dtype, trained, fresh = common_dtype(source.hidden, source.weight), any(needed), True
    sums, scratch = blank_gradients(source, needed, dtype), Scratch(source.hidden.device)
    for x in (sums.hidden, sums.bias):  # dW is written by the first block with a gradient, which saves filling it with zeros
        if x is not None:
            x.zero_()
    total, found, outputs = source.hidden.new_zeros((), dtype=dtype), [], []
    # The logits of a part are gone when the next part's are made: the objective has to see each part by itself, and its
    # gradient with respect to the head's few results is all that autograd does here.
    for part, rows, outside in scan_rows(source, Shard(), outside=trained):
        leaves = [x.detach().requires_grad_(trained) for x in (rows.logp, rows.kept, rows.rest)]
        with torch.set_grad_enabled(trained):
            logp, kept, rest = leaves
            new = SparseDist(rows.ids, kept, rest, rows.rest_max)[None] if source.ids is not None else None
            try:
                value, output = terms[:, part](logp[None], new)
            except ValueError:
                return None
        if value.requires_grad and outside is not None:
            logp, kept, rest = torch.autograd.grad(value, leaves, allow_unused=True)
            grads = HeadGradients.of(Upstream(logp=logp, kept=kept, rest=rest), rows, source.spec.slope)
            if len(picked := grads.nonzero()):
                _add_gradients(sums, source[part], part, rows, grads, picked, outside, scratch, fresh=fresh)
                fresh = False
        total += value.detach()
        found.append(rows)
        outputs.append(output.detach())
    output = join_outputs(outputs)
    output = replace(output, metrics=output.metrics | all_dense(total))

    def finish(factor: Tensor) -> Gradients:
        if fresh and sums.weight is not None:
            sums.weight.zero_()
        inputs = (source.hidden, source.weight, source.bias)
        pairs = zip(vars(sums).values(), inputs, strict=True)
        gradients = Gradients(*(None if g is None or x is None else g.to(x.dtype) for g, x in pairs))
        # On a CPU a factor of 1, as in a plain `backward()`, is skipped; on a GPU reading it would make the host wait.
        return gradients.map(lambda x: x.mul_(factor) if x.is_cuda or float(factor) != 1.0 else x, shared=True)

    return FusedLoss(packing, total, HeadRows.cat(found), output, finish if trained else None)


def _add_gradients(
    sums: Gradients, source: HeadInput, part: slice, rows: HeadRows, grads: HeadGradients, picked: Tensor, outside: Outside,
    scratch: Scratch, *, fresh: bool,
) -> None:  # fmt: skip
    """Add the gradients from one block of tokens to the running `sums`; only tokens in `picked` have a nonzero gradient.

    `source`, `rows`, `grads` and `outside` are of this block, whose place in dH is `part`. The memory of `outside` is
    overwritten. With `fresh`, dW is written and not added to.
    """
    weight, dtype, (masses, peak) = source.weight, rows.lse.dtype, outside
    blocks = list(slices(len(weight), block_size(weight.device, len(picked))[1]))
    gradient = LogitGradient(source.tokens[picked], rows[picked], grads[picked], blocks, entropy=False)
    singles = gradient.singles(torch.cat([rows.kept, rows.logp[:, None]], -1)[picked])
    h = operand(source.hidden[picked], dtype)
    d_hidden = None if sums.hidden is None else torch.zeros_like(h, dtype=dtype)
    for i, block in enumerate(blocks):
        shape = (len(picked), block.stop - block.start)
        mass = torch.index_select(masses[:, block], 0, picked, out=scratch("mass", shape, dtype))
        dz = gradient.of_mass(mass, peak[picked, None], i, singles)
        if d_hidden is not None:
            accumulate(d_hidden, dz, operand(weight[block], dtype, scratch))
        if sums.weight is not None:
            accumulate(sums.weight[block], dz.T, h, fresh=fresh)
        if sums.bias is not None:
            sums.bias[block] += dz.sum(0)
    if sums.hidden is not None and d_hidden is not None:
        sums.hidden[part.start + picked] = d_hidden


def all_dense(like: Tensor) -> dict[str, Tensor]:
    """Metrics of a backward pass without sparse gradients: every token's gradient is dense, and nothing is dropped."""
    return {"head/dense_share": like.new_ones(()), "head/dropped_max": like.new_zeros(())}


def check_sampled(ids: Tensor | None, tokens: Tensor) -> None:
    """Raise ValueError unless the first of the old policy's top-k tokens is the sampled token, at every position.

    Slot 0 of `ids` [N K] is compared with `tokens` [N]; no later check does so.
    """
    if ids is not None and (wrong := int((ids[:, :1] != tokens[:, None]).all(-1).sum())):
        raise ValueError(
            f"policy_loss_from_hidden: slot 0 of dist_old.ids is not the sampled token at {wrong} of {len(tokens)} unmasked "
            f"tokens. Both follow the completion tokens; was one of them shifted twice? See docs/data-flow.md#shift."
        )
