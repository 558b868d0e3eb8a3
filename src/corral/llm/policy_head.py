"""Where the trainer's own forward passes meet `corral.lm_head`: supports come with the log-probs, at no additional pass.

On a GPU the trainer thereby does what `policy_loss_from_hidden` does: hidden states → log-probs and support in one streamed
product, the loss in one kernel where there is one, and a backward pass that is sparse where a row's own bound allows it.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor, nn

from corral.kernels import lm_head
from corral.kernels.foreseen import Expect
from corral.support import gather_support, top_k_support
from corral.types import SparseDist

Forward = Callable[..., Any]


Pick = Callable[[Tensor], Tensor]
"""[B T …] → the rows [N …] that a head is given."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SupportRequest:
    """Which support a pass shall report, the policy's own top-k or given ids [B T K] or none, and what will become of it."""

    top_k: int | None = None
    mass: float = 1.0
    ids: Tensor | None = None
    tolerance: float = 0.0
    """Share of a token's gradient that a sparse backward pass may leave out."""
    foresee: Callable[[Pick], Expect | None] | None = None
    """The loss that will follow, so that gradients can be formed on the way."""

    @property
    def supported(self) -> bool:
        """Whether a support is wanted at all."""
        return self.top_k is not None or self.ids is not None


class PolicyHead:
    """Wraps a model's forward, which TRL has patched already, so that its head also reports a sparse support.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded weights) and hands them to one function. For as long as a support is wanted, that function is ours. TRL before
    1.15 computes all logits, and the support is taken from those.

    A support is not among what the forward returns: the wrappers of distributed training rebuild that, field by field. Their
    hooks sit on the log-probs, which come from the same head and which every loss of TRL's reads.
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        self.temperature = temperature
        self.request: SupportRequest | None = None
        self.tokens = 0
        self.dists: list[SparseDist] = []
        self.reports: list[Tensor] = []
        """What backward passes have said, and will say, of dense rows and of what they left out; [2] each."""
        inner = model.forward

        @functools.wraps(type(model).forward)  # `generate` reads the model's own signature through it
        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            request = self.request
            if request is not None and kwargs.get("fused_lm_head"):
                return self._score_hidden(request, inner, *args, **kwargs)
            if request is not None and request.supported:
                return self._score_logits(request, inner, *args, **kwargs)
            return inner(*args, **kwargs)

        model.forward = types.MethodType(forward, model)

    @contextmanager
    def reporting(self, request: SupportRequest, tokens: int) -> Iterator[list[SparseDist]]:
        """Inside, every pass appends the support of each row's last `tokens` tokens, [B T K], where one is wanted."""
        self.request, self.tokens, self.dists = request, tokens, []
        try:
            yield self.dists
        finally:
            self.request, self.dists = None, []

    def _score_hidden(self, request: SupportRequest, inner: Forward, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        """A fused pass with our head in the place of TRL's."""
        head = _HeadFunction(request, labels[:, 1:] != -100, self.tokens)
        original, trl_utils._ChunkedLogProbFunction = trl_utils._ChunkedLogProbFunction, head
        try:
            output = inner(*args, labels=labels, **kwargs)
        finally:
            trl_utils._ChunkedLogProbFunction = original
        if head.dist is not None:
            self.dists.append(head.dist)
        if head.report is not None and torch.is_grad_enabled():
            self.reports.append(head.report)
        return output

    def finished_reports(self) -> list[Tensor]:
        """Those of backward passes that are over; each is given once. One may be under way; of others nothing will be heard."""
        over = [not bool(report.isnan().any()) for report in self.reports]
        done = [report for report, is_over in zip(self.reports, over, strict=True) if is_over]
        self.reports = [] if all(over) else self.reports[-1:]
        return done

    def _score_logits(self, request: SupportRequest, inner: Forward, *, input_ids: Tensor, **kwargs: Any) -> Any:
        """A pass that computes every logit."""
        output = inner(input_ids=input_ids, **kwargs)
        logits = output.logits[:, :-1][:, -self.tokens :]
        logp = (logits.float() / self.temperature).log_softmax(-1)
        if request.ids is not None:
            dist = gather_support(logp, request.ids)
        else:
            assert request.top_k is not None
            dist = top_k_support(logp, input_ids[:, -self.tokens :], k=min(request.top_k, logp.shape[-1]), mass=request.mass)
        self.dists.append(dist)
        return output


class _HeadFunction:
    """Stands in for TRL's chunked log-prob function for one pass: same call, `corral.lm_head` inside."""

    def __init__(self, request: SupportRequest, scored: Tensor, tokens: int) -> None:
        self.request, self.scored, self.completion = request, scored, scored[:, -tokens:]
        self.dist: SparseDist | None = None
        self.report: Tensor | None = None

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *how: Any
    ) -> tuple[Tensor | None, ...]:
        """Log-probs and entropy of the rows that TRL passes: all of them on a CPU, the scored ones alone on a GPU."""
        _, softcap, scale, outputs = how
        rows = self.scored.to(hidden.device).flatten()
        every_row = len(tokens) == len(rows)
        if every_row:
            hidden, tokens = hidden[rows], tokens[rows]
        ids = None if self.request.ids is None else self.request.ids[self.completion]
        expect = None
        if self.request.foresee is not None and not hidden.is_cuda:  # kernels on a GPU do without
            expect = self.request.foresee(lambda x: x[self.completion])
        empty = not len(tokens)
        if empty:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids, expect = None if ids is None else ids.new_full((1, ids.shape[-1]), -1), None
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for products alone
            head = lm_head(
                hidden, weight, tokens,
                bias=bias, scale=scale, softcap=softcap, temperature=temperature,
                top_k=None if self.request.top_k is None else min(self.request.top_k, len(weight)),
                mass=self.request.mass, ids=ids, entropy="entropy" in outputs,
                expect=expect, tolerance=self.request.tolerance,
            )  # fmt: skip
        keep = slice(0, 0 if empty else None)
        self.report = None if empty else head.report
        if head.dist is not None:
            self.dist = self._spread(SparseDist(head.dist.ids[keep], head.dist.logp[keep], head.dist.rest[keep]))
        results = [None if x is None else x[keep] for x in (head.logp, head.entropy)]
        if every_row:
            results = [None if x is None else x.new_zeros(len(rows)).masked_scatter(rows, x) for x in results]
        return (*results, None, None, None)

    def _spread(self, dist: SparseDist) -> SparseDist:
        """Scored rows [N K] → the completion [B T K], empty where nothing was scored."""
        scored = self.completion.to(dist.rest.device)
        slots = scored[..., None].expand(*scored.shape, dist.ids.shape[-1])
        return SparseDist(
            dist.ids.new_full(slots.shape, -1).masked_scatter(slots, dist.ids),
            dist.logp.new_full(slots.shape, -torch.inf).masked_scatter(slots, dist.logp),
            dist.rest.new_zeros(scored.shape).masked_scatter(scored, dist.rest),
        )
