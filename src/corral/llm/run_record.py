"""What a CorralTrainer's checkpoints say of their run, in trainer_state.json, where `corral report` reads it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from corral.llm.processes import base_model
from corral.llm.trl_api import REDUCTIONS
from corral.provenance import plain, versions

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

_OF_TRL = ("seed", "learning_rate", "num_iterations", "loss_type", "beta", "temperature", "deployed_bound", "advantage")
"""Settings that runs are told apart by."""


class RunRecord(TrainerCallback, ExportableState):
    """Settings of a run; transformers writes the state of such a callback into every checkpoint, under the class's name."""

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        self.about = about or {}

    @classmethod
    def of(cls, trainer: "CorralTrainer") -> "RunRecord":
        """The record of a trainer that is made."""
        args, objective = trainer.args, trainer.objective
        settings = {
            "task": ", ".join(trainer.reward_func_names) or "unknown",
            "model": str(base_model(trainer.model).config._name_or_path or type(base_model(trainer.model)).__name__),
            "objective": objective.name,
            "objective_config": vars(objective.config),
            **{name: vars(args)[name] for name in _OF_TRL},
        }
        reduction = {"name": REDUCTIONS[args.loss_type], "own": args.other_reduction is None}
        return cls(
            plain({"settings": settings, "reduction": reduction, "script": Path(sys.argv[0]).name, "versions": versions()})
        )

    def state(self) -> dict[str, Any]:
        """The record, in the form that `from_state` reads."""
        return {"args": {"about": self.about}, "attributes": {}}
