"""A TRL that is newer than the tested ones: tried where what corral builds on is unchanged, refused by name where it is not."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from corral.lab.jobs.llm.trainer import RunTrainer
from corral.trl import LAST_TESTED, TRL_RANGE, is_untested
from corral.trl.api import CONTRACT, FUSED, Clause, breaches, check_trl
from corral.trl.trainer import CorralTrainer

pytestmark = pytest.mark.skipif(not FUSED, reason="the contract is of the newest releases")

SOURCE = Path(__file__).parents[2] / "src" / "corral"
INSTALL = "pip install 'trl>={},<{}'".format(*TRL_RANGE)


@pytest.mark.supports("other: TRL newer than 1.16, its methods as they were: a warning", door="TRL")
@pytest.mark.parametrize("version", ["1.17.0", "1.17.0.dev0", "1.18.0rc1", "1.20", "2.0.0"])
def test_a_newer_release_with_the_same_methods_is_tried(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_trl(version)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"corral.llm: tested with TRL 1.7 to 1.16; found {version}. The methods that corral builds on look unchanged, so it is "
        f"tried; if it misbehaves: {INSTALL}."
    )


@pytest.mark.parametrize(("version", "untested"), [("1.7.0", False), ("1.16.9", False), ("1.17.0.dev0", True), ("main", True)])
def test_golden_ranges(version: str, untested: bool) -> None:
    assert is_untested(version) is untested
    assert TRL_RANGE[1] == f"1.{int(LAST_TESTED.removeprefix('1.')) + 1}"


def _compute_loss(self: Any, model: Any, inputs: Any, weights: Any) -> None:
    """As in TRL, with another parameter, and without old log-probs."""
    loss = (
        inputs["prompt_ids"],
        inputs["prompt_mask"],
        inputs["completion_ids"],
        inputs["completion_mask"],
        inputs["advantages"],
    )
    self._get_per_token_logps_and_entropies(compute_entropy=True)
    self._metrics += self.beta, self.top_entropy_quantile, self.current_gradient_accumulation_steps
    self.kinds = "grpo", "bnpo", "dr_grpo", "dapo", "luspo", inputs["num_items_in_batch"], inputs["advantages"]
    return loss


def _tokenize_prompts(self: Any, prompts: Any) -> Any:
    images, prompt_ids = prompts
    return images, prompt_ids


def _save_checkpoint(self: Any, model: Any, trial: Any, metrics: Any = None) -> None:
    super(GRPOTrainer, self)._save_checkpoint(model, trial)


def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any, scale: Any) -> Any:
    output = self._step, self._metrics, scale
    return output


@pytest.mark.refuses("other: TRL newer than 1.16, its methods changed", door="TRL")
@pytest.mark.parametrize(
    ("method", "sentences"),
    [
        (
            _compute_loss,
            [
                "takes (self, model, inputs, weights), not (self, model, inputs)",
                "does without old_per_token_logps",
            ],
        ),
        (_tokenize_prompts, ["returns (images, prompt_ids), not (prompt_ids, *)"]),
        (_save_checkpoint, ["takes (self, model, trial, metrics), not (self, model, trial)"]),
        (
            training_step,
            ["takes (self, model, inputs, num_items_in_batch, scale), not (self, model, inputs, num_items_in_batch, *)"],
        ),
    ],
    ids=[
        "parameters and names",
        "order of what is returned",
        "a parameter that an override would drop",
        "one without a default",
    ],
)
def test_golden_changed_methods(
    method: Callable[..., Any], sentences: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GRPOTrainer, method.__name__, method)
    found = [f"trl.GRPOTrainer.{method.__name__} {sentence}" for sentence in sentences]
    assert breaches() == found
    with pytest.raises(ImportError) as refusal:
        check_trl("1.18.0")
    assert str(refusal.value) == (
        f"corral.llm: tested with TRL 1.7 to 1.16; found 1.18.0, which changed what corral builds on: {'; '.join(found)}. "
        f"Install a tested one, {INSTALL}, or a newer corral."
    )
    check_trl("1.16.0")  # tested: nothing is read
    assert not caplog.records


def test_what_is_gone_is_named_and_a_long_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trl_utils, "_ChunkedLogProbFunction")
    monkeypatch.delattr(trl_utils, "pad")
    monkeypatch.delattr(GRPOTrainer, "_generate")
    monkeypatch.setattr(GRPOTrainer, "log", lambda self, logs, start_time=None: self._metrics)
    monkeypatch.setattr("trl.GRPOConfig", type("GRPOConfig", (), {"__init__": lambda self, beta=0.0: None}))
    found = breaches()
    gone = [line for line in found if line.endswith(" is gone")]
    assert gone == [
        "trl.GRPOTrainer._generate is gone",
        "trl.trainer.utils._ChunkedLogProbFunction.forward is gone",
        "trl.trainer.utils.pad is gone",
    ]
    assert found[0].startswith("trl.GRPOConfig has no num_iterations, steps_per_generation, ")
    with pytest.raises(ImportError, match=r"; and 1 more\. Install a tested one"):
        check_trl("1.18.0")


def test_a_name_that_a_class_inherits_counts_and_a_module_that_is_gone_does_not() -> None:
    contract = {"trl.GRPOTrainer.get_tp_size": Clause("self"), "trl.nowhere.at_all": Clause("self")}
    assert breaches(contract) == ["trl.nowhere.at_all is gone"]


def test_every_override_is_in_the_contract() -> None:
    theirs = {name.rpartition(".")[2] for name in CONTRACT if "Trainer." in name}
    for ours in (CorralTrainer, RunTrainer):
        overridden = {name for name, what in vars(ours).items() if callable(what) and hasattr(GRPOTrainer, name)}
        assert overridden - {"__module__", "__doc__"} <= theirs, ours


def test_every_private_name_that_is_read_is_in_the_contract() -> None:
    known = {word for name, clause in CONTRACT.items() for word in (*name.split("."), *clause.names.split())}
    read = set()
    for path in (*SOURCE.glob("trl/*.py"), *SOURCE.glob("lab/jobs/llm/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                    private = owner in ("trainer", "_trl_utils") and name.startswith("_")
                    read |= {name} if private or owner == "chat_template_utils" else set()
                case _:
                    pass
    assert {"parse_response", "_step", "_metrics", "_tokenizer", "_ChunkedLogProbFunction"} <= read <= known
    assert not [name for name in read if name in vars(Trainer) and f"transformers.Trainer.{name}" not in CONTRACT]
