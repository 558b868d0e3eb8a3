"""Spreads of values: percentiles within 0.1 % of the exact ones, whatever the values, in pieces as at once, key by key."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.audit.tally import ACCURACY, Spreads

VALUES = st.lists(
    st.one_of(st.just(0.0), st.floats(-20, 20).map(lambda power: 10.0**power).filter(lambda x: 1e-9 < x < 1e9)), min_size=1
)


PERCENTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def filled(*pieces: list[float], key: int = 0) -> dict[str, float]:
    spreads = Spreads()
    for values in pieces:
        spreads.add(pd.Series(key, range(len(values))), pd.Series(values))
    found = spreads.row(key)
    assert found is not None
    return found


def test_golden() -> None:
    # Ranks ⌈q (n − 1)⌉: of 1, 2, 4, 8 the median is at rank 2, the value 4; the 99th percentile at rank 3, the value 8.
    assert filled([8.0, 1.0, 4.0, 2.0]) == {"mean": 3.75, "p50": 4.0, "p99": 8.0, "p999": 8.0, "max": 8.0}


@given(VALUES)
def test_a_percentile_is_a_value_that_occurs_and_not_below_the_exact_one(values: list[float]) -> None:
    found = filled(values)
    for name, share in PERCENTILES.items():
        exact = float(np.quantile(values, share, method="higher"))
        assert found[name] in values
        assert exact <= found[name] <= exact * (1 + ACCURACY + 1e-9)
    assert found["max"] == max(values)
    assert found["mean"] == pytest.approx(np.mean(values))


@given(VALUES, VALUES)
def test_pieces_make_no_difference(first: list[float], second: list[float]) -> None:
    assert filled(first, second) == pytest.approx(filled(first + second))


@given(VALUES, VALUES)
def test_keys_are_apart(first: list[float], second: list[float]) -> None:
    spreads = Spreads()
    spreads.add(pd.Series([10**17] * len(first) + [-3] * len(second)), pd.Series(first + second))
    assert spreads.row(10**17) == pytest.approx(filled(first))
    assert spreads.row(-3) == pytest.approx(filled(second))


def test_infinities_and_nothing() -> None:
    spreads = Spreads()
    assert spreads.row() is None
    spreads.add(pd.Series([0]), pd.Series([np.nan]))
    assert spreads.row() is None, "NaN is no value"
    assert filled([0.0, np.inf]) == {"mean": np.inf, "p50": np.inf, "p99": np.inf, "p999": np.inf, "max": np.inf}
