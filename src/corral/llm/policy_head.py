"""corral's head in the place of TRL's: every scoring pass goes through `lm_head`, or `policy_loss_from_hidden`.

On a GPU the trainer thereby does what `policy_loss_from_hidden` does: hidden states → log-probs and support in one streamed
GEMM, the loss in one kernel where there is one, and a backward pass that is sparse where a row's own bound allows it.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import trl.trainer.utils
from torch import Tensor, nn

from corral.kernels import lm_head
from corral.kernels.dispatch import choose
from corral.kernels.head import HeadOutput
from corral.kernels.logits import LogitSpec
from corral.kernels.packed import Packing
from corral.kernels.policy_loss import PolicyLoss, policy_loss_from_hidden
from corral.llm.scoring_pass import HeadInputs, HeadResult, ScoringPass, SupportRequest
from corral.llm.trl_api import FUSED
from corral.support import gather_support, top_k_support

_trl_utils: Any = trl.trainer.utils  # one of its names is replaced while a pass is scored


class PolicyHead:
    """The head that scores every pass of the policy and of its reference.

    TRL's fused head finds the hidden states, the weight and everything that model families do to logits (soft caps, scales,
    sharded weights) and hands them to one function. In scoring passes, that function is corral's: old, new and reference
    log-probs then come from one head in one precision, and a support with them. TRL before 1.15 computes all logits, in every
    pass alike, and the support is taken from those.
    """

    def __init__(self, models: Iterable[nn.Module], temperature: float, own: SupportRequest, *, union: bool) -> None:
        """`own` is the support of old passes; with `union`, updates ask for it beside the old policy's."""
        self.models, self.temperature, self.own, self.union = list(models), temperature, own, union
        self._expected: ScoringPass | None = None

    @contextmanager
    def expect(self, scoring: ScoringPass) -> Iterator[None]:
        """Inside, the first pass that TRL makes is `scoring`; others, such as a reference's after it, want no support."""
        self._expected = scoring
        try:
            yield
        finally:
            self._expected = None

    @contextmanager
    def run(self, tokens: int) -> Iterator[ScoringPass]:
        """Inside, models are scored by corral's head, on the last `tokens` tokens of each sequence.

        The hooks are of this pass alone. So is the name in TRL's module: TRL has no argument for its head function, and
        looks it up there, behind whatever accelerate, PEFT or FSDP have wrapped around the model's forward.
        """
        scoring, self._expected = self._expected or ScoringPass(), None
        scoring.tokens = tokens
        with ExitStack() as stack:
            if FUSED:
                head = _FusedHead(scoring, self)
                for model in self.models:
                    stack.callback(model.register_forward_pre_hook(head.read_labels, with_kwargs=True).remove)
                stack.callback(setattr, _trl_utils, "_ChunkedLogProbFunction", _trl_utils._ChunkedLogProbFunction)
                _trl_utils._ChunkedLogProbFunction = head
            elif not scoring.support.is_empty:
                for model in self.models:
                    hook = functools.partial(_read_logits, scoring, self.temperature)
                    stack.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
            before = _random_state() if scoring.keep_hidden else []
            yield scoring
            if before:
                scoring.drew_random = any(not torch.equal(x, y) for x, y in zip(before, _random_state(), strict=True))


