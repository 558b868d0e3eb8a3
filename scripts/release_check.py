"""Is this tree ready to be released? Builds it, checks what was built, and tries it as a stranger would.

    python scripts/release_check.py                    everything, into dist/ (make release-check)
    python scripts/release_check.py --tag v0.1.0       and the tag is this version's
    python scripts/release_check.py --notes v0.1.0     only prints that version's part of CHANGELOG.md

Needs build, twine and check-jsonschema. For each interpreter found (python3.11 … python3.14) the wheel goes into an empty
environment with what the quickstart needs; there the first example of the docs, README's script, two steps of `corral train`
and a report run.
A few minutes and 2 GB each.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
INTERPRETERS = ("3.11", "3.12", "3.13", "3.14")


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command and return its output; a failure ends the program with that output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other spin where others work too
    environment.pop("PYTHONPATH", None)  # what is tried is the wheel
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def version() -> str:
    """The package's own."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/corral/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def notes(tag: str) -> str:
    """Return a version's section of CHANGELOG.md; ends the program if there is none."""
    wanted = re.escape(tag.removeprefix("v"))
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{wanted}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section `## [{tag.removeprefix('v')}] - YYYY-MM-DD`.")
    return found[1].strip()


def check_words(tag: str | None) -> None:
    """Version, tag, citation and changelog name the same release, and workflows fit their schema."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version():
        sys.exit(f"CITATION.cff has version {cited and cited[1]}, corral.__version__ is {version()}.")
    if tag is not None and tag != f"v{version()}":
        sys.exit(f"The tag is {tag}, corral.__version__ is {version()}: tag v{version()}, or change the version first.")
    notes(version())
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)


def build() -> Path:
    """sdist, and the wheel that is built from it; both checked by twine."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("corral-*.whl")
    return wheel


def interpreters() -> list[str]:
    """Find a working interpreter for each release of Python, on PATH or in pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    answering = []
    for each in INTERPRETERS:
        on_path = shutil.which(f"python{each}")
        candidates = [*([on_path] if on_path else []), *map(str, sorted(pyenv.glob(f"{each}.*/bin/python{each}")))]
        answering += [name for name in candidates if not subprocess.run([name, "-c", ""], capture_output=True).returncode][:1]
    if not answering:
        sys.exit(f"None of python{', python'.join(INTERPRETERS)} is on PATH and runs: nothing to try the wheel with.")
    return answering


def try_out(interpreter: str, wheel: Path) -> None:
    """The first example of the docs, the quickstart and a report, in an empty environment and an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(interpreter, "-m", "venv", folder / "env")
        python = folder / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{wheel}[llm,report]")
        example = re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)[0]
        if "0.050 after" not in run(python, "-c", example, cwd=folder):
            sys.exit("The first example of docs/index.md printed something else than it promises.")
        script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
        run(python, "-c", script.replace("max_steps=160", "max_steps=2"), cwd=folder)
        corral = folder / "env" / "bin" / "corral"
        run(corral, "doctor", cwd=folder)
        run(corral, "train", "--steps", "2", "--out", "runs/quick", cwd=folder)
        run(corral, "report", "runs", "--out", "report.html", cwd=folder)
        if not (folder / "report.html").exists():
            sys.exit("corral report wrote no page.")


def main() -> None:
    """Every check in order; the first that fails ends the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is to be released")
    parser.add_argument("--notes", metavar="TAG", help="print what the changelog says of a version, and do nothing else")
    options = parser.parse_args()
    if options.notes:
        sys.stdout.write(notes(options.notes) + "\n")
        return
    check_words(options.tag or None)
    wheel = build()
    sys.stdout.write(f"built and checked: {', '.join(path.name for path in sorted(DIST.iterdir()))}\n")
    for interpreter in interpreters():
        try_out(interpreter, wheel)
        sys.stdout.write(f"{Path(interpreter).name}: installs, trains and reports\n")


if __name__ == "__main__":
    main()
