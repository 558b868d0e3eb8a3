"""README's figure and its sentence say what the runs of the study found."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import headline
import pytest
from study_table import Row

README = (Path(__file__).parents[2] / "README.md").read_text()


def run(objective: str, passes: int, curve: list[float], kl: float) -> Row:
    """Success after every second step, and the same KL of every step."""
    after = [{"step": 2 * place, "success": value, "tr/deployed_kl_mean": kl} for place, value in enumerate(curve)]
    return {"objective": objective, "passes": passes, "seed": 401, "dead": False, "steps": 10, "lines": after}


GROUPS = [
    [run("troll", 4, [0.2, 0.5, 0.7], 0.01), run("troll", 4, [0.2, 0.4, 0.6], 0.03)],
    [run("ppo_clip", 4, [0.2, 0.4, 0.5, 0.6], 0.06)],
    [run("ppo_clip", 1, [0.2, 0.3, 0.4, 0.5, 0.7], 0.03)],
]


def test_the_sentence_has_medians_and_means() -> None:
    said = headline.sentence(GROUPS)
    # .6 is reached after 2 + 2 · .1 / .2 = 3 and after 4 steps, 3.5 in the middle; after 6; after 6 + 2 · .1 / .2 = 7
    assert "60 % of held-out problems after 3.5 batches" in said
    assert "passes after 6,\nwith one pass after 7." in said
    # (.7 + .6) / 2 = .65; (.01 + .03) / 2 = .02
    assert "it has 65 %, clipping 60 %, and a step moves the network 0.02 nats instead of 0.06." in said
    assert "1 fresh seeds" in said


def test_a_mean_is_over_the_runs_of_a_setting() -> None:
    first = headline.lines(GROUPS, headline.held_out)[0]
    assert [y for _, y in first.mean] == pytest.approx([0.2, 0.45, 0.65])
    assert [line.dashed for line in headline.lines(GROUPS, headline.held_out)] == [False, False, True]


def test_a_point_is_where_its_value_is() -> None:
    panel = headline.Panel("", [], lambda value: value, {})
    bottom, middle, top = (panel.place(0, value)[1] for value in (0.0, 0.5, 1.0))
    assert bottom - middle == middle - top > 0
    assert panel.place(10, 0)[0] - panel.place(0, 0)[0] == pytest.approx(panel.width / 2)


def test_labels_do_not_overlap() -> None:
    assert headline._apart({"a": 10.0, "b": 12.0, "c": 11.0}) == {"a": 10.0, "c": 26.0, "b": 42.0}


def test_the_figure_is_whole_and_has_a_dark_form() -> None:
    drawn = headline.draw(GROUPS)
    ElementTree.fromstring(drawn)
    assert drawn.count('class="run troll"') == 2 * 2
    assert "prefers-color-scheme:dark" in drawn


def test_the_readme_shows_it() -> None:
    assert "](docs/headline.svg)" in README
    assert headline.BLOCK.search(README)
