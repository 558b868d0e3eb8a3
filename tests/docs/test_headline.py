"""README's figure and its sentence say what the runs of the study found."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import headline
import pytest
from study_table import Row

README = (Path(__file__).parents[2] / "README.md").read_text()


def run(objective: str, passes: int, success: float, kl: float, **more: object) -> Row:
    lines = [{"step": 0, "success": 0.2}, *({"step": step, "success": success, "tr/deployed_kl_mean": kl} for step in (1, 2))]
    about = {"objective": objective, "passes": passes, "rate": 2e-4, "arm": "off", "steps": 10, "recipe": "demo", "seed": 1}
    return {**about, "dead": False, "lines": lines, **more}


RUNS = [
    run("troll", 1, 0.45, 0.006), run("troll", 8, 0.60, 0.02), run("troll", 8, 0.70, 0.04),
    run("ppo_clip", 1, 0.44, 0.007), run("ppo_clip", 8, 0.54, 0.14),
]  # fmt: skip


def test_the_sentence_has_means_over_seeds_and_how_many_there_are() -> None:
    said = headline.sentence(RUNS)
    # (.60 + .70) / 2 = .65, (.02 + .04) / 2 = .03
    assert "tie (45 %, 44 %)" in said
    assert "TROLL has 65 % and moves 0.03 nats a step,\nclipping 54 % and 0.14." in said
    assert "1 to 2 seeds a point" in said


@pytest.mark.parametrize("change", [{"arm": "on"}, {"rate": 4e-4}, {"steps": 20}, {"reuse": "auto"}, {"passes": 3}])
def test_other_runs_are_left_out(change: dict[str, object]) -> None:
    assert headline.chosen([*RUNS, run("troll", 8, 0.1, 9.0) | change]) == RUNS


def test_a_point_is_where_its_value_is() -> None:
    panel = headline.Panel("", {}, lambda value: value, {})
    bottom, middle, top = (panel.place(1, value)[1] for value in (0.0, 0.5, 1.0))
    assert bottom - middle == middle - top > 0
    assert panel.place(2, 0)[0] - panel.place(1, 0)[0] == pytest.approx(panel.place(8, 0)[0] - panel.place(4, 0)[0])


def test_labels_do_not_overlap() -> None:
    assert headline._apart({"a": 10.0, "b": 12.0, "c": 11.0}) == {"a": 10.0, "c": 26.0, "b": 42.0}


def test_the_figure_is_whole_and_has_a_dark_form() -> None:
    drawn = headline.draw(RUNS)
    ElementTree.fromstring(drawn)
    assert drawn.count('class="dot troll"') == 2 * 3
    assert "prefers-color-scheme:dark" in drawn


def test_the_readme_shows_it() -> None:
    assert "](docs/headline.svg)" in README
    assert headline.BLOCK.search(README)
