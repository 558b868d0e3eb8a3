"""An objective of the user's own, by path: a complete run, its resume, and what is refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import corral
from corral.lab.cli import main
from corral.lab.jobs.llm.own_objective import find_objective, try_objective
from corral.lab.jobs.llm.train import resume, train
from corral.objective import OBJECTIVES, Objective, ObjectiveConfig, make_config, make_objective
from corral.validate import RunError, UserCodeError
from small_runs import save_model, small

OWN = """
from dataclasses import dataclass

import torch

import corral
from corral.objective.ratio import credit, log_ratio


@dataclass(frozen=True, kw_only=True)
class SoftConfig(corral.ObjectiveConfig):
    width: float = 0.2


def soft(batch: corral.TokenBatch, config: SoftConfig) -> corral.ObjectiveOutput:
    loss = -credit(batch) * config.width * torch.tanh(log_ratio(batch) / config.width)
    return corral.ObjectiveOutput(torch.where(batch.mask, loss, 0.0), {})


def weighted(batch):
    return corral.ObjectiveOutput(torch.where(batch.mask, -credit(batch) * log_ratio(batch).exp(), 0.0), {})


def untyped(batch, settings): ...


def three(batch, config: SoftConfig, more): ...


def number(batch):
    return batch.logp_new.sum()


def one_form(batch):
    return corral.ObjectiveOutput(torch.where(batch.mask, -batch.logp_new * batch.advantages[:, None], 0.0), {})


def reduced(batch):
    return corral.ObjectiveOutput(batch.logp_new.sum(), {})


def constant(batch):
    return corral.ObjectiveOutput(batch.logp_new.detach(), {})


def unmasked(batch):
    return corral.ObjectiveOutput(batch.logp_new - 1, {})


def failing(batch):
    return {}["missing"]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file of objectives in the current folder; what it registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    yield "own.py"
    for name in [name for name in OBJECTIVES if ":" in name]:
        del OBJECTIVES[name]
    sys.modules.pop(str(tmp_path / "own.py"), None)


@pytest.mark.supports("run: an objective of one's own", door="command line")
def test_a_run_with_an_objective_of_the_users_own_is_recorded_and_resumed(own: str, tmp_path: Path) -> None:
    model, path = save_model(tmp_path / "model"), f"{own}:soft"
    run = train(small(model, objective=path, objective_config={"width": 0.1}), out=tmp_path / "run", quiet=True)
    assert run.summary["objective"] == path
    content = json.loads((run.path / "config.json").read_text())
    assert content["settings"]["objective"] == path
    assert content["objective"] == {"name": path, "width": 0.1}
    half = Path(shutil.copytree(run.path, tmp_path / "half"))
    shutil.rmtree(sorted((half / "checkpoints").iterdir())[-1])
    del OBJECTIVES[path]  # as in another process
    again = resume(half, quiet=True)
    (whole, repeated) = ([json.loads(x) for x in (one / "metrics.jsonl").read_text().splitlines()] for one in (run.path, half))
    assert [line["loss"] for line in whole[1:]] == [line["loss"] for line in repeated[1:]]
    assert again.summary["stopped"] == "finished"
    clipped = train(small(model, objective="ppo_clip"), out=tmp_path / "other", quiet=True)
    losses = [json.loads(line)["loss"] for line in (clipped.path / "metrics.jsonl").read_text().splitlines()[1:]]
    assert losses != [line["loss"] for line in whole[1:]], "the run's loss is the user's"


def test_resuming_says_which_code_it_imports(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model")
    run = train(
        small(model, objective=f"{own}:soft", steps=1), out="a:run", quiet=True
    )  # no URI, whatever pyarrow takes it for
    resume(run.path, steps=2)
    assert "using what the run's own settings name: --objective own.py:soft" in " ".join(capsys.readouterr().out.split())


def test_settings_stand_in_the_dataclass_or_are_none(own: str) -> None:
    assert find_objective(f"{own}:weighted") is ObjectiveConfig
    assert find_objective(f"{own}:soft").__name__ == "SoftConfig"
    assert vars(make_config(f"{own}:soft", {"width": 0.3})) == {"width": 0.3}
    for name in ("weighted", "soft"):
        try_objective(make_objective(f"{own}:{name}"))
    with pytest.raises(ValueError, match=r"own\.py:soft: there is no setting `widht`\. Did you mean 'width'"):
        make_config(f"{own}:soft", {"widht": 0.3})
    assert find_objective("troll") is OBJECTIVES["troll"][1]


@pytest.mark.refuses("run: an objective of one's own that is none", door="command line")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", r"there is no objective 'nobody'.* Or your own: file\.py:function\."),
        ("own.py:absent", "'own.py:absent' cannot be imported: .*has no attribute 'absent'"),
        ("elsewhere.py:soft", "'elsewhere.py:soft' cannot be imported"),
        ("own.py:torch", "'own.py:torch' is module"),
        ("own.py:SoftConfig", "'own.py:SoftConfig' is type"),
        ("own.py:untyped", "`settings` has no type.* Annotate it with the dataclass of its settings"),
        ("own.py:three", r"'own\.py:three' takes \(batch, config, more\)"),
    ],
)
def test_what_is_no_objective_is_refused(own: str, name: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        find_objective(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r"returned Tensor\. Return corral\.ObjectiveOutput"),
        ("one_form", r"a loss of shape \[2, 2, 3\] for a batch of shape \[2, 3\]\..*credit\(batch\) reads either"),
        ("reduced", r"a loss of shape \[\] for a batch of shape \[2, 3\]"),
        ("constant", r"a loss without a gradient"),
        ("unmasked", r"not 0 at a masked token"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_wrong_loss_is_refused_before_a_model_is_loaded(own: str, name: str, message: str) -> None:
    find_objective(f"{own}:{name}")
    with pytest.raises(RunError, match=message):
        try_objective(make_objective(f"{own}:{name}"))


def test_the_command_shows_where_the_users_function_failed(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--smoke", "--objective", f"{own}:failing", "--out", "run"]) == 1
    said = capsys.readouterr().err
    assert 'return {}["missing"]' in said
    assert said.rstrip().endswith("corral: the objective own.py:failing raised KeyError: 'missing'.")
    assert not Path("run").exists()
    find_objective(f"{own}:failing")
    with pytest.raises(UserCodeError):
        try_objective(make_objective(f"{own}:failing"))


def test_a_shape_error_says_how_advantages_are_shaped() -> None:
    def misshaped(batch: corral.TokenBatch, config: ObjectiveConfig) -> corral.ObjectiveOutput:
        return corral.ObjectiveOutput(torch.ones(2, 5) * batch.logp_new, {})

    with pytest.raises(UserCodeError, match=r"raised RuntimeError: .* `batch.advantages` is \[B\] or \[B T\], and corral"):
        try_objective(Objective("misshaped", misshaped, ObjectiveConfig()))
