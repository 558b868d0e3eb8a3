"""The page "From symptom to setting": its settings and metrics exist, and its sections are whole and short."""

import argparse
import ast
import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl.trainer import grpo_trainer

from corral.lab.cli.train import add_arguments, given_settings
from corral.lab.jobs.llm.settings import TABLES, Settings, resolve
from corral.lab.jobs.llm.trainer import GuardCallback
from corral.lab.run.settings import nested
from corral.llm import CorralConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "symptoms.md").read_text()
ROWS = re.findall(r"^\| \[([^]]+)\]\(#([^)]+)\) \| (.+?) \| `(.+?)` \| `(.+?)` \|$", PAGE, re.MULTILINE)
"""(title, anchor, metrics, flags, fields) of each row of the table."""
SECTIONS = {text.splitlines()[0]: text.splitlines()[1:] for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
LABELS = ["**Recognise it**", "**corral**", "**Setting**", "**Cost**", "**Not known**"]


def by_flags(line: str) -> Settings:
    """Settings of a run with these flags of `corral train`; a setting that does not exist is refused."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return resolve([nested(given_settings(*parser.parse_known_args(shlex.split(line))), TABLES)])


def by_fields(code: str) -> dict[str, Any]:
    """Settings by keyword, or the guard's as a callback."""
    if code.startswith("GuardCallback("):
        return {"guard": eval(code, {"GuardCallback": GuardCallback}).mode}
    call = ast.parse(f"CorralConfig({code})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}


@pytest.mark.parametrize(("line", "code"), [row[3:] for row in ROWS], ids=[row[1] for row in ROWS])
def test_the_flag_and_the_field_exist_and_mean_the_same(line: str, code: str, tmp_path: Path) -> None:
    settings, given = by_flags(line), by_fields(code)
    found = settings.flat()
    assert {name: found[name] for name in given} == given
    if "guard" not in given:
        CorralConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
    named = {name.replace("-", "_") for name in re.findall(r"--(?:set )?([\w-]+)", line)}
    assert named == set(given), "the row's two settings are not the same"


def test_settings_named_in_the_sections_exist() -> None:
    known = {item.name for item in fields(CorralConfig) if item.init}
    named = set(re.findall(r"`(?:[^`]*, )?(\w+)=[^`]*`", PAGE))
    assert len(named) > 8
    assert named <= known
    for flag in re.findall(r"`(--[\w-]+(?: [\w.]+)?)`", "\n".join(map("\n".join, SECTIONS.values()))):
        by_flags(flag if " " in flag else f"{flag} 1")


def test_metrics_exist() -> None:
    corrals = (DOCS / "objectives" / "index.md").read_text() + (DOCS / "deployed.md").read_text()
    for name in re.findall(r"`(tr/\w+)`", PAGE):
        assert f"`{name}`" in corrals, f"{name} is described nowhere"
    logged = inspect.getsource(grpo_trainer)
    others = {name for row in ROWS for name in re.findall(r"`([\w/]+)`", row[2]) if not name.startswith("tr/")}
    for name in others - {"loss", "grad_norm", "success", "greedy"}:  # of transformers, and of `corral train`
        assert f'"{name}"' in logged, f"TRL does not log {name}"


def test_every_symptom_has_a_short_section_with_all_five_answers() -> None:
    assert [row[0] for row in ROWS] == list(SECTIONS)
    assert len(ROWS) == 12
    for title, lines in SECTIONS.items():
        text = [line for line in lines if line]
        assert len(text) <= 8, f"{title} is too long"
        assert [found[1] for line in text if (found := re.match(r"- (\*\*.+?\*\*)", line))] == LABELS, title
