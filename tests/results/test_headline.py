"""README's figure and its sentence say what the runs of the study found."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.lab.report import looks
from results.deployed import figures
from results.packed import Row
from results.plans import CHOSEN
from results.spec import Run

README = (Path(__file__).parents[2] / "README.md").read_text()


def run(how: Mapping[str, Any], seed: int, *success: float) -> Row:
    """A run of the study with a measurement every second step."""
    spec = Run(**{"seed": seed, "steps": 10, **how})
    about = {
        name: getattr(spec, name)
        for name in ("objective", "passes", "rate", "arm", "steps", "recipe", "seed", "schedule", "start")
    }
    lines = [{"step": 2 * place, "success": value} for place, value in enumerate(success)]
    return {**about, "dead": False, "lines": lines}


FRESH = [
    run(how, seed, 0.2, *success)
    for how, success in zip(CHOSEN, ((0.5, 0.7), (0.4, 0.5, 0.6), (0.3, 0.4, 0.5, 0.7)), strict=False)
    for seed in (401, 402)
]


def test_golden_sentence() -> None:
    # .5 → .7 between steps 2 and 4: .6 after 3. Clipping is there at step 6; with one pass .5 → .7 from 6 to 8: after 7.
    said = figures.sentence(FRESH)
    assert "TROLL reaches 60 % held-out success after 3.0 batches" in said
    assert "PPO's clip takes 6.0," in said
    assert "medians of [2 fresh seeds]" in said


def test_golden_curves() -> None:
    troll, clip, once = figures.learned(FRESH)
    assert [troll, clip[6], once[8]] == [{0: [0.2] * 2, 2: [0.5] * 2, 4: [0.7] * 2}, [0.6] * 2, [0.7] * 2]


def test_the_figure_is_whole_is_the_same_every_time_and_has_a_dark_form(tmp_path: Path) -> None:
    files = [tmp_path / name / "headline.svg" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        figures.draw_headline(FRESH, file)
    first, second = (file.read_text() for file in files)
    ElementTree.fromstring(first)
    assert first == second
    place, _ = looks.assign_looks(figures.NAMES)["troll"]
    light, dark = looks.LIGHT[place], looks.DARK[place]
    assert f"stroke: {light}" in first
    assert "@media (prefers-color-scheme:dark)" in first
    assert f'[style*="stroke: {light}"]{{stroke:{dark}!important}}' in first


def test_the_readme_shows_it() -> None:
    assert 'src="docs/headline.svg"' in README
