"""README's figure and its sentence say what the runs of the study found."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corral.lab.report import looks
from results.deployed import figures
from results.deployed.plans import CHOSEN
from results.deployed.spec import Shipped
from results.packed import Row

README = (Path(__file__).parents[2] / "README.md").read_text()


def run(how: Mapping[str, Any], seed: int, *success: float) -> Row:
    """A run of the study with a measurement every second step."""
    spec = Shipped(**{"seed": seed, "steps": 10, **how})
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
HELD = {"passes": 1, "bound": 0.03, "schedule": "constant"}
SWEPT = [
    run({"objective": name, "rate": 1e-3, **how}, 301, 0.2, end)
    for name, how, end in [
        ("troll", HELD, 0.6), ("troll", {**HELD, "bound": math.inf}, 0.1), ("ppo_clip", HELD, 0.5),
    ]
]  # fmt: skip
AUTO = [
    run({"objective": name, "rate": rate, "steps": 15, **how}, 401, 0.2, end)
    for name, ends in [("troll", (0.62, 0.5, 0.6, 0.3)), ("ppo_clip", (0.61, 0.58, 0.4, 0.1))]
    for rate, how, end in zip(("auto", 2e-4, 4e-4, 1e-3), (HELD, {}, {}, {}), ends, strict=True)
]


def test_golden_sentence() -> None:
    # .5 → .7 between steps 2 and 4: .6 after 3. Clipping is there at step 6; with one pass .5 → .7 from 6 to 8: after 7.
    said = figures.sentence(FRESH)
    assert "60 % success after 3.0 batches of rollouts" in said
    assert "tuned over rate and passes,\nafter 6.0, with one pass after 7. (Medians of 2 fresh seeds" in said


def test_golden_sentence_of_rates() -> None:
    said = figures.sentence_of_rates(AUTO)
    assert "TROLL ends at 62 % (1 fresh seeds), at\nthe better of two tuned rates at 60, at 2.5 times that rate at 30" in said
    assert "clip at 61, 58 and 10" in said


def test_golden_curves_and_rates() -> None:
    troll, clip, once = figures.learned([*FRESH, *SWEPT])
    assert [troll, clip[6], once[8]] == [{0: [0.2] * 2, 2: [0.5] * 2, 4: [0.7] * 2}, [0.6] * 2, [0.7] * 2]
    arms = [(name, arm) for name in ("troll", "ppo_clip") for arm in (figures.HELD, figures.UNHELD)]
    found = [figures.over_constant_rates([*FRESH, *SWEPT], *arm) for arm in arms]
    assert found == [{1e-3: [0.6]}, {1e-3: [0.1]}, {1e-3: [0.5]}, {}]


@pytest.mark.parametrize("change", [{"arm": "on 0.1"}, {"rate": 4e-4}, {"steps": 20}, {"schedule": "linear"}, {"passes": 3}])
def test_other_runs_move_nothing(change: dict[str, object]) -> None:
    other = run({"objective": "troll", "rate": 1e-3, **HELD}, 301, 0.2, 0.9) | change
    for arm in (figures.HELD, figures.UNHELD):
        assert figures.over_constant_rates([*SWEPT, other], "troll", arm) == figures.over_constant_rates(SWEPT, "troll", arm)


def test_the_figure_is_whole_is_the_same_every_time_and_has_a_dark_form(tmp_path: Path) -> None:
    files = [tmp_path / name / "headline.svg" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        figures.draw_headline([*FRESH, *SWEPT], file)
    first, second = (file.read_text() for file in files)
    ElementTree.fromstring(first)
    assert first == second
    place, _ = looks.assign_looks(figures.NAMES)["troll"]
    light, dark = looks.LIGHT[place], looks.DARK[place]
    assert f"stroke: {light}" in first
    assert "@media (prefers-color-scheme:dark)" in first
    assert f'[style*="stroke: {light}"]{{stroke:{dark}!important}}' in first


def test_the_readme_shows_it() -> None:
    assert "](docs/headline.svg)" in README
