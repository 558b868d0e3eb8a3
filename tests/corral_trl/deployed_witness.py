"""What the tests of the deployed network share: an independent measurement of every step, and the certificates of a trainer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import dense_logp
from torch import Tensor
from transformers import TrainerCallback

from corral import categorical_kl
from corral.llm import CorralTrainer
from corral.trl.processes import base_model

NAMES = [
    "tr/deployed_kl_mean", "tr/deployed_kl_max", "tr/step_share", "tr/deployed_probes",
    "tr/deployed_kl_se", "tr/deployed_seq_kl_mean", "tr/deployed_seq_kl_max",
]  # fmt: skip
WILD = {"learning_rate": 0.3, "objective": "ppo_clip"}


class Witness(TrainerCallback):
    """Measures for itself: the KL of every token of the step's rollouts, from all logits, at the end of each step."""

    def __init__(self, trainer: CorralTrainer, updates: int, logp: Callable[..., Tensor] = dense_logp) -> None:
        self.trainer, self.updates, self.logp = trainer, updates, logp
        self.batches: list[dict[str, Any]] = []
        self.old: Any = None
        self.kl: list[Tensor] = []
        """KL(new‖old) of every token, for each step."""
        self.sums: list[Tensor] = []
        """KL(old‖new), summed over each completion, for each step."""
        self.rates: list[float] = []
        generate = trainer._generate_and_score_completions

        def remember(inputs: Any) -> dict[str, Any]:
            training, output = trainer.model.training, generate(inputs)
            if training:
                self.batches.append(output)
            return output

        trainer._generate_and_score_completions = remember
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.old, self.batches = copy.deepcopy(self.trainer.model).eval(), []
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.measure()

    def measure(self) -> Tensor:
        """KL(new‖old) of every trained token of the step's rollouts so far; tests call it where a run ends inside a step."""
        found, sums, now = [], [], copy.deepcopy(self.trainer.model).eval()
        with torch.no_grad():
            for batch in self.batches:
                new, old = (self.logp(base_model(model), batch, 0.9) for model in (now, self.old))
                mask = batch["completion_mask"].bool()
                if "tool_mask" in batch:
                    mask = mask & batch["tool_mask"].bool()
                found.append(categorical_kl(new, old)[mask])
                sums.append(torch.where(mask, categorical_kl(old, new), 0.0).sum(-1))
        self.kl.append(torch.cat(found))
        self.sums.append(torch.cat(sums))
        return self.kl[-1]


def certificates(trainer: CorralTrainer) -> list[dict[str, float]]:
    """What the trainer logged of every step."""
    names = [*NAMES, "tr/deployed_kl_p999", "tr/passes"]
    return [{name: line[name] for name in names if name in line} for line in trainer.state.log_history if NAMES[0] in line]


def half_logp(model: Any, batch: dict[str, Any], temperature: float) -> Tensor:
    """log π [B T V] as half precision has it: hidden states and head are rounded to bfloat16, logits are not."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.autocast(ids.device.type, torch.bfloat16):
        states = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
    states = states[:, :-1][:, -batch["completion_ids"].shape[1] :]
    logits = states.bfloat16().float() @ model.lm_head.weight.bfloat16().float().T
    return (logits / temperature).log_softmax(-1)