class _FusedHead:
    """Stands in for TRL's chunked log-prob function in one pass: same call, corral's head inside."""

    def __init__(self, scoring: ScoringPass, policy: PolicyHead) -> None:
        self.scoring, self.policy = scoring, policy
        self.scored: Tensor | None = None

    def read_labels(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: which positions [B L−1] TRL is about to have scored."""
        self.scored = kwargs["labels"][:, 1:] != -100

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, *how: Any
    ) -> tuple[Tensor | None, ...]:
        """Log-probs and entropy of the rows that TRL passes: all of them on a CPU, the scored ones alone on a GPU."""
        _, softcap, scale, outputs = how
        scoring, scored, rows = self.scoring, self.scored, None
        assert scored is not None, "TRL scored a model that is neither the policy nor its reference"
        if len(tokens) == scored.numel():
            rows = scored.to(hidden.device).flatten().nonzero().squeeze(-1)
            hidden, tokens = hidden.index_select(0, rows), tokens[rows]
        completion = scored[:, -scoring.tokens :].to(hidden.device)
        places = completion.flatten().byte().argsort(descending=True, stable=True)  # without a host sync for the count
        packing = Packing(completion, places[: len(tokens)])
        ids = None if scoring.support.ids is None else packing.pack(scoring.support.ids)
        terms = scoring.loss(packing) if scoring.loss is not None and len(tokens) else None
        empty = not len(tokens)
        if empty:  # a micro-batch with nothing to score: one row, then dropped, keeps the loss connected to the weights
            hidden, tokens = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[-1])]), tokens.new_zeros(1)
            ids = None if ids is None else ids.new_full((1, ids.shape[-1]), -1)
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings: dict[str, Any] = {
            "bias": bias, "scale": scale, "softcap": softcap, "temperature": temperature, "entropy": "entropy" in outputs,
            **self._one_implementation(hidden, weight),
        }  # fmt: skip
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            if terms is not None:
                loss = policy_loss_from_hidden(
                    hidden[None], weight, tokens[None], terms.batch, terms.objective, weights=terms.weights,
                    policy_weights=terms.policy_weights, on_policy=terms.on_policy, union=terms.union, **settings,
                )  # fmt: skip
                return _outputs(*self._report_loss(loss, packing), rows, scored.numel())
            head = lm_head(
                hidden, weight, tokens, ids=ids,
                top_k=None if scoring.support.top_k is None else min(scoring.support.top_k, len(weight)),
                mass=scoring.support.mass, tolerance=scoring.tolerance, **settings,
            )  # fmt: skip
        head = _without_rows(head) if empty else head
        inputs = HeadInputs(weight, bias, LogitSpec(scale, softcap, temperature))
        kept = scoring.keep(hidden[: len(head.logp)], packing, inputs)
        scoring.results.append(HeadResult(packing=packing, rows=head, hidden=kept))
        return _outputs(head.logp, head.entropy, rows, scored.numel())

    def _report_loss(self, loss: PolicyLoss, packing: Packing) -> tuple[Tensor, Tensor | None]:
        """Append a loss to the results. The hooks of distributed training sit on what the model returns: log-probs, then,
        depend on the loss, with a gradient of zero."""
        self.scoring.results.append(HeadResult(packing=packing, loss=loss))
        nothing = torch.where(torch.zeros_like(loss.loss, dtype=torch.bool), loss.loss, 0.0)
        return loss.logp[0] + nothing, None if loss.entropy is None else loss.entropy[0]

    def _one_implementation(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """On a GPU the torch path for every pass where one of them has no kernel: two heads would round differently."""
        if not hidden.is_cuda:
            return {}
        own = self.policy.own.top_k
        top_k = None if own is None else min(own, len(weight))
        chosen = choose("CorralTrainer", "auto", hidden, weight, top_k, given=top_k + 1 if self.policy.union and top_k else 0)
        return {"impl": "torch"} if chosen == "torch" else {}


def _random_state() -> list[Tensor]:
    """Of the CPU, and of this process's GPU where it has one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _outputs(logp: Tensor, entropy: Tensor | None, rows: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """What TRL's function returns, for the rows that it passed: `count` of them, where `rows` were scored."""
    found = [logp, entropy]
    if rows is not None:
        found = [None if x is None else x.new_zeros(count).index_copy(0, rows, x) for x in found]
    return (*found, None, None, None)


def _read_logits(
    scoring: ScoringPass, temperature: float, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook that takes a support from all logits, for TRL before 1.15."""
    tokens, support = scoring.tokens, scoring.support
    logp = (output.logits[:, :-1][:, -tokens:].float() / temperature).log_softmax(-1)
    if support.top_k is None:
        assert support.ids is not None
        dist = gather_support(logp, support.ids)
    else:
        k = min(support.top_k, logp.shape[-1])
        dist = top_k_support(logp, kwargs["input_ids"][:, -tokens:], k, support.mass, ids=support.ids)
    scoring.results.append(HeadResult(dist=dist))


def _without_rows(head: HeadOutput) -> HeadOutput:
    """Nothing, still connected to where it came from."""
    dist = None if head.dist is None else head.dist.map(lambda x: x[:0])
    return HeadOutput(head.logp[:0], None if head.entropy is None else head.entropy[:0], dist)
