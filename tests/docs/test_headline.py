"""README's figure and its sentence say what the runs of the study found."""

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


def run(how: Mapping[str, Any], seed: int, *success: float, kl: float = 0.01) -> Row:
    """A run of the study with a measurement every second step."""
    spec = Shipped(**{"seed": seed, "steps": 10, **how})
    about = {name: getattr(spec, name) for name in ("objective", "passes", "rate", "arm", "steps", "recipe", "seed")}
    lines = [{"step": 2 * place, "success": value, "tr/deployed_kl_mean": kl} for place, value in enumerate(success)]
    return {**about, "dead": False, "lines": lines}


FRESH = [
    run(how, seed, 0.2, *success)
    for how, success in zip(CHOSEN, ((0.5, 0.7), (0.4, 0.5, 0.6), (0.3, 0.4, 0.5, 0.7)), strict=False)
    for seed in (401, 402)
]
DEMO = {"rate": 2e-4, "passes": 8}
DEMOS = [
    run({"objective": name, **DEMO}, 1, 0.2, 0.5, kl=kl) for name, kl in (("troll", 0.02), ("dppo", 0.2), ("ppo_clip", 0.1))
]


def test_golden_sentence() -> None:
    # .5 → .7 between steps 2 and 4: .6 after 3. Clipping is there at step 6; with one pass .5 → .7 from 6 to 8: after 7.
    said = headline.sentence(FRESH)
    assert "60 % success after 3.0 batches of rollouts" in said
    assert "tuned over rate and passes,\nafter 6.0, with one pass after 7. (Medians of 2 fresh seeds" in said


def test_golden_curves_and_distances() -> None:
    troll, clip, once = headline.curves([*FRESH, *DEMOS])
    assert [troll.values, clip.values[6], once.values[8]] == [{0: [0.2] * 2, 2: [0.5] * 2, 4: [0.7] * 2}, [0.6] * 2, [0.7] * 2]
    moved = {line.look: line.values for line in headline.distances([*FRESH, *DEMOS])}
    assert {name: values[8] for name, values in moved.items()} == {"troll": [0.02], "dppo": [0.2], "ppo_clip": [0.1]}


@pytest.mark.parametrize("change", [{"arm": "on"}, {"rate": 4e-4}, {"steps": 20}, {"reuse": "auto"}, {"passes": 3}])
def test_other_runs_move_nothing(change: dict[str, object]) -> None:
    other = run({"objective": "troll", **DEMO}, 1, 0.2, 0.5, kl=9.0) | change
    assert headline.distances([*DEMOS, other]) == headline.distances(DEMOS)


def test_a_point_is_where_its_value_is() -> None:
    panel = headline.Panel(
        title="", axis="", lines=(), across=lambda x: x / 20, up=lambda value: value, ticks={}, places=(0, 20)
    )
    bottom, middle, top = (panel.place(1, value)[1] for value in (0.0, 0.5, 1.0))
    assert bottom - middle == middle - top > 0
    assert panel.place(4, 0)[0] - panel.place(2, 0)[0] == pytest.approx(panel.place(20, 0)[0] - panel.place(18, 0)[0])


def test_labels_do_not_overlap() -> None:
    assert headline._apart({"a": 10.0, "b": 12.0, "c": 11.0}) == {"a": 10.0, "c": 26.0, "b": 42.0}


def test_the_figure_is_whole_and_has_a_dark_form() -> None:
    drawn = headline.draw([*FRESH, *DEMOS])
    ElementTree.fromstring(drawn)
    assert drawn.count('class="dot troll"') == 2 * 3 + 1
    assert "prefers-color-scheme:dark" in drawn


def test_the_readme_shows_it() -> None:
    assert "](docs/headline.svg)" in README
    assert headline.BLOCK.search(README)
