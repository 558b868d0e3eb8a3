"""Log-probs of a few more tokens of a policy, on any device: weights are gathered, some rows' at a time."""

import torch
from torch import Tensor

from corral.head.logits import LogitSpec, slices, working_dtype

AT_ONCE = 2**24
"""Elements of the gathered weights held at once."""


def gather_logp(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, tokens: Tensor, logp: Tensor, ids: Tensor
) -> Tensor:
    """`kernels.gathered.gather_logp` on any device: the weights of some rows' tokens are gathered, then multiplied."""
    out = []
    wanted = torch.cat([tokens.long()[:, None], ids.long()], -1)
    dtype = working_dtype(hidden, weight)
    for part in slices(len(hidden), max(1, AT_ONCE // max(wanted.shape[-1] * weight.shape[-1], 1))):
        some = wanted[part].clamp(min=0)
        z = torch.einsum("nh,nmh->nm", hidden[part].to(dtype), weight[some].to(dtype))
        if bias is not None:
            z += bias[some]
        z = spec.finish_(z)
        out.append(logp[part, None] + (z[:, 1:] - z[:, :1]))
    found = torch.cat(out) if out else logp.new_empty(ids.shape)
    return torch.where(ids < 0, -torch.inf, found)
