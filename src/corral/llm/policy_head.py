"""Where the trainer's own forward passes meet `corral.lm_head`: supports come with the log-probs, at no additional pass."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor, nn

from corral.kernels import HeadOutput, lm_head
from corral.types import SparseDist


@dataclass(frozen=True, eq=False)
class SupportRequest:
    """Which support the next passes shall report: the policy's own top-k, or given ids [B T K]."""

    top_k: int | None = None
    mass: float = 1.0
    ids: Tensor | None = None


class PolicyHead:
    """Wraps a model's forward, which TRL has patched already, so that its head also reports a sparse support.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded or offloaded weights) and hands them to one function. For as long as a support is wanted, that function is ours.
    """

    def __init__(self, model: nn.Module) -> None:
        self.request: SupportRequest | None = None
        self.dists: list[SparseDist] = []
        self._inner = model.forward
        model.forward = types.MethodType(_wrapped_forward(self, model.forward), model)

    @contextmanager
    def reporting(self, request: SupportRequest) -> Iterator[list[SparseDist]]:
        """Inside, every scoring pass appends its support [B, completion tokens, K]."""
        self.request, self.dists = request, []
        try:
            yield self.dists
        finally:
            self.request = None

    def score(self, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One fused pass with our head in the place of TRL's."""
        assert self.request is not None
        kernel = _HeadKernel(self.request, labels[:, 1:] != -100)
        original, trl_utils._ChunkedLogProbFunction = trl_utils._ChunkedLogProbFunction, kernel
        try:
            output = self._inner(*args, labels=labels, fused_lm_head=True, **kwargs)
        finally:
            trl_utils._ChunkedLogProbFunction = original
        dist = kernel.dist()
        self.dists.append(dist)
        # Sharded training hooks the tensors that a forward returns: what the loss reads must be among them.
        output["support_logp"], output["support_rest"] = dist.logp, dist.rest
        return output


def _wrapped_forward(head: PolicyHead, inner: Any) -> Any:
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if head.request is not None and fused_lm_head:
            assert labels is not None
            return head.score(labels, *args, **kwargs)
        if labels is not None:
            kwargs["labels"] = labels
        return inner(*args, **kwargs, **({"fused_lm_head": True} if fused_lm_head else {}))

    forward.__wrapped__ = inner  # type: ignore[attr-defined]  # `generate` reads the model's own signature through it
    return forward


class _HeadKernel:
    """Stands in for TRL's chunked log-prob function for one pass: same call, `corral.lm_head` inside."""

    def __init__(self, request: SupportRequest, scored: Tensor) -> None:
        self.request, self.scored = request, scored
        self.output: HeadOutput | None = None
        self.compact = False

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        _, softcap, scale, outputs = rest
        self.compact = len(tokens) != self.scored.numel()
        output = lm_head(
            hidden, weight, tokens,
            bias=bias, scale=scale, softcap=softcap, temperature=temperature,
            top_k=None if self.request.top_k is None else min(self.request.top_k, len(weight)),
            mass=self.request.mass, ids=self._rows_of_ids(), entropy="entropy" in outputs,
        )  # fmt: skip
        self.output = output
        return output.logp, output.entropy, None, None, None

    def _rows_of_ids(self) -> Tensor | None:
        """Ids [B T K] of the completion → one row per scored position; prompts have none."""
        if self.request.ids is None:
            return None
        prompt = self.scored.shape[1] - self.request.ids.shape[1]
        ids = nn.functional.pad(self.request.ids, (0, 0, prompt, 0), value=-1)
        return ids[self.scored] if self.compact else ids.flatten(0, 1)

    def dist(self) -> SparseDist:
        """The support of every position of the batch [B L−1 K]; empty where nothing was scored."""
        assert self.output is not None
        dist = self.output.dist
        assert dist is not None
        shape = self.scored.shape
        if not self.compact:
            return SparseDist(dist.ids.view(*shape, -1), dist.logp.view(*shape, -1), dist.rest.view(shape))
        slots = dist.ids.shape[-1]
        where = self.scored[..., None].expand(*shape, slots)
        ids = dist.ids.new_full((*shape, slots), -1).masked_scatter(where, dist.ids)
        logp = dist.logp.new_full((*shape, slots), -torch.inf).masked_scatter(where, dist.logp)
        rest = dist.rest.new_zeros(shape).masked_scatter(self.scored, dist.rest)
        return SparseDist(ids, logp, rest)
