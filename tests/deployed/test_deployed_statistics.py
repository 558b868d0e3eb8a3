"""Statistics of per-token KLs, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from corral import TokenKL
from corral.deployed import STATISTICS, BatchKL
from corral.deployed.statistics import quantile, worst_mean


def test_golden_of_a_thousand_tokens():
    # 1 … 1000 in any order: mean 500.5; ⌈.999 · 1000⌉ = 999th; the worst ten are 991 … 1000, mean 995.5; largest 1000.
    kl = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).double() + 1
    assert {name: float(of(kl)) for name, of in STATISTICS.items()} == {
        "mean": 500.5, "p999": 999.0, "cvar": 995.5, "max": 1000.0,
    }  # fmt: skip
    # Its unbiased variance is N (N + 1) / 12, and the error of the mean √((N + 1) / 12).
    found = TokenKL.of(kl)
    assert found.se == pytest.approx(math.sqrt(1001 / 12), rel=1e-12)
    assert replace(found, se=None) == TokenKL(mean=500.5, p999=999.0, max=1000.0, tokens=1000)


def batch(new_old, old_new, sequence, log_ratio=None) -> BatchKL:
    values = [None if x is None else torch.tensor(x, dtype=torch.float64) for x in (new_old, old_new, log_ratio)]
    return BatchKL(new_old=values[0], old_new=values[1], sequence=torch.tensor(sequence), log_ratio=values[2])


def test_golden_of_two_sequences():
    # Sequence 7 has tokens (1, 3), sequence 9 (5): mean 3, excesses 4 − 2 · 3 = −2 and 5 − 3 = 2, se = √(2/1 · 8) / 3 = 4/3.
    # KL(old‖new) sums to ½ + ¼ = ¾ and 2: mean 1.375, largest 2.
    found = TokenKL.of(batch([1.0, 5.0, 3.0], [0.5, 2.0, 0.25], [7, 9, 7]))
    assert found.se == pytest.approx(4 / 3)
    assert replace(found, se=None) == TokenKL(mean=3.0, p999=5.0, max=5.0, tokens=3, seq_mean=1.375, seq_max=2.0)
    alone = TokenKL.of(batch([1.0, 3.0], [1.0, 3.0], [4, 4]))
    assert (alone.se, alone.seq_mean) == (None, 4.0)


def test_the_error_of_the_mean_is_that_of_independent_sequences():
    # Oracle: with sequences of one length, the mean over tokens is the mean of their means, and its error s / √S.
    kl = torch.rand(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4
    kl[:, 1:] = kl[:, :1] + 0.1 * kl[:, 1:]  # what one sequence does, all of its tokens do
    flat = kl.flatten()
    found = TokenKL.of(BatchKL(new_old=flat, old_new=flat, sequence=torch.arange(40).repeat_interleave(5)))
    assert found.se == pytest.approx(float(kl.mean(-1).std() / math.sqrt(40)), rel=1e-12)
    assert found.se > 1.5 * TokenKL.of(flat).se  # as if tokens were independent


def test_golden_effective_sample_size():
    # Ratios 1, 1, 2: (1 + 1 + 2)² / (3 · (1 + 1 + 4)) = 16 / 18. A common factor e⁸⁰⁰ changes nothing.
    log_ratio = [800.0, 800.0, 800.0 + math.log(2)]
    assert batch([0.0] * 3, [0.0] * 3, [0] * 3, log_ratio).effective_sample_size() == pytest.approx(16 / 18)
    assert batch([0.0], [0.0], [0]).effective_sample_size() == 1.0


def test_few_tokens_have_their_largest_as_tail():
    kl = torch.tensor([3.0, 1.0, 2.0])
    assert quantile(kl, 0.999) == worst_mean(kl, 0.01) == 3.0


def test_one_nan_is_enough():
    assert all(
        math.isnan(x) for x in (TokenKL.of(torch.tensor([1.0, math.nan])).mean, TokenKL.of(torch.tensor([math.nan])).max)
    )


def test_infinity_is_a_distance():
    found = TokenKL.of(torch.tensor([0.0] * 2000 + [math.inf]))
    assert (found.mean, found.p999, found.max) == (math.inf, 0.0, math.inf)


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="TokenKL: there is no token to measure"):
        TokenKL.of(torch.zeros(0))
