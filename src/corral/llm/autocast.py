"""Generation under mixed precision: weights are rounded once, and to what training computes with."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from corral.llm.sharding import is_sharded

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer


def one_autocast(trainer: "CorralTrainer") -> AbstractContextManager[None]:
    """One autocast around all of a generation: it keeps the rounded copy of each weight until it ends.

    Accelerate puts an autocast around each forward pass, which rounds every weight anew for every token, and which peft's
    generation goes past. Tokens are the same bit for bit. Rounding the weights themselves would not be the same: embeddings
    and norms are used in float32 in training, and steps too small for half precision would never reach the sampler. Memory: a
    copy of the trained weights in half precision, so nothing is kept where they are sharded. Frozen weights are rounded for
    every token as before. A sampler of the user's own sees no autocast.
    """
    kept = not (is_sharded(trainer) or trainer.reports_logps)
    return trainer.accelerator.autocast() if kept else nullcontext()
