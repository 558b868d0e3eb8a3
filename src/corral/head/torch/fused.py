"""Fused loss and gradient in PyTorch: three GEMMs. Recomputing the logits in a backward pass would take a fourth.

Some rows at a time: their logits are made, the objective computes its loss from them, and its gradient is computed from the
same logits before they are dropped. Every token passes the objective once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corral.head.logits import LogitSpec, Scratch, accumulate, block_size, operand, slices
from corral.head.packed import FusedLoss, LossTerms, Packing
from corral.head.rows import Gradients, HeadInput, HeadRows, Upstream
from corral.head.torch.stream import HeadGradients, LogitGradient, Outside, Shard, scan_rows
from corral.numerics import common_dtype
from corral.support import check_ids, check_unique
from corral.tensors import SparseDist, join_outputs


def can_fuse(spec: LogitSpec, objective: object) -> bool:
    """True if the forward pass's logits suffice for the gradients: a token-wise objective, and no soft cap."""
    config = getattr(objective, "config", None)  # an objective may be any function of a batch
    return spec.softcap is None and getattr(config, "tokenwise", False)


def fused_loss(source: HeadInput, terms: LossTerms, needed: Sequence[bool]) -> FusedLoss | None:
    """Compute loss and gradients of a batch [B T …], one block of tokens at a time.

    None if the batch is empty, or the objective refuses a row: it then gets the whole batch, so that its message covers all.
    """
    packing = Packing(terms.batch.mask)
    if not packing.count:
        return None
    source, terms = source.map(packing.pack), terms.pack(packing)
    source = replace(source, tokens=source.tokens.long(), ids=None if source.ids is None else source.ids.long())
    check_ids("policy_loss_from_hidden", "tokens", source.tokens, lowest=0, vocabulary=len(source.weight))
    if source.ids is not None:
        check_sampled(source.ids, source.tokens)
        check_ids("policy_loss_from_hidden", "ids", source.ids, lowest=-1, vocabulary=len(source.weight))
        check_unique("policy_loss_from_hidden", "ids", source.ids)
    total, found, outputs = source.hidden.new_zeros((), dtype=common_dtype(source.hidden, source.weight)), [], []
    into, trained = _GradientSum(source, needed), any(needed)
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
            grads = HeadGradients.of(Upstream(logp=logp, kept=kept, rest=rest), rows)
            into.add(part, rows, grads.scaled(source.spec.slope), outside)
        total += value.detach()
        found.append(rows)
        outputs.append(output.detach())
    output = join_outputs(outputs)
    output = replace(output, metrics=output.metrics | all_dense(total))

    def finish(factor: Tensor) -> Gradients:
        gradients = into.gradients()
        for x in gradients:
            # On a CPU a factor of 1, as in a plain `backward()`, is skipped; on a GPU reading it would make the host wait.
            if x is not None and (x.is_cuda or float(factor) != 1.0):
                x.mul_(factor)
        return gradients

    return FusedLoss(packing, total, HeadRows.cat(found), output, finish if trained else None)


def all_dense(like: Tensor) -> dict[str, Tensor]:
    """Metrics of a backward pass without sparse gradients: every token's gradient is dense, and nothing is dropped."""
    return {"head/dense_share": like.new_ones(()), "head/dropped_max": like.new_zeros(())}


def check_sampled(ids: Tensor | None, tokens: Tensor) -> None:
    """Raise an error if slot 0 of the old top-k tokens [N K] is not the sampled token [N]. No later check compares both."""
    if ids is not None and (wrong := int((ids[:, :1] != tokens[:, None]).all(-1).sum())):
        raise ValueError(
            f"policy_loss_from_hidden: slot 0 of dist_old.ids is not the sampled token at {wrong} of {len(tokens)} unmasked "
            f"tokens. Both follow the completion tokens; was one of them shifted twice? See docs/data-flow.md#shift."
        )


class _GradientSum:
    """Running sums of the gradients dH, dW and db over blocks of tokens, in the working dtype."""

    def __init__(self, source: HeadInput, needed: Sequence[bool]) -> None:
        hidden, weight, bias = source.hidden, source.weight, source.bias
        self.source, self.dtype = source, common_dtype(hidden, weight)
        self.hidden = torch.zeros_like(hidden, dtype=self.dtype) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=self.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=self.dtype) if bias is not None and needed[2] else None
        self.fresh = True  # dW holds nothing yet: the first part overwrites it, which saves filling it with zeros
        self.scratch = Scratch(hidden.device)

    def add(self, part: slice, rows: HeadRows, grads: HeadGradients, outside: Outside) -> None:
        """Add the gradients of a block of tokens; the memory of `outside` is overwritten."""
        picked = grads.nonzero()
        if not len(picked):
            return
        hidden, tokens, weight = self.source.hidden[part], self.source.tokens[part], self.source.weight
        blocks = list(slices(len(weight), block_size(hidden.device, len(picked))[1]))
        gradient = LogitGradient(tokens[picked], rows[picked], grads[picked], blocks, entropy=False)
        singles = gradient.singles(torch.cat([rows.kept, rows.logp[:, None]], -1)[picked])
        h = operand(hidden[picked], self.dtype)
        d_hidden = None if self.hidden is None else torch.zeros_like(h, dtype=self.dtype)
        for i, block in enumerate(blocks):
            shape = (len(picked), block.stop - block.start)
            mass = torch.index_select(outside.mass[:, block], 0, picked, out=self.scratch("mass", shape, self.dtype))
            dz = gradient.of_mass(mass, outside.peak[picked, None], i, singles)
            if d_hidden is not None:
                accumulate(d_hidden, dz, operand(weight[block], self.dtype, self.scratch))
            if self.weight is not None:
                accumulate(self.weight[block], dz.T, h, fresh=self.fresh)
            if self.bias is not None:
                self.bias[block] += dz.sum(0)
        if self.hidden is not None and d_hidden is not None:
            self.hidden[part.start + picked] = d_hidden
        self.fresh = False

    def gradients(self) -> Gradients:
        """Return dH, dW and db in the dtypes of their parameters."""
        if self.fresh and self.weight is not None:
            self.weight.zero_()
        inputs = (self.source.hidden, self.source.weight, self.source.bias)
        found = zip((self.hidden, self.weight, self.bias), inputs, strict=True)
        hidden, weight, bias = (None if g is None or x is None else g.to(x.dtype) for g, x in found)
        return hidden, weight, bias
