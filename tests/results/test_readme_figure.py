"""The plan of README's figure: the settings of README's script, trials on other seeds, and a report of the best trial."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import resolve
from corral.lab.report import looks
from corral.lab.run.settings import read_recipe
from corral.llm import CorralConfig
from results import front
from results.packed import Row
from results.spec import Run
from results.table import CLIP, TROLL

README = (Path(__file__).parents[2] / "README.md").read_text()
PEAKS = {("ppo_clip", 4): 8e-4, ("ppo_clip", 1): 4e-4, ("troll", 4): 2e-4, ("troll", 1): 8e-4}


def row(run: Run) -> Row:
    """A finished run that is best at one rate, with four passes more so."""
    level = 0.7
    if run.rate != "auto":
        level = 0.6 - 0.1 * abs(math.log2(float(run.rate) / PEAKS[run.objective, run.passes])) + run.passes / 100
    level += {"troll": 0.05 + run.seed % 3 / 1000, "ppo_clip": 0.0}[run.objective] + run.seed % 2 / 100
    lines = [{"step": step, "success": level, "greedy": level, "reward": level} for step in (0, run.steps)]
    about = {name: getattr(run, name) for name in ("key", "seed", "steps", "objective", "rate", "passes", "arm")}
    return {**about, "finished": True, "dead": False, "lines": lines}


def to_its_end() -> list[Run]:
    rows: list[Row] = []
    made: list[Run] = []
    while new := [run for run in front.front(rows) if run.key not in {row["key"] for row in rows}]:
        made += new
        rows += map(row, new)
    return made


def test_golden_the_runs_of_the_plan() -> None:
    # Clip with four passes is best at the end of its four rates, so that it has one more: 2 × (4 + 4 + 1), then 2 × (4 + 4).
    made = to_its_end()
    trials = [run for run in made if run.seed in front.TUNING]
    assert Counter(run.objective for run in trials) == {"ppo_clip": 18, "troll": 16}
    reported = Counter((run.objective, run.rate, run.passes, run.schedule) for run in made if run.seed in front.FRESH)
    assert reported == {
        ("troll", "auto", 4, "constant"): 10,
        ("ppo_clip", "auto", 4, "constant"): 10,
        ("ppo_clip", 8e-4, 4, "linear"): 10,
        ("troll", 2e-4, 4, "linear"): 10,
    }
    assert len({run.key for run in made}) == len(made) == 34 + 40
    assert not set(front.TUNING) & set(front.FRESH)


@pytest.mark.parametrize("arm", [TROLL, CLIP], ids=lambda arm: arm.objective)
def test_a_run_has_the_settings_of_the_script(arm: Any, tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    lines = [line for line in script.splitlines() if line.startswith(("cpu =", "batch =", "config ="))]
    there: dict[str, Any] = {"CorralConfig": CorralConfig}
    exec("\n".join(lines).replace('CorralConfig("runs/out"', f'CorralConfig("{tmp_path}", objective="{arm.objective}"'), there)
    (spec, *_) = front.automatic(arm)
    ours = trainer_config(resolve([read_recipe(spec.recipe), spec.layer()]), max_completion_length=15)
    named = ("objective", "loss_type", "advantage", "num_iterations", "steps_per_generation", "num_generations", "max_steps")
    named += ("per_device_train_batch_size", "deployed_bound", "finds_rate", "lr_scheduler_type", "max_completion_length")
    named += ("support_size", "support_mass", "anchor", "beta", "temperature", "weight_decay", "max_grad_norm", "reuse")
    assert {name: getattr(ours, name) for name in named} == {name: getattr(there["config"], name) for name in named}


def rows_of(seeds: int) -> list[Row]:
    """Rows of all trials, and of the first fresh seeds."""
    return [row(run) for run in to_its_end() if run.seed in (*front.TUNING, *front.FRESH[:seeds])]


def test_golden_the_sentence_names_the_best_clip_and_greedy_success() -> None:
    # Seeds 703 and 705 have a point more: .71 and .70 of clip at "auto", .65 and .64 tuned, and TROLL is .051 above both.
    said = " ".join(front.sentence(rows_of(4), 6, 7).split())
    assert said.startswith(
        "TROLL solves more held-out problems in this script than PPO's clip does, if completions are sampled"
    )
    assert "| TROLL, the script | 76 % | 76 % | | PPO's clip, same settings | 70 % | 70 % |" in said
    assert "| PPO's clip, tuned (8e-4, 4 passes) | 64 % | 64 % |" in said
    assert "Beside it is greedy success" in said, "it rises in these rows"
    assert "Means of [4 fresh seeds]" in said
    assert "on 6 of 7 [other tasks" in said


@pytest.mark.parametrize(
    ("change", "beginning"),
    [
        (lambda seed: 0.05, "PPO's clip solves as many held-out problems in this script as TROLL, once it is"),
        (lambda seed: 0.08, "PPO's clip solves more held-out problems"),
        (lambda seed: 0.1 * (seed % 3), "No difference between TROLL and PPO's clip is significant"),
    ],
)
def test_the_sentence_says_so_if_clip_is_as_good(change: Any, beginning: str) -> None:
    rows = rows_of(4)
    for one in rows:
        if one["objective"] == "ppo_clip" and one["seed"] in front.FRESH and (one["rate"] == "auto" or beginning[0] == "N"):
            raised = change(one["seed"]) + 0.06 * (one["rate"] != "auto") + (one["seed"] == 704) / 1000
            one["lines"] = [line | {"success": line["success"] + raised} for line in one["lines"]]
    assert front.sentence(rows, 6, 7).startswith(beginning)


def test_golden_comparisons_are_of_the_seeds_that_all_have() -> None:
    rows = [one for one in rows_of(4) if (one["objective"], one["rate"], one["seed"]) != ("ppo_clip", "auto", 706)]
    first, second, third = front.compared(rows).splitlines()[2:]
    assert first.startswith('| TROLL, `"auto"` (the script) − clip, tuned | +11.1')
    assert " | 3 | " in first
    assert second.startswith('| TROLL, `"auto"` (the script) − clip, `"auto"` | +5.1')
    assert third.startswith("| TROLL, tuned − clip, tuned | +5.1")
    without = [one for one in rows if (one["objective"], one["rate"], one["seed"]) != ("troll", 2e-4, 703)]
    assert len(front.compared(without).splitlines()) == 4, "tuned TROLL is left out, for it lacks a seed"
    assert "| ppo_clip | 4 | 8e-4 | .640 | .650 |".replace(" .640 | .650", " .650 | .640") in front.trials(rows)


def test_the_figure_is_the_same_every_time_and_has_a_dark_form(tmp_path: Path) -> None:
    files = [tmp_path / name / "headline.svg" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        front.draw(rows_of(3), file)
    first, second = (file.read_text() for file in files)
    ElementTree.fromstring(first)
    assert first == second
    place, _ = looks.assign_looks(front.LABELS)["troll"]
    light, dark = looks.LIGHT[place], looks.DARK[place]
    assert f"stroke: {light}" in first
    assert "@media (prefers-color-scheme:dark)" in first
    assert f'[style*="stroke: {light}"]{{stroke:{dark}!important}}' in first


def test_the_readme_shows_it() -> None:
    assert 'src="docs/headline.svg"' in README
