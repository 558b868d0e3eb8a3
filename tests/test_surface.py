"""The package as seen from outside: public names, import direction, what the README promises, the example."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

import corral
from corral import _moved

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "corral"

README = (ROOT / "README.md").read_text()

LIBRARY = """
    _moved validate cores numerics provenance tensors support advantage deployed divergence projection objective head
    trl engines robot
""".split()  # noqa: SIM905 - a list of twenty names reads better as words
"""The library, each unit after those that it may import. `_moved` imports nothing of it."""

MATHS = LIBRARY[: LIBRARY.index("head") + 1]
"""Needs torch and jaxtyping alone; what comes after brings extras of its own."""

LAB = "run workers sandbox tasks models environments baselines jobs report compare audit cli".split()  # noqa: SIM905
"""The same order for units of the lab, which may import all of the library."""

FACADES = {"llm", "task"}
"""Public names of what lies elsewhere, imported when they are first used."""

ALLOWED = {"torch", "jaxtyping", "corral"} | set(sys.stdlib_module_names)


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found.add(node.module or "")
    return found


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def place(parts: Sequence[str]) -> int:
    """Where a module stands in the order: the library first, then the lab."""
    unit = parts[0].removesuffix(".py")
    if unit != "lab":
        return LIBRARY.index(unit)
    inside = parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"
    return len(LIBRARY) + (LAB.index(inside) if inside in LAB else -1)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    if parts[0] in FACADES:
        return
    for name in imports(path):
        package, _, rest = name.partition(".")
        if place(parts) < len(MATHS):
            allowed = ALLOWED | {"triton"} if parts[0] == "head" else ALLOWED
            assert package in allowed, f"{path.name} imports {name}; the maths needs torch and jaxtyping alone"
        if package == "corral" and rest:
            target = rest.split(".")
            assert target[0] not in FACADES, f"{'/'.join(parts)} imports {name}: name the module itself"
            assert place(target) <= place(parts), f"{'/'.join(parts)} imports {name}, which comes after it"


def test_the_order_names_every_unit() -> None:
    units = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert units == {*LIBRARY, *FACADES, "lab"}
    names = {path.name.removesuffix(".py") for path in (SOURCE / "lab").iterdir()}
    assert set(LAB) == names - {"__init__", "recipes", "__pycache__"}


@pytest.mark.parametrize("old", sorted(_moved.MOVED))
def test_an_old_path_is_another_name_of_the_module(old: str) -> None:
    if old.startswith("llm.") and find_spec("trl") is None:
        pytest.skip("needs TRL")
    new = import_module(f"corral.{_moved.MOVED[old]}")
    if old not in FACADES:
        assert import_module(f"corral.{old}") is new
        assert new.__spec__.name == f"corral.{_moved.MOVED[old]}"


@pytest.mark.parametrize(
    ("old", "new"),
    [("corral.run.folder", "corral.lab.run.folder"), ("corral.kernels.torch.stream", "corral.head.torch.stream")],
)
@pytest.mark.parametrize("first", ["old", "new"])
def test_the_modules_of_a_moved_package_are_imported_once(old: str, new: str, first: str) -> None:
    names = (old, new) if first == "old" else (new, old)
    program = f"import sys; from importlib import import_module as get; a, b = map(get, {names}); sys.exit(a is not b)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_what_was_never_a_path_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"corral\.projektion"):
        import_module("corral.projektion")


def test_importing_corral_is_enough_for_its_packages() -> None:
    program = "import corral; corral.task.run_python, corral.robot.ProDMP, corral.llm.TRL_RANGE"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_public_names_are_sorted_whole_and_importable() -> None:
    assert corral.__all__ == sorted(corral.__all__)
    assert all(getattr(corral, name) is not None for name in corral.__all__)
    block = next(node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.name: node.module for node in found for alias in node.names}
    assert set(imported) == set(corral.__all__)
    for name, module in imported.items():  # what type checkers see is what a program gets
        assert getattr(corral, name) is resolve_name(f"{module}:{name}")
    assert set(corral.__all__) <= set(dir(corral))
    with pytest.raises(AttributeError, match="no attribute 'projekt'"):
        _ = corral.projekt


def test_importing_the_package_imports_no_torch() -> None:
    modules = "corral.objective, corral.lab.cli.train, corral.lab.jobs.llm.settings, corral.lab.jobs.robot.settings"
    program = f"import sys, corral, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


CONTRACT = """
    SparseDist top_k_support gather_support categorical_kl categorical_tv binary_kl binary_tv project_categorical_kl
    CategoricalProjection TokenBatch ObjectiveOutput make_objective objective_names register_objective make_correction
    reduce_loss group_advantages gae improvement_bound lm_head policy_loss_from_hidden
    project_gaussian_kl project_gaussian_wasserstein project_gaussian_frobenius project_entropy_floor GaussianProjection
    gaussian_kl gaussian_entropy head_kl retract snapshot Certificate RateController
