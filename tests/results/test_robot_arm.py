"""The arm's long runs → the results page: which are tuning, which count, and what is said of them."""

from pathlib import Path

from results import packed
from results.packed import Row
from results.robots import arm as robot_arm
from results.robots.runs import FILES


def run(row: str, setting: str, seed: int, success: float, paid: float = -2.0, *, tuned: bool = False) -> Row:
    found = {"row": row, "reward": "dense", "setting": setting, "seed": seed, "step": 10, "env_steps": 2_000_000}
    name = f"arm-{'tune-' if tuned else ''}{row}-dense-{setting}-{seed}"
    return {**found, "name": name, "success": success, "paid": paid, "curve": [[0, 0.0], [1_000_000, success]]}


def test_the_block_names_seeds_steps_and_the_best_settings() -> None:
    tuned = [
        run(row, name, 100, 0.5 + (name == "basis-5") / 4, tuned=True) for row in ("tce", "bbrl") for name in robot_arm.SAID
    ]
    tuned += [one | {"name": one["name"].replace("dense", "sparse"), "reward": "sparse"} for one in tuned]
    final = [run("tce", "basis-5", seed, 0.96 + seed / 100, -2.0 - seed) for seed in range(3)]
    final += [run("bbrl", "basis-5", seed, success) for seed, success in enumerate((0.5, 0.53, 0.5))]
    final += [run("bbrl", "critic", 0, 0.99)]  # was not chosen, so it is compared with nobody
    text = robot_arm.block(tuned + final)
    said = "| TCE | 5 basis functions | 3 | 2.00 million | 96.0, 97.0, 98.0 | 97.0 | −3.0 | 1.00 million (3 seeds) |"
    assert said in text
    assert "| BBRL | 5 basis functions | 3 | 2.00 million | 50.0, 53.0, 50.0 | 51.0 | −2.0 | – |" in text
    assert "| dense: success, points | +46.0 (" in text
    assert "| 5 basis functions | **75 %, −2.0** | **75 %, −2.0** | **75 %, −2.0** | **75 %, −2.0** |" in text
    assert "with 2.00 million steps each" in text


def test_the_figure_has_every_seed_and_their_median_on_both_panels(tmp_path: Path) -> None:
    robot_arm.draw(packed.read(FILES["arm"]), tmp_path / "arm.svg")
    drawn = (tmp_path / "arm.svg").read_text()
    for colour in robot_arm.COLOURS.values():
        assert drawn.count(f"stroke: {colour}") >= 12
