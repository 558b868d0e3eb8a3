"""What `make check` leaves out: tests that train, simulate, interpret kernels, start processes or draw many pages."""

from pathlib import Path

TESTS = Path(__file__).parent

NAMES = """
    llm cli compare kernels
    engine/test_verl_head.py
    docs/test_head_benchmark.py docs/test_support_page.py test_add_objective.py
    projection/test_gaussian_kl_condition.py
    report/test_comparison.py report/test_page.py report/test_report_export.py
    robot/test_baseline.py robot/test_learner.py robot/test_robot_recipes.py robot/test_robot_train.py
    task/test_code.py task/test_code_attacks.py task/test_grader.py task/test_grading_fuzz.py task/test_math.py
    task/test_pool.py task/test_sandbox.py task/test_sandbox_attacks.py task/test_sandbox_memory.py
"""
LONG = {TESTS / name for name in NAMES.split()}
"""Folders and files; a single test carries the marker `long` itself."""


def is_long(path: Path) -> bool:
    return not LONG.isdisjoint({path, *path.parents})


def is_of_study(path: Path) -> bool:
    """Whether tests are of plans, drivers or pages of results/; `make test` has one of them."""
    return path.parent == TESTS / "results" and path.suffix == ".py" and path.name != "test_results.py"
