"""Log-histograms: quantiles within 1 % of the exact ones, whatever the values, in pieces as at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.audit.stream import ACCURACY, LogHistogram

VALUES = st.lists(
    st.one_of(st.just(0.0), st.floats(-20, 20).map(lambda power: 10.0**power).filter(lambda x: 1e-9 < x < 1e9)), min_size=1
)


def filled(values: list[float]) -> LogHistogram:
    histogram = LogHistogram()
    histogram.add(np.array(values))
    return histogram


def test_golden() -> None:
    # Ranks ⌈q (n − 1)⌉: of 1, 2, 4, 8 the median is at rank 2, the value 4; the 99th percentile at rank 3, the value 8.
    spread = filled([8.0, 1.0, 4.0, 2.0]).spread()
    assert (spread["mean"], spread["max"]) == (3.75, 8.0)
    assert spread["p50"] == pytest.approx(4.0, rel=0.01)
    assert spread["p99"] == pytest.approx(8.0, rel=0.01)


@given(VALUES, st.sampled_from([0.0, 0.1, 0.5, 0.99, 0.999, 1.0]))
def test_a_quantile_is_within_one_per_cent(values: list[float], share: float) -> None:
    exact = np.quantile(values, share, method="higher")
    assert filled(values).quantile(share) == pytest.approx(exact, rel=ACCURACY + 1e-9)


@given(VALUES, VALUES)
def test_pieces_make_no_difference(first: list[float], second: list[float]) -> None:
    pieces = filled(first)
    pieces.add(np.array(second))
    whole = filled(first + second)
    assert pieces.counts.tolist() == whole.counts.tolist()
    assert pieces.spread() == pytest.approx(whole.spread())


def test_infinities_and_nothing() -> None:
    histogram = LogHistogram()
    assert histogram.spread() == {"mean": 0.0, "p50": 0.0, "p99": 0.0, "p999": 0.0, "max": 0.0}
    histogram.add(np.array([0.0, np.inf]))
    assert histogram.spread() == {"mean": np.inf, "p50": np.inf, "p99": np.inf, "p999": np.inf, "max": np.inf}
    assert histogram.quantile(0.0) == 0.0
