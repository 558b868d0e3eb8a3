"""Teacher of a distillation, or reference policy of a trust region: another model, or a copy of the initial policy.

It is scored on the student's completions. The policy as it was teaches only what it is shown besides; as a reference it reads
what the student reads.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
import trl
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import pad

from corral.trl import TEACHER_PROMPT
from corral.trl.api import FUSED
from corral.trl.old_policy import TEACHER_KEYS, write_support
from corral.trl.processes import base_model, check_teacher, vocabulary_size
from corral.trl.scoring import ScoringPass

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer


class Teacher:
    """Scores the student's completions with the teacher, on the union of both models' most likely tokens.

    Without a model of its own it is a frozen copy of the policy that training began with, shown `teacher_prompt`. One that
    moved with the student would forget how to read it: no loss holds it there (docs/objectives/distill.md has the run).
    """

    def __init__(self, trainer: "CorralTrainer", model: PreTrainedModel | str | None) -> None:
        """Freeze the teacher, move it to the trainer's device, and prepare its LM head as TRL does for a reference model.

        `model` is a model or its name; None copies the current policy.
        """
        if not FUSED:
            raise ValueError(
                f"CorralTrainer: objective={trainer.objective.name!r} needs hidden states, which TRL {trl.__version__} does "
                f"not hand over. Install TRL 1.15 or newer."
            )
        check_teacher(trainer)
        self.trainer, self.is_own = trainer, model is None
        self.is_reference = trainer.objective.config.third_policy == "reference"
        student = base_model(trainer.model)
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=student.dtype, trust_remote_code=False)
        elif model is None:
            model = copy.deepcopy(student)
            vars(model).pop("forward", None)  # with the head that TRL has put into it
        self.model: PreTrainedModel = model
        own, theirs = vocabulary_size(student), vocabulary_size(model)
        if own != theirs:
            raise ValueError(
                f"CorralTrainer: the teacher or reference has a vocabulary of {theirs} tokens and the student one of {own}. "
                f"They are compared token by token: use a model of the same family."
            )
        from trl.trainer.utils import add_fused_lm_head  # not in every release that corral supports

        model.requires_grad_(False).eval().to(trainer.accelerator.device)
        add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32)
        trainer.policy_head.models.append(model)
        trainer.pack(model)

    @torch.no_grad()
    def store(self, rows: list[dict[str, Any]], output: dict[str, Any], scoring: ScoringPass) -> None:
        """Write log-probs of old policy and teacher, on the union of their most likely tokens, into TRL's buffer `output`.

        Args:
            rows: of the dataset, one for each completion.
            output: of the rollouts.
            scoring: the old policy's pass over them, with its hidden states; one that was never run is run here.
        """
        if "pixel_values" in output:
            raise ValueError("CorralTrainer: a teacher or reference reads text alone, and these prompts have images.")
        trainer = self.trainer
        student = output["prompt_ids"], output["prompt_mask"]
        if not scoring.results:  # with one update on each batch of rollouts, TRL needs no old policy
            self._score(trainer.model, student, output, scoring)
            output["old_per_token_logps"] = scoring.logp
        policy = trainer.old_policy
        policy.store(output, scoring)
        old = policy.support(output)
        assert old is not None
        shown_more = not self.is_reference and (self.is_own or TEACHER_PROMPT in rows[0])
        shown = self._prompts(rows) if shown_more else student
        found = ScoringPass(support=trainer.own_support, ids=old.ids)
        self._score(self.model, shown, output, found)
        teacher = found.dist()
        assert teacher is not None
        teacher, old = policy.union(output, teacher, output["completion_mask"].bool())
        policy.forget(output)
        write_support(output, old)
        slots = output["corral_ids"].shape[-1]
        output.update(zip(TEACHER_KEYS, (teacher.logp[..., :slots].contiguous(), teacher.rest), strict=True))

    def _score(self, model: Any, prompt: tuple[Tensor, Tensor], output: dict[str, Any], scoring: ScoringPass) -> None:
        """Compute a model's log-probs of the completions in one scoring pass. The given prompts are padded on the left."""
        ids, mask = (torch.cat([x, output[f"completion_{y}"]], 1) for x, y in zip(prompt, ("ids", "mask"), strict=True))
        tokens, args = output["completion_ids"].shape[1], self.trainer.args
        at_once = args.per_device_train_batch_size if self.trainer.model.training else args.per_device_eval_batch_size
        with self.trainer.policy_head.expect(scoring):
            self.trainer._get_per_token_logps_and_entropies(model, ids, mask, tokens, at_once)

    def _prompts(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask of the teacher's prompts, padded on the left."""
        trainer = self.trainer
        missing = sum(row.get(TEACHER_PROMPT) is None for row in rows)
        if missing:
            raise ValueError(
                f"CorralTrainer: the model is its own teacher, and {missing} of {len(rows)} rows of the dataset have no "
                f"`{TEACHER_PROMPT}`: what the teacher reads in the place of `prompt`, such as the problem with its solution. "
                f"Add that column, or pass another model: CorralTrainer(…, teacher=model)."
            )
        tokens = [torch.tensor(ids) for ids in trainer._tokenize_prompts([row[TEACHER_PROMPT] for row in rows])[0]]
        ids = pad(tokens, padding_value=trainer._tokenizer.pad_token_id, padding_side="left")
        mask = pad([torch.ones_like(x) for x in tokens], padding_value=0, padding_side="left")
        return ids.to(trainer.accelerator.device), mask.to(trainer.accelerator.device)
