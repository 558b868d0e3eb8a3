"""Statistics of per-token KLs, by hand."""

import math

import pytest
import torch

from corral import TokenKL
from corral.deployed import STATISTICS
from corral.deployed.statistics import quantile, worst_mean


def test_golden_of_a_thousand_tokens():
    # 1 … 1000 in any order: mean 500.5; ⌈.999 · 1000⌉ = 999th; the worst ten are 991 … 1000, mean 995.5; largest 1000.
    kl = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).double() + 1
    assert {name: float(of(kl)) for name, of in STATISTICS.items()} == {
        "mean": 500.5, "p999": 999.0, "cvar": 995.5, "max": 1000.0,
    }  # fmt: skip
    assert TokenKL.of(kl) == TokenKL(mean=500.5, p999=999.0, max=1000.0, tokens=1000)


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
