"""The whole of the TRL door's tests, run with the oldest release of TRL that is supported, the newest, and one in between.

    make test-trl-versions        or: pytest -m trl_versions

Each release is installed into a folder of its own, in front of everything else on the path. Needs the network.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from corral.llm.config import TRL_RANGE, check_trl

RELEASES = ("1.10.0", "1.14.2", "1.16.0")
"""All logits; all logits behind other signatures; the fused head. 1.15.0 has the fused head too, but its own needs a GPU."""

REQUESTS = "requests"  # TRL before 1.14 imports it without declaring it
TESTS = ("test_config.py", "test_trainer.py", "test_trainer_distributed.py")

pytestmark = pytest.mark.trl_versions


@pytest.fixture(autouse=True)
def only_when_asked_for(request: pytest.FixtureRequest) -> None:
    if "trl_versions" not in request.config.getoption("markexpr"):
        pytest.skip("needs the network and minutes: make test-trl-versions")


def test_the_ends_of_the_range_are_among_them() -> None:
    for release in RELEASES:
        check_trl(release)
    low, high = (Version(end) for end in TRL_RANGE)
    assert Version(RELEASES[0]).release[:2] == low.release
    assert Version(RELEASES[-1]).minor == high.minor - 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_release(tmp_path: Path, release: str) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(tmp_path)]
    subprocess.run([*install, "--no-deps", f"trl=={release}"], check=True, timeout=300)
    subprocess.run([*install, REQUESTS], check=True, timeout=300)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import trl; print(trl.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == release
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)],
        env=environment, cwd=here.parents[1], capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