"""


@pytest.mark.parametrize("name", CONTRACT.split())
def test_names_that_stay_are_there_and_documented(name: str) -> None:
    assert name in corral.__all__
    assert getattr(corral, name).__doc__


def public_functions() -> list[tuple[str, ast.FunctionDef]]:
    """All but those that Triton compiles, whose arguments have no Python types."""
    return [
        (f"{path.relative_to(SOURCE)}:{node.name}", node)
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not any(isinstance(x, ast.Attribute) and x.attr == "jit" for x in node.decorator_list)
    ]


@pytest.mark.parametrize(("where", "node"), public_functions(), ids=lambda value: value if isinstance(value, str) else "")
def test_public_functions_have_docstrings_and_full_annotations(where: str, node: ast.FunctionDef) -> None:
    assert ast.get_docstring(node), f"{where} has no docstring"
    arguments = [*node.args.args, *node.args.kwonlyargs]
    assert all(argument.annotation for argument in arguments), f"{where} leaves an argument unannotated"
    assert node.returns is not None, f"{where} has no return annotation"


def test_the_version_is_in_one_place() -> None:
    written = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert written is not None
    assert written[1] == corral.__version__
    assert re.search(r'^dynamic = \["version"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.long
def test_the_readmes_script_runs_with_fewer_steps(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "max_steps=160" in script
    short = script.replace("max_steps=160", "max_steps=1").replace("logging_steps=16", "logging_steps=1")
    done = subprocess.run([sys.executable, "-c", short], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mean reward: 0\.\d\d$", done.stdout, re.MULTILINE)
    assert "Warning" not in done.stderr


def test_the_readme_is_short_and_links_to_existing_files_alone() -> None:
    assert len(README.splitlines()) <= 120
    for target in re.findall(r"\]\((?!http)([^)#]+)|src=\"([^\"]+)", README):
        assert (ROOT / "".join(target)).exists(), f"README links to {target}"


@pytest.mark.long
def test_the_demo_trains_all_three_objectives() -> None:
    script = (ROOT / "examples" / "troll_in_100_lines.py").read_text()
    assert len(script.splitlines()) <= 100
    whole = "ROUNDS, UPDATES, LEARNING_RATES, SEEDS = 30, 16, (1e-2, 5e-2), 5"
    short = script.replace(whole, "ROUNDS, UPDATES, LEARNING_RATES, SEEDS = 24, 16, (1e-2,), 1")
    assert short != script
    done = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "an example warns of nothing"
    lines = [line.replace(", ", ",") for line in done.stdout.splitlines() if line[:4] in ("ppo_", "dppo", "trol")]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(rows) == {"ppo_clip", "dppo", "troll", "troll,α=.1"}
    for name, (start, _, kl_before, kl_after, acted, end) in rows.items():
        assert float(start.rstrip("%")) < 10, name  # chance is 1 in 24
        assert float(end.rstrip("%")) > 80, name
        assert float(acted.rstrip("%")) > 0, name
        if name.startswith("troll"):
            assert 0 < float(kl_after) < min(0.05, float(kl_before))
