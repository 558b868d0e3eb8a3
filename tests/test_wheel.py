"""The wheel, as a stranger gets it: built, installed into an empty environment, imported with torch and jaxtyping alone."""

import json
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from corral.lab.models import EMBEDDED

ROOT = Path(__file__).parents[1]

PROBE = """
import json, sys, time
import torch, jaxtyping
before, began = set(sys.modules), time.perf_counter()
import corral
seconds = time.perf_counter() - began
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"seconds": seconds, "modules": sorted(new - set(sys.stdlib_module_names)), "version": corral.__version__}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def depended_on(name: str) -> set[str]:
    """Everything that an installed package needs, by name."""
    found: set[str] = set()
    waiting = {name}
    while waiting:
        found |= waiting
        needed = [Requirement(line) for each in waiting for line in distribution(each).requires or []]
        waiting = {each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})} - found
    return found


def link(name: str, packages: Path) -> None:
    """Put an installed package into another environment: what pip would unpack there, without unpacking it."""
    for top in {file.parts[0] for file in distribution(name).files or []} - {"..", "__pycache__"}:
        (packages / top).symlink_to(distribution(name).locate_file(top))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment that holds the built wheel and what torch and jaxtyping need, nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=ROOT)
    (wheel,) = folder.glob("corral-*.whl")
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    for name in depended_on("torch") | depended_on("jaxtyping"):
        link(name, packages(python))
    # Without an index, what the wheel asks for beyond these is an error.
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", wheel, cwd=folder)
    return python


def packages(python: Path) -> Path:
    """Where its packages are."""
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=python.parent).strip())


@pytest.mark.wheel
def test_the_wheel_needs_torch_and_jaxtyping_alone(python: Path) -> None:
    seen = json.loads(run(python, "-c", PROBE, cwd=python.parent))
    assert seen["modules"] == ["corral"]
    assert seen["seconds"] < 2, "importing corral must cost next to nothing beside torch"
    assert seen["version"] == re.search(r'__version__ = "(.+)"', (ROOT / "src/corral/__init__.py").read_text())[1]
    installed = {each.name.lower() for each in distributions(path=[str(packages(python))])}
    assert {"corral", "torch", "jaxtyping"} <= installed
    assert not installed & {"numpy", "scipy", "transformers", "trl", "beartype"}


@pytest.mark.wheel
def test_the_wheel_carries_its_types_licence_and_models(python: Path) -> None:
    assert (packages(python) / "corral" / "py.typed").exists()
    for name in EMBEDDED:
        assert (packages(python) / "corral" / "lab" / "models" / name / "model.safetensors").stat().st_size > 3_000_000
    assert any(packages(python).glob("corral-*.dist-info/licenses/LICENSE"))


@pytest.mark.wheel
def test_the_first_example_of_the_docs_runs_there(python: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)[:1]
    printed = run(python, "-W", "ignore:Failed to initialize NumPy", "-c", example, cwd=python.parent)
    assert "KL" in printed
