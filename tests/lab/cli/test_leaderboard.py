"""`corral leaderboard`: which comparison it is, with objectives of one's own among the contestants."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.lab.cli import main
from corral.lab.cli.compare import _split_names
from corral.lab.run.settings import read_file, read_recipe, recipes
from corral.objective import OBJECTIVES
from results.spec import STARTS
from results.table import EXTENSIONS, RATES, TABLE_START, settings_of

OWN = """
from dataclasses import dataclass
import torch
import corral
from corral.objective.ratio import credit

@dataclass(frozen=True, kw_only=True)
class Config(corral.ObjectiveConfig):
    scale: float = 1.0

def loss(batch, config: Config):
    ratio = (batch.logp_new - batch.logp_old).exp()
    return corral.ObjectiveOutput(torch.where(batch.mask, -config.scale * ratio * credit(batch), 0.0), {})

def no_output(batch):
    return batch.logp_new
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An objective in a file in the current folder; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    yield "mine.py:loss"
    for name in [name for name in OBJECTIVES if ":" in name]:
        del OBJECTIVES[name]
    sys.modules.pop(str(tmp_path / "mine.py"), None)


@pytest.mark.supports("comparison: an objective of your own, ranked in a cell of the leaderboard", door="command line")
def test_it_is_a_comparison_with_an_objective_of_ones_own(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--objective", own, "--passes", "1", "--lag", "4", "--dry-run", "--jobs", "1", "--out", "here"]
    assert main(["leaderboard", *words]) == 0
    printed = capsys.readouterr().out
    assert "leaderboard: ppo_clip, troll, mine.py:loss" in printed
    assert "learning_rate 2e-4, 4e-4, 8e-4" in printed
    assert "603, 604, 605, 606, 607, 608, 609, 610; settings are chosen on 601, 602" in printed, "the seeds of the table"
    assert "42: 3 contestants × 3 settings × 2 seeds, then 3 contestants × 8 seeds" in printed
    assert "10 steps of 512 completions, for every run" in printed
    assert "dr_grpo, for every run" in printed
    assert not Path("here").exists()


def test_settings_of_ones_own_objective(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--objectives", f"ppo_clip,{own}:scale=2:beta=0", "--dry-run", "--seeds", "1"]) == 0
    assert "mine.py:loss scale=2 beta=0 seed 0" in capsys.readouterr().out
    assert main(["compare", "--objectives", f"ppo_clip,{own}:sale=2", "--dry-run"]) == 1
    assert "there is no setting `sale`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--objective", "mine.py:los"], "mine.py"),
        (["--objective", "none.py:loss"], "none.py"),
        (["--objective", "mine.py:no_output"], "mine.py:no_output"),
        (["--against", "clip"], "there is no objective 'clip'"),
        (["--lag", "-1"], "rollout_lag"),
        (["--resume", "there"], "corral compare --resume there"),
        (["--against", "ppo_clip", "--algorithms", "tce"], "contestants are objectives"),
    ],
    ids=" ".join,
)
def test_mistakes_get_a_sentence(own: str, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["leaderboard", "--dry-run", *argv]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_names_keep_the_colon_of_a_path() -> None:
    assert _split_names("troll:bound=0.1:beta=0, a.b:loss , mine.py:loss:scale=2,troll:bound") == (
        "troll bound=0.1 beta=0", "a.b:loss", "mine.py:loss scale=2", "troll bound",
    )  # fmt: skip


def test_the_recipe_is_a_cell_of_the_table() -> None:
    own, recipe = read_file(recipes()["leaderboard"]), read_recipe("leaderboard")
    assert {name: recipe[name] for name in STARTS[TABLE_START]} == STARTS[TABLE_START]
    compare, cell = own["compare"], settings_of(4, 0)
    assert (compare["seeds"], compare["extend"], compare["choose_by"]) == (8, EXTENSIONS, "area")
    assert tuple(compare["sweep"]["learning_rate"]) == RATES[4]
    assert {name: recipe[name] for name in ("steps", "eval_every", "eval_size")} == {
        name: cell[name] for name in ("steps", "eval_every", "eval_size")
    }
    assert (recipe["num_iterations"], recipe["rollout_lag"]) == (cell["passes"], cell["lag"])


def test_rates_are_those_of_the_table() -> None:
    from corral.lab.cli.leaderboard import _RATES

    assert {passes: tuple(map(float, text.split(","))) for passes, text in _RATES.items()} == RATES
