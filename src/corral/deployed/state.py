"""Context for evaluating a network without changing its train or eval mode, its gradients or the random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Context for an evaluation without gradients and dropout. On exit, module modes and the random state are restored."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.device.type == "cuda"})
    # Not inference_mode: a model may cache what it computes here, and would find it unusable in the next backward pass.
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
