"""The arm's long runs → the results page: which are tuning, which count, and what is said of them."""

import json
from pathlib import Path

import robot_arm
from robot_plans import ARM_TRIED

PRINTED = """\
32 runs to do, 0 done; 12 at a time, 7.0 minutes
   62 s  arm-tune-bbrl-dense-cov-0.01-100         step   150  success 0.340  return   -14.39     48 s
 stopped arm-tce-dense-batch-512-3                step   540  success 0.949  return   -12.57    170 s
 stopped arm-tce-dense-batch-512-4                nothing measured; see arm-tce-dense-batch-512-4.log
arm-tune-bbrl-dense-cov-0.01              success 0.340 (0.34)  return   -14.39   15.4 M    48 s
"""


def run(row: str, setting: str, seed: int, success: float, paid: float = -2.0, *, tuned: bool = False) -> tuple[str, dict]:
    found = {"row": row, "reward": "dense", "setting": setting, "seed": seed, "step": 10, "env_steps": 2_000_000}
    name = f"arm-{'tune-' if tuned else ''}{row}-dense-{setting}-{seed}"
    return name, {**found, "success": success, "paid": paid, "curve": [(0, 0.0), (1_000_000, success)]}


def test_every_setting_has_words() -> None:
    assert set(robot_arm.SAID) == set(ARM_TRIED)


def test_what_the_study_printed_is_read(tmp_path: Path) -> None:
    (tmp_path / "print.txt").write_text(PRINTED)
    found = dict(robot_arm.read(tmp_path / "print.txt"))
    assert list(found) == ["arm-tune-bbrl-dense-cov-0.01-100", "arm-tce-dense-batch-512-3"]
    assert found["arm-tce-dense-batch-512-3"] == {
        "row": "tce", "reward": "dense", "setting": "batch-512", "seed": 3, "step": 540,
        "env_steps": 540 * 512 * 100, "success": 0.949, "paid": -12.57, "curve": [],
    }  # fmt: skip


def test_folders_are_read_with_the_way_there(tmp_path: Path) -> None:
    for name in ("arm-tce-sparse-cov-0.001-4", "something-else-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        lines = [{"step": n, "success": 0.4 * n, "return": -9.0 / (n + 1), "env_steps": 100 * n} for n in range(3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((name, found),) = robot_arm.read(tmp_path)
    assert name == "arm-tce-sparse-cov-0.001-4"
    assert (found["setting"], found["seed"], found["success"], found["paid"]) == ("cov-0.001", 4, 0.8, -3.0)
    assert found["curve"] == [(0, 0.0), (100, 0.4), (200, 0.8)]


def test_the_block_names_seeds_steps_and_the_best_settings() -> None:
    tuned = [run(row, name, 100, 0.5 + (name == "basis-5") / 4, tuned=True) for row in ("tce", "bbrl") for name in ARM_TRIED]
    tuned += [(name.replace("dense", "sparse"), one | {"reward": "sparse"}) for name, one in tuned]
    final = [run("tce", "basis-5", seed, 0.96 + seed / 100, -2.0 - seed) for seed in range(3)]
    final += [run("bbrl", "basis-5", seed, success) for seed, success in enumerate((0.5, 0.53, 0.5))]
    final += [run("bbrl", "critic", 0, 0.99)]  # was not chosen, so it is compared with nobody
    text = robot_arm.block(dict(tuned + final))
    said = "| TCE | 5 basis functions | 3 | 2.00 million | 96.0, 97.0, 98.0 | 97.0 | −3.0 | 1.00 million (3 seeds) |"
    assert said in text
    assert "| BBRL | 5 basis functions | 3 | 2.00 million | 50.0, 53.0, 50.0 | 51.0 | −2.0 | – |" in text
    assert "TCE beats BBRL on success on dense: +46.0 points" in text
    assert "| 5 basis functions | **75 %, −2.0** | **75 %, −2.0** | **75 %, −2.0** | **75 %, −2.0** |" in text
    assert "with 2.00 million steps each" in text


def test_the_page_is_what_the_file_says(tmp_path: Path) -> None:
    runs = json.loads(robot_arm.FILE.read_text())
    assert robot_arm.block(runs).rstrip() in robot_arm.PAGE.read_text(), "run python benchmarks/robot_arm.py"
    final = [run for name, run in runs.items() if not name.startswith("arm-tune")]
    robot_arm.plot(final, tmp_path / "arm.svg")
    drawn = (tmp_path / "arm.svg").read_text()
    for colour in robot_arm.COLOURS.values():  # five seeds and their median on each of two panels
        assert drawn.count(f"stroke: {colour}") >= 12
