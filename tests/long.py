"""What `make check` leaves out: tests that train, simulate, interpret kernels, start processes or draw many pages."""

from pathlib import Path

TESTS = Path(__file__).parent

NAMES = """
    corral_trl head lab/cli lab/compare lab/jobs lab/models lab/audit/test_audit_callback.py
    engines/test_verl_head.py
    docs/test_head_benchmark.py docs/test_notebook.py docs/test_support_page.py test_add_objective.py
    projection/test_gaussian_kl_condition.py
    lab/report/test_comparison.py lab/report/test_page.py lab/report/test_report_export.py
    lab/baselines/test_baseline.py robot/test_learner.py
    lab/sandbox lab/tasks/test_code.py lab/tasks/test_code_attacks.py lab/tasks/test_grader.py lab/tasks/test_grading_fuzz.py
    lab/tasks/test_math.py
"""
LONG = {TESTS / name for name in NAMES.split()}
"""Folders and files; a single test carries the marker `long` itself."""


def is_long(path: Path) -> bool:
    return not LONG.isdisjoint({path, *path.parents})


def is_of_study(path: Path) -> bool:
    """Whether tests are of plans, drivers or pages of results/; `make test` has one of them."""
    return path.parent == TESTS / "results" and path.suffix == ".py" and path.name != "test_results.py"
