"""What the torch head holds at its worst: some rows of logits and what it returns, whatever N is; by counting allocations."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from corral.head import lm_head, logits
from corral.head.torch import stream as online

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11 says so, once

ROWS, COLUMNS, HIDDEN, K = 32, 256, 16, 5
BLOCK = ROWS * COLUMNS * 4
"""Bytes of one block of logits."""
HELD = ROWS * 8192
"""Logits held at once in a forward pass: 32 rows of the larger vocabulary, 128 of the smaller."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits.BLOCK, "cpu", (ROWS, COLUMNS))
    monkeypatch.setitem(online.HELD, "cpu", HELD)
    monkeypatch.setattr(online, "COLUMNS", COLUMNS)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most memory that was allocated and not yet freed at any time during `run`."""
    run()  # whatever is allocated once and for all
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert changes
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def problem(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, HIDDEN), torch.randn(vocabulary, HIDDEN), torch.randint(vocabulary, (tokens,))


def forward(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Peak of a pass with support and entropy, and the bytes of what it returns."""
    hidden, weight, sampled = problem(tokens, vocabulary)
    peak = peak_bytes(lambda: lm_head(hidden, weight, sampled, top_k=K, entropy=True))
    return peak, tokens * (3 * 4 + (K + 1) * (4 + 8))


def update(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Peak of a pass on given ids and of its backward, and the bytes of what both return."""
    hidden, weight, sampled = problem(tokens, vocabulary)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    ids = (torch.randint(vocabulary, (tokens, 1)) + torch.arange(K)) % vocabulary

    def run() -> None:
        hidden.grad = weight.grad = None
        out = lm_head(hidden, weight, sampled, ids=ids, entropy=True)
        (out.logp + out.entropy + out.dist.rest + out.dist.logp.sum(-1)).sum().backward()
        hidden.grad = weight.grad = None

    size = torch.finfo(dtype).bits // 8
    return peak_bytes(run), (hidden.numel() + weight.numel()) * size + tokens * (4 * 4 + K * (4 + 8))


def full_logits(tokens: int, vocabulary: int) -> tuple[int, int]:
    """What others do."""
    hidden, weight, _ = problem(tokens, vocabulary)
    return peak_bytes(lambda: (hidden @ weight.T).log_softmax(-1).topk(K)), tokens * K * (4 + 8)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(256, 2048), (1024, 2048), (256, 8192)])
def test_a_pass_holds_a_few_blocks(tokens: int, vocabulary: int) -> None:
    # The logits of some rows, and a few blocks of their exponentials. All logits would be 2, 8 and 8 times as many.
    peak, returned = forward(tokens, vocabulary)
    assert peak - 2 * returned < 4 * HELD + 12 * BLOCK  # parts and their concatenation
    assert full_logits(tokens, vocabulary)[0] > 8 * HELD  # so the count would notice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(256, 2048), (1024, 2048), (256, 8192)])
def test_a_backward_pass_holds_a_few_blocks_and_its_gradients(tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    peak, returned = update(tokens, vocabulary, dtype)
    per_token = tokens * (HIDDEN * 8 + 100 * (K + 1))  # copies of the hidden states and of the support; V is not in it
    assert peak - returned - per_token < 4 * HELD + 8 * BLOCK


def test_weights_in_half_precision_are_never_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 256)
    peak, returned = update(64, 8192, torch.bfloat16)
    assert peak - returned < 8192 * 256 * 4 / 4  # a copy in float32 would be four times as much, and dW is among the returned
