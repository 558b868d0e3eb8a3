"""What stands in for an engine's function takes the engine's arguments, as committed in signatures/NAME.json."""

import ast
import json
from pathlib import Path

import pytest

import corral

HERE = Path(__file__).parent
SOURCE = Path(corral.__file__).parent / "engine"
VERL = json.loads((HERE / "signatures" / "verl.json").read_text())["signatures"]

_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead."
_TRAINER = "verl.trainer.ppo.v1:PPOTrainerSync."
STAND_INS = {
    ("verl/policy_loss.py", "compute_policy_loss"): "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
    ("verl/loss.py", "corral_ppo_loss"): "verl.workers.utils.losses:ppo_loss",
    ("verl/engine.py", "__init__"): _ENGINE + "__init__",
    ("verl/engine.py", "_build_module"): _ENGINE + "_build_module",
    ("verl/engine.py", "prepare_model_inputs"): _ENGINE + "prepare_model_inputs",
    ("verl/engine.py", "prepare_model_outputs"): _ENGINE + "prepare_model_outputs",
    ("verl/trainer.py", "__init__"): _TRAINER + "__init__",
    ("verl/trainer.py", "_setup"): _TRAINER + "_setup",
    ("verl/trainer.py", "_compute_old_log_prob"): _TRAINER + "_compute_old_log_prob",
}


def parameters(path: Path, name: str) -> list[str]:
    """Of the function of this name in a file that is not imported: it may need its engine."""
    (found,) = (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


@pytest.mark.parametrize(("where", "theirs"), STAND_INS.items(), ids=lambda value: str(value))
def test_ours_takes_what_verl_passes(where: tuple[str, str], theirs: str) -> None:
    file, name = where
    assert parameters(SOURCE / file, name) == VERL[theirs]


@pytest.mark.parametrize("path", sorted((HERE / "signatures").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_where_it_comes_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert {"package", "version", "source", "date", "signatures"} <= record.keys()
    assert record["source"].startswith("https://")
    assert len(record["date"]) == 10
