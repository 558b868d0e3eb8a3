"""Generation in half precision: weights are rounded once, where mixed precision would round them for every token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from corral.llm.sharding import is_sharded

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def rounded_weights(trainer: "CorralTrainer") -> Iterator[None]:
    """Inside, float32 weights are in the half precision of the forward pass; then the very same tensors are back.

    Under autocast weights and activations are cast anew for every token that is generated, and what lies between GEMMs, the
    keys of the cache among it, is float32. In one profile of SmolLM2 generating on an H200 these casts were 93 of 541 ms of
    kernels; whole runs were not timed. Inference engines sample from rounded weights as well. Nothing is rounded in float32
    training, where weights are sharded, or where a sampler of the user's own reads the model.
    """
    dtype = _HALF.get(trainer.accelerator.mixed_precision)
    if dtype is None or is_sharded(trainer) or trainer.args.deepspeed or trainer.reports_logps:
        yield
        return
    exact = {weight: weight.data for weight in trainer.model.parameters() if weight.dtype == torch.float32}
    try:
        for weight in exact:
            weight.data = weight.data.to(dtype)
        yield
    finally:
        for weight, data in exact.items():
            weight.data = data
