"""docs/support.md, written from the markers of the tests.

    python scripts/support_table.py            writes the page
    python scripts/support_table.py --check    only says whether it is up to date

A test that shows a feature at work carries `@pytest.mark.supports("group: feature", door="TRL")`, one that shows it refused
`@pytest.mark.refuses(…)`; `{name}` in a feature is the test's parameter of that name. Tests are collected, not run; files of
another environment, which are skipped here, are read instead.
In groups of `EXPLAINED` a row also says which file tests it, a refusal's `why=`, or the command that would try it.
"""

import argparse
import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"

DOORS = ("import corral", "TRL", "verl", "command line", "robots")
"""In the order of the columns; a door that no test goes through has none."""

GROUPS = {
    "objective": "Objectives",
    "reduction": "Reductions",
    "advantage": "Advantages",
    "correction": "Sampler corrections",
    "anchor": "Anchors and samplers",
    "kept": "What is kept of TRL",
    "model": "Models",
    "scale": "Several processes",
    "run": "A run",
    "comparison": "Comparisons",
    "other": "Other software",
}
"""Sections of the page, by the word before the colon."""

EXPLAINED = ("scale",)
"""Groups with a last column: how it is known, or why it is not to be had."""

TARGETS = {
    "gpu": "GPU",
    "distributed": "`make test-distributed`",
    "vllm": "`make test-vllm`",
    "verl": "`make test-verl`",
    "trl_versions": "`make test-trl-versions`",
    "slow": "`make test-all`",
}
"""Where a test with such a marker runs, the first that it has; without any, in CI."""

LAUNCH = "`accelerate launch --config_file examples/accelerate"

UNTESTED = (
    ("model: vision-language models", "TRL", ""),
    ("model: float16 with a gradient scaler", "TRL", ""),
    ("anchor: `use_transformers_continuous_batching`", "TRL", ""),
    ("scale: more than one GPU", "TRL", f"{LAUNCH}/fsdp2.yaml train.py`"),
    ("scale: more than one GPU", "command line", f"{LAUNCH}/ddp.yaml -m corral.lab.cli train`"),
    ("scale: a vLLM server itself", "TRL", '`trl vllm-serve --model MODEL`, and `vllm_mode="server"` in train.py'),
    ("scale: FSDP2, weights offloaded to the CPU", "TRL", f"{LAUNCH}/fsdp2.yaml --fsdp_offload_params true train.py`"),
    ("scale: DeepSpeed, anything offloaded", "TRL", f"{LAUNCH}/zero3.yaml --offload_optimizer_device cpu train.py`"),
    ("scale: FSDP 1", "verl", ""),
    ("scale: several machines", "verl", ""),
    ("scale: a GPU, NCCL, vLLM in verl", "verl", ""),
    ("scale: Megatron, sampled-token objectives", "verl", ""),
    ("run: `--report-to wandb`", "command line", ""),
    ("run: `--report-to trackio`", "command line", ""),
)
"""What nobody has tried, as far as one might expect it to work: feature, door, and the command that would."""

INTRODUCTION = """# What is supported, and how that is known

Written by `python scripts/support_table.py` from the markers of the tests; do not edit.

- **CI**: `make test` shows it at work, at every change. **GPU**: the same, where there is a CUDA device.
- **`make …`**: a target that takes longer, or needs an environment of its own, shows it at work.
- **refused**: it ends with a sentence that says why and what to do, and a test reads that sentence.
- **untested**: nobody has tried.

An empty cell: it means nothing there, or another door is the place for it.
"""

MARKED = re.compile(r"mark\.(supports|refuses)\(")

Claim = tuple[str, str, str, str]
"""Feature, door, where it is tested or that it is refused, and how that is known."""
Table = dict[str, dict[str, set[str]]]


class SupportError(Exception):
    """A marker, or the list of what is untested, cannot be right."""


