"""Where the trainer's own forward passes meet `corral.lm_head`: supports come with the log-probs, at no additional pass.

On a GPU the trainer thereby does what `policy_loss_from_hidden` does: hidden states → log-probs and support in one streamed
product, the loss in one kernel where there is one, and a backward pass that is sparse where a row's own bound allows it.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import trl.trainer.utils
from torch import Tensor, nn

from corral.kernels import lm_head
from corral.kernels.batch_loss import NewRows
from corral.kernels.dispatch import choose
from corral.kernels.head import HeadOutput
from corral.kernels.logits import LogitSpec
from corral.kernels.packed import LossTerms, Packing
from corral.kernels.policy_loss import PolicyLoss, policy_loss_from_hidden
from corral.support import gather_support, top_k_support
from corral.types import SparseDist

Forward = Callable[..., Any]

trl_utils: Any = trl.trainer.utils  # one of its classes is replaced while a pass is scored


@dataclass(frozen=True, eq=False, kw_only=True)
class SupportRequest:
    """Which support a pass shall report, and what will become of it.

    The policy's own top-k, given ids [B T K], the union of both, or none.
    """

    top_k: int | None = None
    mass: float = 1.0
    ids: Tensor | None = None
    union: bool = False
    """Whether updates ask for the union of this support and their own."""
    keep: bool = False
    """Whether the pass shall report its hidden states and its head too."""
    tolerance: float = 0.0
    """Share of a token's gradient that a sparse backward pass may leave out."""
    loss: Callable[[Packing], LossTerms | None] | None = None
    """The loss to take of the scored tokens [1 N], with its gradient; where it is None the pass says what the policy is."""
    alone: bool = False
    """Whether the pass is all that is wanted of the loss that asks for it."""

    @property
    def supported(self) -> bool:
        """Whether a support is wanted at all."""
        return self.top_k is not None or self.ids is not None


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """A head as one pass had it: what turns a hidden state into logits."""

    weight: Tensor
    bias: Tensor | None
    spec: LogitSpec

    def freeze(self) -> "HeadInputs":
        """The same after the next update: parameters that are trained are copied."""
        weight, bias = (x.detach().clone() if x is not None and x.requires_grad else x for x in (self.weight, self.bias))
        assert weight is not None
        return HeadInputs(weight, bias, self.spec)


@dataclass(frozen=True, eq=False)
class Report:
    """What one pass said of the completion [B T]: its own head row by row, or all of TRL's logits place by place."""

    rows: HeadOutput | None
    live: Packing | None
    """Where the scored rows stand."""
    dist: SparseDist | None = None
    hidden: Tensor | None = None
    """Hidden states of the scored rows [N H], and what they were multiplied with, where they were to be kept."""
    inputs: HeadInputs | None = None
    fused: PolicyLoss | None = None
    """The loss of the scored rows [1 N], where one was asked for."""

    def support(self) -> SparseDist | None:
        """The support of every token [B T K], empty where nothing was scored."""
        if self.rows is None or self.rows.dist is None or self.live is None:
            return self.dist
        return self.live.unpack_dist(self.rows.dist)


class Scored(NamedTuple):
    """What one scoring pass of TRL's gave, for the completion tokens [B T]."""

    logp: Tensor
    entropy: Tensor | None
    reports: list[Report]
    """What the head said, piece by piece, where it was asked to."""

    @property
    def fused(self) -> PolicyLoss | None:
        """The loss, where the head has taken it."""
        return self.reports[0].fused if self.reports else None

    def support(self) -> SparseDist | None:
        """The support of every token, if there is one."""
        pieces = [dist for report in self.reports if (dist := report.support()) is not None]
        if len(pieces) < 2:
            return pieces[0] if pieces else None
        return SparseDist(
            *(torch.cat([getattr(piece, name) for piece in pieces]) for name in ("ids", "logp", "rest", "rest_max"))
        )

    def inputs(self) -> tuple[Tensor, Tensor, HeadInputs] | None:
        """Hidden states [N H], where they stand in the flattened [B T], and the head: where a pass was to keep them."""
        kept = [report for report in self.reports if report.hidden is not None]
        if not kept:
            return None
        places, start = [], 0
        for report in kept:
            assert report.live is not None
            count = report.live.shape.numel()
            rows = torch.arange(count, device=self.logp.device) if report.live.rows is None else report.live.rows
            places.append(rows + start)
            start += count
        assert kept[0].inputs is not None
        return torch.cat([report.hidden for report in kept if report.hidden is not None]), torch.cat(places), kept[0].inputs

    def rows(self) -> tuple[NewRows | None, Tensor | None]:
        """Scored tokens one behind the other, and their entropy; None where they come from more than one pass of our head."""
        rows, live = (self.reports[0].rows, self.reports[0].live) if len(self.reports) == 1 else (None, None)
        return (None, None) if rows is None or live is None else (NewRows(rows.logp, rows.dist, live), rows.entropy)


