"""The k largest of a passing stream: those of a full sort, ties by lower id, and every logit in one place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.kernels import candidates
from corral.kernels.candidates import RunningTopK
from corral.support import rank_top_k

STREAMS = {
    "random": lambda n, v: torch.randn(n, v),
    "ties": lambda n, v: torch.randint(4, (n, v)).float(),
    "all equal": lambda n, v: torch.zeros(n, v),
    "rising": lambda n, v: torch.arange(v).float().expand(n, v).clone(),
    "falling": lambda n, v: -torch.arange(v).float().expand(n, v).clone(),
    "mostly impossible": lambda n, v: torch.where(torch.rand(n, v) < 0.05, torch.randn(n, v), -torch.inf),
    "one row impossible": lambda n, v: torch.where(torch.arange(n)[:, None] == 0, -torch.inf, torch.randn(n, v)),
    "late giants": lambda n, v: torch.where(torch.arange(v) >= v - 3, 100.0, 0.0) + torch.randn(n, v),
}


def streamed(z: Tensor, k: int, size: int) -> tuple[RunningTopK, Tensor, Tensor]:
    """Everything after all blocks: the pool, what left it, and what stayed behind."""
    running = RunningTopK(len(z), k, z)
    z, lost = z.clone(), []
    behind = []
    for start in range(0, z.shape[-1], size):
        block = z[:, start : start + size].contiguous()
        lost.append(running.fold(block, start).clone())
        behind.append(block)
    lost.append(running.sort())
    return running, torch.cat(lost, -1), torch.cat(behind, -1)


@pytest.mark.parametrize("stream", STREAMS)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 96), st.integers(0, 10_000))
def test_they_are_those_of_a_full_sort(stream, vocabulary, k, size, seed):
    torch.manual_seed(seed)
    z = STREAMS[stream](3, vocabulary)
    k = min(k, vocabulary)
    running, lost, behind = streamed(z, k, size)
    ids, values = running.best()
    expected = rank_top_k(z, k)
    assert torch.equal(ids, expected)
    assert torch.equal(values, z.gather(-1, expected))
    # Every finite logit is in one place: chosen, lost on the way, or never taken out.
    places = torch.cat([values, lost, behind], -1)
    for row, original in zip(places, z, strict=True):
        assert torch.equal(row[row > -torch.inf].sort().values, original[original > -torch.inf].sort().values)


def test_few_logits_are_ever_looked_at_twice(monkeypatch):
    # Of 8192 logits in random order, k log(V / first) = 16 · log(64) = 67 pass a bar that keeps up; one that lags lets in more.
    joined = []
    join = torch.bincount
    monkeypatch.setattr(
        candidates.torch, "bincount", lambda row, minlength: joined.append(len(row)) or join(row, minlength=minlength)
    )
    ranked = []
    monkeypatch.setattr(candidates, "rank_top_k", lambda z, k: ranked.append(z.shape[-1]) or rank_top_k(z, k))
    streamed(torch.randn(50, 8192), 16, 128)
    assert ranked == [128]  # only the first block is sorted
    assert sum(joined) / 50 < 3 * 67
    joined.clear()
    streamed(torch.zeros(50, 8192), 16, 128)
    assert sum(joined) == 0  # what equals the bar comes too late


def test_more_than_a_pool_in_one_block_is_ranked(monkeypatch):
    ranked = []
    monkeypatch.setattr(candidates, "rank_top_k", lambda z, k: ranked.append(z.shape[-1]) or rank_top_k(z, k))
    running, _, _ = streamed(torch.arange(64.0)[None], 2, 32)
    assert ranked == [32, 32]
    assert running.best()[0].tolist() == [[63, 62]]