def marked_files() -> list[Path]:
    """Files of tests that have one of the markers."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text())]


def collect(files: Iterable[Path]) -> list[pytest.Item]:
    """Collect the tests of some files."""

    class Collected:
        items: list[pytest.Item]

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.items = session.items

    collected, printed = Collected(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *map(str, files)]
        status = pytest.main(arguments, plugins=[collected])
    if status != pytest.ExitCode.OK:
        raise SupportError(f"the tests cannot be collected:\n{printed.getvalue()[-3000:]}")
    return collected.items


def read_items(items: Iterable[pytest.Item]) -> Iterable[Claim]:
    """Yield the claims of collected tests."""
    for item in items:
        where = next((place for marker, place in TARGETS.items() if item.get_closest_marker(marker)), "CI")
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        for marker, place in (("supports", where), ("refuses", "refused")):
            for mark in item.iter_markers(marker):
                note = mark.kwargs.get("why") or link(item.path)
                yield mark.args[0].format(**parameters), mark.kwargs["door"], place, note


def read_markers(path: Path) -> Iterable[Claim]:
    """Yield the claims of a file that is skipped because its tests need another environment."""
    text = path.read_text()
    place = next((place for name, place in TARGETS.items() if f"\npytestmark = pytest.mark.{name}\n" in text), None)
    if place is None:
        raise SupportError(f"{path} is skipped whole, and its pytestmark names no target. There are {', '.join(TARGETS)}.")
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    for call in calls:
        name = cast(ast.Attribute, call.func).attr
        if name in ("supports", "refuses"):
            feature, door = ast.literal_eval(call.args[0]), ast.literal_eval(call.keywords[0].value)
            if "{" in feature:
                raise SupportError(f"{feature!r} in {path} has a parameter, and the file is skipped whole: write them out.")
            yield feature, door, place if name == "supports" else "refused", link(path)


def tabulate(claims: Iterable[Claim]) -> Table:
    """Feature → door → where it is tested, in the order of the claims."""
    table: Table = {}
    for feature, door, where, _ in claims:
        add(table, feature, door, where)
    for feature, door, _ in UNTESTED:
        if door in table.get(feature, {}):
            raise SupportError(f"{feature!r} is tested through {door!r}: take it from UNTESTED.")
        add(table, feature, door, "untested")
    return table


def explain(claims: Iterable[Claim]) -> dict[str, str]:
    """Feature → how it is known, in the groups that say so."""
    found: dict[str, dict[str, None]] = {}  # an ordered set for each
    untried = ((feature, command) for feature, _, command in UNTESTED if command)
    for feature, note in (*((feature, note) for feature, _, _, note in claims), *untried):
        found.setdefault(feature, {})[note] = None
    return {feature: ", ".join(notes) for feature, notes in found.items() if feature.startswith(EXPLAINED)}


def link(path: Path) -> str:
    """A file of the repository, from the page."""
    return f"[{path.name}](../{path.relative_to(ROOT).as_posix()})"


def add(table: Table, feature: str, door: str, where: str) -> None:
    """Add a claim to the table."""
    if feature.partition(": ")[0] not in GROUPS:
        raise SupportError(f"{feature!r} should begin with a group and a colon; there are {', '.join(GROUPS)}.")
    if door not in DOORS:
        raise SupportError(f"{feature!r} names the door {door!r}; there are {', '.join(DOORS)}.")
    places = table.setdefault(feature, {}).setdefault(door, set())
    places.add(where)
    if "CI" in places:  # what is slow repeats it at other sizes
        places.discard(TARGETS["slow"])


def page(table: Table, notes: dict[str, str] | None = None) -> str:
    """The page, a section per group; `notes` of a feature are the last column where a group has any."""
    doors = [door for door in DOORS if any(door in row for row in table.values())]
    places = ["CI", *TARGETS.values(), "refused", "untested"]
    text = INTRODUCTION
    for group, title in GROUPS.items():
        rows = {feature.partition(": ")[2]: row for feature, row in table.items() if feature.startswith(f"{group}: ")}
        if not rows:
            continue
        used = [door for door in doors if any(door in row for row in rows.values())]
        told = any(f"{group}: {name}" in (notes or {}) for name in rows)
        heads = [*used, *(["how it is known"] if told else [])]
        text += f"\n## {title}\n\n| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}\n"
        for name, row in rows.items():
            cells = [", ".join(place for place in places if place in row.get(door, ())) for door in used]
            cells += [(notes or {}).get(f"{group}: {name}", "")] if told else []
            text += f"| {name} | {' | '.join(cells)} |\n"
    return text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write docs/support.md from the markers of the tests.")
    parser.add_argument("--check", action="store_true", help="write nothing; the status is 1 if the page is not up to date")
    check = parser.parse_args(argv).check
    try:
        files = marked_files()
        items = collect(files)
        found = {item.path for item in items}
        skipped = [path for path in files if path not in found]
        claims = [*read_items(items), *(claim for path in skipped for claim in read_markers(path))]
        text = page(tabulate(claims), explain(claims))
    except SupportError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if check:
        same = PAGE.is_file() and PAGE.read_text() == text
        sys.stdout.write("" if same else f"{PAGE} is not what the tests say. Run: python scripts/support_table.py\n")
        return 0 if same else 1
    from corral.lab.run.files import write_whole  # here, since pytest wants to import its plugins before corral does

    write_whole(PAGE, lambda beside: beside.write_text(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
