"""Stale rollouts: completions sampled with the weights of earlier steps, as in asynchronous engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from corral.deployed.retract import restore, snapshot
from corral.trl.api import updates_per_step

if TYPE_CHECKING:
    from corral.trl.trainer import CorralTrainer

_FILE = "past_weights.pt"
"""Name of the file in a checkpoint that holds the weights of earlier steps."""


class PastWeights:
    """Stores the weights from the start of each of the last `lag` steps. Rollouts are sampled with the oldest stored weights.

        behaviour policy of step t = π of the weights at the start of step t − min(t, lag)

    The queue holds weights instead of rollouts: whatever the lag, a step draws one batch, for the same prompts, and none is
    left over at the end. All that follows sampling is of the present weights: TRL scores the completions with them, so they are
    the old policy and its support. The sampler's own log-probs are recorded while it generates.
    """

    def __init__(self, trainer: "CorralTrainer", lag: int) -> None:
        kind = trainer.accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError(
                f"CorralTrainer: `rollout_lag` samples with copies of earlier weights, and {kind.value} splits the weights "
                f"over processes. Use DDP, or rollout_lag=0."
            )
        self.trainer, self.lag = trainer, lag
        self.weights: dict[int, dict[str, Tensor]] = {}
        """Trained weights at the start of each stored step, on the CPU, by step number. The oldest step comes first."""

    @property
    def step(self) -> int:
        """Number of finished training steps. A step uses one batch of rollouts."""
        return self.trainer.state.global_step // updates_per_step(self.trainer.args)

    @property
    def sampled_at(self) -> int:
        """Number of the training step whose initial weights sample the current rollouts."""
        return min(self.weights, default=self.step)

    def _trim(self) -> None:
        """Drop stored weights that are more than `lag` steps old."""
        self.weights = {step: weights for step, weights in self.weights.items() if step >= self.step - self.lag}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the model has the oldest stored weights. On entry, the current weights are stored first."""
        model, now = self.trainer.model, snapshot(self.trainer.model)
        self.weights[self.step] = {name: x.cpu() for name, x in now.items()}
        self._trim()
        if self.sampled_at == self.step:
            yield
            return
        restore(model, self.weights[self.sampled_at])
        try:
            yield
        finally:
            restore(model, now)

    def save(self, checkpoint: Path) -> None:
        """Write the stored weights into a checkpoint. Inside a batch of rollouts nothing is written.

        TRL samples an unfinished batch again when the run is resumed.
        """
        if self.trainer.state.global_step % updates_per_step(self.trainer.args) == 0:
            self._trim()
            torch.save(self.weights, checkpoint / _FILE)

    def load(self, checkpoint: Path) -> None:
        """Read the stored weights of earlier steps from a checkpoint."""
        if not (checkpoint / _FILE).is_file():
            raise ValueError(
                f"CorralTrainer: {checkpoint} has no {_FILE}, which `rollout_lag` needs: it was written without a lag, or "
                f"inside a batch of rollouts. Resume with rollout_lag=0, or begin a new run."
            )
        self.weights = torch.load(checkpoint / _FILE, weights_only=True)
