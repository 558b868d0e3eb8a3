"""TRL's asynchronous GRPO with a corral objective: vLLM samples on its own GPU while the trainer updates.

    from corral.engines.async_grpo import AsyncCorralConfig, AsyncCorralTrainer

TRL calls this trainer experimental. Its log-probs come from the sampler, some updates ago, so the region lies around the
sampler's policy. The trainer reports the sampled tokens alone, so objectives on a support are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import trl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corral.engines.adapter import EngineObjective, warn_once
from corral.objective.correction import make_correction
from corral.tensors import TokenBatch, metric_kind
from corral.trl import IncompatibleTRL
from corral.trl.api import Clause, breaches

try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
except ImportError as error:
    raise IncompatibleTRL(
        f"corral.engines.async_grpo: TRL {trl.__version__} has no AsyncGRPOTrainer in trl.experimental ({error}). Install "
        f"trl==1.16.0."
    ) from error

_ENGINE = "corral for TRL's AsyncGRPOTrainer"
_ROWS = "trl.experimental.async_grpo.packing.TreeRow.pack"
_CONTRACT = {
    "trl.experimental.async_grpo.AsyncGRPOTrainer.compute_loss": Clause(
        "self model inputs *",
        "token_index old_log_probs advantages segment_id global_n_tokens log_probs _metrics aux_loss_enabled aux_loss "
        "current_gradient_accumulation_steps router_aux_loss_coef",
        returns="loss",
    ),
    "trl.experimental.async_grpo.AsyncGRPOTrainer.log": Clause("self logs *", "_metrics"),
    _ROWS: Clause("self", "token_index old_log_probs advantages segment_id"),
}
"""Parts of TRL's experimental asynchronous trainer that corral needs; an error is raised if a TRL release lacks one."""

if found := breaches(_CONTRACT):
    raise IncompatibleTRL(f"corral.engines.async_grpo: TRL {trl.__version__}: {'; '.join(found)}. Install trl==1.16.0.")


@dataclass
class AsyncCorralConfig(AsyncGRPOConfig):
    """TRL's AsyncGRPOConfig with a corral objective; TRL's own clip settings `epsilon` and `epsilon_high` are ignored."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*AsyncGRPOConfig._VALID_DICT_FIELDS, "objective_config", "correction_config"]  # type: ignore[misc]  # TRL leaves ClassVar out

    objective: str = field(default="dppo", metadata={"help": "Objective that reads sampled tokens alone, such as dppo."})
    objective_config: dict[str, Any] | None = field(default=None, metadata={"help": "Settings of the objective."})
    correction: str | None = field(
        default=None,
        metadata={
            "help": "Sampler correction: tis, seq_tis, icepop or trm. The anchor is then the present policy, and the weight is "
            "its ratio to the sampler. Without a correction the anchor is the sampler."
        },
    )
    correction_config: dict[str, Any] | None = field(default=None, metadata={"help": "Settings of the correction."})

    def __post_init__(self) -> None:
        super().__post_init__()
        truncations = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        truncations["repetition_penalty"] = self.repetition_penalty != 1
        if used := [name for name, on in truncations.items() if on]:
            raise ValueError(
                f"AsyncCorralConfig: `{used[0]}` changes the probabilities that vLLM reports, so ratios to them would be "
                f"wrong. Leave it out."
            )
        self.make_objective()
        self.make_correction()

    def make_objective(self) -> EngineObjective:
        """Build the objective with its anchor policy. Raises ValueError if the objective reads more than sampled tokens."""
        settings = self.objective_config or {}
        wanted = EngineObjective.of(_ENGINE, self.objective, settings, anchor="old" if self.correction else "rollout")
        if self.correction and "logp_rollout" in wanted.objective.needs:
            raise ValueError(
                f"AsyncCorralConfig: {self.objective} weighs the present policy against the sampler itself, and "
                f"correction={self.correction!r} would do it twice. Leave `correction` out."
            )
        return wanted

    def make_correction(self) -> Callable[[TokenBatch], Tensor] | None:
        """Build the correction for the difference between sampler and trainer; None if the configuration has no correction."""
        if self.correction is None and self.correction_config:
            raise ValueError(
                f"AsyncCorralConfig: `correction_config` is {self.correction_config}, but there is no `correction` to set."
            )
        return None if self.correction is None else make_correction(self.correction, **(self.correction_config or {}))


class AsyncCorralTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer with the loss of a corral objective. Rollouts, weight synchronisation and metrics are TRL's.

    TRL's own loss runs once for its forward pass and metrics, and is thrown away. The mean over tokens is TRL's: over the
    tokens of a micro-batch on all processes, then over the micro-batches of an update.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "async-grpo", "corral"]  # type: ignore[misc]  # as above

    def __init__(self, model: str, reward_funcs: Any = None, args: AsyncCorralConfig | None = None, **kwargs: Any) -> None:
        args = AsyncCorralConfig() if args is None else args
        if not isinstance(args, AsyncCorralConfig):
            raise ValueError(f"AsyncCorralTrainer: `args` must be an AsyncCorralConfig; got {type(args).__name__}.")
        self.wanted, self.correction = args.make_objective(), args.make_correction()
        warn_once(_ENGINE, self.wanted.other_reduction("token-mean"))
        super().__init__(model, reward_funcs, args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute the objective's loss from the log-probs of TRL's own forward pass."""
        outputs: Any = None

        def forward(**kwargs: Any) -> Any:
            nonlocal outputs
            outputs = model(**kwargs)
            return outputs

        super().compute_loss(forward, inputs, return_outputs, num_items_in_batch)
        metrics = self._metrics["train"]
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            metrics.pop(name)  # of TRL's clip, which is not applied

        selected = inputs["token_index"] >= 0
        rows = inputs["segment_id"][selected].unique_consecutive(return_counts=True)[1].tolist()

        def by_row(values: Tensor, padding: float = 0.0) -> Tensor:
            return pad_sequence(values.split(rows), batch_first=True, padding_value=padding)

        new = by_row(outputs.log_probs.flatten()[inputs["token_index"][selected]].float())
        rollout = by_row(inputs["old_log_probs"][selected])
        mask = by_row(torch.ones_like(inputs["old_log_probs"][selected])) > 0
        # Every row is used for one update, so before it the old policy is the present one.
        apart = self.correction is not None or "logp_rollout" in self.wanted.objective.needs
        old = new.detach() if apart else rollout
        batch = TokenBatch(new, old, by_row(inputs["advantages"][selected]), mask, logp_rollout=rollout)
        weights = None if self.correction is None else self.correction(batch)
        losses, found = self.wanted.token_loss(batch, weights)

        tokens = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0).float()
        loss = losses.sum() / tokens
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        values = torch.stack([value.detach().float() for value in (*found.values(), mask.sum())])
        everyone = self.accelerator.gather(values[None])
        *parts, counts = everyone.unbind(-1)
        for name, part in zip(found, parts, strict=True):
            if metric_kind(name) == "max":
                metrics[name].append(float(part.max()))
            else:  # TRL divides the sum of the first by the sum of the second
                metrics[name].append((float((part * counts).sum()), float(counts.sum())))
        return loss / self.current_gradient_accumulation_steps

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log metrics, including `tr/staleness`: the mean number of weight synchronisations since a sequence was sampled."""
        metrics = self._metrics["train"]
        if ages := metrics.get("sample/staleness_mean"):
            metrics["tr/staleness"] = list(ages)
        super().log(logs, *args, **kwargs)
