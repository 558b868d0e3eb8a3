"""The whole of the TRL door's tests, run with the oldest release of TRL that is supported, the newest, and two in between.

    make test-trl-versions        or: pytest -m trl_versions

Each release is installed into a virtual environment of its own, which borrows everything else from this one. Needs the network.
"""

import os
import re
import site
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.version import Version

from corral.trl import TRL_RANGE
from corral.trl.api import check_trl

RELEASES = ("1.7.0", "1.10.0", "1.14.2", "1.16.0")
"""Wrong averages; all logits; all logits behind other signatures; the fused head. (1.15.0 needs a GPU for it.)"""

REQUESTS = "requests"  # TRL before 1.14 imports it without declaring it
TESTS = (
    "test_config.py",
    "test_rollout_support.py",
    "test_trainer.py",
    "test_trainer_distributed.py",
    "test_audit_callback.py",
)

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


def environment_with(release: str, folder: Path) -> Path:
    """The Python of a new virtual environment that has this TRL, and all that is installed here."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", f"trl=={release}"], check=True, timeout=300)
    subprocess.run([*install, REQUESTS], check=True, timeout=300)
    # The borrowed folders come last on the path, with the .pth files in them.
    borrowed = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    (own / "borrowed.pth").write_text(f"import site; {borrowed}\n")
    return python


@pytest.mark.supports("other: TRL {release}", door="TRL")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release(tmp_path: Path, release: str) -> None:
    python = environment_with(release, tmp_path / "venv")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [python, "-c", "import trl; print(trl.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == release
    here = Path(__file__).parent
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)],
        env=environment, cwd=here.parents[1], capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
