"""README's figure and its sentence say what the runs of the study found."""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headline
import pytest
from plans import CHOSEN
from spec import Shipped
from study_table import Row

README = (Path(__file__).parents[2] / "README.md").read_text()


def run(how: Mapping[str, Any], seed: int, *success: float) -> Row:
    """A run of the study with a measurement every second step."""
    spec = Shipped(**{"seed": seed, "steps": 10, **how})
    about = {
        name: getattr(spec, name) for name in ("objective", "passes", "rate", "arm", "steps", "recipe", "seed", "schedule")
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
    said = headline.sentence(FRESH)
    assert "60 % success after 3.0 batches of rollouts" in said
    assert "tuned over rate and passes,\nafter 6.0, with one pass after 7. (Medians of 2 fresh seeds" in said


def test_golden_sentence_of_rates() -> None:
    said = headline.sentence_of_rates(AUTO)
    assert "TROLL ends at 62 % (1 fresh seeds), at\nthe better of two tuned rates at 60, at 2.5 times that rate at 30" in said
    assert "clip at 61, 58 and 10" in said


def test_golden_curves_and_rates() -> None:
    troll, clip, once = headline.curves([*FRESH, *SWEPT])
    assert [troll.values, clip.values[6], once.values[8]] == [{0: [0.2] * 2, 2: [0.5] * 2, 4: [0.7] * 2}, [0.6] * 2, [0.7] * 2]
    found = {(line.look, line.label): line.values for line in headline.over_constant_rates([*FRESH, *SWEPT])}
    assert found == {
        ("troll", "TROLL, held"): {1e-3: [0.6]}, ("troll dashed", "TROLL"): {1e-3: [0.1]},
        ("ppo_clip", "clip, held"): {1e-3: [0.5]}, ("ppo_clip dashed", "clip"): {},
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"arm": "on 0.1"}, {"rate": 4e-4}, {"steps": 20}, {"schedule": "linear"}, {"passes": 3}])
def test_other_runs_move_nothing(change: dict[str, object]) -> None:
    other = run({"objective": "troll", "rate": 1e-3, **HELD}, 301, 0.2, 0.9) | change
    assert headline.over_constant_rates([*SWEPT, other]) == headline.over_constant_rates(SWEPT)


def test_a_point_is_where_its_value_is() -> None:
    panel = headline.Panel(
        title="",
        axis="",
        lines=(),
        across=lambda x: x / 20,
        up=lambda value: value,
        ticks={},
        places={"0": 0, "20": 20},
        key=(0, 0),
    )
    bottom, middle, top = (panel.place(1, value)[1] for value in (0.0, 0.5, 1.0))
    assert bottom - middle == middle - top > 0
    assert panel.place(4, 0)[0] - panel.place(2, 0)[0] == pytest.approx(panel.place(20, 0)[0] - panel.place(18, 0)[0])


def test_the_figure_is_whole_and_has_a_dark_form() -> None:
    drawn = headline.draw([*FRESH, *SWEPT])
    ElementTree.fromstring(drawn)
    assert drawn.count('class="dot troll"') == 2 * 3 + 1
    assert drawn.count('class="dot troll dashed"') == 1
    assert "prefers-color-scheme:dark" in drawn


def test_the_readme_shows_it() -> None:
    assert "](docs/headline.svg)" in README
    assert headline.BLOCK.search(README)
