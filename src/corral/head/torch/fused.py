"""Loss and gradient together on the torch path: three GEMMs, where recomputing the logits in a backward pass takes four.

Some rows at a time: their logits are made, the objective computes its loss from them, and its gradient is computed from the
same logits before they are dropped. Every token passes the objective once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from corral.head.logits import LogitSpec, Scratch, accumulate, block_size, operand, slices, working_dtype
from corral.head.packed import LossTerms
from corral.head.rows import Gradients, HeadInput, HeadRows
from corral.head.torch.stream import HeadGradients, LogitGradient, Outside, Shard, scan_rows
from corral.tensors import ObjectiveOutput, SparseDist, join_outputs


def can_fuse(spec: LogitSpec, objective: object) -> bool:
    """True if the forward pass's logits are enough for gradients: the objective works token by token, without a soft cap."""
    config = getattr(objective, "config", None)  # an objective may be any function of a batch
    return spec.softcap is None and getattr(config, "tokenwise", False)


def fused_loss(
    source: HeadInput, terms: LossTerms, needed: Sequence[bool]
) -> tuple[Tensor, HeadRows, ObjectiveOutput, Gradients]:
    """The sum, the head's results, the objective's output [1 N], and the gradients that are needed."""
    total, found, outputs = source.hidden.new_zeros((), dtype=working_dtype(source.hidden, source.weight)), [], []
    into, trained = _GradientSum(source, needed), any(needed)
    for part, rows, outside in scan_rows(source, Shard(), outside=trained):
        leaves = [x.detach().requires_grad_(trained) for x in (rows.logp, rows.kept, rows.rest)]
        with torch.set_grad_enabled(trained):
            logp, kept, rest = leaves
            new = SparseDist(rows.ids, kept, rest, rows.rest_max)[None] if source.ids is not None else None
            value, output = terms[:, part](logp[None], new)
        if value.requires_grad and outside is not None:
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            logp, kept, rest = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True))
            grads = HeadGradients(logp, kept, rest, torch.zeros_like(logp))
            into.add(part, rows, grads.scaled(source.spec.slope), outside)
        total += value.detach()
        found.append(rows)
        outputs.append(output.detach())
    return total, HeadRows.cat(found), join_outputs(outputs), into.gradients()


class _GradientSum:
    """Sums of dH, dW and db over the rows so far, in the working dtype."""

    def __init__(self, source: HeadInput, needed: Sequence[bool]) -> None:
        hidden, weight, bias = source.hidden, source.weight, source.bias
        self.source, self.dtype = source, working_dtype(hidden, weight)
        self.hidden = torch.zeros_like(hidden, dtype=self.dtype) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=self.dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=self.dtype) if bias is not None and needed[2] else None
        self.fresh = True
        self.scratch = Scratch(hidden.device)

    def add(self, part: slice, rows: HeadRows, grads: HeadGradients, outside: Outside) -> None:
        """Add the gradients of some rows; `outside` is overwritten."""
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
        """dH, dW and db in the dtypes of what they are gradients of."""
        if self.fresh and self.weight is not None:
            self.weight.zero_()
        inputs = (self.source.hidden, self.source.weight, self.source.bias)
        found = zip((self.hidden, self.weight, self.bias), inputs, strict=True)
        hidden, weight, bias = (None if g is None or x is None else g.to(x.dtype) for g, x in found)
        return hidden, weight, bias
