"""Colours and markers: the same everywhere, and told apart by those who see few hues."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

import corral
from corral.lab.audit.figures import REGIONS
from corral.lab.report.looks import DARK, LIGHT, MARKERS, SHAPES, assign_looks, fit, palette_css

# Machado, Oliveira & Fernandes 2009, severity 1: linear RGB as it is seen.
SEEN = {
    "everyone": np.eye(3),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(colour: str) -> NDArray[np.float64]:
    """Linear RGB."""
    c = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ottosson 2020: a space in which distances are what people see."""
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    mixed = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return mixed @ np.cbrt(np.clip(cones @ rgb, 0, None))


def contrast(one: str, other: str) -> float:
    """WCAG's."""
    dim, bright = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize(("palette", "paper"), [(LIGHT, "#fdfdfb"), (DARK, "#1b1f26")], ids=["light", "dark"])
def test_colours_are_apart_for_everyone(palette: tuple[str, ...], paper: str, eyes: str) -> None:
    """The old palette's closest two were .011 apart; .02 is the least that can be seen."""
    seen = [oklab(np.clip(SEEN[eyes] @ linear(colour), 0, 1)) for colour in palette]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.055
    assert min(contrast(colour, paper) for colour in palette) >= 3


def test_an_objective_looks_the_same_whoever_is_beside_it() -> None:
    alone = {name: assign_looks([name])[name] for name in corral.objective_names()}
    everybody = assign_looks(reversed(corral.objective_names()))
    known = [name for name in alone if name in ("troll", "dppo", "ppo_clip", "reinforce", "spo", "drpo", "m2po")]
    assert {name: everybody[name] for name in known} == {name: alone[name] for name in known}
    assert len(set(everybody.values())) == len(everybody)
    variants = assign_looks(["troll bound=0.1", "troll bound=0.2", "mine", "dppo"])
    assert variants["troll bound=0.1"] == alone["troll"]
    assert len({colour for colour, _ in variants.values()}) == 4
    assert len(set(assign_looks(map(str, range(64))).values())) == 64
    assert len(MARKERS) == len(SHAPES) == len(LIGHT) == len(DARK)
    assert palette_css().count(LIGHT[0]) == 2  # screens and paper


def test_the_kinds_of_an_audit_have_colours_of_their_own() -> None:
    assert len({colour for colour, _ in REGIONS.values()}) == len(REGIONS)


def test_labels_are_shortened_in_their_middle() -> None:
    assert fit("troll") == "troll"
    assert fit("troll a_rather_long_name_of_a_setting=1e-4", 24) == "troll a_rath…etting=1e-4"
