"""What stands in for an engine's function takes the engine's arguments, as committed in signatures/NAME.json."""

import ast
import json
import re
from pathlib import Path

import pytest
from doors import make_batch, rllm_context

import corral
from corral.engines import rllm

HERE = Path(__file__).parent
SOURCE = Path(corral.__file__).parent / "engines"
SIGNATURES = {path.stem: json.loads(path.read_text())["signatures"] for path in sorted((HERE / "signatures").glob("*.json"))}

_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead."
_TRAINER = "verl.trainer.ppo.v1:PPOTrainerSync."
STAND_INS = {
    ("verl/policy_loss.py", "compute_policy_loss"): "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
    ("verl/loss.py", "corral_ppo_loss"): "verl.workers.utils.losses:ppo_loss",
    ("verl/engine.py", "__init__"): _ENGINE + "__init__",
    ("verl/engine.py", "_build_module"): _ENGINE + "_build_module",
    ("verl/engine.py", "train_batch"): _ENGINE + "train_batch",
    ("verl/engine.py", "prepare_model_inputs"): _ENGINE + "prepare_model_inputs",
    ("verl/engine.py", "prepare_model_outputs"): _ENGINE + "prepare_model_outputs",
    ("verl/trainer.py", "__init__"): _TRAINER + "__init__",
    ("verl/trainer.py", "_setup"): _TRAINER + "_setup",
    ("verl/trainer.py", "_compute_old_log_prob"): _TRAINER + "_compute_old_log_prob",
    ("verl/trainer.py", "_update_actor"): _TRAINER + "_update_actor",
    ("skyrl.py", "corral_policy_loss"): "skyrl.backends.skyrl_train.utils.ppo_utils:ppo_policy_loss",
    ("slime.py", "policy_loss_function"): "slime.backends.megatron_utils.loss:policy_loss_function",
    ("tinker.py", "corral_loss"): "tinker.lib.public_interfaces.training_client:CustomLossFnV1",
}


@pytest.mark.parametrize("engine", SIGNATURES)
def test_the_page_names_the_version_that_signatures_are_of(engine: str) -> None:
    record = json.loads((HERE / "signatures" / f"{engine}.json").read_text())
    rows = (HERE.parents[1] / "docs" / "engines.md").read_text().partition("## What ran")[2].partition("\n## ")[0].splitlines()
    names = {"nemo_rl": "NeMo-RL", "prime_rl": "prime-rl", "rllm": "rLLM", "skyrl": "SkyRL", "tinker": "Tinker"}
    (row,) = (row for row in rows if row.startswith(f"| {names.get(engine, engine)} |"))
    assert record["version"] in row
    commit = record["source"].partition("/tree/")[2][:7]
    assert commit in row


def parameters(path: Path, name: str) -> list[str]:
    """Of the function of this name in a file that is not imported: it may need its engine."""
    (found,) = (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


@pytest.mark.parametrize(("where", "theirs"), STAND_INS.items(), ids=lambda value: str(value))
def test_ours_takes_what_the_engine_passes(where: tuple[str, str], theirs: str) -> None:
    file, name = where
    engine = file.partition("/")[0].removesuffix(".py")
    assert parameters(SOURCE / file, name) == SIGNATURES[engine][theirs]


def test_nemo_rls_keywords_and_prime_rls_fields_are_those_that_ours_reads() -> None:
    nemo = SIGNATURES["nemo_rl"]
    *whole, _ = nemo["nemo_rl.algorithms.loss.interfaces:LossFunction.__call__"]
    more = nemo["kwargs of LossInputType.LOGPROB"] + nemo["kwargs of LossInputType.DISTILLATION"]
    assert parameters(SOURCE / "nemo_rl.py", "__call__") == whole + more
    read = set(re.findall(r"inputs\.(\w+)", (SOURCE / "prime_rl.py").read_text()))
    assert read <= set(SIGNATURES["prime_rl"]["prime_rl.trainer.rl.loss:LossInputs"])


def test_rllms_context_and_settings_are_those_that_ours_reads() -> None:
    record = SIGNATURES["rllm"]
    read = set(re.findall(r"ctx\.(\w+)", (SOURCE / "rllm.py").read_text()))
    assert {"logp_curr", "aggregate"} < read <= set(record["rllm:LossContext"])
    assert list(rllm.OWN) == record["params that rLLM adds"]
    context = rllm_context(make_batch(), {}, one=False)  # what test_parity.py passes
    assert vars(context).keys() == set(record["rllm:LossContext"])


@pytest.mark.parametrize("path", sorted((HERE / "signatures").glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_where_it_comes_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert {"package", "version", "source", "date", "signatures"} <= record.keys()
    assert record["source"].startswith("https://")
    assert len(record["date"]) == 10
