"""Documentation that cannot drift: every objective has a page, every setting its default, every example runs."""

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

import corral
from corral.objective import OBJECTIVES
from corral.objective.correction import CORRECTIONS

DOCS = Path(__file__).parents[2] / "docs"
NAMES = corral.objective_names()  # before any other test registers one of its own
FENCED = re.compile(r"^```(?P<tag>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
SETTING = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \| (?P<meaning>.+) \|$", re.MULTILINE)


def page(name: str, docs: Path = DOCS) -> str:
    return (docs / "objectives" / f"{name}.md").read_text()


def section(text: str, title: str) -> str:
    """What stands under `## title`, up to the next heading of that level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section `## {title}`"
    return found[1]


def documented_settings(text: str) -> dict[str, str]:
    return {row["name"]: row["default"] for row in SETTING.finditer(section(text, "Settings"))}


def actual_settings(name: str) -> dict[str, str]:
    _, config_cls = OBJECTIVES[name]
    return {field.name: repr(field.default) for field in dataclasses.fields(config_cls)}


def examples(docs: Path = DOCS) -> list[tuple[str, str, str | None]]:
    """(where, code, the output it promises) of every ```python block; a ```text block right after one is its output."""
    found = []
    for path in sorted(docs.rglob("*.md")):
        text = path.read_text()
        for block, after in pairwise([*FENCED.finditer(text), None]):
            if block["tag"].strip() != "python":  # "python no-run" is for reading only
                continue
            output = after["body"] if after and after["tag"].strip() == "text" else None
            if after and text[block.end() : after.start()].strip():
                output = None
            where = f"{path.relative_to(docs)}:{text[: block.start()].count(chr(10)) + 1}"
            found.append((where, block["body"], output))
    return found


def output_of(where: str, code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, where, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def heading_anchors(text: str) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(docs: Path = DOCS) -> list[str]:
    broken = []
    for path in sorted(docs.rglob("*.md")):
        for link in LINK.finditer(FENCED.sub("", path.read_text())):
            file, _, anchor = link["target"].partition("#")
            if file.startswith(("http://", "https://", "mailto:")):
                continue
            target = path.parent / file if file else path
            if not target.exists():
                broken.append(f"{path.relative_to(docs)}: {link['target']} does not exist")
            elif anchor and anchor not in heading_anchors(target.read_text()):
                broken.append(f"{path.relative_to(docs)}: {link['target']}: no such heading")
    return broken


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_has_a_page(name: str) -> None:
    assert page(name).startswith(f"# {name}\n")


def test_every_page_is_of_a_registered_objective() -> None:
    pages = {path.stem for path in (DOCS / "objectives").glob("*.md")} - {"index"}
    assert pages == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_table_lists_every_field_with_its_default_and_nothing_else(name: str) -> None:
    assert documented_settings(page(name)) == actual_settings(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_everything_the_objective_needs_of_a_batch(name: str) -> None:
    needs = section(page(name), "Needs")
    preset_of = re.search(r"As \[`(\w+)`\]", needs)
    if preset_of:
        needs = section(page(preset_of[1]), "Needs")
    config = corral.make_objective(name).config
    assert all(f"`{field}`" in needs for field in config.needs)
    assert f"Anchor: `{config.anchor}`" in needs


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_the_index_lists_every_correction_with_its_defaults(name: str) -> None:
    rows = [line for line in section(page("index"), "Sampler corrections").splitlines() if line.startswith(f"| `{name}` | ")]
    assert len(rows) == 1
    defaults = [f"`{field.name}` {field.default!r}" for field in dataclasses.fields(CORRECTIONS[name][1])]
    assert rows[0].split(" | ")[2] == ", ".join(defaults)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_the_index_says_what_was_verified_of_corrections(name: str) -> None:
    verified = section(page("index"), "What was verified against its source")
    assert f"\n| `{name}` | " in verified


@pytest.mark.parametrize(("where", "code", "promised"), [pytest.param(*example, id=example[0]) for example in examples()])
def test_every_example_runs_and_prints_what_it_says(
    where: str,
    code: str,
    promised: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    with mock.patch.dict(OBJECTIVES):  # one registers an objective
        printed = output_of(where, code)
    if promised is not None:
        assert printed == promised
    assert not [record.message for record in caplog.records if record.name.startswith("corral.objective")]


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_page_shows_a_loss(name: str) -> None:
    shown = [code for where, code, promised in examples() if where.startswith(f"objectives/{name}.md:") and promised]
    assert any(f'make_objective("{name}"' in code for code in shown)


def test_links_between_pages_resolve() -> None:
    assert broken_links() == []


def test_the_index_explains_every_metric() -> None:
    """Every name that the maths writes into `metrics` has a row."""
    source = Path(corral.__file__).parent / "objective"
    written = {name for path in source.glob("*.py") for name in re.findall(r'"(tr/\w+)"', path.read_text())}
    explained = set(re.findall(r"^\| `(tr/\w+)` \| ", section(page("index"), "Metrics"), re.MULTILINE))
    assert written
    assert explained == written


def test_the_tables_of_objectives_are_up_to_date() -> None:
    script = DOCS.parent / "scripts" / "objective_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
