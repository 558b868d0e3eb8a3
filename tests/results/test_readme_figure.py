"""The plan of README's figure: the settings of README's script, trials on other seeds, and a report of the best trial."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import resolve
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
    lines = [{"step": step, "success": level, "greedy": level, "reward": level} for step in (0, run.steps)]
    return {"key": run.key, "seed": run.seed, "steps": run.steps, "finished": True, "dead": False, "lines": lines}


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
