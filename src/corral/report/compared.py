"""The old name of `corral.report.comparison`, for one release."""

from corral.report.comparison import read_comparison, read_comparisons

__all__ = ["read_comparison", "read_comparisons"]