class PolicyHead:
    """Wraps the forward of the policy and its reference, which TRL has patched already, so that one head scores every pass.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded weights) and hands them to one function. In scoring passes, that function is `corral.lm_head`: old, new and
    reference log-probs then come from one head in one precision, and a support with them. TRL before 1.15 computes all
    logits, in every pass alike, and the support is taken from those.

    A support is not among what the forward returns: the wrappers of distributed training rebuild that, field by field. Their
    hooks sit on the log-probs, which come from the same head and which the trainer's loss reads wherever there are such hooks.
    """

    def __init__(self, models: Iterable[nn.Module], temperature: float, own: SupportRequest) -> None:
        """`own` is the support that old passes report, and that decides which implementation scores all of them."""
        self.temperature, self.own = temperature, own
        self.request: SupportRequest | None = None
        self.tokens = 0
        self.passes: list[Report] = []
        self.backward_reports: list[Tensor] = []
        """What backward passes have said, and will say, of dense rows and of what they left out; [2] each."""
        for model in models:
            self._wrap(model)

    def _wrap(self, model: nn.Module) -> None:
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
    def reporting(self, request: SupportRequest, tokens: int) -> Iterator[list[Report]]:
        """Inside, every pass appends what it says of each sequence's last `tokens` tokens."""
        self.request, self.tokens, self.passes = request, tokens, []
        try:
            yield self.passes
        finally:
            self.request, self.passes = None, []

    def _score_hidden(self, request: SupportRequest, inner: Forward, *args: Any, labels: Tensor, **kwargs: Any) -> Any:
        """A fused pass with our head in the place of TRL's."""
        head = _HeadFunction(request, labels[:, 1:] != -100, self.tokens, self.own)
        original, trl_utils._ChunkedLogProbFunction = trl_utils._ChunkedLogProbFunction, head
        try:
            output = inner(*args, labels=labels, **kwargs)
        finally:
            trl_utils._ChunkedLogProbFunction = original
        if head.said is not None:
            self.passes.append(head.said)
            if (rows := head.said.rows) is not None and rows.report is not None and torch.is_grad_enabled():
                self.backward_reports.append(rows.report)
        return output

    def take_backward_reports(self) -> Tensor | None:
        """Of the passes so far [n 2], each given once; NaN where no backward pass has followed."""
        reports, self.backward_reports = self.backward_reports, []
        return torch.stack(reports) if reports else None

    def _score_logits(self, request: SupportRequest, inner: Forward, *, input_ids: Tensor, **kwargs: Any) -> Any:
        """A pass that computes every logit."""
        output = inner(input_ids=input_ids, **kwargs)
        logits = output.logits[:, :-1][:, -self.tokens :]
        logp = (logits.float() / self.temperature).log_softmax(-1)
        if request.top_k is None:
            assert request.ids is not None
            dist = gather_support(logp, request.ids)
        else:
            k = min(request.top_k, logp.shape[-1])
            dist = top_k_support(logp, input_ids[:, -self.tokens :], k, request.mass, ids=request.ids)
        self.passes.append(Report(None, None, dist))
        return output


