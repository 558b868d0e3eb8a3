"""Behaviour log-probs of transformers' generation: recorded with what each token is drawn from, while it is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from corral.head.packed import Packing
from corral.support import top_k_support
from corral.tensors import SparseDist
from corral.trl.old_policy import write_support
from corral.trl.scoring import SupportRequest


class Behaviour(LogitsProcessor):
    """Last logits processor of a generation: changes nothing, and stores log-probs of the tokens that are drawn.

    It reads what the next token is drawn from, as vLLM reports it: float32 logits divided by the temperature, without the
    tokens that top-p, top-k or min-p cut off, and renormalised. A step's log-probs [B V] are held until the next call shows
    which tokens were drawn, so that one step's are in memory and no more.
    """

    def __init__(self, support: SupportRequest | None = None) -> None:
        """Record log-probs of the drawn tokens; with a `support` also its most likely tokens and the mass of all others."""
        self.support = SupportRequest() if support is None else support
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[list[int]] = []
        self._logps: list[Float[Tensor, " B"]] = []
        self._dists: list[SparseDist] = []
        self._last: Float[Tensor, "B V"] | None = None

    @contextmanager
    def record(self, model: Any) -> Iterator[None]:
        """Context of one generation, whose records replace those of the one before.

        transformers puts processors that it is given before temperature and truncation, so this one joins the finished list.
        """
        self._begin()
        build = model._get_logits_processor

        def build_with_record(*args: Any, **kwargs: Any) -> LogitsProcessorList:
            return LogitsProcessorList([*build(*args, **kwargs), self])

        model._get_logits_processor = build_with_record
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Store the step before this one, whose tokens are now known."""
        if self._last is not None:
            self._store(input_ids[:, -1])
        self._last = scores.float().log_softmax(-1)
        return scores

    def _store(self, tokens: Int[Tensor, " B"]) -> None:
        """Store the held step."""
        assert self._last is not None
        self._logps.append(self._last.gather(1, tokens[:, None])[:, 0])
        if self.support.top_k is not None:
            k = min(self.support.top_k, self._last.shape[1])
            self._dists.append(top_k_support(self._last, tokens, k, self.support.mass, check=False))

    def logps(self, tokens: list[list[int]]) -> list[list[float]]:
        """Log-probs of the completions' tokens, which end with the first end-of-sequence token."""
        last, longest = len(self._logps), max(map(len, tokens))
        if self._last is not None and last < longest:  # a finished row holds padding there
            self._store(torch.tensor([row[last] if last < len(row) else 0 for row in tokens], device=self._last.device))
        if len(self._logps) < longest:
            raise RuntimeError(
                "CorralTrainer: transformers' generation drew tokens without the logits processor that records them. Has it "
                "changed? Please report it."
            )
        self._tokens, self._last = tokens, None
        found = torch.stack(self._logps, 1).tolist()
        return [row[: len(own)] for row, own in zip(found, tokens, strict=True)]

    def store(self, output: dict[str, Any]) -> None:
        """Write the support of the recorded completions into TRL's buffer `output`."""
        tokens = output["completion_ids"]
        lengths = torch.tensor([[len(row)] for row in self._tokens], device=tokens.device)
        found = SparseDist.cat([dist.map(lambda x: x[:, None]) for dist in self._dists], dim=1)
        # Completions' own tokens: those that `mask_truncated_completions` takes out are still recorded.
        drawn, kept = (Packing(torch.arange(x.shape[1], device=tokens.device) < lengths) for x in (found.ids, tokens))
        write_support(output, kept.unpack_dist(found.map(drawn.pack)))
