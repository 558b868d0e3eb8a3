"""The package as seen from outside: public names, import direction, what the README promises, the example."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import corral

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "corral"

README = (ROOT / "README.md").read_text()
ORDER = re.findall(r"^[├└]── (\w+)(?:\.py|/) ", README, re.MULTILINE)
"""README's tree: a unit imports from itself and from those above it; `corral` itself, the list of public names, sits on top."""

MATHS = {"torch", "jaxtyping", "corral"} | set(sys.stdlib_module_names)
"""What everything down to `objective/` may import; what comes below brings its own extras."""


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


def unit(path: Path) -> str:
    """The file or folder directly under src/corral that a source file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    place = ORDER.index(unit(path))
    for name in imports(path):
        package, _, rest = name.partition(".")
        if place <= ORDER.index("objective"):
            allowed = MATHS | {"triton"} if unit(path) == "kernels" else MATHS
            assert package in allowed, f"{path.name} imports {name}; the maths needs torch and jaxtyping alone"
        if package == "corral":
            target = rest.partition(".")[0]
            if not target:  # the list of public names sits on top of the maths
                assert place > ORDER.index("objective"), f"{path.name} imports from the package itself; name the module"
                continue
            assert ORDER.index(target) <= place, (
                f"{path.relative_to(SOURCE)} imports {name}, which is below it in README's tree"
            )


def test_readmes_tree_has_every_unit() -> None:
    assert sorted(ORDER) == sorted({unit(path) for path in MODULES})
    sentence = "from the bottom of this list to its top; everything down to `objective/` needs torch and jaxtyping alone"
    assert sentence in README


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
    program = "import sys, corral, corral.lab.cli.train, corral.lab.jobs.llm.settings, corral.lab.jobs.robot.settings; sys.exit('torch' in sys.modules)"
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


OLD_NAMES = {
    "corral.lab.report.comparison:read_comparisons": "corral.lab.report.comparison:read_comparisons",
    "corral.lab.compare.job:Means": "corral.lab.compare.job:ExecutionConfig",
    "corral.lab.run.guard:Limits": "corral.lab.run.guard:CollapseLimits",
}
"""Names that docs once showed, kept for one release."""


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_stay_for_a_release(old: str) -> None:
    assert resolve_name(old) is resolve_name(OLD_NAMES[old])


def public_functions() -> list[tuple[str, ast.FunctionDef]]:
    """All but those that Triton compiles, whose arguments have no Python types."""
    return [
        (f"{path.relative_to(SOURCE)}:{node.name}", node)
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not any(isinstance(x, ast.Name) and x.id == "no_type_check" for x in node.decorator_list)
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


README_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_projects_a_policy_in_about_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in README_BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 11
    namespace: dict[str, object] = {}
    exec(README_BLOCKS[0], namespace)
    printed = capsys.readouterr().out
    # KL(new‖old) = .1 log(.1/.7) + .15 log(.15/.2) + .7 log(.7/.09) + .05 log(.05/.01) = −.1946 − .0432 + 1.4359 + .0805
    assert "KL to the old policy: 1.279 before, 0.050 after" in printed


@pytest.mark.parametrize("block", README_BLOCKS[1:])
def test_every_other_readme_example_runs_and_warns_of_nothing(
    block: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    exec(block, {})
    assert "tr/active_frac" in capsys.readouterr().out
    assert not caplog.messages


def test_the_readme_lists_every_objective_and_only_existing_files() -> None:
    text = README
    assert set(re.findall(r"\[`(\w+)`\]\(docs/objectives/", text)) == set(corral.objective_names())
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / target).exists(), f"README links to {target}"


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