class _HeadFunction:
    """Stands in for TRL's chunked log-prob function for one pass: same call, `corral.lm_head` inside."""

    def __init__(self, request: SupportRequest, scored: Tensor, tokens: int, own: SupportRequest) -> None:
        self.request, self.scored, self.completion, self.own = request, scored, scored[:, -tokens:], own
        self.said: Report | None = None

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *how: Any
    ) -> tuple[Tensor | None, ...]:
        """Log-probs and entropy of the rows that TRL passes: all of them on a CPU, the scored ones alone on a GPU."""
        _, softcap, scale, outputs = how
        every = None
        if len(tokens) == self.scored.numel():
            every = self.scored.to(hidden.device).flatten().nonzero().squeeze(-1)
            hidden, tokens = hidden.index_select(0, every), tokens[every]
        live = scored_rows(self.completion.to(hidden.device), len(tokens))
        ids = None if self.request.ids is None else live.pack(self.request.ids)
        terms = self.request.loss(live) if self.request.loss is not None and len(tokens) else None
        empty = not len(tokens)
        if empty:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids = None if ids is None else ids.new_full((1, ids.shape[-1]), -1)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings = {
            "bias": bias,
            "scale": scale,
            "softcap": softcap,
            "temperature": temperature,
            "entropy": "entropy" in outputs,
        }
        settings |= self._one_implementation(hidden, weight)
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            if terms is not None:
                return self._loss(live, every, policy_loss_from_hidden(
                    hidden[None], weight, tokens[None], terms.batch, terms.objective, weights=terms.weights,
                    policy_weights=terms.policy_weights, on_policy=terms.on_policy, **settings,
                ))  # fmt: skip
            head = lm_head(
                hidden, weight, tokens, ids=ids,
                top_k=None if self.request.top_k is None else min(self.request.top_k, len(weight)),
                mass=self.request.mass, tolerance=self.request.tolerance, **settings,
            )  # fmt: skip
        head = _without_rows(head) if empty else head
        kept: tuple[Tensor, HeadInputs] | tuple[None, None] = (None, None)
        if self.request.keep:
            spec = LogitSpec(scale, softcap, temperature)
            kept = hidden[: len(head.logp)].detach(), HeadInputs(weight, bias, spec)
        self.said = Report(head, live, None, *kept)
        return self._results(head.logp, head.entropy, every)

    def _loss(self, live: Packing, every: Tensor | None, out: PolicyLoss) -> tuple[Tensor | None, ...]:
        """Report a loss with its gradient. The hooks of distributed training sit on what the model returns: log-probs, then,
        depend on the loss, with a gradient of zero."""
        self.said = Report(None, live, fused=out)
        nothing = torch.where(torch.zeros_like(out.loss, dtype=torch.bool), out.loss, 0.0)
        return self._results(out.logp[0] + nothing, None if out.entropy is None else out.entropy[0], every)

    def _results(self, logp: Tensor, entropy: Tensor | None, every: Tensor | None) -> tuple[Tensor | None, ...]:
        """What TRL's function returns, for as many rows as it passed."""
        results = [logp, entropy]
        if every is not None:
            results = [None if x is None else x.new_zeros(self.scored.numel()).index_copy(0, every, x) for x in results]
        return (*results, None, None, None)

    def _one_implementation(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """On a GPU the torch path for every pass where one of them has no kernel: two heads would round differently."""
        if not hidden.is_cuda:
            return {}
        top_k = None if self.own.top_k is None else min(self.own.top_k, len(weight))
        chosen = choose("CorralTrainer", "auto", hidden, weight, top_k, given=1 if self.own.union else 0)
        return {"impl": "torch"} if chosen == "torch" else {}


def scored_rows(scored: Tensor, count: int) -> Packing:
    """The tokens [B T] that were scored, so many of them: nobody waits for the device to count them."""
    return Packing(scored, scored.flatten().byte().argsort(descending=True, stable=True)[:count])


def _without_rows(head: HeadOutput) -> HeadOutput:
    """Nothing, still connected to where it came from."""
    dist = None if head.dist is None else head.dist.map(lambda x: x[:0])
    return HeadOutput(head.logp[:0], None if head.entropy is None else head.entropy[:0], dist)
